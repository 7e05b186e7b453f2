r"""Calibration of the confidence head.

Raw confidences are sigmoids that were trained on single positions; their running
product is off even where each factor looks fair. Sequential temperature scaling
(STS, DSpark paper) fits one temperature per position, left to right,

    c'_k = sigmoid(logit(c_k) / T_k + b_k),      a'_k = c'_1 ... c'_k
    T_k  = argmin_T  ECE(a'_{k-1} * sigmoid(logit(c_k) / T),  y_k)

with y_k = 1 if the first k drafts were all accepted, and T_1..T_{k-1} already fixed.
Past a first rejection y_k is known: it is 0. Rows whose window ends before k are left
out whatever happened inside it: were those kept that were rejected before the end
(and so known to be 0), the sample would hold too many failures. Greedy and sampled
requests accept by different rules, so each class has its own parameters.

A temperature cannot move a confidence across 1/2, so STS fails where the head is off
by more than sharpness: a head that was trained for sampled drafts says 0.77 where
greedy drafts of sampled requests are accepted 0.41 of the time. `fit_scaling` fits
slope and offset of each position together (Platt), by maximum likelihood of the
conditional outcomes; serving corrects the offsets further (online.py).
"""

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import CalibrationError
from vllm_dspark.planning.quality import equal_mass_ece

FloatArray = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]
Float64Array = npt.NDArray[np.float64]
Vector = tuple[float, ...]

# Keeps logits finite. Smaller than any confidence gap that matters, larger than the
# float32 spacing below 1, so a saturated 1.0 stays tied with itself only.
_EDGE = np.float32(1e-6)
# Outside these a temperature is a broken fit, not a property of a head.
MIN_TEMPERATURE = 0.05
MAX_TEMPERATURE = 20.0


def logit(probability: npt.NDArray[np.floating]) -> FloatArray:
    """log(p / (1 - p)) in float32 with the ends cut off."""
    p = np.maximum(probability, _EDGE, dtype=np.float32)
    np.minimum(p, np.float32(1.0) - _EDGE, out=p)
    odds: FloatArray = p / (np.float32(1.0) - p)
    return np.log(odds, out=odds)


@dataclass(frozen=True)
class Calibration:
    """Parameters per request class (greedy, sampled), one entry per draft position."""

    greedy: Vector
    sampled: Vector
    greedy_offset: Vector = ()
    sampled_offset: Vector = ()
    _slope: FloatArray = field(init=False, repr=False, compare=False)  # [2, K, 1] of -1 / T
    _offset: FloatArray = field(init=False, repr=False, compare=False)  # [2, K, 1] of -b
    _identity: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        width = len(self.greedy)
        for name in ("greedy", "sampled"):
            if not getattr(self, f"{name}_offset"):
                object.__setattr__(self, f"{name}_offset", (0.0,) * width)
            _check(name, getattr(self, name), getattr(self, f"{name}_offset"), width)
        slope = 1.0 / np.array([self.greedy, self.sampled], dtype=np.float64)
        offset = np.array([self.greedy_offset, self.sampled_offset], dtype=np.float32)
        # Signs turned, because the sigmoid wants exp(-z).
        object.__setattr__(self, "_slope", -slope.astype(np.float32)[:, :, None])
        object.__setattr__(self, "_offset", -offset[:, :, None])
        object.__setattr__(self, "_identity", bool((slope == 1.0).all() and not offset.any()))

    @property
    def num_positions(self) -> int:
        """K."""
        return len(self.greedy)

    @staticmethod
    def identity(num_positions: int) -> "Calibration":
        """Trust the head as it is."""
        ones = (1.0,) * num_positions
        return Calibration(ones, ones)

    def with_offsets(self, offsets: npt.NDArray[np.floating]) -> "Calibration":
        """The same temperatures with [2, K] offsets (greedy, sampled)."""
        greedy, sampled = (tuple(float(value) for value in row) for row in offsets)
        return Calibration(self.greedy, self.sampled, greedy, sampled)

    def apply(self, confidence: FloatArray, sampled: BoolArray) -> FloatArray:
        """Calibrated copy of [K, n] confidences in [0, 1]; `sampled` [n] picks the class."""
        if self._identity:
            return confidence.astype(np.float32, copy=True)
        num_sampled = int(np.count_nonzero(sampled))
        if num_sampled in (0, sampled.size):
            slope, offset = self._slope[int(num_sampled > 0)], self._offset[int(num_sampled > 0)]
        else:
            slope = np.where(sampled, self._slope[1], self._slope[0])
            offset = np.where(sampled, self._offset[1], self._offset[0])
        z = logit(confidence)
        np.multiply(z, slope, out=z)
        np.add(z, offset, out=z)
        np.exp(z, out=z)
        np.add(z, np.float32(1.0), out=z)
        return np.reciprocal(z, out=z)


