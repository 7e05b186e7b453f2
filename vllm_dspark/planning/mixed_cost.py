"""What steps with prefill rows cost, learned from such steps alone.

No cost table of decode steps says it: they run in other graphs or none, attention works on long
rows beside short ones, and the drafter writes the prompts' context first. While an engine serves,
every mixed step is timed and is a sample. With v rows of decoding requests and p rows of prompts:

    T(v, p) = a + c (v + p) + e v + r(v)

a, c and e by least squares over the last hundred or so samples, relative errors counting alike, e
drawn towards 0: where v hardly varies, a row to be verified is taken to cost what one of a prompt
does (it costs more, as it needs logits; a guess, replaced once it was acted on, or tried,
planner.py). r is what is left, by geometric bins of v, each mean drawn towards 0 as long as it has
few samples, linear between bins. Steps are priced at p0, the running mean of p, since how many
prompts join is not known beforehand; c p0 of the price is the prompts' own time, which is no cost
of a decision (budget.py). Prices never fall with v, and never below c p0 and a little.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.cost import interpolate

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
# Ascending sizes in tokens, twice, and their times in ms.
Axis = tuple[tuple[int, ...], IntArray, Float64Array]

MIN_SAMPLES = 16
_BIN = 1.15  # ratio of the sizes of neighbouring bins
_MIN_IN_BIN = 2
_MEMORY = 32  # samples that a bin, and p0, remember
_FIT_MEMORY = 128  # samples that the plane remembers
_FEW = 4  # samples of a bin that count as much as the plane
_CLIP = 1.5  # a sample counts as if it were within this factor of what was expected
_MOST_PROMPTS = 0.95  # of the time of the smallest step
_LOWEST = 0.05  # of the mean time of steps, for the smallest one without prompts
_ROWS = 256.0  # unit of rows in the fit
_RIDGE = 0.005  # pull of e towards 0, in samples whose v is _ROWS off
_SHORTEST, _LONGEST = 1e-4, 1e7  # ms; beyond, it is no time of a step
_REFRESH = 4  # samples between recomputations of the curve


@dataclass(slots=True)
class _Bin:
    """Running means of the samples of one bin."""

    rows: float = 0.0
    prefill_rows: float = 0.0
    ms: float = 0.0
    count: int = 0

    def add(self, rows: float, prefill_rows: float, ms: float) -> None:
        self.count += 1
        rate = 1.0 / min(self.count, _MEMORY)
        self.rows += rate * (rows - self.rows)
        self.prefill_rows += rate * (prefill_rows - self.prefill_rows)
        self.ms += rate * (ms - self.ms)


class _Plane:
    """a + c (v + p) + e v by weighted least squares with a fading memory."""

    def __init__(self) -> None:
        self._square = np.zeros((3, 3))
        self._cross = np.zeros(3)
        self.base, self.per_row, self.more_if_verified = 0.0, 0.0, 0.0

    def at(self, rows: float, prefill_rows: float) -> float:
        """Expected ms."""
        verified = self.more_if_verified * rows
        return self.base + self.per_row * (rows + prefill_rows) + verified

    def add(self, rows: float, prefill_rows: float, ms: float, usual_ms: float) -> None:
        """Take in a sample; usual_ms: of the steps so far, lest one far too short own the fit."""
        features = np.array([1.0, (rows + prefill_rows) / _ROWS, rows / _ROWS])
        fade, weight = 1.0 - 1.0 / _FIT_MEMORY, 1.0 / max(ms, usual_ms / 4.0) ** 2
        self._square = fade * self._square + weight * np.outer(features, features)
        self._cross = fade * self._cross + weight * features * ms

    def solve(self) -> None:
        """Coefficients of the samples so far, none below 0."""
        square = self._square.copy()
        ridge = _RIDGE * square[0, 0]
        square[2, 2] += ridge
        # A step of one size after the other says nothing about slopes.
        square[1, 1] += 1e-3 * ridge
        kept = [0, 1, 2]
        while True:
            found = np.linalg.lstsq(square[np.ix_(kept, kept)], self._cross[kept], rcond=None)[0]
            if (found >= 0.0).all():
                break
            kept.pop(int(np.argmin(found)))
        fitted = np.zeros(3)
        fitted[kept] = found
        self.base = float(fitted[0])
        self.per_row, self.more_if_verified = (float(x) for x in fitted[1:] / _ROWS)


class MixedCosts:
    """Prices of an engine's mixed steps; deterministic in the order of the samples."""

    def __init__(self) -> None:
        self.prefill_rows = 0.0  # p0 of the axis
        self.prompts_ms = 0.0  # c p0, less than any time of the axis
        self._mean_prefill = 0.0
        self._mean_ms = 0.0
        self._plane = _Plane()
        self._bins: dict[int, _Bin] = {}  # by rows
        self._drafts: dict[int, _Bin] = {}  # by requests
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
        if self._axis is not None:
            expected = max(self._plane.at(rows, prefill_rows), 1e-6)
            forward_ms = min(max(forward_ms, expected / _CLIP), expected * _CLIP)
        self._plane.add(rows, prefill_rows, forward_ms, self._mean_ms)
        self._bins.setdefault(_bin_of(rows), _Bin()).add(rows, prefill_rows, forward_ms)
        if draft_ms is not None and _is_time(draft_ms):
            found = self._drafts.setdefault(_bin_of(num_requests), _Bin())
            if found.count >= _MIN_IN_BIN:
                draft_ms = min(max(draft_ms, found.ms / _CLIP), found.ms * _CLIP)
            found.add(num_requests, 0, draft_ms)
        self._num_samples += 1
        rate = 1.0 / min(self._num_samples, _MEMORY)
        self._mean_prefill += rate * (prefill_rows - self._mean_prefill)
        self._mean_ms += rate * (forward_ms - self._mean_ms)
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
        return interpolate(self._axis[1], self._axis[2], num_tokens)

    def draft_ms(self, num_requests: int) -> float | None:
        """Time of the full draft pass of a mixed step; None: too few samples."""
        if self._draft_axis is None:
            return None
        return interpolate(self._draft_axis[1], self._draft_axis[2], num_requests)

    def served(self, rows: int) -> bool:
        """Whether steps of about so many rows of decoding requests were served."""
        index = _bin_of(max(rows, 1))
        near = [self._bins.get(i) for i in (index - 1, index, index + 1)]
        return any(found is not None and found.count >= _MIN_IN_BIN for found in near)

    def _refresh(self) -> None:
        self._plane.solve()
        bins = _settled(self._bins)
        if bins:
            self.prefill_rows = self._mean_prefill
            self._axis = self._step_axis(bins)
        drafts = _settled(self._drafts)
        if drafts:
            requests = np.array([b.rows for b in drafts])
            self._draft_axis = _axis_of(requests, np.array([b.ms for b in drafts]), 0.0)

    def _step_axis(self, bins: Sequence[_Bin]) -> Axis:
        """Times over tokens at p0."""
        plane, prompts = self._plane, self._mean_prefill
        rows = np.array([b.rows for b in bins])
        left = np.array(
            [(b.ms - plane.at(b.rows, b.prefill_rows)) * b.count / (b.count + _FEW) for b in bins]
        )
        nodes = np.array([1.0, *rows, 2.0 * rows[-1]])
        beyond = np.array([0.0, *left, left[-1]])
        times = np.array([plane.at(v, prompts) for v in nodes]) + beyond
        own = plane.per_row * prompts
        least = _LOWEST * self._mean_ms
        if own > 0.0:
            own = min(own, _MOST_PROMPTS * float(times[1:].min()))
        self.prompts_ms = max(own, 0.0)
        return _axis_of(nodes, np.maximum(times, self.prompts_ms + least), prompts)


def _settled(bins: Mapping[int, _Bin]) -> list[_Bin]:
    return sorted((b for b in bins.values() if b.count >= _MIN_IN_BIN), key=lambda b: b.rows)


def _axis_of(nodes: Float64Array, ms: Float64Array, more: float) -> Axis:
    """Times that never fall, at whole numbers of nodes + more."""
    rising = np.maximum.accumulate(ms)
    sizes = np.unique(np.rint(nodes + more).astype(np.int64))
    return tuple(sizes.tolist()), sizes, np.interp(sizes, nodes + more, rising)


def _bin_of(size: int) -> int:
    return int(math.log(size) / math.log(_BIN))


def _is_time(ms: float) -> bool:
    return _SHORTEST < ms < _LONGEST
