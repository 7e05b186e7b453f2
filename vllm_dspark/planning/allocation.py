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
IntArray = npt.NDArray[np.int32]

_FORCED = np.float32(2.0)  # above every survival
_BARRED = np.float32(-1.0)  # below every survival


def ranking_keys(
    survival: FloatArray,  # [K, n]
    capacity: IntArray,  # [n] drafts of each request that may be admitted
    floor: IntArray,  # [n] drafts that must be
) -> FloatArray:
    """Sort keys [K, n]: survival, overruled by floors and capacities."""
    positions = np.arange(survival.shape[0], dtype=np.int32)[:, None]
    keys = np.where(positions < capacity, survival, _BARRED)
    if floor.any():
        np.copyto(keys, _FORCED, where=positions < floor)
    return keys


def admit(keys: FloatArray, budget: int) -> IntArray:
    """Drafts admitted per request, [n], from keys [K, n] that never rise along K.

    Equal to sorting by (key descending, position, request) and counting the first
    `budget`: everything above the budget-th key is in, and C order of [K, n] is the
    tie order among drafts equal to it.
    """
    num_requests = keys.shape[1]
    if budget <= 0:
        return np.zeros(num_requests, dtype=np.int32)
    flat = keys.ravel()
    cut = flat.size - budget
    threshold = np.partition(flat, cut)[cut]
    above = keys > threshold
    admitted: IntArray = np.add.reduce(above, axis=0, dtype=np.int32)
    missing = budget - int(np.add.reduce(admitted))
    tied = np.flatnonzero(flat == threshold)[:missing] % num_requests
    np.add.at(admitted, tied, np.int32(1))
    return admitted


def allocate(survival: FloatArray, capacity: IntArray, floor: IntArray, budget: int) -> IntArray:
    """Admitted drafts per request, [n], summing to `budget` exactly."""
    least, most = int(floor.sum()), int(capacity.sum())
    if not least <= budget <= most or (floor > capacity).any():
        raise PlanError(
            f"budget {budget} cannot be met by floors summing to {least} and "
            f"capacities summing to {most}"
        )
    if budget == most:
        return capacity.astype(np.int32, copy=True)
    return admit(ranking_keys(survival, capacity, floor), budget)


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
