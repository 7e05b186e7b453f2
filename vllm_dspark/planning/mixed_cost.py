"""What steps with prefill rows cost, learned from such steps alone.

No cost table of decode steps says it: they run in other graphs or none, attention works on long
rows beside short ones, and the drafter writes the prompts' context first. While an engine serves,
every mixed step that is timed is a sample, and prompts of all lengths make their sizes vary by
themselves. Two curves come out of them, the target's time by tokens and the drafter's by requests:

    T(n) = isotonic regression over geometric size bins, linear between their means,
           continued with the least-squares slope of all bins, never below a quarter of T(smallest)

A curve is used once `MIN_SAMPLES` samples fill bins that differ enough in size. What it says far
from the sizes served is a guess; acting on it serves those sizes, and that replaces the guess.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MIN_SAMPLES = 16
_BIN = 1.15  # ratio of the sizes of neighbouring bins
_MIN_IN_BIN = 2
_MIN_SPAN = 1.1  # of sizes, for a slope
_MEMORY = 32  # samples that a bin remembers
_CLIP = 1.5  # a sample moves a settled bin as if it were within this factor of it
_LOWEST = 0.25  # of the time of the smallest bin, where the slope would lead below
_REFRESH = 4  # samples between recomputations of the curve


@dataclass(slots=True)
class _Bin:
    size: float = 0.0
    ms: float = 0.0
    count: int = 0

    def add(self, size: int, ms: float) -> None:
        if self.count >= _MIN_IN_BIN:
            ms = min(max(ms, self.ms / _CLIP), self.ms * _CLIP)
        self.count += 1
        rate = 1.0 / min(self.count, _MEMORY)
        self.size += rate * (size - self.size)
        self.ms += rate * (ms - self.ms)


class SizeCurve:
    """Time by size, from samples alone; deterministic in the order of the samples."""

    def __init__(self, least_span: float = _MIN_SPAN) -> None:
        """least_span: largest over smallest size from which on there is a curve; 1: flat is one."""
        self._least_span = least_span
        self._bins: dict[int, _Bin] = {}
        self._num_samples = 0
        self._until_refresh = 0
        self._nodes: tuple[tuple[int, ...], IntArray, Float64Array] | None = None

    def add(self, size: int, ms: float) -> None:
        """Take in one step; times that are none (NaN, zero) are ignored."""
        if size < 1 or not (math.isfinite(ms) and ms > 0.0):
            return
        self._bins.setdefault(int(math.log(size) / math.log(_BIN)), _Bin()).add(size, ms)
        self._num_samples += 1
        self._until_refresh -= 1
        if self._until_refresh <= 0 and self._num_samples >= MIN_SAMPLES:
            self._until_refresh = _REFRESH
            self._nodes = self._curve()

    def nodes(self) -> tuple[tuple[int, ...], IntArray, Float64Array] | None:
        """Ascending sizes, twice, and their times (ms), from size 1 on; None: too few samples."""
        return self._nodes

    def at(self, size: int) -> float | None:
        """Time (ms) at a size; None: too few samples."""
        if self._nodes is None:
            return None
        _, sizes, times = self._nodes
        return float(np.interp(size, sizes, times))

    def _curve(self) -> tuple[tuple[int, ...], IntArray, Float64Array] | None:
        bins = [found for found in self._bins.values() if found.count >= _MIN_IN_BIN]
        bins.sort(key=lambda found: found.size)
        if not bins or bins[-1].size < self._least_span * bins[0].size:
            return self._nodes
        size = np.array([found.size for found in bins])
        ms = np.array([found.ms for found in bins])
        weight = np.array([float(min(found.count, _MEMORY)) for found in bins])
        slope = _slope(size, ms, weight)
        ms = _isotonic(ms, weight)
        below = max(ms[0] - slope * (size[0] - 1.0), _LOWEST * ms[0])
        above = ms[-1] + slope * size[-1]
        sizes = np.unique(np.rint([1.0, *size, 2.0 * size[-1]]).astype(np.int64))
        times = np.interp(sizes, [1.0, *size, 2.0 * size[-1]], [min(below, ms[0]), *ms, above])
        return tuple(sizes.tolist()), sizes, times


class MixedCosts:
    """The two curves of an engine's mixed steps."""

    def __init__(self) -> None:
        self.target = SizeCurve()  # by tokens of the step
        self.draft = SizeCurve(least_span=1.0)  # by requests of the step, of a steady load one

    @property
    def ready(self) -> bool:
        """Whether mixed steps have prices."""
        return self.target.nodes() is not None

    def observe(
        self, num_tokens: int, num_requests: int, forward_ms: float, draft_ms: float | None
    ) -> None:
        """Take in one mixed step; draft_ms: None where nothing was drafted."""
        self.target.add(num_tokens, forward_ms)
        if draft_ms is not None:
            self.draft.add(num_requests, draft_ms)


def _slope(size: Float64Array, ms: Float64Array, weight: Float64Array) -> float:
    """Weighted least-squares slope, not below 0."""
    total = weight.sum()
    centred = size - (weight * size).sum() / total
    spread = float((weight * centred**2).sum())
    return max(0.0, float((weight * centred * ms).sum()) / spread) if spread > 0.0 else 0.0


def _isotonic(ms: Float64Array, weight: Float64Array) -> Float64Array:
    """Nearest non-decreasing values (pool adjacent violators), weighted."""
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for value, share in zip(ms.tolist(), weight.tolist(), strict=True):
        mean, total, members = value, share, 1
        while pools and pools[-1][0] > mean:
            before, mass, count = pools.pop()
            mean = (before * mass + mean * total) / (mass + total)
            total, members = total + mass, members + count
        pools.append((mean, total, members))
    return np.repeat([mean for mean, _, _ in pools], [members for _, _, members in pools])
