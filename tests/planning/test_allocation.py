"""Allocation against the definition: sort all drafts, take the first `budget`."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dspark.errors import PlanError
from vllm_dspark.planning.allocation import allocate, ragged_layout, rank
from vllm_dspark.planning.survival import survival


def by_definition(alive, capacity, floor, budget):
    """(forced, survival descending, position, request index), spelled out."""
    slots = [
        (k >= floor[r], -float(alive[k, r]) if k >= floor[r] else 0.0, k, r)
        for k in range(alive.shape[0])
        for r in range(alive.shape[1])
        if k < capacity[r]
    ]
    admitted = np.zeros(alive.shape[1], dtype=int)
    for *_, r in sorted(slots)[:budget]:
        admitted[r] += 1
    return admitted


@st.composite
def problems(draw):
    """Conditional acceptances from few values, so that ties are the rule."""
    width = draw(st.integers(1, 7))
    n = draw(st.integers(1, 12))
    value = st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0])
    flat = draw(st.lists(value, min_size=width * n, max_size=width * n))
    capacity = np.array(draw(st.lists(st.integers(0, width), min_size=n, max_size=n)))
    floor = np.array([draw(st.integers(0, int(c))) for c in capacity])
    budget = draw(st.integers(int(floor.sum()), int(capacity.sum())))
    alive = survival(np.array(flat, dtype=np.float32).reshape(width, n))
    return alive, capacity, floor, budget


@settings(max_examples=150, deadline=None)
@given(problems())
def test_equals_the_definition(problem):
    alive, capacity, floor, budget = problem
    admitted = allocate(alive, capacity, floor, budget)
    np.testing.assert_array_equal(admitted, by_definition(alive, capacity, floor, budget))
    assert admitted.sum() == budget
    assert (admitted >= floor).all()
    assert (admitted <= capacity).all()


@settings(max_examples=100, deadline=None)
@given(problems())
def test_gains_are_the_survival_of_what_is_admitted(problem):
    alive, capacity, floor, _ = problem
    ranking = rank(alive, capacity, floor)
    budgets = np.arange(ranking.least, ranking.most + 1)
    positions = np.arange(alive.shape[0])[:, None]
    expected = [alive[positions < ranking.admit(int(b))].sum() for b in budgets]
    np.testing.assert_allclose(ranking.gains(budgets), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ranking.total_gain(), expected[-1], rtol=1e-5, atol=1e-6)
    sparse = budgets[::3]
    np.testing.assert_allclose(ranking.gains(sparse), expected[::3], rtol=1e-5, atol=1e-6)


@settings(max_examples=100, deadline=None)
@given(problems(), st.integers(0, 2**32 - 1))
def test_admission_of_a_draft_ignores_what_comes_at_or_after_it(problem, seed):
    """Non-anticipation: redrawing request r from draft k on cannot change "k is admitted"."""
    alive, capacity, floor, budget = problem
    rng = np.random.default_rng(seed)
    r, k = rng.integers(alive.shape[1]), rng.integers(alive.shape[0])
    changed = alive.copy()
    later = rng.choice([0.0, 0.5, 1.0], alive.shape[0] - k - 1).astype(np.float32)
    changed[k + 1 :, r] = alive[k, r] * np.cumprod(later, dtype=np.float32)
    before = allocate(alive, capacity, floor, budget)[r] > k
    after = allocate(changed, capacity, floor, budget)[r] > k
    assert before == after


def test_a_larger_budget_never_takes_a_draft_away():
    alive = survival(np.random.default_rng(0).random((7, 40), dtype=np.float32))
    full, none = np.full(40, 7), np.zeros(40, dtype=int)
    previous = none
    for budget in range(281):
        admitted = allocate(alive, full, none, budget)
        assert (admitted >= previous).all()
        previous = admitted


@pytest.mark.parametrize("budget", [-1, 1, 9])
def test_impossible_budgets_are_refused(budget):
    alive = np.ones((2, 4), dtype=np.float32)
    floor = np.array([2, 0, 0, 0])
    with pytest.raises(PlanError, match="cannot be met"):
        allocate(alive, np.full(4, 2), floor, budget)


def test_contradicting_bounds_are_refused():
    alive = np.ones((2, 1), dtype=np.float32)
    with pytest.raises(PlanError, match="floor exceeds"):
        allocate(alive, np.array([1]), np.array([2]), 1)
    with pytest.raises(PlanError, match="draft width"):
        allocate(alive, np.array([3]), np.array([0]), 1)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_layout_keeps_the_right_rows(data):
    """Trimming drops exactly the last drafts of each request, prefill rows stay."""
    n = data.draw(st.integers(1, 8))
    drafts = np.array(data.draw(st.lists(st.integers(0, 7), min_size=n, max_size=n)))
    others = np.array(data.draw(st.lists(st.integers(1, 5), min_size=n, max_size=n)))
    admitted = np.array([data.draw(st.integers(0, int(d))) for d in drafts])
    rows, padded = drafts + others, data.draw(st.integers(0, 12))
    layout = ragged_layout(admitted, drafts, rows, padded)
    start, kept, logits = 0, [], []
    for r in range(n):
        keep = others[r] + admitted[r]
        logits += range(len(kept) + others[r] - 1, len(kept) + keep)
        kept += range(start, start + keep)
        start += rows[r]
    np.testing.assert_array_equal(layout.source_rows, kept)
    np.testing.assert_array_equal(layout.logits_rows, logits)
    np.testing.assert_array_equal(np.diff(layout.cu_num_logits), layout.windows)
    np.testing.assert_array_equal(layout.windows, admitted + 1)
    np.testing.assert_array_equal(np.diff(layout.query_start_loc[: n + 1]), others + admitted)
    assert len(layout.query_start_loc) == max(n, padded) + 1
    assert (layout.query_start_loc[n:] == len(kept)).all()
    assert layout.query_start_loc.dtype == layout.source_rows.dtype == np.int32


def test_layout_refuses_contradictions():
    with pytest.raises(PlanError, match="more drafts than it has"):
        ragged_layout(np.array([2]), np.array([1]), np.array([3]))
    with pytest.raises(PlanError, match="no other row"):
        ragged_layout(np.array([1]), np.array([1]), np.array([1]))
