"""Steps that repeat a decision without a look at requests are as if those were looked at."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.costs import write_cost_table
from tests.support.pairs import Pair
from tests.support.schedulers import (
    CHEAP,
    DEAR,
    K,
    MadeUpWorker,
    add_request,
    bare_scheduler,
    options,
    settled,
)
from vllm_dspark.integration.report import attach_report, order_of, report_of
from vllm_dspark.planning.plan import PlanKind

pytestmark = pytest.mark.usefixtures("runner_choice")

COUNT = 128


class TestRest:
    """Settled native steps, in which no request is looked at."""

    def settle(self, pair: Pair, folder: Path, **changes: Any) -> tuple[Any, MadeUpWorker]:
        length = 10_000
        scheduler = bare_scheduler(
            pair,
            options(folder, CHEAP, **changes),
            max_num_seqs=9,
            max_model_len=length,
            hf_overrides={"max_position_embeddings": length},
        )
        return scheduler, settled(scheduler, steps=70)

    def test_learns_less_and_counts_all(self, pair: Pair, tmp_path: Path) -> None:
        """Catches bookkeeping that costs as much as planning, and metrics that lose steps by it."""
        scheduler, worker = self.settle(pair, tmp_path)
        conductor, totals = scheduler.conductor, scheduler.dspark_totals
        learned, steps = conductor.table.posterior.num_observed, totals.steps
        batches, rows = conductor.rows.states.sum(), totals.request_steps
        accepted, windows = totals.accepted.copy(), totals.windows.copy()
        for _ in range(96):
            worker.step()
        assert {plan.kind for plan in worker.plans} == {PlanKind.NATIVE}
        assert [plan.step_id for plan in worker.plans] == list(range(71, 167))
        assert totals.steps - steps == 96
        assert totals.request_steps - rows == 96 * 8
        assert (totals.accepted - accepted).tolist() == [96 * 8] * 3 + [0] * 4
        assert (totals.windows - windows)[K] == 96 * 8
        assert totals.trimmed.sum() == 0
        # 8 requests, 3 of 7 drafts accepted: 4 judged; 8 steps of 32 are learned from
        assert conductor.table.posterior.num_observed - learned == 3 * 8 * 8 * 4
        assert conductor.rows.states.sum() - batches == 3 * 8, "one step in 32 is planned"

    def test_what_was_left_out_is_made_up_for(self, pair: Pair, tmp_path: Path) -> None:
        """Catches stale stamps and remains after a rest: the table as if all had been looked at."""
        scheduler, worker = self.settle(pair, tmp_path)
        conductor = scheduler.conductor
        while conductor.resting_batch() is None or conductor.resting_batch().done < 5:
            worker.step()
        add_request(scheduler, "new")
        output = worker.step()
        assert not order_of(output).at_rest and conductor.resting_batch() is None
        order = order_of(worker.step())
        names = [f"r{i}" for i in range(8)]
        assert order.request_ids[:8] == names
        assert set(order.draft_stamps.tolist()) == {order.step_id - 1}
        slots = conductor.table.slots(names)
        left = scheduler.max_model_len - scheduler.requests["r0"].num_tokens
        assert set(conductor.table.remaining(slots).tolist()) == {left}

    def test_a_stop_is_counted_by_request(self, pair: Pair, tmp_path: Path) -> None:
        """Catches tokens behind a stop counted as accepted where nobody looks at requests."""
        scheduler, worker = self.settle(pair, tmp_path)
        conductor, totals = scheduler.conductor, scheduler.dspark_totals
        while conductor.resting_batch() is None:
            worker.step()
        request = scheduler.requests["r3"]
        request.max_tokens = request.num_output_tokens + 2  # of the 4 tokens of the next step
        accepted, discarded = totals.accepted.copy(), totals.discarded.copy()
        output = worker.step()
        assert order_of(output).at_rest
        assert "r3" not in scheduler.requests
        assert (totals.accepted - accepted).tolist() == [8, 8, 7, 0, 0, 0, 0]
        assert (totals.discarded - discarded).tolist() == [2]
        assert order_of(worker.step()).request_ids == [f"r{i}" for i in range(8) if i != 3]

    def test_drafts_that_vllm_left_out_end_it(self, pair: Pair, tmp_path: Path) -> None:
        """Catches an order about drafts that are not in the step."""
        scheduler, worker = self.settle(pair, tmp_path)
        conductor, totals = scheduler.conductor, scheduler.dspark_totals
        while conductor.resting_batch() is None:
            worker.step()
        scheduler.requests["r2"].spec_token_ids = [7] * 3
        verified = totals.verified.copy()
        order = order_of(worker.step())
        assert not order.at_rest
        assert order.num_drafts.tolist() == [7, 7, 3, 7, 7, 7, 7, 7]
        assert order.plan.budget == 7 * 7 + 3
        assert (totals.verified - verified).tolist() == [8, 8, 8, 7, 7, 7, 7]

    def test_it_ends_before_a_request_does(self, pair: Pair, tmp_path: Path) -> None:
        """Catches rest in steps whose drafts vLLM cuts, because a request is about to end."""
        scheduler, worker = self.settle(pair, tmp_path)
        conductor = scheduler.conductor
        while conductor.resting_batch() is None:
            worker.step()
        conductor.wake()
        request = scheduler.requests["r0"]
        request.max_tokens = request.num_output_tokens + 60
        slots = conductor.table.slots(["r0"])
        conductor.table.count_emitted(slots, conductor.table.remaining(slots) - 61)
        for _ in range(40):
            left = request.max_tokens - request.num_output_tokens
            if order_of(worker.step()).at_rest:
                assert left > 2 * (K + 1)
            if "r0" not in scheduler.requests:
                break
        assert "r0" not in scheduler.requests

    def test_where_nothing_is_scheduled_most_steps_rest(self, pair: Pair, tmp_path: Path) -> None:
        scheduler = bare_scheduler(pair, {"scheduling": False}, max_num_seqs=8)
        worker = settled(scheduler)
        totals, live = scheduler.dspark_totals, scheduler.conductor.table.live
        steps, paired = totals.steps, live.paired.copy()
        rested = sum(order_of(worker.step()).at_rest for _ in range(64))
        assert totals.steps - steps == 64
        assert 40 <= rested <= 48
        assert (live.paired > paired).any(), "the calibration error is not followed any more"


def crowd(
    pair: Pair, folder: Path, windows: str = "device", **worker: Any
) -> tuple[Any, MadeUpWorker]:
    """Requests of unlike acceptance; max_tokens of some lets them end one after another."""
    length = 10_000
    path = write_cost_table(folder / "large.json", max_requests=COUNT, per_token_ms=0.02)
    scheduler = bare_scheduler(
        pair,
        options(folder, DEAR, cost_table=str(path), windows=windows),
        max_num_seqs=COUNT,
        max_num_batched_tokens=4 * COUNT * (K + 1),
        max_model_len=length,
        hf_overrides={"max_position_embeddings": length},
    )
    assert scheduler.conductor.device_windows is (windows == "device")
    for i in range(COUNT):
        ends = {"max_tokens": 150 + 40 * i} if i % 32 == 0 else {}
        add_request(scheduler, f"r{i}", **ends)
    rng = np.random.default_rng(1)
    accept = lambda _, drafts: int(rng.binomial(drafts, 0.7))  # noqa: E731
    return scheduler, MadeUpWorker(scheduler, accept, **worker)


class TestTrimmedRest:
    """Trimmed plans repeated without a look at requests."""

    @pytest.mark.parametrize(
        ("windows", "worker"),
        [
            ("device", {}),
            ("device", {"lag": 1}),
            ("device", {"backwards": True}),
            # without lag, rows are about the drafts at hand, and each step is planned by them
            ("host", {"lag": 1}),
            ("host", {"lag": 2, "backwards": True}),
        ],
    )
    def test_changes_nothing_but_time(
        self,
        pair: Pair,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        windows: str,
        worker: dict[str, Any],
    ) -> None:
        """Catches counts, stamps, remains or plans that differ from those of steps looked at."""
        seen = []
        for rests in (True, False):
            scheduler, made_up = crowd(pair, tmp_path, windows, **worker)
            if not rests:
                monkeypatch.setattr(scheduler.conductor, "settle_down", lambda *_: None)
            unseen, stats = 0, []
            for _ in range(140):
                output = scheduler.schedule()
                ran = made_up.run(output)
                found = scheduler.update_from_output(output, ran)
                made_up.draft(output)
                unseen += order_of(output).unseen
                of_step = next(iter(found.values())).scheduler_stats.spec_decoding_stats
                stats.append(of_step)
            assert (unseen > 40) is rests
            scheduler.conductor.wake()
            scheduler.dspark_metrics._next_slow = 0.0  # what is brought up to date once a second
            scheduler.dspark_metrics.publish()
            table = scheduler.conductor.table
            seen.append((made_up.plans, stats, table, scheduler.dspark_metrics))
        (plans, stats, table, metrics), (other_plans, other_stats, other, other_metrics) = seen
        assert sum(plan.kind is PlanKind.TRIM for plan in plans) > 100
        assert plans == other_plans
        assert stats == other_stats
        slots = table.slots(name for name in (f"r{i}" for i in range(COUNT)) if name in table)
        assert COUNT - 4 <= slots.size < COUNT, "nobody ended"
        assert (table.remaining(slots) == other.remaining(slots)).all()
        assert (table.ranking_parameters().prior == other.ranking_parameters().prior).all()
        sampled = np.zeros(slots.size, dtype=np.bool_)
        mine, theirs = (each.posterior.estimate(slots, sampled) for each in (table, other))
        assert (mine == theirs).all()
        for family, mine, theirs in zip(
            metrics.families, metrics._arrays, other_metrics._arrays, strict=True
        ):
            assert np.allclose(mine, theirs, equal_nan=True), family.name

    def test_a_report_without_windows_is_no_rest(self, pair: Pair, tmp_path: Path) -> None:
        """Catches drafts counted as verified in a step that a worker refused to trim."""
        scheduler, worker = crowd(pair, tmp_path)
        conductor, plans = scheduler.conductor, scheduler.dspark_metrics.plans
        while conductor.resting_batch() is None:
            worker.step()
        refused, trimmed = plans.fallbacks.sum(), scheduler.dspark_totals.trimmed.sum()
        output = scheduler.schedule()
        assert order_of(output).at_rest
        ran = worker.run(output)
        attach_report(ran, replace(report_of(ran), admitted=None))
        scheduler.update_from_output(output, ran)
        assert plans.fallbacks.sum() == refused + 1
        assert scheduler.dspark_totals.trimmed.sum() == trimmed


class TestHostWindowsAtRest:
    """Windows of single requests: the scheduler cuts drafts and looks at nothing else."""

    def rest(self, pair: Pair, folder: Path) -> tuple[Any, MadeUpWorker]:
        scheduler, worker = crowd(pair, folder, "host", lag=1)
        while scheduler.conductor.resting_batch() is None:
            worker.step()
        return scheduler, worker

    def trimmed(self, scheduler: Any) -> tuple[Any, int]:
        """A request at rest that keeps some of its drafts, but not all, and how many."""
        cuts = scheduler.conductor.resting_batch().cuts
        return next((request, piece.stop) for request, piece in cuts if piece.stop > 1)

    def test_requests_verify_what_the_plan_says(self, pair: Pair, tmp_path: Path) -> None:
        """Catches windows of a step at rest that are not the repeated ones."""
        scheduler, worker = self.rest(pair, tmp_path)
        steps, trimmed = scheduler.conductor.resting_batch().steps, 0
        assert steps > 1
        before = scheduler.dspark_totals.trimmed.sum()
        for _ in range(steps):
            output = worker.step()
            order, drafts = order_of(output), output.scheduled_spec_decode_tokens
            assert order.unseen and not order.at_rest, "workers are to report"
            windows = [1 + len(drafts.get(name, ())) for name in order.request_ids]
            assert tuple(windows) == order.plan.windows
            trimmed += COUNT * K - order.plan.budget
        assert scheduler.dspark_totals.trimmed.sum() - before == trimmed > 0
        assert not order_of(worker.step()).unseen

    def test_drafts_that_are_missing_end_it(self, pair: Pair, tmp_path: Path) -> None:
        """Catches an order about drafts that are not in the step."""
        scheduler, worker = self.rest(pair, tmp_path)
        request, kept = self.trimmed(scheduler)
        place = scheduler.running.index(request)
        request.spec_token_ids = request.spec_token_ids[: kept - 1]
        order = order_of(worker.step())
        assert not order.unseen and scheduler.conductor.resting_batch() is None
        expected = [K] * COUNT
        expected[place] = kept - 1
        assert order.num_drafts.tolist() == expected
        assert order.plan.windows[place] == kept
        assert sum(order.plan.windows) - COUNT == order.plan.budget

    def test_a_stop_is_counted_by_request(self, pair: Pair, tmp_path: Path) -> None:
        """Catches tokens behind a stop counted as accepted where nobody looks at requests."""
        scheduler, worker = self.rest(pair, tmp_path)
        request, kept = self.trimmed(scheduler)
        worker._accept = lambda name, drafts: drafts
        request.max_tokens = request.num_output_tokens + 1
        totals = scheduler.dspark_totals
        discarded, accepted = totals.discarded.copy(), totals.accepted.sum()
        output = worker.step()
        order = order_of(output)
        assert order.unseen and request.request_id not in scheduler.requests
        assert (totals.discarded - discarded).tolist() == [kept]
        assert totals.accepted.sum() - accepted == order.plan.budget - kept + 1

    def test_a_grammar_prevents_it(self, pair: Pair, tmp_path: Path) -> None:
        """Catches drafts that a grammar left out counted as if they had been there."""
        scheduler, worker = self.rest(pair, tmp_path)
        conductor = scheduler.conductor
        conductor.wake()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(scheduler.running[0]), "use_structured_output", True)
            output = scheduler.schedule()
        order = order_of(output)
        assert order.repeats and order.plan.sets_windows
        assert conductor.resting_batch() is None
        scheduler.update_from_output(output, worker.run(output))
        worker.draft(output)
        assert any(order_of(worker.step()).unseen for _ in range(6))
