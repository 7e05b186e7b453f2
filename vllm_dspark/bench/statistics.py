r"""Medians, cross-fitted best settings and bootstrap intervals, over interleaved repeats.

Repeat r of one row asks the same prompts of every mode one after the other, so ratios are taken
within a repeat. The best of several fixed settings is a maximum of noisy figures: chosen and scored
on the same repeats it would look better than it is. So for each repeat the setting is chosen by the
medians of the other repeats and scored on this one:

    ratio = exp( mean_r log( ours_r / fixed_{b(-r), r} ) ),   b(-r) = argmax_m median_{s != r} m_s

Intervals are percentiles of the same figure over repeats drawn with replacement.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

Rates = Mapping[int, float]  # repeat -> tokens per second
DRAWS = 1000  # of a bootstrap
_SEED = 0


@dataclass(frozen=True)
class Ratio:
    """A ratio with its bootstrap interval (95 %); chosen: best setting by repeats that chose it."""

    value: float
    low: float
    high: float
    chosen: dict[str, int]

    def as_json(self) -> dict[str, object]:
        """For the report."""
        return {"value": self.value, "low": self.low, "high": self.high, "chosen": self.chosen}


def spread(values: Sequence[float]) -> dict[str, float]:
    """Median, least, largest, and half the distance of the 20th and 80th percentile."""
    low, high = _quantile(values, 0.2), _quantile(values, 0.8)
    return {
        "median": statistics.median(values),
        "min": min(values),
        "max": max(values),
        "half_range_20_80": (high - low) / 2.0,
        "repeats": float(len(values)),
    }


def geometric_mean(values: Sequence[float]) -> float:
    """exp of the mean logarithm; ValueError for nothing or for what is not positive."""
    if not values or min(values) <= 0.0:
        raise ValueError(f"no geometric mean of {list(values)}")
    return math.exp(statistics.fmean(math.log(value) for value in values))


def against_best(ours: Rates, fixed: Mapping[str, Rates], draws: int = DRAWS) -> Ratio | None:
    """Ours over the best fixed setting of one row; None with fewer than two common repeats."""
    return against_best_single([ours], [fixed], draws)


def against_best_single(
    ours: Sequence[Rates], fixed: Sequence[Mapping[str, Rates]], draws: int = DRAWS
) -> Ratio | None:
    """Ours over the one setting that is best over all rows, geometric means over rows.

    ours[i] and fixed[i] are about row i; settings that are not in every row are left out.
    """
    names = sorted(set.intersection(*(set(row) for row in fixed))) if fixed else []
    repeats = _common_repeats(ours, fixed, names)
    if len(repeats) < 2 or not names:
        return None
    value, chosen = _cross_fit(ours, fixed, names, repeats)
    source = random.Random(_SEED)
    found = sorted(
        _cross_fit(ours, fixed, names, source.choices(repeats, k=len(repeats)))[0]
        for _ in range(draws)
    )
    return Ratio(value, _quantile(found, 0.025), _quantile(found, 0.975), chosen)


def between(first: Rates, second: Rates, draws: int = DRAWS) -> Ratio | None:
    """Ratio of two modes, paired by repeat; None with fewer than two common repeats."""
    return against_best(first, {"": second}, draws)


def _common_repeats(
    ours: Sequence[Rates], fixed: Sequence[Mapping[str, Rates]], names: Sequence[str]
) -> list[int]:
    parts = [set(row) for row in ours]
    parts += [set(row[name]) for row in fixed for name in names]
    return sorted(set.intersection(*parts)) if parts else []


def _cross_fit(
    ours: Sequence[Rates],
    fixed: Sequence[Mapping[str, Rates]],
    names: Sequence[str],
    repeats: Sequence[int],
) -> tuple[float, dict[str, int]]:
    """The figure over these repeats (some may occur twice), and what was chosen how often."""
    logs, chosen = [], dict[str, int]()
    for scored in repeats:
        others = [r for r in repeats if r != scored] or list(repeats)
        best = _best(fixed, names, others)
        chosen[best] = chosen.get(best, 0) + 1
        logs += [math.log(o[scored] / f[best][scored]) for o, f in zip(ours, fixed, strict=True)]
    return math.exp(statistics.fmean(logs)), chosen


def _best(
    fixed: Sequence[Mapping[str, Rates]], names: Sequence[str], repeats: Sequence[int]
) -> str:
    def score(name: str) -> float:
        medians = [statistics.median(row[name][r] for r in repeats) for row in fixed]
        return statistics.fmean(math.log(median) for median in medians)

    return max(names, key=score)


def _quantile(values: Sequence[float], share: float) -> float:
    """Linear between order statistics."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def median_of(
    figures: Sequence[float | None], summary: Callable[[Sequence[float]], float] = statistics.median
) -> float | None:
    """Median of what is known, None of nothing."""
    known = [value for value in figures if value is not None]
    return summary(known) if known else None
