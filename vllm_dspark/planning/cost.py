r"""Measured step times, and what makes a table of them fit to price steps.

    predicted step time = T(G, kv tokens; mode, shape) + D(requests) + overhead

T is a grid per execution mode and step shape: G the token count after padding, kv
the KV tokens that attention reads. In padded modes (captured graphs) only the
measured sizes exist and a step runs at the next larger one; elsewhere T is
interpolated in G. On the kv axis it is always interpolated, and beyond the last
node continued with the last slope. D is the drafter's time by request count, of full
draft width; where narrower passes were measured too, D(requests, columns) follows from
them (draft_cost.py).
Shapes are priced apart because they run differently: RAGGED steps pay `allocation_ms`
on top, NATIVE ones run uniform graphs of width K + 1, SINGLE ones (skip-draft)
uniform graphs of width 1 and no drafter.

A cell holds the median of its samples, their spread (half the distance between the
20th and 80th percentile) and their count. Tables that cannot rank budgets are
refused with a reason: incomplete, too few samples, not positive, flat, or falling
with G by more than the spread explains.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import CostTableError

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

MIN_SAMPLES = 3
# A table whose largest size costs less than this over its smallest measures something
# else than the model, typically launch time of a host that cannot keep up.
_FLAT_RATIO = 1.02
# Kernel selection makes real steps cheaper at some larger sizes: of captured graphs by much
# (Qwen3-8B on an H200: 6 % from 8 to 16 tokens), elsewhere by little.
DIP_TOLERANCE = 0.05
_GRAPH_DIP_TOLERANCE = 0.15


class StepMode(Enum):
    """How the target's forward pass of a step runs."""

    FULL = "full"  # one captured graph
    PIECEWISE = "piecewise"  # graphs between attention calls
    EAGER = "eager"
    MIXED = "mixed"  # decode and prefill rows together

    # Members are singletons; Enum's own __hash__ is a Python call per look-up.
    __hash__ = object.__hash__

    @property
    def padded(self) -> bool:
        """Whether steps run at the next measured size instead of their own."""
        return self is StepMode.FULL or self is StepMode.PIECEWISE


class StepShape(Enum):
    """Row structure of a step."""

    RAGGED = "ragged"  # windows of different length
    NATIVE = "native"  # K + 1 rows per request
    SINGLE = "single"  # one row per request

    __hash__ = object.__hash__


GridKey = tuple[StepMode, StepShape]


@dataclass(frozen=True)
class StepTiming:
    """One executed step, as the worker measured it."""

    mode: StepMode
    shape: StepShape
    num_requests: int
    num_tokens: int  # after padding
    kv_tokens: int  # KV tokens read by attention
    forward_ms: float
    draft_ms: float | None = None  # None if the drafter did not run
    draft_width: int | None = None  # columns that the drafter drafted; None: all K
    prefill_rows: int = 0  # of the tokens, those of prompts


@dataclass(frozen=True, eq=False)
class CostGrid:
    """Cells over (kv tokens, size); arrays are [kv nodes, sizes]."""

    sizes: tuple[int, ...]
    kv_tokens: tuple[int, ...]
    median_ms: Float64Array
    spread_ms: Float64Array
    count: IntArray
    size_array: IntArray = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size_array", np.array(self.sizes, dtype=np.int64))

    def at(self, kv_tokens: float, cells: Float64Array | None = None) -> Float64Array:
        """Step times of all sizes at a kv load, [sizes]; never below the first node's."""
        table = self.median_ms if cells is None else cells
        nodes = self.kv_tokens
        if len(nodes) == 1 or kv_tokens <= nodes[0]:
            first: Float64Array = table[0]
            return first
        upper = len(nodes) - 1
        for index in range(1, len(nodes)):  # a handful of nodes: a scan beats searchsorted
            if kv_tokens <= nodes[index]:
                upper = index
                break
        low, high = nodes[upper - 1], nodes[upper]
        slope = (table[upper] - table[upper - 1]) / (high - low)
        if kv_tokens > high:
            slope = np.maximum(slope, 0.0)
        times: Float64Array = table[upper] + slope * (kv_tokens - high)
        return times