def _check(name: str, temperatures: Vector, offsets: Vector, width: int) -> None:
    if not temperatures or len(temperatures) != width or len(offsets) != width:
        raise CalibrationError(
            f"{name} has {len(temperatures)} temperatures and {len(offsets)} offsets where "
            f"{width} draft positions are calibrated; refit with `vllm-dspark calibrate`"
        )
    for k, value in enumerate(temperatures):
        if not (math.isfinite(value) and MIN_TEMPERATURE <= value <= MAX_TEMPERATURE):
            raise CalibrationError(
                f"{name} temperature {value!r} of position {k + 1} is not between "
                f"{MIN_TEMPERATURE} and {MAX_TEMPERATURE}"
            )
    for k, value in enumerate(offsets):
        if not math.isfinite(value):
            raise CalibrationError(f"{name} offset {value!r} of position {k + 1} is not finite")


def fit_temperatures(
    confidence: npt.NDArray[np.floating],  # [N, K] raw confidences
    accepted: npt.NDArray[np.integer],  # [N] accepted drafts
    admitted: npt.NDArray[np.integer],  # [N] drafts that were verified
    num_bins: int = 15,
) -> Vector:
    """STS: temperatures of one request class, fitted left to right."""
    logits = logit(confidence).astype(np.float64)
    product = np.ones(len(logits))
    temperatures = []
    for k in range(logits.shape[1]):
        known = admitted > k
        outcome = (accepted > k)[known]
        before, z = product[known], logits[known, k]
        temperature = _best_temperature(before, z, outcome, num_bins)
        temperatures.append(temperature)
        product = product / (1.0 + np.exp(-logits[:, k] / temperature))
    return tuple(temperatures)


def _best_temperature(
    before: Float64Array, z: Float64Array, outcome: npt.NDArray[np.bool_], num_bins: int
) -> float:
    """1-D search over log T: a coarse grid, then a finer one around its best point.

    ECE is piecewise constant in the binning and not convex, so no descent is used.
    Candidates are visited from T = 1 outwards and only a real improvement replaces
    an earlier one, so a tie keeps the temperature nearest to "no change".
    """
    if outcome.size == 0:
        return 1.0
    best, best_error = 0.0, math.inf
    span, centre = math.log(8.0), 0.0
    for points in (33, 33):
        grid = centre + np.linspace(-span, span, points)
        for log_t in grid[np.argsort(np.abs(grid), kind="stable")]:
            predicted = before / (1.0 + np.exp(-z * math.exp(-log_t)))
            error = equal_mass_ece(predicted, outcome, num_bins)
            if error < best_error - 1e-9:
                best, best_error = float(log_t), error
        centre, span = best, 2.0 * span / (points - 1)
    return math.exp(best)


def fit_scaling(
    confidence: npt.NDArray[np.floating],  # [N, K] raw confidences
    accepted: npt.NDArray[np.integer],  # [N] accepted drafts
    admitted: npt.NDArray[np.integer],  # [N] drafts that were verified
) -> tuple[Vector, Vector]:
    """Temperatures and offsets of one request class, by maximum likelihood per position.

    Position k is fitted on the drafts that were judged there: verified, and all before them
    accepted. With none, or where the likelihood wants a temperature outside the legal range (a
    head that carries no information there), the nearest legal one is taken.
    """
    logits = logit(confidence).astype(np.float64)
    temperatures, offsets = [], []
    for k in range(logits.shape[1]):
        judged = (admitted > k) & (accepted >= k)
        slope, offset = _logistic(logits[judged, k], (accepted > k)[judged])
        slope = min(max(slope, 1.0 / MAX_TEMPERATURE), 1.0 / MIN_TEMPERATURE)
        temperatures.append(1.0 / slope)
        offsets.append(offset)
    return tuple(temperatures), tuple(offsets)


# A Gaussian prior around "no change": rows it is worth. Keeps separable samples finite.
_PRIOR_ROWS = 4.0


def _logistic(z: Float64Array, outcome: npt.NDArray[np.bool_]) -> tuple[float, float]:
    """(slope, offset) of P(outcome) = sigmoid(slope z + offset), by Newton's method."""
    design = np.stack([z, np.ones_like(z)], axis=1)
    start = np.array([1.0, 0.0])
    weights = start.copy()
    for _ in range(50):
        predicted = 1.0 / (1.0 + np.exp(-np.clip(design @ weights, -30.0, 30.0)))
        gradient = design.T @ (predicted - outcome) + _PRIOR_ROWS * (weights - start)
        spread = predicted * (1.0 - predicted)
        curvature = design.T @ (design * spread[:, None]) + _PRIOR_ROWS * np.eye(2)
        step = np.clip(np.linalg.solve(curvature, gradient), -1.0, 1.0)
        weights -= step
        if np.abs(step).max() < 1e-9:
            break
    return float(weights[0]), float(weights[1])
