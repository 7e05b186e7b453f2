"""What steps with prefill rows cost, learned from such steps alone.

No cost table of decode steps says it: they run in other graphs or none, attention works on long
rows beside short ones, and the drafter writes the prompts' context first. While an engine serves,
every mixed step is timed and is a sample. With v rows of decoding requests and p rows of prompts:

    T(v, p) = f(v) + c (p - p0)

A row to be verified costs more than one of a prompt, which needs no logits, so the two are kept
apart: f is an isotonic regression over geometric bins of v, linear between their means; c is the
least-squares slope over p within bins; p0 is the running mean of p, for which steps are priced,
since how many prompts join is not known beforehand. Beyond the rows served f goes on with the
slope of all bins, at least c, and never below a quarter of its first bin: a guess, which is
replaced once it was acted on (or tried, planner.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# Ascending sizes in tokens, twice, and their times in ms.
Axis = tuple[tuple[int, ...], IntArray, Float64Array]

MIN_SAMPLES = 16
_BIN = 1.15  # ratio of the sizes of neighbouring bins
_MIN_IN_BIN = 2
_MIN_SPAN = 1.1  # of sizes, for a slope of their own
_MEMORY = 32  # samples that a bin remembers
_CLIP = 1.5  # a sample moves a settled bin as if it were within this factor of it
_LOWEST = 0.25  # of the time of the smallest bin, where the slope would lead below
_REFRESH = 4  # samples between recomputations of the curve


@dataclass(slots=True)
class _Bin:
    """Running means of the samples of one bin."""

    rows: float = 0.0
    prefill_rows: float = 0.0
    ms: float = 0.0
    count: int = 0

    def add(self, rows: int, prefill_rows: int, ms: float) -> tuple[float, float]:
        """Take in a sample; how far its prefill rows and its time were from the means."""
        if self.count >= _MIN_IN_BIN:
            ms = min(max(ms, self.ms / _CLIP), self.ms * _CLIP)
        off = prefill_rows - self.prefill_rows, ms - self.ms
        if not self.count:
            off = 0.0, 0.0
        self.count += 1
        rate = 1.0 / min(self.count, _MEMORY)
        self.rows += rate * (rows - self.rows)
        self.prefill_rows += rate * (prefill_rows - self.prefill_rows)
        self.ms += rate * (ms - self.ms)
        return off


class _Slope:
    """Slope of time over prefill rows within bins, not below 0; remembers some 64 samples."""

    def __init__(self) -> None:
        self._cross = self._square = 0.0

    def add(self, rows: float, ms: float) -> None:
        self._cross += rows * ms - self._cross / (2 * _MEMORY)
        self._square += rows * rows - self._square / (2 * _MEMORY)

    @property
    def value(self) -> float:
        return max(0.0, self._cross / self._square) if self._square > 0.0 else 0.0


class MixedCosts:
    """Prices of an engine's mixed steps; deterministic in the order of the samples."""

    def __init__(self) -> None:
        self.prefill_rows = 0.0  # p0
        self._bins: dict[int, _Bin] = {}
        self._drafts: dict[int, _Bin] = {}  # by requests
        self._slope = _Slope()
        self._num_samples = 0
        self._until_refresh = 0
        self._axis: Axis | None = None
        self._draft_axis: Axis | None = None

    def observe(
        self,
        rows: int,
        prefill_rows: int,
        num_requests: int,
        forward_ms: float,
        draft_ms: float | None,
    ) -> None:
        """Take in one mixed step; times that are none (NaN, zero) are ignored.

        rows: of decoding requests, drafts included; draft_ms: None where nothing was drafted.
        """
        if rows < 1 or prefill_rows < 0 or num_requests < 1 or not _is_time(forward_ms):
            return
        found = self._bins.setdefault(_bin_of(rows), _Bin())
        self._slope.add(*found.add(rows, prefill_rows, forward_ms))
        if draft_ms is not None and _is_time(draft_ms):
            self._drafts.setdefault(_bin_of(num_requests), _Bin()).add(num_requests, 0, draft_ms)
        self._num_samples += 1
        self.prefill_rows += (prefill_rows - self.prefill_rows) / min(self._num_samples, _MEMORY)
        self._until_refresh -= 1
        if self._until_refresh <= 0 and self._num_samples >= MIN_SAMPLES:
            self._until_refresh = _REFRESH
            self._refresh()

    @property
    def ready(self) -> bool:
        """Whether mixed steps have prices."""
        return self._axis is not None

    def axis(self) -> Axis | None:
        """Sizes in tokens, p0 prefill rows included, and their times; None: too few samples."""
        return self._axis

    def step_ms(self, num_tokens: int) -> float | None:
        """Time of a step of so many tokens, p0 of them prefill rows; None: too few samples."""
        if self._axis is None:
            return None
        return float(np.interp(num_tokens, self._axis[1], self._axis[2]))

    def draft_ms(self, num_requests: int) -> float | None:
        """Time of the full draft pass of a mixed step; None: too few samples."""
        if self._draft_axis is None:
            return None
        return float(np.interp(num_requests, self._draft_axis[1], self._draft_axis[2]))

    def served(self, rows: int) -> bool:
        """Whether steps of about so many rows of decoding requests were served."""
        index = _bin_of(max(rows, 1))
        near = [self._bins.get(i) for i in (index - 1, index, index + 1)]
        return any(found is not None and found.count >= _MIN_IN_BIN for found in near)

    def _refresh(self) -> None:
        slope = self._slope.value
        self._axis = _curve(list(self._bins.values()), self.prefill_rows, slope) or self._axis
        drafts = _curve(list(self._drafts.values()), 0.0, 0.0)
        self._draft_axis = drafts or self._draft_axis


def _curve(bins: Sequence[_Bin], prefill_rows: float, slope: float) -> Axis | None:
    """Times over tokens at a number of prefill rows; None: no bin is settled yet."""
    bins = sorted((b for b in bins if b.count >= _MIN_IN_BIN), key=lambda b: b.rows)
    if not bins:
        return None
    rows = np.array([b.rows for b in bins])
    ms = np.array([b.ms + slope * (prefill_rows - b.prefill_rows) for b in bins])
    ms = np.maximum(ms, _LOWEST * np.array([b.ms for b in bins]))
    weight = np.array([float(min(b.count, _MEMORY)) for b in bins])
    if rows[-1] >= _MIN_SPAN * rows[0]:
        slope = max(slope, _least_squares(rows, ms, weight))
    ms = _isotonic(ms, weight)
    below = min(max(ms[0] - slope * (rows[0] - 1.0), _LOWEST * ms[0]), ms[0])
    nodes = np.array([1.0, *rows, 2.0 * rows[-1]])
    times = np.array([below, *ms, ms[-1] + slope * rows[-1]])
    sizes = np.unique(np.rint(nodes + prefill_rows).astype(np.int64))
    return tuple(sizes.tolist()), sizes, np.interp(sizes, nodes + prefill_rows, times)


def _bin_of(size: int) -> int:
    return int(math.log(size) / math.log(_BIN))


def _is_time(ms: float) -> bool:
    return math.isfinite(ms) and ms > 0.0


def _least_squares(size: Float64Array, ms: Float64Array, weight: Float64Array) -> float:
    """Weighted slope; the sizes differ."""
    centred = size - (weight * size).sum() / weight.sum()
    return float((weight * centred * ms).sum() / (weight * centred**2).sum())


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
