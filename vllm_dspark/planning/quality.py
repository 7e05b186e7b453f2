"""How good probability forecasts are: ECE, Brier score, AUC, per position.

ECE uses bins of equal mass (DESIGN.md: 15), because survivals crowd near 0 and 1
and equal-width bins would leave most of them empty.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.integer]


def equal_mass_ece(
    predicted: npt.NDArray[np.floating], outcome: BoolArray, num_bins: int = 15
) -> float:
    """Expected calibration error: mean |forecast - frequency| over bins of equal mass."""
    total = predicted.size
    if total == 0:
        return 0.0
    order = np.argsort(predicted, kind="stable")
    residual = predicted[order] - outcome[order]
    edges = np.linspace(0, total, min(num_bins, total) + 1).astype(np.int64)[:-1]
    return float(np.abs(np.add.reduceat(residual, edges)).sum() / total)


def brier(predicted: npt.NDArray[np.floating], outcome: BoolArray) -> float:
    """Mean squared error of the forecast."""
    return float(np.mean((predicted - outcome) ** 2)) if predicted.size else 0.0


def auc(predicted: npt.NDArray[np.floating], outcome: BoolArray) -> float:
    """P(an accepted draft is ranked above a rejected one), ties counting half; 0.5 if undefined."""
    positives = int(np.count_nonzero(outcome))
    negatives = outcome.size - positives
    if positives == 0 or negatives == 0:
        return 0.5
    _, index, counts = np.unique(predicted, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    mean_rank = last - (counts - 1) / 2.0  # ranks from 1, averaged within ties
    rank_sum = float(mean_rank[index][outcome].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


@dataclass(frozen=True)
class PositionQuality:
    """Forecast quality of the survival a_k at one draft position (1-based)."""

    position: int
    count: int
    base_rate: float
    ece: float
    brier: float
    brier_of_base_rate: float
    auc: float


def quality_by_position(
    survival: npt.NDArray[np.floating],  # [N, K] predicted a_k
    accepted: IntArray,  # [N]
    admitted: IntArray,  # [N]
    num_bins: int = 15,
) -> tuple[PositionQuality, ...]:
    """Quality per position over the entries whose outcome is known (see calibration.py)."""
    rows = []
    for k in range(survival.shape[1]):
        known = admitted > k
        predicted, outcome = survival[known, k], (accepted > k)[known]
        rate = float(outcome.mean()) if outcome.size else 0.0
        rows.append(
            PositionQuality(
                position=k + 1,
                count=int(outcome.size),
                base_rate=rate,
                ece=equal_mass_ece(predicted, outcome, num_bins),
                brier=brier(predicted, outcome),
                brier_of_base_rate=rate * (1.0 - rate),
                auc=auc(predicted, outcome),
            )
        )
    return tuple(rows)


class LiveQuality:
    """Running ECE per position from fixed-width bins, with exponential forgetting.

    Serving cannot keep and sort all forecasts; bins hold sums instead. Forgetting
    halves what is known every `half_life` observed rows.
    """

    def __init__(self, num_positions: int, num_bins: int = 20, half_life: int = 20_000) -> None:
        self._bins = num_bins
        self._half_life = half_life
        self._weight = np.zeros((num_positions, num_bins))
        self._residual = np.zeros((num_positions, num_bins))
        # Without forgetting, per position: pairs seen, accepted as predicted, accepted in fact.
        self.paired = np.zeros(num_positions)
        self.predicted = np.zeros(num_positions)
        self.realised = np.zeros(num_positions)

    def observe(
        self,
        survival: npt.NDArray[np.floating],  # [K, m]
        accepted: IntArray,  # [m]
        admitted: IntArray,  # [m]
    ) -> None:
        """Add m verified rows."""
        positions = np.arange(survival.shape[0])[:, None]
        known = positions < admitted
        bins = np.minimum((survival * self._bins).astype(np.int64), self._bins - 1)
        flat = (positions * self._bins + bins)[known]
        residual = (survival - (positions < accepted))[known]
        keep = 0.5 ** (accepted.size / self._half_life)
        hits = known & (positions < accepted)
        self.paired += known.sum(axis=1)
        self.predicted += np.where(known, survival, 0.0).sum(axis=1)
        self.realised += hits.sum(axis=1)
        size = self._weight.size
        self._weight *= keep
        self._residual *= keep
        self._weight += np.bincount(flat, minlength=size).reshape(self._weight.shape)
        self._residual += np.bincount(flat, residual, size).reshape(self._weight.shape)

    def ece(self) -> Float64Array:
        """Current ECE per position; 0 where nothing was seen."""
        total = self._weight.sum(axis=1)
        error: Float64Array = np.abs(self._residual).sum(axis=1) / np.maximum(total, 1e-12)
        return error
