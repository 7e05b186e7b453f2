"""Choosing the width of draft passes: by hand, without flapping, and back at full width in time."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from tests.planning.builders import batch, facts, grid
from vllm_dspark.errors import CostTableError
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape, StepTiming, build_cost_table
from vllm_dspark.planning.draft_cost import DraftShares, ladder, measured_widths
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.width import WidthReason, WidthSelector

K = 7
EAGER = {"mode": StepMode.EAGER, "native_mode": StepMode.EAGER}
AT_ONCE = PlannerOptions(
    min_gain=0.0, hysteresis_steps=0, drain_guard=False, lazy=False, choose_width=True
)


def cpu_table(narrow=True, draft_ms=(8.0, 39.0), share=0.2):
    """A step of t tokens takes 60 + 0.15 t ms; n of K columns take share + (1 - share) n / K."""
    sizes, requests = (1, 8, 64, 512), (1, 32)
    shapes = {
        (StepMode.EAGER, StepShape.RAGGED): grid(sizes, [60.0 + 0.15 * size for size in sizes])
    }
    widths = {}
    if narrow:
        for n in measured_widths(K):
            part = share + (1.0 - share) * n / K
            widths[n] = grid(requests, [part * ms for ms in draft_ms])
    return CostTable(shapes, grid(requests, draft_ms), narrow=widths)


def planner(options=AT_ONCE, **table):
    return Planner(CostModel(cpu_table(**table), online=False, num_positions=K), options)


def uniform(n, rate, **changes):
    return batch(np.full((K, n), rate), **changes)


def goodput_by_hand(n, rate, width, num_drafts):
    """Of a step that verifies the best `num_drafts` drafts, after passes of `width` columns."""
    survivals = sorted((rate ** (k + 1) for k in range(width) for _ in range(n)), reverse=True)
    draft = 8.0 + (39.0 - 8.0) * (n - 1) / 31
    ms = 60.0 + 0.15 * (n + num_drafts) + draft * (0.2 + 0.8 * width / K)
    return (n + sum(survivals[:num_drafts])) / ms


def best_by_hand(n, rate):
    """The width of the ladder with the highest goodput over all budgets."""
    best = {
        width: max(goodput_by_hand(n, rate, width, b) for b in range(n * width + 1))
        for width in ladder(K)
    }
    return max(best, key=best.__getitem__)


def test_ladder():
    assert ladder(7) == (1, 2, 3, 5, 7)
    assert ladder(8) == (1, 2, 3, 5, 8)
    assert ladder(1) == (1,)
    assert ladder(2) == (1, 2)
    assert ladder(5) == (1, 2, 3, 5)
    assert all(set(measured_widths(k)) <= set(ladder(k)) for k in range(2, 20))


class TestShares:
    def test_interpolates_in_requests_and_columns(self):
        shares = DraftShares(
            grid((1, 31), (10.0, 40.0)), {1: grid((1, 31), (5.0, 8.0)), 3: grid((1,), (6.0,))}, K
        )
        assert shares.of(1, 1) == pytest.approx(0.5)
        assert shares.of(31, 1) == pytest.approx(0.2)
        assert shares.of(16, 1) == pytest.approx(0.35)
        assert shares.of(31, 3) == pytest.approx(0.6)  # measured for one request only
        assert shares.of(31, 2) == pytest.approx(0.4)
        assert shares.of(31, 5) == pytest.approx(0.8)
        assert shares.of(31, K) == 1.0

    def test_more_columns_never_cost_less(self):
        shares = DraftShares(grid((4,), (10.0,)), {1: grid((4,), (9.0,)), 3: grid((4,), (7.0,))}, K)
        values = [shares.of(4, n) for n in range(1, K + 1)]
        assert values == sorted(values)
        assert (values[0], values[2], values[-1]) == (0.7, 0.7, 1.0)

    def test_measured_passes_correct_their_width(self):
        table = cpu_table()
        cost = CostModel(table, num_positions=K)
        before = cost.draft_ms(32, 1), cost.draft_ms(32, K)
        for _ in range(400):
            cost.observe(
                StepTiming(StepMode.EAGER, StepShape.RAGGED, 32, 64, 0, 39.2, before[0] * 1.3, 1)
            )
            cost.observe(
                StepTiming(StepMode.EAGER, StepShape.RAGGED, 32, 64, 0, 39.2, before[1], None)
            )
        assert cost.draft_ms(32, 1) == pytest.approx(1.3 * before[0], rel=0.05)
        assert cost.draft_ms(32, K) == pytest.approx(before[1], rel=0.05)

    def test_a_corrected_table_keeps_the_prices(self):
        cost = CostModel(cpu_table(), num_positions=K)
        for _ in range(64):
            cost.observe(StepTiming(StepMode.EAGER, StepShape.RAGGED, 32, 64, 0, 69.6, 60.0))
        again = CostModel(cost.corrected_table(), num_positions=K)
        for n in (1, 2, 3, 5, K):
            assert again.draft_ms(32, n) == pytest.approx(cost.draft_ms(32, n))
        assert again.draft_ms(32) > CostModel(cpu_table(), num_positions=K).draft_ms(32)

    def test_tables_are_built_from_narrow_samples_too(self):
        def sample(tokens, forward, draft, columns=None):
            mode, shape = StepMode.EAGER, StepShape.RAGGED
            return StepTiming(mode, shape, 1, tokens, 128, forward, draft, columns)

        samples = [sample(8, 20.0, 10.0), sample(64, 40.0, 10.0), sample(3, 1.0, 4.0, 2)] * 3
        table = build_cost_table(samples)
        assert table.grids[StepMode.EAGER, StepShape.RAGGED].sizes == (8, 64)
        assert CostModel(table, num_positions=K).draft_ms(1, 2) == 4.0
        with pytest.raises(CostTableError, match="draft of 2 columns"):
            build_cost_table([*samples[:-1], sample(3, 1.0, float("nan"), 2)])

    def test_without_narrow_passes_all_widths_cost_the_same(self):
        cost = CostModel(cpu_table(narrow=False), num_positions=K)
        assert not cost.prices_widths
        assert cost.draft_ms(8, 1) == cost.draft_ms(8) == cost.draft_ms(8, K)


class TestChoice:
    @pytest.mark.parametrize("rate", [0.3, 0.45, 0.6, 0.75, 0.9])
    @pytest.mark.parametrize("n", [1, 4, 16, 32])
    def test_equals_the_hand_computed_width(self, n, rate):
        one = planner(replace(AT_ONCE, skip_draft=False))
        plan = one.plan(facts(**EAGER), uniform(n, rate))
        if plan.kind is PlanKind.TRIM:
            assert plan.columns == best_by_hand(n, rate)
        else:  # full windows are the best there is
            assert best_by_hand(n, rate) == K == plan.columns

    def test_both_ends_occur(self):
        """The parametrised test above would prove nothing if one width were always best."""
        widths = {best_by_hand(n, rate) for n in (1, 32) for rate in (0.3, 0.45, 0.9)}
        assert {1, K} <= widths

    def test_cheap_passes_keep_drafting_alive(self):
        """Where K columns do not pay, two may: no pause."""
        narrow = planner().plan(facts(**EAGER), uniform(32, 0.45))
        wide = planner(replace(AT_ONCE, choose_width=False)).plan(facts(**EAGER), uniform(32, 0.45))
        assert (wide.reason, wide.draft_next) == (Reason.SKIP_LEFTOVER, False)
        assert narrow.reason is Reason.TRIM_GAIN
        assert narrow.columns == best_by_hand(32, 0.45) == 2

    def test_drafts_that_are_missing_are_not_verified(self):
        few = uniform(32, 0.6, num_drafts=np.full(32, 2, dtype=np.int32))
        plan = planner().plan(facts(**EAGER), few)
        assert plan.kind is PlanKind.TRIM
        assert max(plan.windows) <= 3
        assert plan.budget == sum(plan.windows) - 32

    def test_prediction_has_the_price_of_the_width(self):
        plan = planner().plan(facts(**EAGER), uniform(32, 0.6))
        assert plan.columns < K
        rows = 32 + plan.budget
        draft = 39.0 * (0.2 + 0.8 * plan.columns / K)
        assert plan.predicted_ms == pytest.approx(60.0 + 0.15 * rows + draft)

    @pytest.mark.parametrize(
        ("options", "table", "changes"),
        [
            pytest.param({"choose_width": False}, {}, {}, id="switched off"),
            pytest.param({}, {"narrow": False}, {}, id="old cost table"),
            pytest.param({}, {}, {"reserved": np.arange(32) == 3}, id="a seeded request"),
            pytest.param({}, {}, {"excluded": np.arange(32) == 3}, id="an excluded request"),
        ],
    )
    def test_full_width_where_narrow_is_not_allowed(self, options, table, changes):
        one = planner(replace(AT_ONCE, skip_draft=False, **options), **table)
        assert (
            planner(replace(AT_ONCE, skip_draft=False))
            .plan(facts(**EAGER), uniform(32, 0.45))
            .columns
            < K
        ), "this load wants narrow passes"
        plan = one.plan(facts(**EAGER), uniform(32, 0.45, **changes))
        assert (plan.columns, plan.draft_width) == (K, None)

    def test_steps_with_prefill_rows_keep_the_width(self):
        one = planner()
        width = one.plan(facts(1, **EAGER), uniform(32, 0.6)).columns
        mixed = {"mode": StepMode.MIXED, "native_mode": StepMode.MIXED, "reserved_rows": 100}
        plan = one.plan(facts(2, **mixed), uniform(32, 0.6))
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.MIXED)
        assert plan.columns == width < K

    def test_forced_width_of_tests(self):
        one = planner(replace(AT_ONCE, enabled=False, test_draft_width=(2, 5)))
        plans = [one.plan(facts(s, **EAGER), uniform(4, 0.8)) for s in range(4)]
        assert [plan.columns for plan in plans] == [2, 5, 2, 5]
        assert {plan.width_reason for plan in plans} == {WidthReason.FORCED}
        one = planner(replace(AT_ONCE, enabled=False, test_draft_width="random"))
        seen = {one.plan(facts(s, **EAGER), uniform(4, 0.8)).columns for s in range(100)}
        assert seen == set(range(1, K + 1))


class TestHysteresis:
    OPTIONS = replace(AT_ONCE, min_gain=0.04, hysteresis_steps=4, probe_interval=1000)

    def run(self, one, loads, rate=0.55, noise=0.0, seed=0) -> list[VerifyPlan]:
        rng = np.random.default_rng(seed)
        plans, drafts = [], K
        for step, n in enumerate(loads):
            wobble = np.clip(rate + noise * rng.normal(size=(K, n)), 0.02, 0.99)
            plan = one.plan(
                facts(step, **EAGER),
                batch(wobble, num_drafts=np.full(n, drafts, dtype=np.int32)),
            )
            drafts = plan.columns
            plans.append(plan)
        return plans

    def test_full_width_returns_within_two_steps_of_the_load_falling(self):
        plans = self.run(planner(self.OPTIONS), [32] * 40 + [1] * 10, rate=0.75)
        assert plans[39].columns < K
        assert plans[40].columns == K  # the step that notices
        assert plans[41].windows == (K + 1,)  # and its drafts are verified by the next

    def test_one_decision_is_not_enough_to_narrow(self):
        plans = self.run(planner(self.OPTIONS), [32] * 12)
        widths = [plan.columns for plan in plans]
        assert widths[0] == K
        assert widths[-1] < K

    @pytest.mark.parametrize("rate", [0.45, 0.55, 0.65, 0.75])
    def test_does_not_flap(self, rate):
        """Acceptances that scatter by 0.1 from step to step hardly move the width."""
        plans = self.run(planner(self.OPTIONS), [16] * 400, rate=rate, noise=0.1)
        settled = [plan.columns for plan in plans[20:]]
        assert sum(a != b for a, b in pairwise(settled)) <= 4

    def test_probes_at_full_width(self):
        one = planner(replace(self.OPTIONS, probe_interval=8))
        plans = self.run(one, [32] * 60)
        probes = [i for i, plan in enumerate(plans) if plan.width_reason is WidthReason.PROBE]
        assert len(probes) >= 4
        assert all(plans[i].columns == K for i in probes)
        assert {b - a for a, b in pairwise(probes)} == {8}


class TestSelector:
    def selector(self, **changes):
        values = {"min_gain": 0.04, "steps": 3, "probe_interval": 100}
        return WidthSelector((1, 2, 3), **(values | changes))

    def test_ties_keep_the_wider(self):
        selector = self.selector(steps=0, min_gain=0.0)
        assert selector.select([1.0, 1.0, 1.0]) == 2

    def test_narrower_gains_must_add_up(self):
        """3 decisions of just 2 %, 2 of 3 %, 2 of 50 %; an interruption starts anew."""
        for gain, decisions in ((0.0201, 3), (0.031, 2), (0.5, 2)):
            selector = self.selector()
            found = [selector.select([1.0 + gain, 1.0, 1.0]) for _ in range(decisions)]
            assert found == [2] * (decisions - 1) + [0], gain
        selector = self.selector()
        for _ in range(5):
            assert selector.select([1.5, 1.0, 1.0]) == 2
            assert selector.select([1.0, 1.0, 1.0]) == 2

    def test_wider_at_once_only_for_more_than_the_margin(self):
        selector = self.selector()
        for _ in range(3):
            selector.select([2.0, 1.0, 1.0])
        assert selector.width == 1
        assert selector.select([1.0, 1.0, 1.03]) == 0  # held
        assert selector.next_pass() == (1, WidthReason.HELD)
        assert selector.select([1.0, 1.0, 1.05]) == 2

    def test_wishes_in_both_directions_do_not_add_up(self):
        selector = self.selector()
        for _ in range(3):
            selector.select([1.0, 2.0, 1.0])
        assert selector.width == 2
        for _ in range(10):
            assert selector.select([1.5, 1.0, 1.0]) == 1
            assert selector.select([1.0, 1.0, 1.03]) == 1

    def test_what_is_not_on_offer_is_left(self):
        selector = self.selector()
        for _ in range(3):
            selector.select([2.0, 1.0, 1.0])
        assert selector.select([0.0, 1.0, 1.01]) == 2
