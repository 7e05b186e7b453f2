r"""What a draft pass of n <= K columns costs, from few measured widths.

    D(R, n) = D(R, K) * q(R, n)

D(R, K) is the drafter's own curve, corrected while serving (online_cost.py). q is the share of it
that a narrower pass takes: measured at some widths and request counts, linear between them in R
and in n, constant beyond the request counts that were measured. A share rather than a time, so
that one correction of the curve moves the prices of all widths alike; on top of it each measured
width has its own bounded correction, since widths that are served often can be told apart.
"""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.cost import CostGrid

Float64Array = npt.NDArray[np.float64]

# A narrow pass is never taken to be free, nor dearer than a full one: noise of a measurement.
_LEAST_SHARE = 0.05
_RATE = 0.02
_BOUND = math.log(1.5)


def ladder(num_positions: int) -> tuple[int, ...]:
    """Widths that are considered: Fibonacci numbers below K, and K.

    D is close to linear in n and goodput is flat around its maximum, so that the best of these is
    within about one per cent of the best of all; few widths are calmer and quicker to compare.
    """
    widths, following = [1], 2
    while following < num_positions:
        widths.append(following)
        following = widths[-1] + widths[-2]
    return (*(n for n in widths if n < num_positions), num_positions)


def measured_widths(num_positions: int) -> tuple[int, ...]:
    """Narrower widths that a profile measures: those of small blocks, and the first beyond."""
    return tuple(n for n in (1, 2, 3) if n < num_positions)


class DraftShares:
    """q(R, n); `available` only where narrower passes were measured."""

    def __init__(self, draft: CostGrid, narrow: Mapping[int, CostGrid], num_positions: int) -> None:
        self.available = bool(narrow)
        self._full = num_positions
        self._widths = sorted(n for n in narrow if n < num_positions)
        self._curves: dict[int, tuple[npt.NDArray[np.int64], Float64Array]] = {}
        for n in self._widths:
            grid = narrow[n]
            whole = np.interp(grid.size_array, draft.size_array, draft.median_ms[0])
            share = np.clip(grid.median_ms[0] / whole, _LEAST_SHARE, 1.0)
            self._curves[n] = (grid.size_array, share)
        self._factor = dict.fromkeys(self._widths, 0.0)
        self._known: dict[tuple[int, int], float] = {}  # shares, until one is corrected

    def of(self, num_requests: int, columns: int) -> float:
        """q(R, n), 1 at full width or where nothing narrower was measured."""
        if columns >= self._full or not self._widths:
            return 1.0
        known = self._known.get((num_requests, columns))
        if known is None:
            known = self._known[num_requests, columns] = self._share(num_requests, columns)
        return known

    def _share(self, num_requests: int, columns: int) -> float:
        nodes = [*self._widths, self._full]
        shares = [*(self._at(n, num_requests) for n in self._widths), 1.0]
        # Noise makes a pass look slower, never faster: what a wider one took bounds a narrower one.
        bounded = np.minimum.accumulate(shares[::-1])[::-1]
        return float(np.interp(columns, nodes, bounded))

    def _at(self, width: int, num_requests: int) -> float:
        sizes, share = self._curves[width]
        corrected = float(np.interp(num_requests, sizes, share)) * math.exp(self._factor[width])
        return min(max(corrected, _LEAST_SHARE), 1.0)

    def correct(self, columns: int, innovation: float) -> None:
        """Move the share of the measured width nearest to `columns` by a small part of a log ratio.

        innovation: log(measured / predicted) of one pass, clipped by the caller.
        """
        if not self._widths:
            return
        nearest = min(self._widths, key=lambda n: (abs(n - columns), n))
        moved = self._factor[nearest] + _RATE * innovation
        self._factor[nearest] = max(-_BOUND, min(_BOUND, moved))
        self._known.clear()