@dataclass(frozen=True, eq=False)
class CostTable:
    """Everything a step can cost; immutable, checked by `validate`."""

    grids: Mapping[GridKey, CostGrid]
    draft: CostGrid  # sizes are request counts, one kv node
    allocation_ms: float = 0.0  # device-side ranking and compaction of a RAGGED step
    overhead_ms: float = 0.0  # of every step: sampling, bookkeeping, gaps
    narrow: Mapping[int, CostGrid] = field(default_factory=dict)  # like draft, by columns < K

    def resolve(self, mode: StepMode, shape: StepShape) -> GridKey | None:
        """The grid that prices a step, or None.

        Outside full graphs a native or single step runs the very code of a ragged
        one, so the ragged grid stands in where nothing more specific was measured.
        """
        if (mode, shape) in self.grids:
            return mode, shape
        if mode is not StepMode.FULL and (mode, StepShape.RAGGED) in self.grids:
            return mode, StepShape.RAGGED
        return None

    def validate(self) -> None:
        """Raise CostTableError unless the table can rank budgets."""
        if not any(shape is StepShape.RAGGED for _, shape in self.grids):
            raise CostTableError("incomplete", "no grid for ragged steps")
        for mode, _ in self.grids:
            for shape in StepShape if mode is StepMode.FULL else ():
                if (mode, shape) not in self.grids:
                    raise CostTableError(
                        "incomplete", f"full graphs were measured, but no {shape.value} steps"
                    )
        for (mode, shape), grid in self.grids.items():
            # One row per request: the few rows of a small engine may well cost the same.
            grows = shape is not StepShape.SINGLE
            dip = _GRAPH_DIP_TOLERANCE if mode.padded else DIP_TOLERANCE
            _check_grid(f"{mode.value}/{shape.value}", grid, must_grow=grows, dip=dip)
        captured = any(mode.padded for mode, _ in self.grids)
        dip = _GRAPH_DIP_TOLERANCE if captured else DIP_TOLERANCE
        _check_grid("draft", self.draft, must_grow=False, dip=dip)
        for columns, grid in self.narrow.items():
            _check_grid(f"draft of {columns} columns", grid, must_grow=False, dip=dip)
            if columns < 1 or len(grid.kv_tokens) > 1:
                raise CostTableError("incomplete", f"draft of {columns} columns: not a draft grid")
        for name, value in (("allocation", self.allocation_ms), ("overhead", self.overhead_ms)):
            if not (np.isfinite(value) and value >= 0.0):
                raise CostTableError("not_positive", f"{name} time is {value!r} ms")


def _check_grid(name: str, grid: CostGrid, must_grow: bool, dip: float = DIP_TOLERANCE) -> None:
    shape = (len(grid.kv_tokens), len(grid.sizes))
    for array in (grid.median_ms, grid.spread_ms, grid.count):
        if array.shape != shape or 0 in shape:
            raise CostTableError(
                "incomplete", f"{name} has cells of shape {array.shape} for axes of {shape}"
            )
    for axis, label in ((grid.sizes, "sizes"), (grid.kv_tokens, "kv tokens")):
        if any(low >= high for low, high in pairwise(axis)) or axis[0] < 0:
            raise CostTableError("incomplete", f"{name} {label} do not ascend: {axis}")
    legal = np.isfinite(grid.median_ms) & (grid.median_ms > 0.0) & (grid.spread_ms >= 0.0)
    if not legal.all():
        kv, size = np.argwhere(~legal)[0]
        raise CostTableError(
            "not_positive",
            f"{name} at {grid.sizes[size]} tokens is {grid.median_ms[kv, size]!r} ms",
        )
    if (grid.count < MIN_SAMPLES).any():
        kv, size = np.argwhere(grid.count < MIN_SAMPLES)[0]
        raise CostTableError(
            "few_samples",
            f"{name} at {grid.sizes[size]} tokens has {grid.count[kv, size]} samples, "
            f"at least {MIN_SAMPLES} are needed",
        )
    _check_monotone(name, grid, dip)
    if must_grow:
        if len(grid.sizes) < 2:
            raise CostTableError("incomplete", f"{name} holds the single size {grid.sizes[0]}")
        growth = grid.median_ms[:, -1] / grid.median_ms[:, 0]
        if (growth < _FLAT_RATIO).any():
            raise CostTableError(
                "flat",
                f"{name} costs the same at {grid.sizes[0]} and {grid.sizes[-1]} tokens "
                f"(ratio {growth.min():.3f}); was the model run at all?",
            )


