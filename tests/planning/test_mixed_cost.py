"""Prices of steps with prefill rows, learned from such steps alone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.builders import batch, facts, table_from
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.mixed_cost import MIN_SAMPLES, MixedCosts, SizeCurve
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason
from vllm_dspark.planning.planner import Planner

K = 7
MIXED = {"mode": StepMode.MIXED, "native_mode": StepMode.MIXED}


def fed(cost, slope, *, requests=64, draft_ms=4.0, base=10.0, steps=200, windows=K + 1, seed=0):
    """`cost`, after mixed steps of full windows and prompts of 50 to 400 tokens."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        tokens = requests * windows + int(rng.integers(50, 400))
        cost.observe(
            StepTiming(
                StepMode.MIXED,
                StepShape.NATIVE,
                requests,
                tokens,
                0,
                (base + slope * tokens) * float(np.exp(rng.normal(0.0, 0.03))),
                draft_ms if windows > 1 else None,
            )
        )
    return cost


class TestCurve:
    def test_no_price_before_enough_samples_of_different_sizes(self):
        curve = SizeCurve()
        for _ in range(10 * MIN_SAMPLES):
            curve.add(500, 10.0)
        assert curve.at(500) is None
        for _ in range(MIN_SAMPLES):
            curve.add(1000, 20.0)
        assert curve.at(500) == pytest.approx(10.0)
        assert curve.at(750) == pytest.approx(15.0, rel=0.01)

    @pytest.mark.parametrize("slope", [0.0, 0.01, 0.05])
    def test_reaches_beyond_what_was_served(self, slope):
        cost = MixedCosts()
        rng = np.random.default_rng(1)
        for _ in range(300):
            tokens = int(rng.integers(600, 1200))
            cost.observe(tokens, 64, (10.0 + slope * tokens) * np.exp(rng.normal(0, 0.03)), 4.0)
        for tokens in (150, 600, 900, 1200, 1800):
            assert cost.target.at(tokens) == pytest.approx(10.0 + slope * tokens, rel=0.25)
        assert cost.target.at(900) == pytest.approx(10.0 + slope * 900, rel=0.05)

    def test_a_stalled_step_moves_little(self):
        curve = SizeCurve()
        for i in range(200):
            curve.add(500 + 5 * (i % 40), 10.0)
        curve.add(600, 5000.0)
        for i in range(4):
            curve.add(500 + 60 * i, 10.0)
        assert curve.at(600) == pytest.approx(10.0, rel=0.06)

    @given(
        st.lists(
            st.tuples(st.integers(0, 10_000), st.floats(allow_nan=True, allow_infinity=True)),
            max_size=200,
        )
    )
    def test_prices_are_positive_finite_and_never_fall(self, samples):
        curve = SizeCurve()
        for size, ms in samples:
            curve.add(size, ms)
        nodes = curve.nodes()
        if nodes is not None:
            sizes, array, times = nodes
            assert list(sizes) == array.tolist() == sorted(set(sizes))
            assert np.isfinite(times).all() and (times > 0.0).all()
            assert (np.diff(times) >= -1e-9 * times[1:]).all()


def cost_model():
    """Decode steps cost nearly nothing, so that whoever prices mixed ones by them is found out."""
    return CostModel(
        table_from(lambda s: 1.0 + 0.001 * s, range(8, 1025, 8), K, draft=(0.1, 0.1)),
        num_positions=K,
    )


