"""Prices of steps with prefill rows, learned from such steps alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.planning.builders import batch, facts, grid, table_from
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.mixed_cost import MIN_SAMPLES, MixedCosts
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.width import WidthReason

K = 7
MIXED = {"mode": StepMode.MIXED, "native_mode": StepMode.MIXED}


def fed(cost, slope, *, requests=64, draft_ms=4.0, base=10.0, steps=200, windows=K + 1, seed=0):
    """`cost`, after mixed steps of full windows and prompts of 50 to 400 tokens."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        prompts = int(rng.integers(50, 400))
        tokens = requests * windows + prompts
        cost.observe(
            StepTiming(
                StepMode.MIXED,
                StepShape.NATIVE,
                requests,
                tokens,
                0,
                (base + slope * tokens) * float(np.exp(rng.normal(0.0, 0.03))),
                draft_ms if windows > 1 else None,
                prefill_rows=prompts,
            )
        )
    return cost


class TestCurve:
    def learn(self, rows, prompts, ms, *, steps=300, seed=1, noise=0.03):
        """Costs after steps of rows and prefill rows drawn from two ranges; ms(rows, prompts)."""
        cost, rng = MixedCosts(), np.random.default_rng(seed)
        for _ in range(steps):
            v, p = int(rng.integers(*rows)), int(rng.integers(*prompts))
            cost.observe(v, p, 64, ms(v, p) * np.exp(rng.normal(0.0, noise)), 4.0)
        return cost

    def test_no_price_before_enough_samples(self):
        cost = MixedCosts()
        for _ in range(MIN_SAMPLES - 1):
            cost.observe(500, 100, 64, 10.0, 4.0)
        assert not cost.ready and cost.step_ms(600) is None and cost.draft_ms(64) is None
        cost.observe(500, 100, 64, 10.0, 4.0)
        assert cost.ready
        assert cost.step_ms(600) == pytest.approx(10.0)
        assert cost.draft_ms(64) == pytest.approx(4.0)

    @pytest.mark.parametrize("dear", [0.0, 0.01, 0.05])
    def test_reaches_beyond_what_was_served(self, dear):
        def ms(v, p):
            return 10.0 + dear * v + 0.2 * dear * p

        cost = self.learn((500, 800), (50, 400), ms)
        assert 150 <= cost.prefill_rows <= 300
        for v in (150, 500, 800, 1400):
            at_mean = ms(v, cost.prefill_rows)
            near = 0.05 if 500 <= v <= 800 else 0.25
            assert cost.step_ms(round(v + cost.prefill_rows)) == pytest.approx(at_mean, rel=near)

    def test_rows_of_prompts_do_not_pass_for_verified_ones(self):
        """Full windows only, so nothing but prompts makes sizes vary, and those cost little."""
        cost = self.learn((511, 513), (50, 400), lambda v, p: 10.0 + 0.05 * v + 0.01 * p)
        expected = 10.0 + 0.05 * 512 + 0.01 * cost.prefill_rows
        assert cost.step_ms(round(512 + cost.prefill_rows)) == pytest.approx(expected, rel=0.05)
        assert cost.served(512) and not cost.served(256)
        for _ in range(4):  # once some were trimmed, their own times count
            cost.observe(256, 225, 64, 10.0 + 0.05 * 256 + 0.01 * 225, 4.0)
        assert cost.served(256)
        expected = 10.0 + 0.05 * 256 + 0.01 * cost.prefill_rows
        assert cost.step_ms(round(256 + cost.prefill_rows)) == pytest.approx(expected, rel=0.05)

    def test_steps_of_many_prompts_are_no_outliers(self):
        """Catches a price of prompts cut down where they vary most: 0 or 40 x 256 in a step."""

        def ms(v, p):
            return 4.0 + 0.03 * (v + p)

        cost, rng = MixedCosts(), np.random.default_rng(4)
        for step in range(200):
            p = 256 * int(rng.poisson(2.0)) if step % 20 else 256 * 40
            cost.observe(256, p, 64, ms(256, p) * np.exp(rng.normal(0.0, 0.05)), 4.0)
        assert cost.prompts_ms == pytest.approx(0.03 * cost.prefill_rows, rel=0.15)
        assert cost.step_ms(round(256 + cost.prefill_rows)) == pytest.approx(
            ms(256, cost.prefill_rows), rel=0.15
        )
        _, _, times = cost.axis()
        assert 0.0 < cost.prompts_ms < times.min()

    def test_prices_go_on_beyond_the_largest_step_served(self):
        """Catches a batch that has grown for which all widths and kinds cost the same."""
        cost = self.learn((30, 35), (50, 400), lambda v, p: 8.0 + 0.02 * (v + p))
        for v in (64, 256, 2048):
            expected = 8.0 + 0.02 * (v + cost.prefill_rows)
            assert cost.step_ms(round(v + cost.prefill_rows)) == pytest.approx(expected, rel=0.1)

    def test_a_time_far_too_short_owns_no_price(self):
        cost, rng = MixedCosts(), np.random.default_rng(8)
        for step in range(40):
            p = int(rng.integers(50, 400))
            ms = 0.05 if step == 5 else 10.0 + 0.02 * p
            cost.observe(100, p, 64, ms, 4.0)
        assert cost.step_ms(round(100 + cost.prefill_rows)) == pytest.approx(
            10.0 + 0.02 * cost.prefill_rows, rel=0.15
        )

    def test_a_stalled_step_moves_little(self):
        cost = self.learn((500, 700), (50, 60), lambda v, p: 10.0, noise=0.0)
        cost.observe(600, 55, 64, 5000.0, 4.0)
        for i in range(4):
            cost.observe(500 + 60 * i, 55, 64, 10.0, 4.0)
        assert cost.step_ms(655) == pytest.approx(10.0, rel=0.06)

    @given(
        st.lists(
            st.tuples(
                st.integers(-5, 10_000),
                st.integers(-5, 10_000),
                st.floats(allow_nan=True, allow_infinity=True),
            ),
            max_size=200,
        )
    )
    def test_prices_are_positive_finite_and_never_fall(self, samples):
        cost = MixedCosts()
        for rows, prompts, ms in samples:
            cost.observe(rows, prompts, max(rows // 8, 0), ms, ms)
        if cost.ready:
            sizes, array, times = cost.axis()
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
        tokens = 512 + cost.prefill_rows
        priced = cost.step_ms(StepMode.MIXED, StepShape.NATIVE, 0, tokens)
        assert priced == (tokens, pytest.approx(10.0 + 0.05 * tokens, rel=0.05))
        assert cost.draft_ms(64, mode=StepMode.MIXED) == pytest.approx(4.0)
        assert before == (cost.step_ms(StepMode.FULL, StepShape.NATIVE, 0, 512), cost.draft_ms(64))

    def test_not_learned_where_costs_are_not_corrected_online(self):
        cost = CostModel(cost_model().table, online=False, num_positions=K)
        assert not fed(cost, 0.05).prices_mixed


class TestPlanner:
    """Under load: each step has prompts. 64 requests; acceptance .8 each."""

    def run(
        self, cost, *, mixed, slope, base=10.0, steps=120, acceptance=0.8, requests=64,
        dear_prompts=True,
    ):  # fmt: skip
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
                    base + slope * (tokens - prompt) + (slope if dear_prompts else 0.0) * prompt,
                    4.0 if plan.draft_next else None,
                    prefill_rows=prompt,
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
        """Catches prompts taken for a cost of the step that more drafts share: 5 of 7 then."""
        cost = fed(cost_model(), 0.2, base=30.0)
        plans = self.run(cost, mixed=True, slope=0.2, base=30.0)
        late = plans[20:]
        assert all(plan.kind is PlanKind.TRIM for plan in late)
        # 47 ms without prompts and .2 a draft, 64 tokens and .8^k a draft: 3 of 7 are best
        budgets = np.array([plan.budget for plan in late])
        assert 2 * 64 <= np.median(budgets) <= 4 * 64

    def test_another_size_is_tried_where_only_full_windows_were_served(self):
        """Prompts cost nothing, so full windows say nothing about what fewer rows would save: the
        guess is that they save nothing, and a planner that trusts it never finds out."""
        plans = self.run(cost_model(), mixed=True, slope=0.2, base=15.0, dear_prompts=False)
        tried = [i for i, plan in enumerate(plans) if plan.reason is Reason.EXPLORE]
        assert tried and len(tried) <= 8
        late = plans[60:]
        assert all(plan.kind is PlanKind.TRIM for plan in late)
        assert 64 <= np.median([plan.budget for plan in late]) <= 4 * 64

    def run_widths(self, *, mixed_share, skip=True, steps=160, acceptance=0.8, requests=64):
        """Plans of a load without evidence for trimming: 60 ms and .3 ms a row, passes 1 to 4 ms.

        Per step: whether it had prefill rows, the drafts it found, its plan.
        """
        table = cost_model().table
        table = replace(table, narrow={n: grid((1, 256), (0.5 * n, 0.5 * n)) for n in (1, 2, 3)})
        cost = CostModel(table, num_positions=K)
        options = PlannerOptions(choose_width=True, hysteresis_steps=2, skip_draft=skip)
        planner = Planner(cost, options)
        rng, drafts, found = np.random.default_rng(6), np.full(requests, K, dtype=np.int32), []
        for number in range(1, steps + 1):
            mixed = bool(rng.random() < mixed_share)
            prompt = int(rng.integers(50, 400)) if mixed else 0
            plan = planner.plan(
                facts(number, **(MIXED if mixed else {}), reserved_rows=200 if mixed else 0),
                batch(np.full((K, requests), acceptance), num_drafts=drafts),
            )
            found.append((mixed, drafts, plan))
            rows = requests + (plan.budget if plan.kind is not PlanKind.SKIP_DRAFT else 0)
            mode = StepMode.MIXED if mixed else StepMode.FULL
            took = 40.0 + 0.3 * (rows + prompt) if mixed else 1.0 + 0.001 * rows
            cost.observe(
                StepTiming(
                    mode, StepShape.RAGGED, requests, rows + prompt, 0, took,
                    0.5 * plan.columns or None, plan.draft_width, prefill_rows=prompt,
                )
            )  # fmt: skip
            drafts = np.full(requests, plan.columns, dtype=np.int32)
        return found

    @pytest.mark.parametrize("skip", [True, False])
    def test_without_evidence_the_width_follows_mixed_prices(self, skip):
        """Catches full passes, all verified, where half of their columns would be best, and steps
        between that draft for themselves: 59 ms and 19 per column, for .8^k of 64 tokens."""
        late = self.run_widths(mixed_share=0.9, skip=skip)[80:]
        others = [plan for mixed, _, plan in late if not mixed]
        assert len(others) > 4
        for plan in others:
            assert plan.columns in (2, 3) or plan.width_reason is WidthReason.PROBE
        for mixed, drafts, plan in late:
            if mixed:
                assert (plan.kind, plan.reason) == (PlanKind.NATIVE, Reason.MIXED)
                assert plan.budget == drafts.sum()  # nothing is trimmed
        widths = [plan.columns for _, _, plan in late if plan.width_reason is WidthReason.BEST]
        assert len(widths) >= 0.8 * len(late)
        assert set(widths) <= {2, 3} and any(plan.columns == K for _, _, plan in late)  # probes

    def test_where_few_steps_have_prompts_widths_are_those_of_the_others(self):
        late = self.run_widths(mixed_share=0.1)[80:]
        others = [plan.columns for mixed, _, plan in late if not mixed]
        assert others.count(K) >= 0.8 * len(others)

    def test_without_prices_nothing_changes(self):
        planner = Planner(cost_model(), PlannerOptions(mixed=True))
        plan = planner.plan(facts(1, **MIXED, reserved_rows=200), batch(np.full((K, 64), 0.8)))
        assert (plan.kind, plan.reason, plan.draft_next) == (PlanKind.NATIVE, Reason.UNPRICED, True)
