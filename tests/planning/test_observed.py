"""Cost tables from served steps."""

import numpy as np
import pytest

from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.observed import ObservedCosts

K = 7


def timing(requests, ms, mode=StepMode.EAGER, draft_ms=2.0):
    return StepTiming(mode, StepShape.NATIVE, requests, 8 * requests, 999, ms, draft_ms)


def serve(observed, loads, steps=128, noise=0.05):
    rng, table = np.random.default_rng(0), None
    for step in range(steps):
        requests = loads[step % len(loads)]
        ms = (20.0 + 8 * requests) * (1 + noise * rng.standard_normal())
        table = observed.add(timing(requests, ms)) or table
    return table


def test_two_loads_make_a_table_whatever_single_steps_took():
    observed = ObservedCosts(StepMode.EAGER, K)
    for _ in range(3):
        assert observed.add(timing(1, 500.0)) is None  # a busy moment
    table = serve(observed, (1, 2, 4))
    grid = table.grids[StepMode.EAGER, StepShape.RAGGED]
    assert grid.sizes == (8, 16, 32)
    np.testing.assert_allclose(grid.median_ms[0], [28.0, 36.0, 52.0], rtol=0.05)
    assert table.draft.sizes == (1, 2, 4)


@pytest.mark.parametrize(
    ("loads", "word"), [((3,), "single size"), ((1, 2, 4), "flat")], ids=["one load", "flat"]
)
def test_what_cannot_price_steps_is_refused(loads, word):
    observed = ObservedCosts(StepMode.EAGER, K)
    for step in range(256):
        assert observed.add(timing(loads[step % len(loads)], 20.0)) is None
    assert word in observed.refusal


def test_other_steps_are_left_out():
    observed = ObservedCosts(StepMode.EAGER, K)
    for step in range(256):
        requests = (1, 2, 4)[step % 3]
        assert observed.add(timing(requests, 9.0 * requests, mode=StepMode.MIXED)) is None
        assert observed.add(timing(requests, 9.0 * requests, draft_ms=None)) is None
    assert observed.refusal == "nothing served yet"
