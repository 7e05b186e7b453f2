"""A machine that changes speed: prices follow within a few steps, and so do decisions."""

import math

import numpy as np
import pytest

from tests.planning.builders import facts, grid
from tests.planning.test_width import cpu_table
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape, StepTiming
from vllm_dspark.planning.draft_cost import ladder
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.shift import WINDOW, ShiftWatch
from vllm_dspark.planning.table import RequestTable

K = 7
EAGER, RAGGED = StepMode.EAGER, StepShape.RAGGED


def feed(watch, ratios):
    return [watch.observe(ratio) for ratio in ratios]


class TestWatch:
    def test_most_of_the_last_steps_decide(self):
        shifts = feed(ShiftWatch(), [math.log(2.0)] * WINDOW)
        assert shifts == [0.0] * (WINDOW - 1) + [pytest.approx(math.log(2.0))]

    def test_the_window_starts_anew_after_a_shift(self):
        watch = ShiftWatch()
        feed(watch, [0.5] * WINDOW)
        assert not any(feed(watch, [0.5] * (WINDOW - 1)))

    @pytest.mark.parametrize("stalled", range(WINDOW // 2))
    def test_a_minority_of_stalled_steps_is_nothing(self, stalled):
        ratios = ([3.0] * stalled + [0.0] * (WINDOW - stalled)) * 5
        assert not any(feed(ShiftWatch(), ratios))

    def test_noise_is_nothing(self):
        """10 % a step: a median of eight passes the limit once in about 1,500 windows."""
        shifts = feed(ShiftWatch(), np.random.default_rng(0).normal(0.0, 0.1, 2000).tolist())
        assert np.count_nonzero(shifts) < 20


def timing(tokens, ms, requests=1, draft_ms=None, columns=None):
    return StepTiming(EAGER, RAGGED, requests, tokens, 0, ms, draft_ms, columns)


class TestPrices:
    def model(self):
        sizes, ms = (1, 8, 64, 512), (60.0, 61.0, 70.0, 137.0)
        table = CostTable({(EAGER, RAGGED): grid(sizes, ms)}, grid((1, 32), (8.0, 39.0)))
        return CostModel(table)

    def price(self, model, tokens):
        return model.step_ms(EAGER, RAGGED, 0, tokens)[1]

    @pytest.mark.parametrize("slower", [0.5, 1.9])
    def test_sizes_that_were_not_served_follow_at_once(self, slower):
        """In steps of two per cent a size that is not served would be 40 % off after this."""
        model = self.model()
        for _ in range(2 * WINDOW):
            model.observe(timing(64, 70.0 * slower, draft_ms=8.0))
        for size, ms in ((1, 60.0), (64, 70.0), (512, 137.0)):
            assert self.price(model, size) == pytest.approx(slower * ms, rel=0.08)
        assert model.draft_ms(1) == pytest.approx(8.0)

    def test_the_drafter_has_a_speed_of_its_own(self):
        model = self.model()
        for _ in range(2 * WINDOW):
            model.observe(timing(64, 70.0, draft_ms=16.0))
        assert model.draft_ms(32) == pytest.approx(78.0, rel=0.08)
        assert self.price(model, 64) == pytest.approx(70.0)

    def test_shifts_stay_within_the_bound(self):
        model = self.model()
        for _ in range(10 * WINDOW):
            model.observe(timing(64, 1e9))
        # Four times for the mode, 1.5 times for the size.
        assert self.price(model, 64) <= 70.0 * 6.0 + 1e-6


class SlowMachine:
    """Serves n equal requests on a machine `slower` than its table, with the real planner."""

    def __init__(self, n, rates, slower, seed):
        self.n, self.rates, self.slower = n, rates, slower
        self.rng = np.random.default_rng(seed)
        self.truth = CostModel(cpu_table(), online=False, num_positions=K)
        self.cost = CostModel(cpu_table(), num_positions=K)
        options = PlannerOptions(choose_width=True, lazy=False)
        self.planner = Planner(self.cost, options)
        self.table = RequestTable(K, n, Calibration.identity(K), rank_by_posterior=True)
        ids = [f"r{i}" for i in range(n)]
        for request in ids:
            self.table.add(request, sampled=True)
        self.slots = self.table.slots(ids)

    def verify_ms(self, tokens):
        return self.slower * self.truth.step_ms(EAGER, RAGGED, 0, tokens)[1]

    def draft_ms(self, columns):
        return self.truth.draft_ms(self.n, columns if columns < K else None)

    def goodput(self, steps, warm_up):
        """Tokens per ms from step `warm_up` on."""
        drafts, tokens, ms = np.zeros(self.n, dtype=np.int32), 0.0, 0.0
        for step in range(1, steps + 1):
            here = facts(step, mode=EAGER, native_mode=EAGER)
            stamps = np.full(self.n, step, dtype=np.int32)
            plan = self.planner.plan(here, self.table.batch(self.slots, drafts, stamps))
            admitted = np.array(plan.windows) - 1
            rejected = self.rng.random((self.n, K)) >= self.rates
            free = np.where(rejected.any(1), rejected.argmax(1), K)
            accepted = np.minimum(free, admitted)
            self.table.record_outcomes(self.slots, step, admitted, accepted)
            columns = (plan.draft_width or K) if plan.draft_next else 0
            size = int(self.n + admitted.sum())
            spent = [self.verify_ms(size), self.draft_ms(columns) if columns else None]
            noisy = [x and x * math.exp(self.rng.normal(0.0, 0.08)) for x in spent]
            width = columns if 0 < columns < K else None
            self.cost.observe(timing(size, noisy[0], self.n, noisy[1], width))
            if step > warm_up:
                tokens, ms = tokens + self.n + accepted.sum(), ms + spent[0] + (spent[1] or 0.0)
            drafts = np.full(self.n, columns, dtype=np.int32)
        return tokens / ms

    def best_fixed(self):
        """Of any K or no speculation, in expectation."""
        gains = np.cumsum(np.cumprod(self.rates))
        found = [self.n / self.verify_ms(self.n)]
        for k in ladder(K):
            ms = self.verify_ms(self.n * (k + 1)) + self.draft_ms(k)
            found.append(self.n * (1.0 + gains[k - 1]) / ms)
        return max(found)


@pytest.mark.parametrize("slower", [0.6, 1.0, 3.0])
def test_a_machine_unlike_its_table_costs_little(slower):
    """32 requests, from step 20 on: within 3 % of the best fixed setting at its true speed.

    Drafts are cheap where verifying has become three times as dear, and the other way round.
    """
    rates = np.array([0.62, 0.58, 0.57, 0.58, 0.5, 0.57, 0.57])
    ratios = []
    for seed in range(3):
        machine = SlowMachine(32, rates, slower, seed)
        ratios.append(machine.goodput(100, 20) / machine.best_fixed())
    assert np.mean(ratios) >= 0.97
