"""Whole episodes: realised tokens per ms against every fixed setting.

Requests accept with rates of their own, the machine costs what its table says, and
the planner knows neither: it learns from outcomes, host windows, no confidences.
Realised throughput is compared with the best fixed K (or none) on the same machine,
chosen with hindsight from exact expectations.
"""

import numpy as np
import pytest

from tests.planning.builders import facts, table_from
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.table import RequestTable

K = 7
LADDER = np.array([1, 2, 4, *range(8, 257, 8), *range(272, 513, 16), 1024, 2048])


def h200(tokens):
    """Step times behind DESIGN.md's table, roughly: flat to 64 tokens, then linear."""
    return 5.0 + 0.002 * tokens + 0.022 * max(0, tokens - 64)


def accepted_of(rng, rates, drafts):
    """Accepted drafts of requests that have `drafts` verified."""
    rejected = rng.random((len(rates), K)) >= rates[:, None]
    free = np.where(rejected.any(1), rejected.argmax(1), K)
    return np.minimum(free, drafts)


def best_fixed(cost, rates):
    """Tokens per ms of the best K, or of no speculation, in expectation."""
    n, found = len(rates), [len(rates) / h200(single_size(len(rates)))]
    for k in range(1, K + 1):
        size = LADDER[LADDER.searchsorted(n * (k + 1))]
        gain = sum((rates**j).sum() for j in range(1, k + 1))
        found.append((n + gain) / (h200(size) + cost.draft_ms(n)))
    return max(found)


def single_size(n):
    return 2 ** int(np.ceil(np.log2(n)))


def run(rates, steps, warm_up=100, seed=0, eager=False):
    """Realised tokens per ms of the planner, after a warm-up; true costs of what it does."""
    rng, n = np.random.default_rng(seed), len(rates)
    full_table = table_from(h200, LADDER.tolist(), K)
    if eager:
        ragged = full_table.grids[StepMode.FULL, StepShape.RAGGED]
        full_table = CostTable({(StepMode.EAGER, StepShape.RAGGED): ragged}, full_table.draft)
    mode = StepMode.EAGER if eager else StepMode.FULL
    cost = CostModel(full_table, online=False)
    planner = Planner(cost, PlannerOptions())
    table = RequestTable(K, n, Calibration.identity(K), rank_by_posterior=True)
    ids = [f"r{i}" for i in range(n)]
    for request in ids:
        table.add(request, sampled=True)
    slots = table.slots(ids)
    drafts, tokens, ms = np.zeros(n, dtype=np.int64), 0, 0.0
    for step in range(steps):
        here = facts(step, mode=mode, native_mode=mode)
        plan = planner.shortcut(here, table.owners(slots), drafts)
        if plan is None:
            stamp = np.full(n, step + 1, dtype=np.int32)
            plan = planner.plan(here, table.batch(slots, drafts, stamp))
        admitted = np.array(plan.windows) - 1
        accepted = accepted_of(rng, rates, admitted)
        table.record_outcomes(slots, step + 1, admitted, accepted)
        if step >= warm_up:
            tokens += n + accepted.sum()
            size = n + admitted.sum()
            if not eager and not admitted.any():
                size = single_size(n)
            elif not eager:
                size = LADDER[LADDER.searchsorted(size)]
            ms += h200(size) + (cost.draft_ms(n) if plan.draft_next else 0.0)
        drafts = np.full(n, K if plan.draft_next else 0)
    return tokens / ms, best_fixed(cost, rates)


@pytest.mark.parametrize("n", [1, 4, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("rate", [0.5, 0.85])
def test_equal_requests_never_lose_to_the_best_fixed_setting(n, rate):
    """Measured 0.99 to 1.00 from 16 requests on; below, noise of the realised sum is 2 %.

    Catches believing every request's luck (a fixed, small shrinkage loses 2.5 % here), also where
    it is the prior that is still on its way and not the requests that differ.
    """
    ours, fixed = run(np.full(n, rate), 600 if n < 64 else 300)
    assert ours >= (0.95 if n < 16 else 0.98) * fixed


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("n", [32, 64, 128])
def test_unequal_requests_gain_over_every_fixed_setting(n, eager):
    """Half easy, half hard: telling them apart pays, without any confidence head."""
    rates = np.where(np.arange(n) % 2 == 0, 0.92, 0.35)
    ours, fixed = run(rates, 400, eager=eager)
    assert ours >= (1.0 if eager else 1.03) * fixed
