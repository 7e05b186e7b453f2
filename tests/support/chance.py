"""Chi-square tests with a stated false-alarm rate and computed power, without scipy.

Quantiles by Wilson and Hilferty (a cube root of chi-square / dof is nearly normal), good to a
fraction of a percent in the statistic at the tails used here.
"""

import math
from statistics import NormalDist

import torch

FALSE_ALARM = 1e-6


def threshold(dof: int, false_alarm: float = FALSE_ALARM) -> float:
    """Statistic that a chi-square variable with `dof` exceeds with probability `false_alarm`."""
    z = NormalDist().inv_cdf(1 - false_alarm)
    return dof * (1 - 2 / (9 * dof) + z * math.sqrt(2 / (9 * dof))) ** 3


def power(dof: int, noncentrality: float, false_alarm: float = FALSE_ALARM) -> float:
    """Chance that a test at `false_alarm` sees a departure of this noncentrality (Patnaik)."""
    spread = dof + 2 * noncentrality
    shape = (dof + noncentrality) ** 2 / spread
    scaled = threshold(dof, false_alarm) / (spread / (dof + noncentrality))
    z = ((scaled / shape) ** (1 / 3) - (1 - 2 / (9 * shape))) / math.sqrt(2 / (9 * shape))
    return 1 - NormalDist().cdf(z)


def statistic(counts: torch.Tensor, expected: torch.Tensor) -> tuple[float, int]:
    """(Pearson's statistic, degrees of freedom); cells with little expectation are pooled."""
    counts, expected = counts.double().flatten(), expected.double().flatten()
    rare = expected < 8
    if rare.any():
        pooled = torch.stack([counts[rare].sum(), expected[rare].sum()])
        counts = torch.cat([counts[~rare], pooled[:1]])
        expected = torch.cat([expected[~rare], pooled[1:]])
        if pooled[1] == 0:
            assert pooled[0] == 0, "an impossible outcome occurred"
            counts, expected = counts[:-1], expected[:-1]
    return float(((counts - expected) ** 2 / expected).sum()), len(counts) - 1


def departs(counts: torch.Tensor, probabilities: torch.Tensor) -> bool:
    """Whether counts are incompatible with the probabilities at FALSE_ALARM."""
    value, dof = statistic(counts, probabilities.double() * counts.sum())
    return value > threshold(dof)


def noncentrality(actual: torch.Tensor, claimed: torch.Tensor, draws: int) -> float:
    """Of `draws` outcomes that follow `actual` in a test of `claimed`."""
    actual, claimed = actual.double(), claimed.double()
    return float(draws * ((actual - claimed) ** 2 / claimed).sum())


def independent(a: torch.Tensor, b: torch.Tensor, bins: int = 16) -> bool:
    """Whether paired uint32 values (int64 tensors) look independent and uniform, bins x bins."""
    cell = (a * bins >> 32) * bins + (b * bins >> 32)
    counts = torch.bincount(cell, minlength=bins * bins)
    return not departs(counts, torch.full((bins * bins,), 1.0 / bins**2))
