r"""How many drafts to verify in all: the argmax of predicted goodput.

    goodput(B) = tokens(B) / (ms(B) - prompts)
    tokens(B)  = sampling requests + sum of the B largest survivals
    ms(B)      = T(G(base + B), kv) + D(requests) + overhead (+ allocation)

with base the rows that are not drafts. prompts is the time of the step's prefill rows: these have
to be computed whatever is decided, now or in another step, as many for each request that ends, and
so for each token. With r ms of them per token, throughput is 1 / (r + 1 / goodput): largest where
goodput is. Taken as a fixed cost of the step, it would make any draft look worth its row.

Inside a padded size G further drafts are free, so in padded modes only budgets that fill a size are
candidates; elsewhere T is piecewise linear and up to _NUM_CANDIDATES evenly spaced budgets are
tried. The best of these competes with the NATIVE step (all drafts, uniform graphs, no allocation)
and the SINGLE one (no draft verified, none made), each at its own price.
"""

from bisect import bisect_left
from dataclasses import dataclass

import numpy as np

from vllm_dspark.planning.allocation import Ranking
from vllm_dspark.planning.cost import StepMode, StepShape
from vllm_dspark.planning.online_cost import CostModel

_NUM_CANDIDATES = 64
# Where a full graph is too small for a step, it runs in one of these.
_FALLBACK_MODES = (StepMode.PIECEWISE, StepMode.EAGER)


@dataclass(slots=True)
class Option:
    """One way to run the step and what it is predicted to give."""

    budget: int
    padded_tokens: int
    ms: float
    tokens: float
    prompts_ms: float = 0.0  # part of ms

    @property
    def goodput(self) -> float:
        """Tokens per ms that is not spent on prompts."""
        return self.tokens / (self.ms - self.prompts_ms)


@dataclass(slots=True)
class StepRows:
    """The rows that a step has besides trimmable drafts."""

    base: int  # rows that are not drafts, prefill chunks included
    num_sampling: int  # requests that emit a token whatever is admitted
    kv_tokens: int
    prompts_ms: float = 0.0  # time of prefill rows


def best_ragged(
    cost: CostModel, mode: StepMode, rows: StepRows, ranking: Ranking, fixed_ms: float
) -> Option | None:
    """The ragged step of highest goodput, or None if no candidate can be priced."""
    axis = cost.axis(mode, StepShape.RAGGED, rows.kv_tokens)
    if axis is None:
        return None
    sizes, size_array, times = axis
    least, most = ranking.least, ranking.most
    if mode.padded:
        first = bisect_left(sizes, rows.base + least)
        last = bisect_left(sizes, rows.base + most)
        padded, ms = size_array[first : last + 1], times[first : last + 1]
        if padded.size == 0:
            return None
        budgets = padded - rows.base
        budgets[-1] = min(budgets[-1], most)
    else:
        step = max(1, (most - least) // _NUM_CANDIDATES)
        budgets = np.append(np.arange(least, most, step), most)
        padded = budgets + rows.base
        ms = np.interp(padded, size_array, times)
        if padded[-1] > sizes[-1]:
            slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
            ms = ms + slope * np.maximum(padded - sizes[-1], 0)
    tokens = ranking.gains(budgets)
    tokens += rows.num_sampling
    total_ms = ms + fixed_ms
    goodput = tokens / (total_ms - rows.prompts_ms)
    best = int(goodput.argmax())  # the first, so the smallest, of equals
    return Option(
        int(budgets[best]),
        int(padded[best]),
        float(total_ms[best]),
        float(tokens[best]),
        rows.prompts_ms,
    )


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
    priced = cost.step_ms(mode, shape, rows.kv_tokens, rows.base + budget)
    if priced is None and mode is StepMode.FULL:
        for other in _FALLBACK_MODES:
            priced = cost.step_ms(other, shape, rows.kv_tokens, rows.base + budget)
            if priced is not None:
                break
    if priced is None:
        return None
    padded, ms = priced
    return Option(budget, padded, ms + fixed_ms, rows.num_sampling + gain, rows.prompts_ms)
