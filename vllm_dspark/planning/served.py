"""Which sizes of a grid were measured lately: their prices are known, those of others are guesses.

A size that is served again after a long time, or for the first time, is priced by its neighbours
(`spread`), and the first steps there may take something else. That says nothing about the machine
as a whole: the median of `NEEDED` such steps goes to this size alone, at once.
"""

from statistics import median

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

NEEDED = 3  # steps that make a price known; their median outlives one stalled step
_SETTLED = 8  # the same for the first size of all, which is measured along with the machine's speed
_LATELY = 2048  # steps of a grid after which a price is a guess again
_PER_OCTAVE = 0.15  # log of how far costs of sizes a factor of two apart may go apart
_MOST = 0.3


class ServedSizes:
    """Steps measured at each size of one grid."""

    def __init__(self, sizes: IntArray) -> None:
        self._log_size = np.log2(np.maximum(sizes, 1)).astype(np.float64)
        self._known = np.zeros(sizes.size, dtype=np.bool_)
        self._seen = np.zeros(sizes.size, dtype=np.int64)
        self._count = np.zeros(sizes.size, dtype=np.int64)
        self._pending: dict[int, list[float]] = {}
        self._clock = 0
        self.any = False  # whether any size has a price that is known

    def fresh(self, j: int) -> bool:
        """Whether size index j was measured lately."""
        return bool(self._known[j]) and self._clock - int(self._seen[j]) <= _LATELY

    def note(self, j: int) -> None:
        """One step was measured at size index j, and what it says was taken for the machine's."""
        self._clock += 1
        self._seen[j] = self._clock
        self._count[j] += 1
        if self._count[j] >= _SETTLED:
            self._known[j] = self.any = True

    def judge(self, j: int, ratio: float) -> float | None:
        """Note a step at a size that is not fresh; by what the size's price is off, once known.

        ratio: log(measured / predicted), not clipped.
        """
        self._clock += 1
        ratios = self._pending.setdefault(j, [])
        ratios.append(ratio)
        if len(ratios) < NEEDED:
            return None
        del self._pending[j]
        self._known[j] = self.any = True
        self._seen[j] = self._clock
        self._count[j] = max(int(self._count[j]), _SETTLED)
        return median(ratios)

    def machine_changed(self, j: int | None) -> None:
        """All sizes but the one being served (None: it is in another grid) are guesses again."""
        self._seen[:] = self._clock - _LATELY - 1
        if j is not None:
            self._seen[j] = self._clock
        self._pending.clear()

    def spread(self, residual: Float64Array) -> Float64Array:
        """Corrections of all sizes from those of the known ones.

        Linear over log tokens between them, constant beyond them: as they were while none is known.
        """
        known = self._known
        if not known.any():
            return residual
        found: Float64Array = np.interp(self._log_size, self._log_size[known], residual[known])
        return found

    def doubt(self, j: int) -> float:
        """Log factor by which the price of size index j may be off; 0 if it is fresh."""
        if self.fresh(j):
            return 0.0
        fresh = self._known & (self._clock - self._seen <= _LATELY)
        if not fresh.any():
            return _MOST
        distance = float(np.abs(self._log_size[fresh] - self._log_size[j]).min())
        return min(_PER_OCTAVE * distance, _MOST)
