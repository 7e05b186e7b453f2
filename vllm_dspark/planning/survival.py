r"""From confidences to survival probabilities.

The drafter's head says c_k = P(draft k accepted | all before it accepted); a draft
is verified usefully if all before it survive, so what counts is

    a_k = c_1 c_2 ... c_k        (DSpark paper, "survival probability")

which never rises along a request. Only rows that may be used enter. A row is used
if it was written for this owner, carries a stamp, is at most `max_age` draft passes
older than the drafts about to be verified, and - for sampled requests - is at least
one pass older. The last clause is the barrier of the paper's appendix A: admission
of draft k may depend on nothing drawn at or after k, and a budget computed from the
row of the pass being verified has seen its own tokens through c_{k+1}(x_k). At T=0
acceptance is a function of the target alone, so there the current row is allowed.

A refused row, and a single entry that is not a probability (NaN, inf, < 0, > 1), is
neutral: replaced by the acceptance prior of its request and position. Its value can
then move nothing, so in particular NaN cannot sort to the front.
"""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.calibration import Calibration

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]

# Stamps run 1 .. 2**31 - 1 and wrap to 1: they fit an int32, and 0 means never.
_STAMP_PERIOD = 2**31 - 1


def stamp_next(stamp: int) -> int:
    """The stamp after `stamp` (0, never, is followed by 1)."""
    return stamp % _STAMP_PERIOD + 1


def stamp_age(newer: int, older: int) -> int:
    """Draft passes from `older` to `newer`; huge if `older` is in fact the later one."""
    return (newer - older) % _STAMP_PERIOD


@dataclass(frozen=True, slots=True)
class RowCounts:
    """Why rows and entries were not used, for the metrics."""

    stale: int = 0  # rows of another owner, never written, or too old
    current: int = 0  # rows of the very pass to be verified, refused for sampled requests
    invalid: int = 0  # entries of usable rows that are no probabilities


@dataclass(frozen=True, slots=True)
class RowUse:
    """Which rows may inform a step, [n] each."""

    usable: BoolArray
    current: BoolArray  # usable and about the very drafts to be verified (greedy only)
    counts: RowCounts


def usable_rows(
    owner: npt.NDArray[np.int64],
    row_owner: npt.NDArray[np.int64],
    row_stamp: IntArray,
    draft_stamp: IntArray,
    sampled: BoolArray,
    max_age: int,
) -> RowUse:
    """Apply the rules above; `draft_stamp` is 0 where there is nothing to verify."""
    age = np.subtract(draft_stamp, row_stamp, dtype=np.int64)
    age %= _STAMP_PERIOD
    known = (row_owner == owner) & (row_stamp > 0) & (draft_stamp > 0) & (age <= max_age)
    same_pass = known & (age == 0)
    refused = same_pass & sampled
    num_refused = int(np.count_nonzero(refused))
    usable, current = known, same_pass
    if num_refused:
        usable, current = known & ~refused, same_pass & ~refused
    num_stale = owner.size - num_refused - int(np.count_nonzero(usable))
    return RowUse(usable, current, RowCounts(stale=num_stale, current=num_refused))


def acceptance(
    confidence: FloatArray,  # [K, n] as the worker sent it
    usable: BoolArray,  # [n]
    prior: FloatArray | Callable[[], FloatArray],  # [K, n] in [0, 1], or how to get it if needed
    calibration: Calibration,
    sampled: BoolArray,  # [n]
) -> tuple[FloatArray, int]:
    """Calibrated P(accept | all before accepted), [K, n], and how many entries were invalid."""
    # Written so that NaN fails both comparisons.
    legal = (confidence >= 0.0) & (confidence <= 1.0)
    all_legal = np.count_nonzero(legal) == legal.size
    all_usable = np.count_nonzero(usable) == usable.size
    if all_legal and all_usable:
        return calibration.apply(confidence, sampled), 0
    neutral = prior() if callable(prior) else prior
    if all_legal:
        calibrated = calibration.apply(confidence, sampled)
        np.copyto(calibrated, neutral, where=~usable)
        return calibrated, 0
    num_invalid = int(np.count_nonzero(~legal & usable))
    calibrated = calibration.apply(np.where(legal, confidence, neutral), sampled)
    np.copyto(calibrated, neutral, where=~(legal & usable))
    return calibrated, num_invalid


def survival(conditional: FloatArray) -> FloatArray:
    """Running product along positions of [K, n] conditional acceptances, as a new array."""
    out = conditional.copy()
    for before, row in pairwise(out):  # K row products beat one strided accumulate
        np.multiply(row, before, row)
    return out
