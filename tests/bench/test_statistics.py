"""Cross-fitting and intervals; each test names the bias that it would catch."""

import math
import random

import pytest

from vllm_dspark.bench import statistics


def test_best_setting_is_chosen_on_other_repeats() -> None:
    """Catches choosing and scoring on the same repeats: of equal noisy settings the best one
    looks better than it is, so an equal `ours` would seem to lose."""
    source = random.Random(1)

    def rates() -> dict[int, float]:
        return {r: 100.0 * math.exp(source.gauss(0.0, 0.05)) for r in range(6)}

    naive, fitted = [], []
    for _ in range(200):
        fixed = {str(k): rates() for k in range(5)}
        ours = rates()
        ratio = statistics.against_best(ours, fixed, draws=1)
        assert ratio is not None
        fitted.append(math.log(ratio.value))
        best = [max(row[r] for row in fixed.values()) for r in range(6)]
        naive.append(sum(math.log(ours[r] / best[r]) for r in range(6)) / 6)
    assert sum(naive) / 200 < -0.04
    assert abs(sum(fitted) / 200) < 0.01


def test_ratio_and_interval_of_a_clear_case() -> None:
    """Catches a ratio that is upside down, or pairs repeats that do not belong together."""
    fixed = {"1": {0: 100.0, 1: 10.0, 2: 1.0}, "7": {0: 50.0, 1: 5.0, 2: 0.5}}
    ratio = statistics.against_best({0: 110.0, 1: 11.0, 2: 1.1}, fixed)
    assert ratio is not None
    assert ratio.value == pytest.approx(1.1)
    assert (ratio.low, ratio.high) == (pytest.approx(1.1), pytest.approx(1.1))
    assert ratio.chosen == {"1": 3}


def test_interval_covers_about_as_often_as_it_says() -> None:
    """Catches an interval that ignores the spread between repeats."""
    source, covered = random.Random(2), 0
    for _ in range(100):
        ours = {r: math.exp(source.gauss(0.0, 0.1)) for r in range(12)}
        ratio = statistics.between(ours, dict.fromkeys(range(12), 1.0), draws=200)
        assert ratio is not None
        covered += ratio.low <= 1.0 <= ratio.high
    assert 80 <= covered <= 99


def test_best_single_setting_is_one_for_all_rows() -> None:
    """Catches a "single" setting that differs from row to row."""
    ours = [{0: 10.0, 1: 10.0}, {0: 10.0, 1: 10.0}]
    fixed = [
        {"1": {0: 10.0, 1: 10.0}, "7": {0: 5.0, 1: 5.0}},
        {"1": {0: 5.0, 1: 5.0}, "7": {0: 9.0, 1: 9.0}},
    ]
    ratio = statistics.against_best_single(ours, fixed)
    assert ratio is not None
    assert ratio.value == pytest.approx(math.sqrt(2.0))  # setting 1: equal here, half there
    assert ratio.chosen == {"1": 2}


def test_one_repeat_is_too_few() -> None:
    assert statistics.against_best({0: 1.0}, {"1": {0: 1.0}}) is None
    assert statistics.against_best({0: 1.0, 1: 1.0}, {"1": {1: 1.0, 2: 1.0}}) is None


def test_spread_and_geometric_mean() -> None:
    found = statistics.spread([1.0, 2.0, 3.0, 4.0, 10.0])
    assert (found["median"], found["min"], found["max"]) == (3.0, 1.0, 10.0)
    assert found["half_range_20_80"] == pytest.approx(1.7)
    assert statistics.geometric_mean([1.0, 4.0]) == pytest.approx(2.0)
    with pytest.raises(ValueError, match="no geometric mean"):
        statistics.geometric_mean([1.0, 0.0])
    assert statistics.median_of([None, None]) is None
    assert statistics.median_of([None, 3.0, 1.0]) == 2.0
