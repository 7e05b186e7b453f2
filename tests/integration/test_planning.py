"""Plans made in the engine core and executed by the worker, with windows on the host and on it.

Each engine gets a cost table by file, so what is planned depends on no clock.
"""

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.costs import write_cost_table
from tests.support.engines import dspark, engine, runner_of, scheduler_of, token_lists
from tests.support.pairs import Pair, PairSpec
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.plan import PlanKind

pytestmark = pytest.mark.engine

SPEC = PairSpec(kind="markov", noise=0.2)
# Every row costs a tenth of an empty step: at 8 requests most drafts are not worth it.
DEAR = {"base_ms": 10.0, "per_token_ms": 1.0}
# Rows are all that costs: no draft of this drafter can be worth verifying.
HOPELESS = {"base_ms": 0.1, "per_token_ms": 10.0, "draft_ms": 10.0}
# Eight full draft passes take as long as the step: few columns pay.
COSTLY = {"base_ms": 40.0, "per_token_ms": 1.0, "draft_ms": 80.0, "narrow_share": 0.1}
CHEAP = {"base_ms": 100.0, "per_token_ms": 0.05, "draft_ms": 0.1}


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [10 + i, 20, 30 + 2 * i]} for i in range(count)]


def greedy(tokens: int = 40) -> Any:
    from vllm import SamplingParams

    return SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def pair(build: Callable) -> Pair:
    return build(SPEC)


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    with engine(pair.target) as llm:
        return token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False))


def options(table: Path, **changes: Any) -> dict[str, Any]:
    return {
        "scheduling": "auto",
        "cost_table": str(table),
        "online_cost": False,
        **changes,
    }


def watch_plans(llm: Any) -> list[Any]:
    """Every plan that the engine core makes from now on."""
    conductor = scheduler_of(llm).conductor
    plans: list[Any] = []
    order = conductor.order

    def noted(*args: Any) -> Any:
        made = order(*args)
        if made.plan is not None:
            plans.append(made.plan)
        return made

    conductor.order = noted
    return plans


@pytest.mark.parametrize("windows", ["host", "device"])
def test_trimming_keeps_the_output(
    pair: Pair, expected: list[list[int]], tmp_path: Path, windows: str
) -> None:
    """Catches windows that lose, repeat or misplace tokens, and plans that never trim at all."""
    table = write_cost_table(tmp_path / "table.json", **DEAR)
    speculative = dspark(pair.drafter, options(table, windows=windows))
    with engine(pair.target, speculative) as llm:
        plans = watch_plans(llm)
        outputs = token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False))
        totals, runner = scheduler_of(llm).dspark_totals, runner_of(llm)
        box = runner._windows.box if runner._windows is not None else None
    assert outputs == expected
    trimmed = [plan for plan in plans if plan.kind is PlanKind.TRIM]
    assert len(trimmed) > 5, [plan.reason for plan in plans]
    assert 0 < totals.verified.sum() < totals.drafted.sum()
    assert totals.accepted.sum() > 0
    if windows == "device":
        assert box is not None, "device windows were asked for and are not there"
        assert box.accepted == len(trimmed)
        assert box.mismatched == box.unclaimed == 0
        assert all(plan.windows == () for plan in trimmed)
    else:
        assert box is None
        assert all(len(plan.windows) == plan.num_requests for plan in trimmed)


@pytest.mark.parametrize("windows", ["host", "device"])
def test_trimmed_steps_at_rest_keep_the_output(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: str
) -> None:
    """Catches steps at rest that are not trimmed, or whose windows are not reported."""
    from vllm_dspark.planning import repeat

    # Decisions of eight requests serve as long as those of hundreds.
    monkeypatch.setattr(repeat, "_LAZY_REQUESTS", 2)
    monkeypatch.setattr(repeat, "_STEADY", 1)
    long = greedy(160)
    with engine(pair.target) as llm:
        wanted = token_lists(llm.generate(prompts(8), long, use_tqdm=False))
    table = write_cost_table(tmp_path / "table.json", **DEAR)
    with engine(pair.target, dspark(pair.drafter, options(table, windows=windows))) as llm:
        plans = watch_plans(llm)
        scheduler = scheduler_of(llm)
        conductor, rested = scheduler.conductor, []
        if windows == "host":  # rows about the drafts at hand would have each step planned by them
            conductor._take_rows = lambda report: None
        was_rested = conductor.rested

        def noted(order: Any, output: Any) -> bool:
            at_rest = was_rested(order, output)
            (rested if at_rest else plans).append(order.plan)
            return at_rest

        conductor.rested = noted
        outputs = token_lists(llm.generate(prompts(8), long, use_tqdm=False))
        totals, worker = scheduler.dspark_totals, runner_of(llm)._windows
        fallbacks = scheduler.dspark_metrics.plans.fallbacks.sum()
    assert outputs == wanted
    assert len(rested) > 8
    assert {plan.kind for plan in rested} == {PlanKind.TRIM}
    trimmed = [plan for plan in plans if plan.kind is PlanKind.TRIM] + rested
    if windows == "device":
        box = worker.box
        assert (box.accepted, box.mismatched, box.unclaimed) == (len(trimmed), 0, 0)
        assert fallbacks == 0
    # Plans of 8 requests with all their drafts say how many are verified.
    kept = sum(7 * plan.num_requests - plan.budget for plan in rested)
    assert totals.trimmed.sum() >= kept > 0


