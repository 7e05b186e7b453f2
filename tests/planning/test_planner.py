"""The planner's decisions, one reason at a time, and over whole episodes."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.builders import batch, facts, grid, table_from
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.survival import survival

K = 7
LADDER = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), *range(1024, 2049, 1024))
AT_ONCE = PlannerOptions(min_gain=0.0, hysteresis_steps=0, drain_guard=False, lazy=False)


def flat_until(knee, base=5.0, slope=0.02):
    """Memory bound up to `knee` tokens, compute bound beyond."""
    return lambda tokens: base + 0.0005 * tokens + slope * max(0, tokens - knee)


def planner(options=AT_ONCE, step_ms=None, **table):
    step_ms = step_ms or flat_until(64)
    return Planner(CostModel(table_from(step_ms, LADDER, K, **table), online=False), options)


def uniform(n, rate, k=K, **changes):
    return batch(np.full((k, n), rate), **changes)


class TestReasons:
    def test_low_load_is_native(self):
        plan = planner().plan(facts(), uniform(2, 0.9))
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.NATIVE_BEST)
        assert plan.windows == (8, 8)
        assert (plan.budget, plan.draft_next) == (14, True)
        assert plan.predicted_ms == plan.native_ms > 0

    def test_high_load_is_trimmed(self):
        plan = planner().plan(facts(), uniform(64, 0.8))
        assert (plan.kind, plan.reason) == (PlanKind.TRIM, Reason.TRIM_GAIN)
        assert 0 < plan.budget < 64 * K
        assert sum(plan.windows) == plan.budget + 64 == plan.padded_tokens
        assert plan.predicted_gain > 0

    def test_worthless_drafts_are_not_made(self):
        plan = planner().plan(facts(), uniform(128, 0.05))
        assert (plan.kind, plan.reason) == (PlanKind.SKIP_DRAFT, Reason.SKIP_GAIN)
        assert not plan.draft_next

    def test_small_gains_are_left_alone(self):
        eager = planner().plan(facts(), uniform(64, 0.8))
        options = replace(AT_ONCE, min_gain=eager.predicted_gain * 1.01)
        plan = planner(options).plan(facts(), uniform(64, 0.8))
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.MIN_GAIN)

    def test_gains_must_last(self):
        options = replace(AT_ONCE, hysteresis_steps=3)
        one = planner(options)
        reasons = [one.plan(facts(s), uniform(64, 0.8)).reason for s in range(4)]
        assert reasons == [Reason.HYSTERESIS] * 2 + [Reason.TRIM_GAIN] * 2

    def test_excluded_requests_keep_the_whole_step_native(self):
        excluded = np.arange(64) == 3
        plan = planner().plan(facts(), uniform(64, 0.8, excluded=excluded))
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.EXCLUDED)
        assert plan.windows == (8,) * 64

    @pytest.mark.parametrize("changes", [{"reserved_rows": 5}, {"mode": StepMode.MIXED}])
    def test_mixed_steps_are_native_without_evidence(self, changes):
        plan = planner().plan(facts(**changes), uniform(64, 0.8))
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.MIXED)

    def test_mixed_steps_are_never_priced_by_decode_cells(self):
        plan = planner(replace(AT_ONCE, mixed=True)).plan(
            facts(mode=StepMode.MIXED, native_mode=StepMode.MIXED, reserved_rows=100),
            uniform(64, 0.8),
        )
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.UNPRICED)

    def test_mixed_steps_with_evidence_use_mixed_cells(self):
        sizes = (64, 256, 1024)
        ms = [flat_until(64)(s) for s in sizes]
        table = CostTable(
            {(StepMode.MIXED, StepShape.RAGGED): grid(sizes, ms)}, grid((1, 64), (1, 2))
        )
        one = Planner(CostModel(table), replace(AT_ONCE, mixed=True))
        mixed = facts(mode=StepMode.MIXED, native_mode=StepMode.MIXED, reserved_rows=100)
        plan = one.plan(mixed, uniform(64, 0.8))
        assert plan.kind is PlanKind.TRIM
        assert plan.padded_tokens == 164 + plan.budget

    def test_nothing_known_means_full_windows(self):
        known = np.zeros(64, dtype=bool)
        plan = planner().plan(facts(), uniform(64, 0.8, known=known))
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.UNKNOWN)
        known[0] = True
        assert planner().plan(facts(), uniform(64, 0.8, known=known)).kind is PlanKind.TRIM

    def test_without_a_cost_table_everything_is_native(self):
        plan = Planner().plan(facts(), uniform(64, 0.8))
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.UNPRICED)
        assert plan.windows == (8,) * 64

    def test_switched_off(self):
        one = planner(replace(AT_ONCE, enabled=False))
        plan = one.plan(facts(), uniform(64, 0.8))
        assert (plan.kind, plan.reason) == (PlanKind.OFF, Reason.DISABLED)
        assert (plan.windows, plan.draft_next) == ((8,) * 64, True)
        one = planner(replace(AT_ONCE, enabled=False, test_windows=2))
        assert one.plan(facts(), uniform(64, 0.8)).windows == (2,) * 64

    def test_empty_step(self):
        plan = planner().plan(facts(), batch(np.zeros((K, 0))))
        assert (plan.kind, plan.reason, plan.budget) == (PlanKind.NATIVE, Reason.EMPTY, 0)

    def test_step_beyond_every_graph_is_native(self):
        plan = planner().plan(facts(), uniform(300, 0.8))
        assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.UNPRICED)


class TestBudget:
    @settings(max_examples=60, deadline=None)
    @given(st.integers(1, 60), st.integers(0, 2**32 - 1))
    def test_is_the_argmax_over_all_budgets(self, n, seed):
        """No budget, edge of the ladder or not, has a higher goodput than the plan's."""
        rng = np.random.default_rng(seed)
        rates = rng.uniform(0.2, 1.0, (K, n)).astype(np.float32)
        step_ms = flat_until(int(rng.integers(1, 200)))
        one = planner(replace(AT_ONCE, skip_draft=False), step_ms)
        plan = one.plan(facts(), batch(rates))
        ladder = np.array(LADDER)
        ranked = np.sort(survival(rates).ravel())[::-1].astype(np.float64)
        best = 0.0
        for budget in range(n * K + 1):
            padded = ladder[ladder.searchsorted(n + budget)]
            ms = step_ms(padded) + one.cost.draft_ms(n)
            best = max(best, (n + ranked[:budget].sum()) / ms)
        chosen = plan.predicted_tokens / plan.predicted_ms
        assert chosen >= best * (1 - 1e-6)

    @settings(max_examples=40, deadline=None)
    @given(st.integers(1, 40), st.integers(0, 2**32 - 1))
    def test_without_graphs_too(self, n, seed):
        """Eager: every budget runs at its own size; 64 candidates are within 0.5 %."""
        rng = np.random.default_rng(seed)
        rates = rng.uniform(0.2, 1.0, (K, n)).astype(np.float32)
        sizes, step_ms = (1, 50, 100, 400), flat_until(int(rng.integers(1, 200)))
        ms = [step_ms(size) for size in sizes]
        table = CostTable(
            {(StepMode.EAGER, StepShape.RAGGED): grid(sizes, ms)}, grid((1, 64), (1, 2))
        )
        one = Planner(CostModel(table), replace(AT_ONCE, skip_draft=False))
        plan = one.plan(facts(mode=StepMode.EAGER, native_mode=StepMode.EAGER), batch(rates))
        ranked = np.sort(survival(rates).ravel())[::-1].astype(np.float64)
        tokens = n + np.concatenate(([0.0], np.cumsum(ranked)))
        costs = np.interp(n + np.arange(n * K + 1), sizes, ms) + one.cost.draft_ms(n)
        chosen = plan.predicted_tokens / plan.predicted_ms
        assert chosen >= (tokens / costs).max() * 0.995

    @pytest.mark.parametrize("rate", [0.5, 0.7, 0.85, 0.95])
    @pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 32, 64, 128, 256])
    def test_never_worse_than_any_fixed_setting(self, n, rate):
        """With default margins the plan is at most the margin below the best fixed K or none."""
        one = planner(PlannerOptions(lazy=False))
        for step in range(5):
            plan = one.plan(facts(step), uniform(n, rate))
        alive = survival(np.full((K, 1), rate, dtype=np.float32))[:, 0].cumsum()
        fixed = [n / flat_until(64)(n)]
        ladder = np.array(LADDER)
        for k in range(1, K + 1):
            padded = ladder[ladder.searchsorted(n * (k + 1))]
            fixed.append(n * (1 + alive[k - 1]) / (flat_until(64)(padded) + one.cost.draft_ms(n)))
        goodput = plan.predicted_tokens / plan.predicted_ms
        if plan.reason is Reason.SKIP_LEFTOVER:  # its drafts are already paid for
            goodput = fixed[0]
        assert goodput >= max(fixed) / 1.045

    def test_better_in_between_when_requests_differ(self):
        rates = np.full((K, 64), 0.9)
        rates[:, ::2] = 0.3
        plan = planner().plan(facts(), batch(rates))
        windows = np.array(plan.windows)
        assert windows[1::2].min() > windows[::2].max()

    def test_what_cannot_be_emitted_is_not_verified(self):
        capacity = np.full(64, K)
        capacity[:32] = 1
        plan = planner().plan(facts(), uniform(64, 0.99, capacity=capacity))
        assert plan.kind is PlanKind.TRIM
        assert max(plan.windows[:32]) <= 2
        assert plan.predicted_tokens <= 64 + capacity.sum()

    def test_reserved_requests_keep_native_width(self):
        reserved = np.arange(64) < 4
        plan = planner().plan(facts(), uniform(64, 0.6, reserved=reserved))
        assert plan.kind is PlanKind.TRIM
        assert plan.windows[:4] == (8,) * 4
        assert max(plan.windows[4:]) < 8

    def test_request_floor(self):
        rates = np.full((K, 64), 0.9)
        rates[:, 0] = 0.01
        plan = planner(replace(AT_ONCE, request_floor=2)).plan(facts(), batch(rates))
        assert plan.kind is PlanKind.TRIM
        assert plan.windows[0] == 3

    def test_allocation_is_charged_to_device_windows_only(self):
        for device, expected in ((True, PlanKind.NATIVE), (False, PlanKind.TRIM)):
            options = replace(AT_ONCE, device_windows=device, skip_draft=False)
            plan = planner(options, allocation=1e6).plan(facts(), uniform(64, 0.8))
            assert plan.kind is expected
            assert plan.windows == () or not device

    def test_a_full_graph_too_small_falls_back_to_measured_modes(self):
        one = planner()
        grids = dict(one.cost.table.grids)
        sizes = (512, 1024, 4096)
        grids[StepMode.EAGER, StepShape.RAGGED] = grid(
            sizes, [flat_until(64)(s) + 9 for s in sizes]
        )
        one = Planner(CostModel(replace(one.cost.table, grids=grids)), AT_ONCE)
        plan = one.plan(facts(), uniform(257, 0.8))
        assert plan.kind is PlanKind.TRIM
        assert plan.native_ms > flat_until(64)(257 * 8) + 9