class TestModel:
    def test_priced_by_mixed_steps_and_decode_prices_stay(self):
        cost = cost_model()
        before = cost.step_ms(StepMode.FULL, StepShape.NATIVE, 0, 512), cost.draft_ms(64)
        assert cost.step_ms(StepMode.MIXED, StepShape.NATIVE, 0, 700) is None
        assert not cost.prices_mixed
        fed(cost, 0.05)
        assert cost.prices_mixed
        priced = cost.step_ms(StepMode.MIXED, StepShape.NATIVE, 0, 700)
        assert priced == (700, pytest.approx(45.0, rel=0.05))
        assert cost.draft_ms(64, mode=StepMode.MIXED) == pytest.approx(4.0)
        assert before == (cost.step_ms(StepMode.FULL, StepShape.NATIVE, 0, 512), cost.draft_ms(64))

    def test_not_learned_where_costs_are_not_corrected_online(self):
        cost = CostModel(cost_model().table, online=False, num_positions=K)
        assert not fed(cost, 0.05).prices_mixed


class TestPlanner:
    """Under load: each step has prompts. 64 requests; acceptance .8 each."""

    def run(self, cost, *, mixed, slope, base=10.0, steps=120, acceptance=0.8, requests=64):
        """Plans of steps whose times follow from what is verified, as an engine would have them."""
        planner = Planner(cost, PlannerOptions(mixed=mixed, hysteresis_steps=2))
        drafts = np.full(requests, K, dtype=np.int32)
        rng = np.random.default_rng(3)
        plans = []
        for step in range(1, steps + 1):
            prompt = int(rng.integers(50, 400))
            plan = planner.plan(
                facts(step, **MIXED, reserved_rows=200),
                batch(np.full((K, requests), acceptance), num_drafts=drafts),
            )
            verified = int(drafts.sum()) if plan.kind is PlanKind.NATIVE else plan.budget
            tokens = requests + verified + prompt
            cost.observe(
                StepTiming(
                    StepMode.MIXED,
                    StepShape.RAGGED,
                    requests,
                    tokens,
                    0,
                    base + slope * tokens,
                    4.0 if plan.draft_next else None,
                )
            )
            drafts = np.full(requests, K if plan.draft_next else 0, dtype=np.int32)
            plans.append(plan)
        return plans

    def test_drafting_stops_under_load_although_nothing_may_be_trimmed(self):
        """Full windows take 2.6 times as long as no drafts and give 2 times the tokens."""
        cost = fed(cost_model(), 0.2, base=5.0)
        plans = self.run(cost, mixed=False, slope=0.2, base=5.0, acceptance=0.5)
        assert {plan.kind for plan in plans} <= {PlanKind.NATIVE, PlanKind.SKIP_DRAFT}
        for plan in plans:  # what was drafted is verified in full
            if plan.kind is PlanKind.NATIVE:
                assert plan.reason in (Reason.MIXED, Reason.UNKNOWN)
        late = plans[60:]
        skipped = sum(plan.kind is PlanKind.SKIP_DRAFT for plan in late)
        assert skipped >= 0.9 * len(late)
        assert any(plan.reason is Reason.PROBE_DRAFT for plan in late)

    def test_drafting_goes_on_where_it_pays(self):
        cost = fed(cost_model(), 0.005)
        plans = self.run(cost, mixed=False, slope=0.005)
        assert {plan.kind for plan in plans} == {PlanKind.NATIVE}
        assert all(plan.draft_next for plan in plans)

    def test_with_evidence_windows_are_trimmed_by_mixed_prices(self):
        cost = fed(cost_model(), 0.2, base=5.0)
        plans = self.run(cost, mixed=True, slope=0.2, base=5.0)
        late = plans[20:]
        assert all(plan.kind is PlanKind.TRIM for plan in late)
        # 62 ms and .2 a draft, 64 tokens and .8^k a draft: 3 of 7 are best
        budgets = np.array([plan.budget for plan in late])
        assert 2 * 64 <= np.median(budgets) <= 4 * 64

    def test_without_prices_nothing_changes(self):
        planner = Planner(cost_model(), PlannerOptions(mixed=True))
        plan = planner.plan(facts(1, **MIXED, reserved_rows=200), batch(np.full((K, 64), 0.8)))
        assert (plan.kind, plan.reason, plan.draft_next) == (PlanKind.NATIVE, Reason.UNPRICED, True)
