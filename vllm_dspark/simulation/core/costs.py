"""Prices: planning.online_cost.CostModel without the online correction, and the world's truth."""

import numpy as np

from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.state import Costs, Grid


@inner
def node_of(grid: Grid, kv_tokens: int):
    """Upper node, weight of a segment and whether the load lies beyond the last node."""
    nodes = grid.kv
    upper = nodes.size - 1
    for index in range(1, nodes.size):
        if kv_tokens <= nodes[index]:
            upper = index
            break
    return upper


@inner
def cell(grid: Grid, kv_tokens: int, j: int) -> float:
    """Time of size index j at a (rounded) kv load: CostGrid.at."""
    nodes, cells = grid.kv, grid.cells
    if nodes.size == 1 or kv_tokens <= nodes[0]:
        return cells[0, j]
    upper = node_of(grid, kv_tokens)
    low, high = nodes[upper - 1], nodes[upper]
    slope = (cells[upper, j] - cells[upper - 1, j]) / (high - low)
    if kv_tokens > high:
        slope = max(slope, 0.0)
    return cells[upper, j] + slope * (kv_tokens - high)


@inner
def rounded(grid: Grid, kv_tokens: int) -> int:
    """The load that prices are kept for."""
    return kv_tokens // grid.quantum * grid.quantum


@inner
def between(grid: Grid, kv_tokens: int, num_tokens: int, falling: bool) -> float:
    """Interpolated time of a step; `falling`: allow a falling last slope beyond the grid."""
    sizes, last = grid.sizes, grid.sizes.size - 1
    if num_tokens <= sizes[0]:
        return cell(grid, kv_tokens, 0)
    if num_tokens >= sizes[last]:
        end = cell(grid, kv_tokens, last)
        if last == 0 or num_tokens == sizes[last]:
            return end
        slope = (end - cell(grid, kv_tokens, last - 1)) / (sizes[last] - sizes[last - 1])
        if not falling:
            slope = max(slope, 0.0)
        return end + slope * (num_tokens - sizes[last])
    j = np.searchsorted(sizes, num_tokens, side="right") - 1
    low, high = cell(grid, kv_tokens, j), cell(grid, kv_tokens, j + 1)
    return (high - low) / (sizes[j + 1] - sizes[j]) * (num_tokens - sizes[j]) + low


@inner
def step_ms(grid: Grid, padded: int, kv_tokens: int, num_tokens: int):
    """(padded size, ms); size -1 if no cell covers the step: CostModel.step_ms."""
    if not grid.exists:
        return -1, 0.0
    kv = rounded(grid, kv_tokens)
    if not padded:
        return num_tokens, between(grid, kv, num_tokens, False)
    j = np.searchsorted(grid.sizes, num_tokens)
    if j == grid.sizes.size:
        return -1, 0.0
    return grid.sizes[j], cell(grid, kv, j)


@inner
def uniform_ms(costs: Costs, is_native: bool, kv_tokens: int, num_tokens: int):
    """Like step_ms, for native or single steps; a step too large for full graphs falls back."""
    grid = costs.native if is_native else costs.single
    size, ms = step_ms(grid, costs.padded, kv_tokens, num_tokens)
    if size < 0:
        fallback = costs.native_fallback if is_native else costs.single_fallback
        size, ms = step_ms(fallback, 0, kv_tokens, num_tokens)
    return size, ms


@inner
def draft_ms(costs: Costs, num_requests: int) -> float:
    """Time of one draft pass: CostModel.draft_ms."""
    sizes, times = costs.draft_sizes, costs.draft_ms
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
def true_ms(costs: Costs, grid: Grid, exact_size: bool, kv_tokens: int, num_tokens: int) -> float:
    """What a step takes in the simulated world; beyond the largest size the last slope goes on.

    exact_size: the step runs at its own size even where graphs are padded (an engine set up for
    another width would have captured it).
    """
    if costs.padded and not exact_size:
        size, ms = step_ms(grid, 1, kv_tokens, num_tokens)
        if size >= 0:
            return ms
    return between(grid, rounded(grid, kv_tokens), num_tokens, False)
