"""The summary line, with a fake clock, and the counting behind it, without an engine."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.planning.builders import batch, table_from
from vllm_dspark.artifacts.freshness import Resolution
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.conductor import Conductor
from vllm_dspark.integration.metrics import EngineMetrics
from vllm_dspark.integration.metrics_catalog import FALLBACKS, RATIO_BOUNDS, catalog
from vllm_dspark.integration.metrics_log import SummaryLog
from vllm_dspark.integration.metrics_totals import PlanTotals, RowTotals, StepTimes
from vllm_dspark.integration.outcomes import OutcomeTotals, StepOutcomes, reach
from vllm_dspark.integration.report import StepOrder
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan
from vllm_dspark.planning.survival import RowCounts
from vllm_dspark.planning.table import RequestTable

K = 7
FAMILIES = catalog(K)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def plan(kind=PlanKind.NATIVE, reason=Reason.NATIVE_BEST, *, draft_next=True, tokens=0.0):
    return VerifyPlan(
        1,
        0,
        1,
        K,
        kind,
        reason,
        0,
        0,
        draft_next,
        (),
        0.0,
        tokens,
        native_ms=0.0,
        native_tokens=0.0,
    )


def outcomes(accepted, verified=K, rows=1):
    def column(value):
        return np.full(rows, value)

    return StepOutcomes(
        [f"r{i}" for i in range(rows)],
        drafted=column(K),
        scheduled=column(verified),
        admitted=column(verified),
        verified=column(verified),
        before_stop=column(verified),
        accepted=column(accepted),
        sampled=column(accepted + 1),
        emitted=column(accepted + 1),
        stamps=column(1),
        reached=reach(
            [column(n) for n in (K, verified, verified, min(verified, accepted + 1), accepted)], K
        ),
    )


class Engine:
    """An `EngineMetrics` over real accumulators, and what the scheduler does with them."""

    def __init__(self, interval_s=60.0, off_reason="", *, device=False):
        table = RequestTable(K, 8, Calibration.identity(K), rank_by_posterior=True)
        cost = None if off_reason else table_from(lambda n: 1.0 + 0.1 * n, [1, 8, 64, 512], K)
        resolution = Resolution(off_reason, Calibration.identity(K), cost)
        self.conductor = Conductor(
            table, resolution, DSparkConfig(), StepMode.EAGER, device_windows=device
        )
        self.totals = OutcomeTotals(K)
        self.clock = Clock()
        self.lines = []
        self.metrics = EngineMetrics(self.conductor, self.totals, 0.25, self.clock)
        self.metrics.log = SummaryLog(
            FAMILIES, interval_s, clock=self.clock, write=self.lines.append
        )

    def step(self, seconds=1.0, plan=None, outcomes=None, drafted=True, report=None):
        self.clock.now += seconds
        self.totals.add(outcomes)
        order = StepOrder.of(1, plan, {"r0": K} if drafted else {}, 1)
        self.metrics.step(order, outcomes, report)

    def value(self, name, *cell):
        start = 0
        for family in self.metrics.families:
            if family.name == name:
                index = family.cells.index(cell) if cell else 0
                return self.metrics._values[start + index]
            start += family.size
        raise KeyError(name)


class TestSummaryLine:
    def test_reads_as_documented(self):
        engine = Engine()
        cost = engine.conductor.planner.cost
        for i in range(61):
            kind, reason = PlanKind.NATIVE, Reason.NATIVE_BEST
            if i % 4 == 3:
                kind, reason = PlanKind.TRIM, Reason.TRIM_GAIN
            timing = StepTiming(StepMode.FULL, StepShape.NATIVE, 1, 8, 0, 3.0, 1.0)
            engine.conductor.times.add(timing, cost)
            engine.step(1.0, plan(kind, reason, tokens=4.0), outcomes(2, verified=4))
        (line,) = engine.lines
        assert line == (
            "dspark: 59 s, 60 steps (75 % native, 25 % trim), AL 3.00, admitted 4.0/7, "
            "verified 4.0, accepted 2.0, step 4.0 ms (predicted 2.1), tokens 75 % of predicted"
        )

    def test_one_line_per_interval_and_only_its_own_steps(self):
        engine = Engine(interval_s=10.0)
        for _ in range(35):
            engine.step(1.0, plan(), outcomes(2))
        assert len(engine.lines) == 3
        assert all("10 steps" in line and "AL 3.00" in line for line in engine.lines)

    def test_idle_writes_nothing_and_counts_no_time(self):
        engine = Engine(interval_s=10.0)
        for _ in range(4):
            engine.step(1.0, plan(), outcomes(2))
        engine.step(3600.0, plan(), outcomes(2))  # the next request comes an hour later
        assert len(engine.lines) == 1
        assert engine.lines[0].startswith("dspark: 3 s, 4 steps")
        engine.metrics.close()
        assert engine.lines[1].startswith("dspark: 0 s, 1 steps")

    def test_an_engine_that_did_nothing_says_nothing(self):
        engine = Engine()
        engine.metrics.close()
        assert engine.lines == []

    def test_troubles_are_named(self):
        engine = Engine()
        counts = RowCounts(stale=2, current=0, invalid=3)
        engine.conductor.rows.add(batch(np.full((K, 2), 0.5), counts=counts))
        engine.step(1.0, plan(PlanKind.NATIVE, Reason.MIXED), outcomes(0))
        engine.step(1.0, plan(PlanKind.NATIVE, Reason.MIXED), outcomes(0))
        engine.metrics.close()
        (line,) = engine.lines
        for words in (
            "3 invalid confidences",
            "100 % of rows neutral",
            "declined 2 times for mixed",
        ):
            assert words in line

    def test_calibration_error(self):
        engine = Engine()
        engine.step(1.0, plan(), outcomes(0))
        live = engine.conductor.table.live
        live.observe(np.full((K, 50), 0.9), np.zeros(50, dtype=int), np.full(50, K))
        engine.step(0.1, plan(), outcomes(0))
        engine.metrics.close()
        assert "ECE 0.90" in engine.lines[0]


class TestCounting:
    def test_kinds_reasons_and_draft_passes(self):
        engine = Engine()
        engine.step(plan=plan(), outcomes=outcomes(1))
        engine.step(plan=plan(PlanKind.SKIP_DRAFT, Reason.SKIP_GAIN, draft_next=False))
        engine.step(plan=plan(PlanKind.SKIP_DRAFT, Reason.PROBE_DRAFT))
        engine.step(plan=None, drafted=False)
        assert engine.value("steps", "native", "native_best") == 1
        assert engine.value("steps", "skip_draft", "skip_gain") == 1
        assert engine.value("steps", "unplanned", "unplanned") == 1
        assert engine.value("draft_passes") == 3
        assert engine.value("skipped_draft_passes") == 1
        assert engine.value("probes") == 1
        assert engine.metrics.plans.by_kind()["skip_draft"] == 2

    @pytest.mark.parametrize("reason", ["excluded", "mixed", "unpriced", "unknown"])
    def test_native_steps_that_could_not_be_scheduled(self, reason):
        engine = Engine()
        engine.step(plan=plan(reason=Reason(reason)))
        assert engine.value("fallbacks", reason) == 1

    def test_steps_without_a_planner(self):
        off = Engine(off_reason="no confidence head")
        off.step(drafted=False)
        off.step()
        assert off.value("fallbacks", "scheduling_off") == 1
        assert off.value("scheduling") == 0
        waiting = Engine()
        waiting.step()
        assert waiting.value("fallbacks", "no_cost_table") == 1
        assert waiting.value("scheduling") == 1

    def test_a_plan_that_the_worker_refused(self):
        engine = Engine(device=True)
        trim = plan(PlanKind.TRIM, Reason.TRIM_GAIN)
        engine.step(plan=trim, report=SimpleNamespace(admitted={"r0": 2}))
        assert engine.value("fallbacks", "plan_refused") == 0
        engine.step(plan=trim, report=SimpleNamespace(admitted=None))
        assert engine.value("fallbacks", "plan_refused") == 1

    def test_promised_tokens_are_compared_with_those_of_the_same_steps(self):
        engine = Engine()
        engine.step(plan=plan(tokens=3.5), outcomes=outcomes(2))
        engine.step(plan=plan(tokens=0.0), outcomes=outcomes(5))
        assert engine.value("predicted_tokens") == 3.5
        assert engine.value("realised_tokens") == 3

    def test_every_reason_of_a_decline_is_documented(self):
        totals = PlanTotals(3)
        for reason in FALLBACKS:
            totals.decline(reason)
        assert totals.fallbacks.tolist() == [1] * len(FALLBACKS)
        with pytest.raises(KeyError):
            totals.decline("for no reason")


class TestTimesAndRows:
    def timing(self, forward, draft=None):
        return StepTiming(StepMode.FULL, StepShape.NATIVE, 1, 8, 0, forward, draft)

    def test_measured_against_the_price_before_learning(self):
        cost = CostModel(table_from(lambda n: 1.0 + 0.1 * n, [8, 64], K))  # 1.8 ms, drafter 0.3 ms
        times = StepTimes()
        times.add(self.timing(3.6, 0.6), cost)
        times.add(self.timing(1.8), cost)
        assert times.timed[0] == 2
        assert times.measured_s[0] == pytest.approx(6.0e-3)
        assert times.predicted_s[0] == pytest.approx(3.9e-3)
        assert times.draft_s[0] == pytest.approx(0.6e-3)
        assert times.ratio[RATIO_BOUNDS.index(2.0)] == 1
        assert times.ratio[RATIO_BOUNDS.index(1.0)] == 1
        assert times.ratio[-1] == pytest.approx(3.0)

    @pytest.mark.parametrize("forward", [0.0, -1.0, float("nan"), float("inf")])
    def test_a_time_that_is_no_time_counts_nowhere(self, forward):
        times = StepTimes()
        times.add(self.timing(forward, 0.6), CostModel(table_from(lambda n: 1.0 + n, [8, 64], K)))
        assert times.timed[0] == times.measured_s[0] == times.draft_s[0] == 0

    def test_a_step_that_cannot_be_priced(self):
        times = StepTimes()
        cost = CostModel(table_from(lambda n: 1.0 + n, [8, 64], K))
        times.add(StepTiming(StepMode.MIXED, StepShape.NATIVE, 1, 8, 0, 1.0), cost)
        assert times.timed[0] == 0

    def test_rows(self):
        rows = RowTotals()
        rows.add(batch(np.full((K, 5), 0.5), counts=RowCounts(stale=2, current=1, invalid=4)))
        rows.add(batch(np.full((K, 5), 0.5)))
        assert rows.states.tolist() == [7, 2, 1]
        assert rows.neutral.tolist() == [3]
        assert rows.invalid.tolist() == [4]

    def test_drift_reaches_the_metrics(self):
        engine = Engine()
        cost = engine.conductor.planner.cost
        for _ in range(300):
            cost.observe(self.timing(5.0, 0.3))
        engine.step(2.0, plan())
        assert engine.value("cost_ratio", "full/native") > 1.5
        assert np.isnan(engine.value("cost_ratio", "mixed/native"))
        assert engine.value("cost_drifted_cells") >= 1