@pytest.mark.parametrize(("windows", "drafts"), [("host", "greedy"), ("device", "probabilistic")])
def test_narrow_passes_keep_the_output(
    pair: Pair, expected: list[list[int]], tmp_path: Path, windows: str, drafts: str
) -> None:
    """Catches drafts of another position, rows of absent columns, a drafter that makes all K."""
    table = write_cost_table(tmp_path / "table.json", **COSTLY)
    speculative = dspark(
        pair.drafter,
        options(table, windows=windows, probe_interval=6),
        draft_sample_method=drafts,
    )
    with engine(pair.target, speculative) as llm:
        plans = watch_plans(llm)
        blocks = []
        ops = runner_of(llm).speculator.ops
        sample_block = ops.sample_block

        def noted(head: Any, batch: Any, *args: Any) -> None:
            blocks.append(batch.base_logits.shape[1])
            sample_block(head, batch, *args)

        ops.sample_block = noted
        outputs = token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False))
        scheduler = scheduler_of(llm)
        totals, rows = scheduler.dspark_totals, scheduler.conductor.rows
    assert outputs == expected
    widths = [plan.columns for plan in plans if plan.draft_next]
    assert {1, 2} & set(widths) and 7 in widths, widths
    assert min(blocks) == min(widths)
    assert [n for n in blocks if n < 7] == [n for n in widths if n < 7]
    assert totals.accepted[0] > 0
    assert totals.drafted[0] > totals.drafted[6] > 0
    assert rows.invalid[0] == 0


def test_cheap_rows_stay_native(pair: Pair, expected: list[list[int]], tmp_path: Path) -> None:
    """Catches trimming for its own sake: where rows are free, every draft is verified."""
    table = write_cost_table(tmp_path / "table.json", **CHEAP)
    with engine(pair.target, dspark(pair.drafter, options(table))) as llm:
        plans = watch_plans(llm)
        assert token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False)) == expected
        totals = scheduler_of(llm).dspark_totals
    assert {plan.kind for plan in plans} == {PlanKind.NATIVE}
    assert (totals.verified[0], totals.trimmed.sum()) == (totals.drafted[0], 0)


def test_skipped_drafting_keeps_output_and_resumes(
    pair: Pair, expected: list[list[int]], tmp_path: Path
) -> None:
    """Catches stale drafts after a pause, lost context KV, and a pause that never ends."""
    table = write_cost_table(tmp_path / "table.json", **HOPELESS)
    speculative = dspark(pair.drafter, options(table, probe_interval=8, hysteresis_steps=1))
    with engine(pair.target, speculative) as llm:
        plans = watch_plans(llm)
        assert token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False)) == expected
        kinds = [plan.kind for plan in plans]
        assert kinds.count(PlanKind.SKIP_DRAFT) > 10, kinds
        assert any(not plan.draft_next for plan in plans)
        # Load falls: rows become free, and within two steps drafts are verified again.
        from vllm_dspark.artifacts.store import read_cost_table
        from vllm_dspark.planning.online_cost import CostModel

        cheap = read_cost_table(write_cost_table(tmp_path / "cheap.json", **CHEAP)).to_table()
        scheduler_of(llm).conductor.planner.cost = CostModel(cheap, online=False)
        plans.clear()
        verified = scheduler_of(llm).dspark_totals.verified.sum()
        assert token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False)) == expected
        assert scheduler_of(llm).dspark_totals.verified.sum() > verified
        first_native = next(i for i, p in enumerate(plans) if p.kind is PlanKind.NATIVE)
    assert first_native <= 2 + 2, [plan.reason for plan in plans[:8]]  # prefill steps come first


