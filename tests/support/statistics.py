"""Tests of sampled tokens against an exact law, with p-values small enough to be trusted.

Three statistics, each a function of the emitted tokens and of the exact conditional laws:

- `chi_square`: counts of cells against their expected numbers (cells expected rarely are merged).
- `favoured_token_z`: tokens that equal a token named beforehand, against its probability. The sum
  of (1[x = d] - p(d)) is a martingale, so d may depend on everything drawn before. This is the
  sharpest test of the likeliest mistake, mass moved to what the drafter proposes.
- `transform`: the randomised probability integral transform. Listing the tokens in an order
  fixed before the draw, u = P(tokens listed before x) + v P(x) with v uniform is uniform on (0, 1)
  and independent of all earlier u, exactly, whatever the context. Cells of u, and of pairs of
  successive u, turn into chi-square tests of every conditional law and of the joint law of pairs.
"""

import math

import numpy as np
import torch

MIN_EXPECTED = 10.0  # below, the chi-square tail is not to be trusted at 1e-8


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """p-value of observed counts; expected counts have the same sum."""
    order = np.argsort(expected.ravel())
    observed, wanted = counts.ravel()[order].astype(float), expected.ravel()[order].astype(float)
    if not math.isclose(observed.sum(), wanted.sum(), rel_tol=1e-6):
        raise ValueError(f"{observed.sum()} observed, {wanted.sum()} expected")
    few = int(np.searchsorted(wanted, MIN_EXPECTED))
    while few and wanted[:few].sum() < MIN_EXPECTED:  # the merged cell must be large enough too
        few += 1
    if few:
        observed = np.append(observed[few:], observed[:few].sum())
        wanted = np.append(wanted[few:], wanted[:few].sum())
    statistic = float(((observed - wanted) ** 2 / wanted).sum())
    return chi_square_tail(statistic, len(wanted) - 1)


def chi_square_tail(statistic: float, degrees: int) -> float:
    """P(chi-square variable with `degrees` exceeds `statistic`)."""
    half = torch.tensor([degrees / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))


def favoured_token_z(tokens: np.ndarray, laws: np.ndarray, favoured: np.ndarray) -> float:
    """Standard deviations by which the favoured tokens came too often.

    tokens, favoured: [N]; laws: [N, V] exact conditional laws of the draws.
    """
    p = np.take_along_axis(laws, favoured[:, None], axis=1)[:, 0]
    variance = float((p * (1.0 - p)).sum())
    return float(((tokens == favoured) - p).sum() / math.sqrt(variance))


def normal_tail(z: float) -> float:
    """Two-sided p-value of a standard normal deviate."""
    return math.erfc(abs(z) / math.sqrt(2.0))


def transform(
    tokens: np.ndarray, laws: np.ndarray, scores: np.ndarray, generator: np.random.Generator
) -> np.ndarray:
    """Uniform variables [N] of draws `tokens` [N] listed by falling `scores` [N, V]."""
    order = np.argsort(-scores, axis=1, kind="stable")
    listed = np.take_along_axis(laws, order, axis=1)
    place = (order == tokens[:, None]).argmax(axis=1)
    before = np.concatenate([np.zeros((len(laws), 1)), listed.cumsum(axis=1)], axis=1)
    rows = np.arange(len(tokens))
    return before[rows, place] + generator.random(len(tokens)) * listed[rows, place]


def uniformity(values: np.ndarray, cells: int) -> float:
    """p-value of variables that should be uniform on (0, 1)."""
    counts = np.bincount(_cell(values, cells), minlength=cells)
    return chi_square(counts, np.full(cells, len(values) / cells))


def pair_uniformity(first: np.ndarray, second: np.ndarray, cells: int) -> float:
    """p-value of pairs that should be uniform on the square."""
    joint = _cell(first, cells) * cells + _cell(second, cells)
    counts = np.bincount(joint, minlength=cells * cells)
    return chi_square(counts, np.full(cells * cells, len(first) / cells**2))


def _cell(values: np.ndarray, cells: int) -> np.ndarray:
    return np.minimum((values * cells).astype(np.int64), cells - 1)
