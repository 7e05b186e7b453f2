r"""From recorded pairs to a fitted calibration, judged on prompts it has not seen.

STS (calibration.py) has a temperature per position and nothing else, so it cannot move a
confidence across 1/2. Where a head is biased, `fit_scaling` fits an offset per position as well.
"auto" stays with STS unless the offsets are clearly better on the very rows whose ECE STS
minimised.

Rows of one prompt resemble each other, so the split is by prompt, never by row. STS has one
parameter per position, which needs less data than an ECE of 15 bins; that is why half of the
prompts are held out by default. What an ECE would be if the forecast were perfect is not 0 but

    floor = sum_b (n_b / N) sqrt(2 / pi) sqrt(p_b (1 - p_b) / n_b)

(mean absolute error of a binomial frequency, bins b of n_b rows and mean forecast p_b), and it is
larger still where rows depend on each other. A measured ECE below its floor proves nothing more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.calibration import (
    Calibration,
    Vector,
    fit_scaling,
    fit_temperatures,
    logit,
)
from vllm_dspark.planning.quality import PositionQuality, quality_by_position

BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.integer]

NUM_BINS = 15
METHODS = ("auto", "sts", "affine")
# How much lower the worst ECE must be for "auto" to leave STS.
_CLEARLY = 0.005
# Rows that a part needs per bin for its frequency to mean anything.
MIN_PER_BIN = 20


@dataclass(frozen=True, eq=False)
class Pairs:
    """Confidence rows with their outcomes; N rows of one request class."""

    confidence: Float64Array  # [N, K] raw, in [0, 1]
    verified: IntArray  # [N] drafts whose outcome the target decided
    accepted: IntArray  # [N]
    prompt: IntArray  # [N] whose row it is

    def __len__(self) -> int:
        return int(self.accepted.size)

    @property
    def num_positions(self) -> int:
        """K."""
        return int(self.confidence.shape[1])

    def select(self, rows: BoolArray) -> Pairs:
        """The rows of a mask [N]."""
        return Pairs(
            self.confidence[rows], self.verified[rows], self.accepted[rows], self.prompt[rows]
        )


@dataclass(frozen=True)
class Bin:
    """One point of a reliability diagram."""

    predicted: float
    observed: float
    count: int


@dataclass(frozen=True)
class PositionFit:
    """One position on held-out rows: before and after calibration, and its diagrams."""

    before: PositionQuality
    after: PositionQuality
    ece_floor: float
    bins_before: tuple[Bin, ...]
    bins_after: tuple[Bin, ...]


@dataclass(frozen=True)
class ClassFit:
    """A request class: its temperatures and how they do on held-out prompts."""

    temperatures: Vector
    offsets: Vector  # zero for STS
    method: str  # "sts" or "affine"
    num_fit: int
    num_held_out: int
    positions: tuple[PositionFit, ...]
    ece_sts: Vector = ()  # held-out ECE by position of STS alone, where both were fitted


def reliability(
    predicted: npt.NDArray[np.floating], outcome: BoolArray, num_bins: int = NUM_BINS
) -> tuple[Bin, ...]:
    """Mean forecast and frequency in bins of equal mass, in ascending order."""
    total = predicted.size
    if total == 0:
        return ()
    order = np.argsort(predicted, kind="stable")
    edges = np.linspace(0, total, min(num_bins, total) + 1).astype(np.int64)
    counts = np.diff(edges)
    forecast = np.add.reduceat(predicted[order].astype(np.float64), edges[:-1]) / counts
    frequency = np.add.reduceat(outcome[order].astype(np.float64), edges[:-1]) / counts
    return tuple(
        Bin(float(p), float(f), int(n)) for p, f, n in zip(forecast, frequency, counts, strict=True)
    )


def ece_floor(bins: tuple[Bin, ...]) -> float:
    """Expected ECE of a perfect forecast with these bins (see above)."""
    total = sum(item.count for item in bins)
    return sum(
        item.count
        / total
        * math.sqrt(2.0 / math.pi)
        * math.sqrt(item.predicted * (1.0 - item.predicted) / item.count)
        for item in bins
    )


def held_out_prompts(num_prompts: int, share: float, seed: int) -> BoolArray:
    """[num_prompts] which prompts judge instead of fit; at least one on either side."""
    chosen = np.zeros(num_prompts, dtype=np.bool_)
    count = min(max(round(num_prompts * share), 1), num_prompts - 1) if num_prompts > 1 else 0
    chosen[np.random.default_rng(seed).permutation(num_prompts)[:count]] = True
    return chosen


def survival_of(confidence: Float64Array, temperatures: Vector, offsets: Vector) -> Float64Array:
    """[N, K] survivals under a class's parameters."""
    z = logit(confidence).astype(np.float64) / np.array(temperatures) + np.array(offsets)
    product: Float64Array = np.cumprod(1.0 / (1.0 + np.exp(-z)), axis=1)
    return product


