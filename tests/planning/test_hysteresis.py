"""Choosing a kind of step without flapping."""

from itertools import pairwise

import numpy as np

from vllm_dspark.planning.hysteresis import KindSelector
from vllm_dspark.planning.plan import PlanKind, Reason

NATIVE, TRIM, SKIP = PlanKind.NATIVE, PlanKind.TRIM, PlanKind.SKIP_DRAFT


def test_native_wins_ties_and_small_gains():
    selector = KindSelector(0.04, 1)
    assert selector.select(1.0, 1.0, 1.0) == (NATIVE, Reason.NATIVE_BEST)
    assert selector.select(1.0, 1.04, 0.0) == (NATIVE, Reason.MIN_GAIN)
    assert selector.select(1.0, 1.05, 0.0) == (TRIM, Reason.TRIM_GAIN)


def test_without_margin_and_delay_it_is_the_argmax():
    rng = np.random.default_rng(0)
    selector = KindSelector(0.0, 0)
    for native, trim, skip in rng.random((200, 3)):
        best = max((native, NATIVE), (trim, TRIM), (skip, SKIP), key=lambda item: item[0])
        assert selector.select(native, trim, skip)[0] is best[1]


def test_entering_takes_steps_leaving_takes_one():
    selector = KindSelector(0.04, 3)
    kinds = [selector.select(1.0, 1.2, 0.0) for _ in range(3)]
    assert kinds == [(NATIVE, Reason.HYSTERESIS)] * 2 + [(TRIM, Reason.TRIM_GAIN)]
    assert selector.select(1.0, 1.0, 0.0)[0] is NATIVE
    assert selector.select(1.0, 1.2, 0.0) == (NATIVE, Reason.HYSTERESIS)


def test_staying_takes_half_the_margin():
    selector = KindSelector(0.04, 1)
    selector.select(1.0, 1.2, 0.0)
    assert selector.select(1.0, 1.03, 0.0)[0] is TRIM
    assert selector.select(1.0, 1.015, 0.0)[0] is NATIVE
    assert selector.select(1.0, 1.03, 0.0)[0] is NATIVE


def test_interrupted_streaks_start_again():
    selector = KindSelector(0.04, 3)
    for _ in range(5):
        assert selector.select(1.0, 1.2, 0.0)[0] is NATIVE
        assert selector.select(1.0, 1.2, 0.0)[0] is NATIVE
        assert selector.select(1.0, 1.0, 0.0)[0] is NATIVE


def test_skipping_ends_at_once():
    for trim, expected in ((0.9, NATIVE), (1.2, TRIM)):
        selector = KindSelector(0.04, 4)
        for _ in range(4):
            kind, _ = selector.select(1.0, 0.9, 1.3)
        assert kind is SKIP
        assert selector.select(1.0, trim, 0.9)[0] is expected


def test_between_trim_and_skip_the_current_one_is_favoured():
    selector = KindSelector(0.04, 1)
    assert selector.select(1.0, 1.2, 1.19)[0] is TRIM
    assert selector.select(1.0, 1.2, 1.21)[0] is TRIM
    assert selector.select(1.0, 1.2, 1.23)[0] is SKIP
    assert selector.select(1.0, 1.21, 1.2)[0] is SKIP


def test_noise_does_not_make_it_flap():
    """Goodputs 5 % apart with 3 % noise: changes of kind are rare."""
    rng = np.random.default_rng(1)
    selector, kinds = KindSelector(0.04, 4), []
    for _ in range(2000):
        kinds.append(selector.select(1.0, 1.05 + 0.03 * rng.normal(), 0.0)[0])
    changes = sum(a is not b for a, b in pairwise(kinds))
    eager, eager_kinds = KindSelector(0.0, 0), []
    rng = np.random.default_rng(1)
    for _ in range(2000):
        eager_kinds.append(eager.select(1.05, 1.05 + 0.03 * rng.normal(), 0.0)[0])
    assert changes < 0.25 * sum(a is not b for a, b in pairwise(eager_kinds))