def _check_monotone(name: str, grid: CostGrid, dip: float) -> None:
    ms, spread = grid.median_ms, grid.spread_ms
    peak = np.maximum.accumulate(ms, axis=1)
    allowed = 2.0 * (spread + np.maximum.accumulate(spread, axis=1)) + dip * peak
    dips = np.argwhere(peak - ms > allowed)
    if dips.size:
        kv, size = dips[0]
        raise CostTableError(
            "non_monotone",
            f"{name} takes {ms[kv, size]:.4g} ms at {grid.sizes[size]} tokens but "
            f"{peak[kv, size]:.4g} ms at fewer; the machine was not quiet while measuring",
        )


def build_cost_table(
    samples: Iterable[StepTiming], allocation_ms: float = 0.0, overhead_ms: float = 0.0
) -> CostTable:
    """Cells from profiling samples; `kv_tokens` of a sample is its profiling node.

    Sizes measured at only some kv nodes of their grid would leave holes, so the
    table is refused as incomplete then. Of samples with a narrower draft pass only
    that pass counts: their sizes are no nodes of a grid.
    """
    cells: dict[GridKey, dict[tuple[int, int], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    draft: dict[tuple[int, int], list[float]] = defaultdict(list)
    narrow: dict[int, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        if sample.draft_width is not None:
            if sample.draft_ms is not None:
                narrow[sample.draft_width][0, sample.num_requests].append(sample.draft_ms)
            continue
        key = (sample.kv_tokens, sample.num_tokens)
        cells[sample.mode, sample.shape][key].append(sample.forward_ms)
        if sample.draft_ms is not None:
            draft[0, sample.num_requests].append(sample.draft_ms)
    if not draft:
        raise CostTableError("incomplete", "the drafter was never timed")
    grids = {
        (mode, shape): _grid(f"{mode.value}/{shape.value}", grid)
        for (mode, shape), grid in cells.items()
    }
    narrower = {n: _grid(f"draft of {n} columns", narrow[n]) for n in sorted(narrow)}
    table = CostTable(grids, _grid("draft", draft), allocation_ms, overhead_ms, narrower)
    table.validate()
    return table


def _grid(name: str, cells: Mapping[tuple[int, int], list[float]]) -> CostGrid:
    kv_nodes = tuple(sorted({kv for kv, _ in cells}))
    sizes = tuple(sorted({size for _, size in cells}))
    statistics = np.zeros((3, len(kv_nodes), len(sizes)))
    for i, kv in enumerate(kv_nodes):
        for j, size in enumerate(sizes):
            values = cells.get((kv, size))
            if not values:
                raise CostTableError(
                    "incomplete", f"{name} was not measured at {size} tokens and {kv} kv tokens"
                )
            low, median, high = np.percentile(values, (20, 50, 80))
            statistics[:, i, j] = median, (high - low) / 2.0, len(values)
    count = statistics[2].astype(np.int64)
    return CostGrid(sizes, kv_nodes, statistics[0], statistics[1], count)


def interpolate(sizes: npt.NDArray[np.int64], times: npt.NDArray[np.float64], size: int) -> float:
    """Linear between nodes, constant below the first, last slope above the last."""
    if size <= sizes[-1]:
        return float(np.interp(size, sizes, times))
    if len(sizes) == 1:
        return float(times[-1])
    slope = (times[-1] - times[-2]) / (sizes[-1] - sizes[-2])
    return float(times[-1] + max(slope, 0.0) * (size - sizes[-1]))
