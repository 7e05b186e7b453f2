"""Which rows count, and what they are worth."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.survival import (
    acceptance,
    stamp_age,
    stamp_next,
    survival,
    usable_rows,
)

TOP = 2**31 - 1


def test_stamps_wrap_inside_int32_without_zero():
    assert stamp_next(0) == 1
    assert stamp_next(TOP - 1) == TOP
    assert stamp_next(TOP) == 1
    assert stamp_age(1, TOP) == 1
    assert stamp_age(2, TOP - 1) == 3


@given(st.integers(1, TOP), st.integers(0, 50))
def test_age_counts_passes_across_the_wrap(stamp, passes):
    later = stamp
    for _ in range(passes):
        later = stamp_next(later)
    assert 1 <= later <= TOP
    assert stamp_age(later, stamp) == passes
    assert passes == 0 or stamp_age(stamp, later) > 1000


def use(row_stamp, draft_stamp, *, row_owner=5, sampled=True, max_age=4):
    one = np.ones(1, dtype=np.int64)
    return usable_rows(
        5 * one,
        row_owner * one,
        (row_stamp * one).astype(np.int32),
        (draft_stamp * one).astype(np.int32),
        np.array([sampled]),
        max_age,
    )


@pytest.mark.parametrize(
    ("row_stamp", "draft_stamp", "changes", "usable"),
    [
        (9, 10, {}, True),
        (6, 10, {}, True),
        (5, 10, {}, False),  # too old
        (11, 10, {}, False),  # from the future
        (0, 3, {}, False),  # never written
        (9, 0, {}, False),  # nothing to verify
        (9, 10, {"row_owner": 6}, False),  # slot was another request's
        (TOP, 1, {}, True),  # across the wrap
        (10, 10, {"sampled": False}, True),  # current row, T = 0
    ],
)
def test_rows_are_used_by_owner_and_age(row_stamp, draft_stamp, changes, usable):
    found = use(row_stamp, draft_stamp, **changes)
    assert bool(found.usable[0]) is usable
    assert found.counts.stale == int(not usable)
    assert found.counts.current == 0


def test_current_row_of_a_sampled_request_is_refused_and_counted():
    found = use(10, 10)
    assert not found.usable[0]
    assert not found.current[0]
    assert (found.counts.current, found.counts.stale) == (1, 0)
    assert use(10, 10, sampled=False).current[0]


BAD = [np.nan, np.inf, -np.inf, -0.1, 1.5]


@pytest.mark.parametrize("bad", BAD)
def test_what_is_no_probability_becomes_the_prior_and_is_counted(bad):
    rows = np.full((3, 2), 0.9, dtype=np.float32)
    rows[1, 0] = bad
    prior = np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], dtype=np.float32)
    sampled = np.zeros(2, dtype=bool)
    calibration = Calibration((2.0,) * 3, (1.0,) * 3)
    out, num_invalid = acceptance(rows, np.ones(2, bool), prior, calibration, sampled)
    assert num_invalid == 1
    assert out[1, 0] == prior[1, 0]  # the prior itself, not calibrated once more
    np.testing.assert_allclose(np.delete(out.ravel(), 2), 0.75, rtol=1e-5)


def test_bad_entries_of_unused_rows_are_not_counted():
    rows = np.full((2, 2), np.nan, dtype=np.float32)
    prior = np.full((2, 2), 0.5, dtype=np.float32)
    out, num_invalid = acceptance(
        rows, np.array([False, True]), prior, Calibration.identity(2), np.ones(2, bool)
    )
    assert num_invalid == 2
    np.testing.assert_array_equal(out, prior)


@given(st.integers(1, 8), st.integers(1, 9), st.integers(0, 2**32 - 1))
def test_survival_is_the_product_and_never_rises(width, n, seed):
    conditional = np.random.default_rng(seed).random((width, n), dtype=np.float32)
    conditional[conditional > 0.9] = 1.0
    before = conditional.copy()
    alive = survival(conditional)
    np.testing.assert_array_equal(conditional, before)
    np.testing.assert_allclose(alive, np.cumprod(before, axis=0), rtol=1e-6)
    assert (np.diff(alive, axis=0) <= 0).all()
