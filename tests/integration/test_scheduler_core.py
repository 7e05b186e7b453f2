"""What the scheduler does around vLLM's own, without an engine: budgets, exclusions, tenants."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.integration.conftest import make_config
from tests.support.costs import any_fingerprint, write_cost_table
from tests.support.pairs import Pair
from tests.support.schedulers import (
    CHEAP,
    DEAR,
    HOPELESS,
    K,
    MadeUpWorker,
    add_request,
    bare_scheduler,
    half,
    options,
    settled,
)
from vllm_dspark.artifacts.freshness import Resolution
from vllm_dspark.integration import exclusions, startup
from vllm_dspark.integration.report import order_of
from vllm_dspark.integration.request_traits import tenant_of
from vllm_dspark.planning.online import BOUND
from vllm_dspark.planning.plan import PlanBox, PlanKind, Reason, request_digest
from vllm_dspark.planning.posterior import INFLUENCE_BOUND

pytestmark = pytest.mark.usefixtures("runner_choice")


def allow_mixed(scheduler: Any) -> None:
    """As if there were evidence and a price for steps with prefill rows."""

    from vllm_dspark.planning.cost import CostTable, StepMode, StepShape
    from vllm_dspark.planning.online_cost import CostModel

    conductor = scheduler.conductor
    conductor._resolution = replace(conductor._resolution, mixed=True)
    planner = conductor.planner
    planner.options = replace(planner.options, mixed=True)
    table = planner.cost.table
    grid = table.grids[StepMode.EAGER, StepShape.RAGGED]
    grids = {**table.grids, (StepMode.MIXED, StepShape.RAGGED): grid}
    planner.cost = CostModel(CostTable(grids, table.draft), online=False)


@pytest.mark.parametrize("mixed", [True, False])
def test_trimmed_budget_goes_to_waiting_prefills_in_the_same_schedule(
    pair: Pair, tmp_path: Path, mixed: bool
) -> None:
    """Catches windows cut after scheduling, when the freed rows help nobody.

    8 requests with 8 rows each fill the 64 rows of a step; what trimming frees is all that a
    waiting prompt of 200 tokens can get.
    """
    scheduler = bare_scheduler(pair, options(tmp_path, DEAR), max_num_seqs=9)
    worker = settled(scheduler)
    scheduler.max_num_scheduled_tokens = 64
    if mixed:
        allow_mixed(scheduler)
    add_request(scheduler, "waiting", prompt=range(10, 210))
    output = worker.step()
    (plan,) = worker.plans
    if mixed:
        assert plan.kind is PlanKind.TRIM
        freed = 8 * K - plan.budget
        assert output.num_scheduled_tokens["waiting"] == freed > 0
        assert output.total_num_scheduled_tokens == 64
    else:
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.MIXED)
        assert "waiting" not in output.num_scheduled_tokens


def test_prefill_without_evidence_does_not_disable_decode_only_scheduling(
    pair: Pair, tmp_path: Path
) -> None:
    """Catches `confidence_mixed_evidence: null` that also ends trimming of pure decode steps."""
    scheduler = bare_scheduler(pair, options(tmp_path, DEAR), max_num_seqs=9)
    worker = settled(scheduler)
    add_request(scheduler, "new")
    worker.step()
    worker.step()
    kinds = [plan.kind for plan in worker.plans]
    assert kinds == [PlanKind.NATIVE, PlanKind.TRIM], [plan.reason for plan in worker.plans]


class TestRestated:
    """vLLM schedules something else than was planned: the plan that travels is about that."""

    def cut(self, pair: Pair, folder: Path, windows: str, tokens: int) -> tuple[Any, Any]:
        table = DEAR if windows == "device" else CHEAP
        scheduler = bare_scheduler(pair, options(folder, table, windows=windows), max_num_seqs=8)
        worker = settled(scheduler)
        self.before = scheduler.conductor.restated
        scheduler.max_num_scheduled_tokens = tokens  # less than all drafts need
        return scheduler, worker.step()

    def test_host_plan_counts_what_was_scheduled(self, pair: Pair, tmp_path: Path) -> None:
        scheduler, output = self.cut(pair, tmp_path, "host", 40)
        plan = order_of(output).plan
        scheduled = sum(map(len, output.scheduled_spec_decode_tokens.values()))
        assert scheduler.conductor.restated == self.before + 1
        assert plan.num_requests == len(output.num_scheduled_tokens) == 5
        assert plan.budget == scheduled == 35
        assert plan.padded_tokens == 40

    def test_device_plan_names_the_requests_that_have_drafts(
        self, pair: Pair, tmp_path: Path
    ) -> None:
        """Catches a plan that the worker must refuse because a request was left out."""
        scheduler, output = self.cut(pair, tmp_path, "device", 42)
        order = order_of(output)
        drafts = {name: len(d) for name, d in output.scheduled_spec_decode_tokens.items() if d}
        table = scheduler.conductor.table
        digest = request_digest(table.owners(table.slots(drafts)))
        assert order.plan.kind is PlanKind.TRIM
        assert order.plan.budget <= sum(drafts.values())
        box = PlanBox()
        box.put(order.plan)
        assert box.take(order.step_id, digest, len(drafts), K) is not None, box.last_mismatch

    def test_as_planned_nothing_is_restated(self, pair: Pair, tmp_path: Path) -> None:
        for windows in ("host", "device"):
            scheduler = bare_scheduler(pair, options(tmp_path, DEAR, windows=windows))
            settled(scheduler)
            before = scheduler.conductor.restated
            worker = MadeUpWorker(scheduler, half)
            for _ in range(6):
                worker.step()
            assert {plan.kind for plan in worker.plans} == {PlanKind.TRIM}
            assert scheduler.conductor.restated == before


class _Ragged:
    """A custom logits processor that takes ragged rows."""

    dspark_ragged_rows = True


class _Uniform:
    """A custom logits processor that says nothing."""


@pytest.mark.parametrize(
    ("limits", "changes"),
    [({}, {"max_tokens": 5}), ({"max_model_len": 8}, {})],
    ids=["max_tokens", "max_model_len"],
)
def test_what_cannot_be_emitted_is_not_admitted(
    pair: Pair, tmp_path: Path, limits: dict[str, Any], changes: dict[str, Any]
) -> None:
    """Catches a ceiling that forgets max_model_len: the budget would be spent on nothing.

    After a prompt of 3 tokens and its first own one, 4 more can be emitted: 3 drafts and one token.
    """
    scheduler = bare_scheduler(pair, options(tmp_path, DEAR), **limits)
    add_request(scheduler, "short", **changes)
    MadeUpWorker(scheduler, half).step()
    conductor = scheduler.conductor
    slots = conductor.table.slots(["short"])
    batch = conductor.table.batch(slots, np.array([K], np.int32), np.array([1], np.int32))
    assert (batch.remaining.tolist(), batch.capacity.tolist()) == ([4], [3])
    assert conductor._limits([scheduler.requests["short"]], slots)[1] == {"short": 3}


class TestExclusions:
    @pytest.mark.parametrize(
        ("given", "found"),
        [
            (None, ()),
            ([_Ragged], ()),
            (["tests.integration.test_scheduler_core:_Ragged"], ()),
            (
                ["tests.integration.test_scheduler_core:_Uniform"],
                ("tests.integration.test_scheduler_core:_Uniform",),
            ),
        ],
    )
    def test_processors_must_declare_that_ragged_rows_suit_them(self, given, found) -> None:
        config = SimpleNamespace(model_config=SimpleNamespace(logits_processors=given))
        assert exclusions.undeclared_processors(config) == found

    @pytest.mark.parametrize(
        ("changes", "word"),
        [
            ({}, ""),
            ({"sampling_params": None}, "pooling"),
            ({"resumable": True}, "resumable"),
        ],
    )
    def test_requests(self, changes: dict[str, Any], word: str) -> None:
        request = SimpleNamespace(**{"sampling_params": object(), "resumable": False, **changes})
        reason = exclusions.exclusion(request, ())
        assert word in reason and bool(word) is bool(reason)
        assert "Some" in exclusions.exclusion(request, ("Some",))

    @pytest.mark.parametrize("windows", ["host", "device"])
    def test_the_whole_step_is_planned_native_before_it_runs(
        self, pair: Pair, tmp_path: Path, windows: str
    ) -> None:
        """Catches a request that scheduling must not touch in a trimmed step."""
        scheduler = bare_scheduler(pair, options(tmp_path, DEAR, windows=windows), max_num_seqs=9)
        worker = settled(scheduler)
        worker.step()
        assert worker.plans[-1].kind is PlanKind.TRIM
        add_request(scheduler, "untouchable")
        request = scheduler.requests["untouchable"]
        request.resumable = True
        worker.step()  # its prompt
        output = scheduler.schedule()
        plan = order_of(output).plan
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.EXCLUDED)
        assert {len(d) for d in output.scheduled_spec_decode_tokens.values()} == {K}


class TestPauses:
    def test_a_seeded_request_ends_a_pause_in_the_step_of_its_prompt(
        self, pair: Pair, tmp_path: Path
    ) -> None:
        """Catches a first window that depends on whether neighbours had made drafting pause."""
        scheduler = bare_scheduler(pair, options(tmp_path, HOPELESS), max_num_seqs=9)
        worker = settled(scheduler)
        worker.step()
        assert not worker.plans[-1].draft_next, worker.plans[-1].reason
        add_request(scheduler, "seeded", temperature=0.9, seed=5)
        output = worker.step()
        assert "seeded" in output.num_scheduled_tokens
        assert order_of(output).draft_next
        output = worker.step()
        assert len(output.scheduled_spec_decode_tokens["seeded"]) == K

    def test_resumes_within_two_steps_after_load_falls(self, pair: Pair, tmp_path: Path) -> None:
        """Catches a pause that outlives its cause: prices fall, drafts are back two steps later."""
        from vllm_dspark.artifacts.store import read_cost_table
        from vllm_dspark.planning.online_cost import CostModel

        scheduler = bare_scheduler(pair, options(tmp_path, HOPELESS, probe_interval=8))
        worker = settled(scheduler, steps=20)
        worker.step()
        assert not worker.plans[-1].draft_next
        cheap = read_cost_table(write_cost_table(tmp_path / "cheap.json", **CHEAP)).to_table()
        scheduler.conductor.planner.cost = CostModel(cheap, online=False)
        verified = [
            sum(map(len, worker.step().scheduled_spec_decode_tokens.values())) for _ in range(2)
        ]
        assert verified == [0, 8 * K]


class TestTenants:
    def test_who_counts_as_a_tenant(self) -> None:
        def of(salt: str | None, lora: str | None) -> int | None:
            adapter = None if lora is None else SimpleNamespace(lora_name=lora)
            return tenant_of(SimpleNamespace(cache_salt=salt, lora_request=adapter))

        assert of(None, None) is None
        assert of("a", None) == of("a", "x") != of("b", None)
        assert of(None, "x") not in (of(None, "y"), of("x", None))

    def run(
        self,
        pair: Pair,
        folder: Path,
        hostile_salts: Callable[[int], str | None],
        *,
        num_bad: int = 5,
        salted: bool = True,
    ) -> Any:
        """3 honest users whose drafts are all accepted; a stream of 50 requests gets none.

        The hostile requests are short, `num_bad` at a time, so every one of them is new.
        """
        length = 10_000
        scheduler = bare_scheduler(
            pair,
            options(folder, CHEAP),
            max_num_seqs=8,
            max_model_len=length,
            hf_overrides={"max_position_embeddings": length},
        )
        for i in range(3):
            add_request(scheduler, f"honest{i}", cache_salt=f"user{i}" if salted else None)

        def accept(name: str, drafts: int) -> int:
            return drafts if name.startswith("honest") else 0

        worker = MadeUpWorker(scheduler, accept, confidence=0.8)
        for _ in range(100):  # they have been there before
            worker.step()
        sent = 0
        for _ in range(500):
            running = [r.request_id for r in scheduler.running]
            for _ in range(num_bad - sum(name.startswith("bad") for name in running)):
                add_request(scheduler, f"bad{sent}", max_tokens=50, cache_salt=hostile_salts(sent))
                sent += 1
            worker.step()
        assert sent >= 10 * num_bad
        return scheduler.conductor.table

    def honest(self, table: Any) -> np.ndarray:
        slots = table.slots([f"honest{i}" for i in range(3)])
        return table.posterior.estimate(slots, np.zeros(3, dtype=bool))

    def test_a_hostile_stream_of_one_tenant_does_not_move_the_others(
        self, pair: Pair, tmp_path: Path
    ) -> None:
        """Catches learning that follows the loudest client.

        Of 8 rows a step 5 are hostile; alone, they would take the shared rate of the first
        position to 3/8. One tenant of four, capped, may take it to about 3/4.
        """
        table = self.run(pair, tmp_path, lambda i: "hostile")
        assert table.posterior.prior(False)[0] > 0.7
        assert self.honest(table).min() > 0.75
        # the head says 0.8, capped traffic 0.75: next to nothing to correct
        assert abs(table.online.calibration.greedy_offset[0]) < 0.5

    def test_without_salts_a_stream_at_their_rate_moves_honest_requests_by_the_bound(
        self, pair: Pair, tmp_path: Path
    ) -> None:
        """Catches shared learning that is a mean: it would go half of the way, from 1 to 0.5."""
        alone, among = (
            self.run(pair, tmp_path, lambda i: None, num_bad=num_bad, salted=False)
            for num_bad in (0, 3)
        )
        first = [table.posterior.prior(False)[0] for table in (alone, among)]
        assert first[0] - first[1] <= INFLUENCE_BOUND
        moved = np.abs(self.honest(alone) - self.honest(among))
        assert moved.max() <= INFLUENCE_BOUND
        assert self.honest(among).min() > 0.8

    def test_what_many_that_look_like_users_can_do_is_bounded(
        self, pair: Pair, tmp_path: Path
    ) -> None:
        """More of them than of honest users are not told apart from many users.

        They bend the shared rate of a position they reach, and the calibration by at most BOUND:
        speed at stake, never the output.
        """
        table = self.run(pair, tmp_path, str)
        assert self.honest(table)[1:].min() > 0.9, "positions it never reached moved"
        offsets = np.array(table.online.calibration.greedy_offset)
        assert (np.abs(offsets) <= BOUND + 1e-6).all()


class TestStartUp:
    def test_one_draft_is_never_scheduled(self, pair: Pair, tmp_path: Path) -> None:
        """K = 1 resolves to off, and full windows run."""
        scheduler = bare_scheduler(
            pair, {"scheduling": "auto", "cache_dir": str(tmp_path)}, width=1
        )
        assert "num_speculative_tokens = 1" in scheduler.conductor.off_reason
        assert scheduler.conductor.planner is None

    def test_demanded_freshness_is_settled_before_the_engine(
        self, pair: Pair, tmp_path: Path
    ) -> None:
        """Catches a stale table that is used although freshness was demanded."""
        given = options(tmp_path, DEAR, validate_confidence_artifact_freshness=True)
        config = make_config(pair, given)
        from vllm_dspark.integration.carrier import options_of

        found = startup.resolve_scheduling(config, options_of(config))
        assert isinstance(found, Resolution) and not found.scheduling
        assert "is not from this machine and model" in found.off_reason
        live = startup.live_fingerprint(config)
        assert live.differences(any_fingerprint(K))
        assert startup.live_fingerprint(make_config(pair, given)) == live
        compiled = type(config.compilation_config.mode).VLLM_COMPILE
        assert config.compilation_config.mode is not compiled  # the tests' engines are eager
        config.compilation_config.mode = compiled  # whose steps take other times
        (difference,) = live.differences(startup.live_fingerprint(config))
        assert difference.startswith("compilation: recorded 'NONE', now 'VLLM_COMPILE'")
