r"""Online correction of the calibration, bounded and hard to poison.

The offline temperatures stay; what moves is one offset b_qk per class and position
in logit space. Given that draft k was reached, its acceptance is Bernoulli(c'_k), so
the score equation of b_qk over reached drafts is sum w (y - c'_k) = 0, solved by a
damped Newton step every time enough weighted trials have gathered:

    b_qk += clip( sum w (y - c'_k) / (sum w c'_k (1 - c'_k) + rho), +-STEP )

and |b_qk| <= BOUND always. Drafts behind the first rejection or outside the window
were not reached: censored, they contribute nothing (counting them as rejections is
the mistake that makes trimming look like bad drafting). Requests whose target
distribution was altered (grammar, penalties, bad words) do not take part, and no
tenant's weight exceeds its cap (influence.py).
"""

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.influence import InfluenceCap

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]

BOUND = 1.0  # largest |offset|: 0.5 can become 0.27 or 0.73, no more
_STEP = 0.1
_ENOUGH = 256.0  # weighted trials per update of one position
_RIDGE = 64.0  # rho: keeps a saturated head from taking full steps on noise


class OnlineCalibration:
    """Learns offsets beside fixed temperatures; read `calibration` and `version`."""

    def __init__(self, base: Calibration) -> None:
        self.base = base
        self.calibration = base
        self.version = 0  # raised whenever `calibration` changes
        width = base.num_positions
        self._positions = np.arange(width, dtype=np.int32)[:, None]
        start = np.array([base.greedy_offset, base.sampled_offset])
        self._start, self._offset = start, start.copy()
        self._trials = np.zeros((2, width))
        self._residual = np.zeros((2, width))
        self._curvature = np.zeros((2, width))
        self._cap = InfluenceCap()

    def observe(
        self,
        confidence: FloatArray,  # [K, m] raw rows of the drafts that were verified
        admitted: IntArray,  # [m]
        accepted: IntArray,  # [m]
        sampled: BoolArray,  # [m]
        untouched: BoolArray,  # [m]
        tenant: IntArray,  # [m]
    ) -> None:
        """Add one step's verified rows."""
        reached = self._positions < np.minimum(admitted, accepted + 1)
        reached &= untouched & (confidence >= 0.0) & (confidence <= 1.0)
        verified: BoolArray = np.logical_or.reduce(reached, axis=0)
        if not verified.any():
            return
        weight = self._cap.weights(tenant, verified)
        safe = np.where(reached, confidence, np.float32(0.5))
        predicted = self.calibration.apply(safe, sampled)
        residual = np.where(reached, (self._positions < accepted) - predicted, 0)
        curvature = np.where(reached, predicted * (1.0 - predicted), 0)
        for group in (0, 1):
            share = weight * (sampled == bool(group))
            self._trials[group] += reached @ share
            self._residual[group] += residual @ share
            self._curvature[group] += curvature @ share
        self._update()

    def _update(self) -> None:
        ready = self._trials >= _ENOUGH
        if not ready.any():
            return
        step = np.clip(self._residual / (self._curvature + _RIDGE), -_STEP, _STEP)
        moved = np.clip(self._offset + step, self._start - BOUND, self._start + BOUND)
        self._offset = np.where(ready, moved, self._offset)
        for sums in (self._trials, self._residual, self._curvature):
            sums[ready] = 0.0
        self.calibration = self.base.with_offsets(self._offset)
        self.version += 1
