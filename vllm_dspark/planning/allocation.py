"""Which drafts are verified: the global ranking, and the ragged layout it leads to.

All drafts of a step are ranked by (survival descending, position, request index) and
the first `budget` of them are admitted. Survival never rises along a request, and a
tie goes to the smaller position, so what a request gets is always a prefix, and
whether draft k of a request is admitted never depends on what its own drafts at or
after k turned out to be (DSpark paper, appendix A): those only ever rank behind it.
Drafts below a request's floor come first; drafts at or above its capacity never do.
Reserved requests (bootstrap, first context chunk, ...) have floor = capacity.

These functions are the host's path and the numpy oracle of the device kernels.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import PlanError

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]

_FORCED = np.float32(2.0)  # above every survival
_BARRED = np.float32(-1.0)  # below every survival


@dataclass(slots=True)
class Ranking:
    """All drafts of one step, sorted once; answers every budget. Built by `rank`."""

    keys: FloatArray  # [K, n] survival, overruled by floor and capacity
    ascending: FloatArray  # [K * n] sorted keys
    least: int  # sum of floors
    most: int  # sum of capacities
    forced_gain: float  # survival of the drafts below the floors
    _total: float | None = None  # gain of all drafts, once known

    def gains(self, budgets: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Expected accepted drafts of ascending budgets between `least` and `most`."""
        bounds = np.zeros(len(budgets) + 1, dtype=np.int64)
        np.subtract(budgets, self.least, out=bounds[1:])
        last = int(bounds[-1])
        if last == 0:
            return np.full(len(budgets), self.forced_gain)
        descending = self.ascending[::-1][self.least : self.least + last]
        segments = np.add.reduceat(descending, bounds[:-1])
        if bounds[1] == 0:  # reduceat returns an element, not zero, for an empty segment
            segments[0] = 0.0
        segments[0] += self.forced_gain
        gained: npt.NDArray[np.float64] = np.add.accumulate(segments.astype(np.float64))
        if last == self.most - self.least:
            self._total = float(gained[-1])
        return gained

    def total_gain(self) -> float:
        """Expected accepted drafts if all are admitted."""
        if self._total is not None:
            return self._total
        free = self.ascending
        if self.least or self.most < free.size:
            free = free[free.size - self.most :][: self.most - self.least]
        return self.forced_gain + float(np.add.reduce(free))

    def admit(self, budget: int) -> IntArray:
        """Drafts admitted per request, [n], summing to `budget` exactly.

        Equal to sorting by (key descending, position, request) and counting the first
        `budget`: everything from the budget-th key up is in, less the last of those
        equal to it in the C order of [K, n], which is (position, request).
        """
        if not self.least <= budget <= self.most:
            raise PlanError(
                f"budget {budget} cannot be met by floors summing to {self.least} and "
                f"capacities summing to {self.most}"
            )
        num_requests = self.keys.shape[1]
        if budget == 0:
            return np.zeros(num_requests, dtype=np.int32)
        threshold = self.ascending[self.ascending.size - budget]
        admitted: IntArray = np.add.reduce(self.keys >= threshold, axis=0, dtype=np.int32)
        excess = int(np.add.reduce(admitted)) - budget
        if excess:  # ties at the threshold: the last of them stay out
            tied = (self.keys == threshold).ravel().nonzero()[0][-excess:]
            np.subtract.at(admitted, tied % num_requests, np.int32(1))
        return admitted


def rank(survival: FloatArray, capacity: IntArray, floor: IntArray | None = None) -> Ranking:
    """Rank drafts [K, n]; of request i at least floor[i] and at most capacity[i] are admitted."""
    most = int(np.add.reduce(capacity))
    least = 0 if floor is None else int(np.add.reduce(floor))
    keys, forced_gain = survival, 0.0
    if most < survival.size:
        keys = np.where(_positions(survival) < capacity, survival, _BARRED)
    if floor is not None and least:
        below = _positions(survival) < floor
        forced_gain = float(np.add.reduce(survival[below]))
        keys = np.where(below, _FORCED, keys)
    ascending = keys.flatten()
    ascending.sort()
    return Ranking(keys, ascending, least, most, forced_gain)


def _positions(survival: FloatArray) -> IntArray:
    return np.arange(survival.shape[0], dtype=np.int32)[:, None]


def allocate(survival: FloatArray, capacity: IntArray, floor: IntArray, budget: int) -> IntArray:
    """Admitted drafts per request, [n]: the oracle of the device's allocation kernel."""
    if (floor > capacity).any() or (capacity > survival.shape[0]).any():
        raise PlanError("a floor exceeds its capacity, or a capacity the draft width")
    return rank(survival, capacity, floor).admit(budget)


@dataclass(frozen=True)
class RaggedLayout:
    """Row layout of a trimmed step; offsets are int32, padded entries repeat the total."""

    windows: IntArray  # [n] 1 + admitted drafts
    query_start_loc: IntArray  # [padded requests + 1]
    cu_num_logits: IntArray  # [n + 1]
    source_rows: IntArray  # [rows] row of the untrimmed batch that each kept row was
    logits_rows: IntArray  # [logits] kept rows whose logits are needed


def ragged_layout(
    admitted: IntArray,  # [n]
    num_drafts: IntArray,  # [n] drafts in the untrimmed batch
    num_rows: IntArray,  # [n] rows in the untrimmed batch, drafts included and last
    padded_requests: int = 0,
) -> RaggedLayout:
    """Offsets and compaction maps after trimming each request to `admitted` drafts."""
    if (admitted > num_drafts).any() or (num_rows <= num_drafts).any():
        raise PlanError("a request would keep more drafts than it has, or has no other row")
    kept = (num_rows - num_drafts + admitted).astype(np.int32)
    windows = (admitted + 1).astype(np.int32)
    starts, logits = _offsets(kept), _offsets(windows)
    before = _offsets(num_rows)
    source = np.repeat(before[:-1] - starts[:-1], kept) + np.arange(starts[-1])
    first_logit = starts[1:] - windows
    rows = np.repeat(first_logit - logits[:-1], windows) + np.arange(logits[-1])
    padding = max(0, padded_requests - admitted.size)
    return RaggedLayout(
        windows=windows,
        query_start_loc=np.append(starts, np.full(padding, starts[-1], dtype=np.int32)),
        cu_num_logits=logits,
        source_rows=source.astype(np.int32),
        logits_rows=rows.astype(np.int32),
    )


def _offsets(lengths: IntArray) -> IntArray:
    offsets = np.zeros(lengths.size + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