@pytest.mark.parametrize("windows", ["host", "device"])
def test_budget_is_not_capped_by_one_logits_chunk(
    pair: Pair,
    expected: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    windows: str,
) -> None:
    """Catches a budget that must fit one chunk of logits, and chunks cut at the wrong rows."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    rows_per_chunk = 10
    monkeypatch.setattr(rejection_sampler, "MAX_CHUNK_BYTES", rows_per_chunk * 4 * SPEC.vocab_size)
    table = write_cost_table(tmp_path / "table.json", **DEAR)
    with engine(pair.target, dspark(pair.drafter, options(table, windows=windows))) as llm:
        plans = watch_plans(llm)
        ops, sizes = runner_of(llm).rejection_sampler.ops, []
        reject = ops.reject

        def noted(batch: Any, *args: Any) -> Any:
            sizes.append(batch.target_logits.shape[0])
            return reject(batch, *args)

        ops.reject = noted
        assert token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False)) == expected
    rows = [plan.num_requests + plan.budget for plan in plans if plan.kind is PlanKind.TRIM]
    assert max(rows) > rows_per_chunk, rows
    assert max(sizes) <= rows_per_chunk
    assert len(sizes) > len(plans), "no step was verified in chunks"


def test_a_plan_of_another_step_is_refused(pair: Pair, tmp_path: Path) -> None:
    """Catches half-applied plans: what does not match the step runs native and is counted."""
    table = write_cost_table(tmp_path / "table.json", **DEAR)
    with engine(pair.target, dspark(pair.drafter, options(table, windows="device"))) as llm:
        conductor = scheduler_of(llm).conductor
        order = conductor.order

        def stale(*args: Any) -> Any:
            made = order(*args)
            if made.plan is None or made.plan.kind is not PlanKind.TRIM:
                return made
            return replace(made, plan=replace(made.plan, step_id=made.plan.step_id + 1))

        conductor.order = stale
        outputs = token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False))
        box = runner_of(llm)._windows.box
        totals = scheduler_of(llm).dspark_totals
    assert box.accepted == 0 and box.mismatched > 5
    assert totals.trimmed.sum() == 0, "a refused plan was executed all the same"
    assert all(len(tokens) == 40 for tokens in outputs)


def test_measured_table_is_kept_for_the_next_start(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a second start that measures again, and a table that never reaches the planner.

    The measurement runs for real, but its times and its clock are replaced: on a busy machine the
    times may rightly be refused as noise, and large sizes left out.
    """
    from vllm_dspark.integration import profiling

    measured: list[tuple[int, int]] = []

    def timed(
        runner: Any, requests: int, tokens: int, kv_tokens: int, columns: int | None = None
    ) -> list[StepTiming]:
        samples = real(runner, requests, tokens, kv_tokens, columns)
        measured.append((tokens, kv_tokens))
        ms = 10.0 + tokens + kv_tokens / 1000
        draft_ms = 2.0 if columns is None else 0.5 + 0.2 * columns
        return [replace(sample, forward_ms=ms, draft_ms=draft_ms) for sample in samples]

    real = profiling._measure
    monkeypatch.setattr(profiling, "_measure", timed)
    looks = itertools.count()
    monkeypatch.setattr(profiling, "time", SimpleNamespace(perf_counter=lambda: next(looks) / 1000))
    settings = {"scheduling": "auto", "cache_dir": str(tmp_path)}
    small = {"max_num_seqs": 2, "max_model_len": 64}
    with engine(pair.target, dspark(pair.drafter, settings), **small) as llm:
        llm.generate(prompts(2), greedy(8), use_tqdm=False)
        planner = scheduler_of(llm).conductor.planner
    assert planner is not None and planner.cost is not None
    assert planner.cost.table.draft.sizes == (1, 2)
    assert planner.cost.draft_ms(2, 1) == pytest.approx(0.7)
    assert planner.cost.draft_ms(2, 3) == pytest.approx(1.1)
    sizes = planner.cost.table.grids[StepMode.EAGER, StepShape.RAGGED].sizes
    assert sizes == (1, 2, 3, 4, 5, 6, 7, 8, 16)
    (file,) = tmp_path.glob("cost-table-*.json")
    measured.clear()
    with engine(pair.target, dspark(pair.drafter, settings), **small) as llm:
        assert scheduler_of(llm).conductor.planner is not None, "not reused at start-up"
    assert measured == [] and list(tmp_path.glob("cost-table-*.json")) == [file]
