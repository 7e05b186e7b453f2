"""Prices: planning.online_cost.CostModel without the online correction, and the world's truth.

Without it no width is tried either (planning/explore.py).

`g` is the index of a grid (state.py).
"""

import numpy as np

from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.state import (
    NUM_NODES,
    NUM_SIZES,
    QUANTUM,
    SINGLE,
    SINGLE_FALLBACK,
    UNIFORM,
    UNIFORM_FALLBACK,
    Costs,
)


@inner
def cell(c: Costs, g: int, kv_tokens: int, j: int) -> float:
    """Time of size index j at a (rounded) kv load: CostGrid.at."""
    kv, cells, nodes = c.kv, c.cells, c.shape[g, NUM_NODES]
    if nodes == 1 or kv_tokens <= kv[g, 0]:
        return cells[g, 0, j]
    upper = 1
    while upper < nodes - 1 and kv_tokens > kv[g, upper]:
        upper += 1
    low, high = kv[g, upper - 1], kv[g, upper]
    slope = (cells[g, upper, j] - cells[g, upper - 1, j]) / (high - low)
    if kv_tokens > high:
        slope = max(slope, 0.0)
    return cells[g, upper, j] + slope * (kv_tokens - high)


@inner
def rounded(c: Costs, g: int, kv_tokens: int) -> int:
    """The load that prices are kept for."""
    quantum = c.shape[g, QUANTUM]
    return kv_tokens // quantum * quantum


@inner
def place(c: Costs, g: int, num_tokens: int) -> int:
    """Index of the smallest size that holds so many tokens; the number of sizes if none does."""
    sizes, low, high = c.sizes, 0, c.shape[g, NUM_SIZES]
    while low < high:
        middle = (low + high) // 2
        if sizes[g, middle] < num_tokens:
            low = middle + 1
        else:
            high = middle
    return low


@inner
def between(c: Costs, g: int, kv_tokens: int, num_tokens: int, falling: bool) -> float:
    """Interpolated time of a step; `falling`: allow a falling last slope beyond the grid."""
    sizes, last = c.sizes, c.shape[g, NUM_SIZES] - 1
    if num_tokens <= sizes[g, 0]:
        return cell(c, g, kv_tokens, 0)
    if num_tokens >= sizes[g, last]:
        end = cell(c, g, kv_tokens, last)
        if last == 0 or num_tokens == sizes[g, last]:
            return end
        slope = (end - cell(c, g, kv_tokens, last - 1)) / (sizes[g, last] - sizes[g, last - 1])
        if not falling:
            slope = max(slope, 0.0)
        return end + slope * (num_tokens - sizes[g, last])
    j = place(c, g, num_tokens)
    if sizes[g, j] != num_tokens:
        j -= 1
    low, high = cell(c, g, kv_tokens, j), cell(c, g, kv_tokens, j + 1)
    return (high - low) / (sizes[g, j + 1] - sizes[g, j]) * (num_tokens - sizes[g, j]) + low


@inner
def step_ms(c: Costs, g: int, padded: int, kv_tokens: int, num_tokens: int):
    """(padded size, ms); size -1 if no cell covers the step: CostModel.step_ms."""
    count = c.shape[g, NUM_SIZES]
    if count == 0:
        return -1, 0.0
    kv = rounded(c, g, kv_tokens)
    if not padded:
        return num_tokens, between(c, g, kv, num_tokens, False)
    j = place(c, g, num_tokens)
    if j == count:
        return -1, 0.0
    return c.sizes[g, j], cell(c, g, kv, j)


@inner
def uniform_ms(c: Costs, is_native: bool, kv_tokens: int, num_tokens: int):
    """Like step_ms, for native or single steps; a step too large for full graphs falls back."""
    g = UNIFORM if is_native else SINGLE
    size, ms = step_ms(c, g, c.padded, kv_tokens, num_tokens)
    if size < 0:
        g = UNIFORM_FALLBACK if is_native else SINGLE_FALLBACK
        size, ms = step_ms(c, g, 0, kv_tokens, num_tokens)
    return size, ms


@inner
def draft_ms(c: Costs, num_requests: int) -> float:
    """Time of one draft pass: CostModel.draft_ms."""
    sizes, times = c.draft[0], c.draft[1]
    last = sizes.size - 1
    if num_requests > sizes[last]:
        if last == 0:
            return times[0]
        slope = (times[last] - times[last - 1]) / (sizes[last] - sizes[last - 1])
        return times[last] + max(slope, 0.0) * (num_requests - sizes[last])
    if num_requests <= sizes[0]:
        return times[0]
    j = np.searchsorted(sizes, num_requests) - 1
    slope = (times[j + 1] - times[j]) / (sizes[j + 1] - sizes[j])
    return slope * (num_requests - sizes[j]) + times[j]


@inner
def true_ms(c: Costs, g: int, exact_size: bool, kv_tokens: int, num_tokens: int) -> float:
    """What a step takes in the simulated world; beyond the largest size the last slope goes on.

    exact_size: the step runs at its own size even where graphs are padded (an engine set up for
    another width would have captured it).
    """
    if c.padded and not exact_size:
        size, ms = step_ms(c, g, 1, kv_tokens, num_tokens)
        if size >= 0:
            return ms
    return between(c, g, rounded(c, g, kv_tokens), num_tokens, False)