def fit_class(pairs: Pairs, held_out: BoolArray, method: str = "auto") -> ClassFit:
    """Parameters from the rows of some prompts, judged on those of the others.

    held_out: [prompts] which of them judge; method: one of METHODS.
    """
    judge = held_out[pairs.prompt]
    fit, test = pairs.select(~judge), pairs.select(judge)
    zeros = (0.0,) * pairs.num_positions
    chosen, parameters = "sts", (zeros, zeros)
    ece_sts: Vector = ()
    if method != "affine":
        temperatures = fit_temperatures(fit.confidence, fit.accepted, fit.verified, NUM_BINS)
        parameters = (temperatures, zeros)
        ece_sts = tuple(item.after.ece for item in judge_class(test, *parameters))
    if method != "sts":
        affine = fit_scaling(fit.confidence, fit.accepted, fit.verified)
        if method == "affine" or _worst(fit, affine) < _worst(fit, parameters) - _CLEARLY:
            chosen, parameters = "affine", affine
    judged = judge_class(test, *parameters)
    return ClassFit(*parameters, chosen, len(fit), len(test), judged, ece_sts)


def _worst(pairs: Pairs, parameters: tuple[Vector, Vector]) -> float:
    """Largest ECE over positions."""
    survival = survival_of(pairs.confidence, *parameters)
    rows = quality_by_position(survival, pairs.accepted, pairs.verified, NUM_BINS)
    return max(row.ece for row in rows)


def judge_class(test: Pairs, temperatures: Vector, offsets: Vector) -> tuple[PositionFit, ...]:
    """Quality per position of the raw and of the calibrated survival on `test`."""
    width = len(temperatures)
    raw = survival_of(test.confidence, (1.0,) * width, (0.0,) * width)
    calibrated = survival_of(test.confidence, temperatures, offsets)
    before = quality_by_position(raw, test.accepted, test.verified, NUM_BINS)
    after = quality_by_position(calibrated, test.accepted, test.verified, NUM_BINS)
    positions = []
    for k in range(test.num_positions):
        known = test.verified > k
        outcome = (test.accepted > k)[known]
        bins_after = reliability(calibrated[known, k], outcome)
        positions.append(
            PositionFit(
                before[k],
                after[k],
                ece_floor(bins_after) if bins_after else 0.0,
                reliability(raw[known, k], outcome),
                bins_after,
            )
        )
    return tuple(positions)


def shortage(pairs: Pairs, held_out: BoolArray, min_outcomes: int) -> str:
    """Why there is too little data to fit and judge this class, or "".

    Each part needs `MIN_PER_BIN` rows per bin, and at each position `min_outcomes` of both kinds:
    a temperature fitted to a handful of acceptances is a guess.
    """
    judge = held_out[pairs.prompt]
    for part, rows in (("fit", pairs.select(~judge)), ("judge", pairs.select(judge))):
        for k in range(pairs.num_positions):
            known = rows.verified > k
            total = int(np.count_nonzero(known))
            hits = int(np.count_nonzero((rows.accepted > k)[known]))
            if total < NUM_BINS * MIN_PER_BIN:
                return (
                    f"position {k + 1} has {total} rows to {part} it with, at least "
                    f"{NUM_BINS * MIN_PER_BIN} are needed"
                )
            rare = min(hits, total - hits)
            if rare < min_outcomes:
                kind = "accepted" if hits < total - hits else "rejected"
                return (
                    f"position {k + 1} has {rare} {kind} drafts among its {total} rows to {part} "
                    f"it with, at least {min_outcomes} are needed"
                )
    return ""


def combine(greedy: ClassFit | None, sampled: ClassFit | None, num_positions: int) -> Calibration:
    """A calibration of both classes; a class that was not measured keeps its raw confidences."""
    ones, zeros = (1.0,) * num_positions, (0.0,) * num_positions
    return Calibration(
        greedy.temperatures if greedy else ones,
        sampled.temperatures if sampled else ones,
        greedy.offsets if greedy else zeros,
        sampled.offsets if sampled else zeros,
    )
