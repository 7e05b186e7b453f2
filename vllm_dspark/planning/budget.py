r"""How many drafts to verify in all: the argmax of predicted goodput.

    goodput(B) = tokens(B) / ms(B)
    tokens(B)  = sampling requests + sum of the B largest survivals
    ms(B)      = T(G(base + B), kv) + D(requests) + overhead (+ allocation)

with base the rows that are not drafts. Inside a padded size G further drafts are
free, so in padded modes only budgets that fill a size are candidates; elsewhere T is
piecewise linear and up to _NUM_CANDIDATES evenly spaced budgets are tried. The best
of these competes with the NATIVE step (all drafts, uniform graphs, no allocation)
and the SINGLE one (no draft verified, none made), each at its own price.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.cost import StepMode, StepShape
from vllm_dspark.planning.online_cost import CostModel

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

_NUM_CANDIDATES = 64
# Where a full graph is too small for a step, it runs in one of these.
_FALLBACK_MODES = (StepMode.PIECEWISE, StepMode.EAGER)


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run the step and what it is predicted to give."""

    budget: int
    padded_tokens: int
    ms: float
    tokens: float

    @property
    def goodput(self) -> float:
        """Tokens per ms."""
        return self.tokens / self.ms


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows that a step has besides trimmable drafts."""

    base: int  # rows that are not drafts, prefill chunks included
    num_requests: int  # that the drafter would serve
    num_sampling: int  # requests that emit a token whatever is admitted
    kv_tokens: int
    max_tokens: int  # largest step allowed


def gains(
    survival: FloatArray,  # [K, n]
    capacity: IntArray,  # [n]
    floor: IntArray,  # [n]
    budgets: npt.NDArray[np.int64],  # ascending, from sum(floor) to sum(capacity)
) -> npt.NDArray[np.float64]:
    """Expected accepted drafts for each budget."""
    positions = np.arange(survival.shape[0], dtype=np.int32)[:, None]
    open_slots = np.where(positions < capacity, survival, np.float32(0.0))
    forced, num_forced = 0.0, int(floor.sum())
    if num_forced:
        below = positions < floor
        forced = float(open_slots[below].sum())
        open_slots[below] = 0.0
    ranked = np.sort(open_slots, axis=None)[::-1]
    ends = budgets - num_forced
    # Sums between consecutive budgets; reduceat would return an element, not zero,
    # for an empty first segment.
    starts = np.concatenate(([0], ends[:-1]))
    last = int(ends[-1])
    if last == 0:
        return np.full(len(budgets), forced)
    segments = np.add.reduceat(ranked[:last], starts)
    if ends[0] == 0:
        segments[0] = 0.0
    return forced + np.cumsum(segments, dtype=np.float64)


def best_ragged(
    cost: CostModel,
    mode: StepMode,
    rows: StepRows,
    survival: FloatArray,
    capacity: IntArray,
    floor: IntArray,
    fixed_ms: float,
) -> Option | None:
    """The ragged step of highest goodput, or None if no candidate can be priced."""
    axis = cost.axis(mode, StepShape.RAGGED, rows.kv_tokens)
    if axis is None:
        return None
    sizes, times = axis
    least, most = int(floor.sum()), int(capacity.sum())
    most = min(most, rows.max_tokens - rows.base)
    if most < least:
        return None
    if mode.padded:
        first = int(sizes.searchsorted(rows.base + least))
        last = int(sizes.searchsorted(rows.base + most))
        padded, ms = sizes[first : last + 1], times[first : last + 1]
        if padded.size == 0:
            return None
        budgets = np.minimum(padded - rows.base, most)
    else:
        step = max(1, (most - least) // _NUM_CANDIDATES)
        budgets = np.append(np.arange(least, most, step), most)
        padded = budgets + rows.base
        ms = np.interp(padded, sizes, times)
        if padded[-1] > sizes[-1]:
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            ms = ms + slope * np.maximum(padded - sizes[-1], 0)
    tokens = rows.num_sampling + gains(survival, capacity, floor, budgets)
    total_ms = ms + fixed_ms
    best = int(np.argmax(tokens / total_ms))  # the first, so the smallest, of equals
    return Option(int(budgets[best]), int(padded[best]), float(total_ms[best]), float(tokens[best]))


def uniform(
    cost: CostModel,
    mode: StepMode,
    shape: StepShape,
    rows: StepRows,
    budget: int,
    gain: float,
    fixed_ms: float,
) -> Option | None:
    """The NATIVE or SINGLE step, or None if it cannot be priced."""
    modes = (mode, *_FALLBACK_MODES) if mode is StepMode.FULL else (mode,)
    for candidate in modes:
        priced = cost.step_ms(candidate, shape, rows.kv_tokens, rows.base + budget)
        if priced is not None:
            padded, ms = priced
            return Option(budget, padded, ms + fixed_ms, rows.num_sampling + gain)
    return None
