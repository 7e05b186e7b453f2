"""Cost tables of machines that were not measured, by scaling one that was.

A step's time at a kv load is split where the smallest size stands: T(G) = T(G0) + rest. The first
part mostly reads weights and waits for launches, and scales with memory bandwidth; the rest is what
further tokens cost, and scales with compute. Both are stated with the result: an estimate, to be
replaced by a profile of the machine itself.
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import SimulationError
from vllm_dspark.planning.cost import CostGrid, CostTable, StepMode, StepShape
from vllm_dspark.planning.draft_cost import DraftShares

Cells = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Machine:
    """How another machine compares; 1.0 everywhere is the measured one."""

    bandwidth: float = 1.0  # its memory bandwidth over the measured machine's
    compute: float = 1.0  # its arithmetic throughput over the measured machine's
    tensor_parallel: int = 1  # its TP size over the measured one's
    tp_efficiency: float = 0.9  # share of an ideal speed-up that each doubling keeps

    def __post_init__(self) -> None:
        legal = min(self.bandwidth, self.compute, self.tensor_parallel) > 0
        if not legal or not 0.0 < self.tp_efficiency <= 1.0:
            raise SimulationError(
                f"bandwidth {self.bandwidth}, compute {self.compute}, tensor_parallel "
                f"{self.tensor_parallel}, tp_efficiency {self.tp_efficiency}: ratios must be above "
                "0 and the efficiency at most 1"
            )

    @property
    def label(self) -> str:
        """What differs from the measured machine; empty if nothing does."""
        parts = []
        if self.bandwidth != 1.0:
            parts.append(f"bandwidth x{self.bandwidth:g}")
        if self.compute != 1.0:
            parts.append(f"compute x{self.compute:g}")
        if self.tensor_parallel != 1:
            parts.append(f"TP x{self.tensor_parallel} at {self.tp_efficiency:g}")
        return ", ".join(parts)

    @property
    def speed_up(self) -> float:
        """Of tensor parallelism alone."""
        return float(self.tensor_parallel * self.tp_efficiency ** np.log2(self.tensor_parallel))


def scaled(table: CostTable, machine: Machine) -> CostTable:
    """The table as `machine` would show it."""
    if not machine.label:
        return table
    fixed = 1.0 / (machine.bandwidth * machine.speed_up)
    rest = 1.0 / (machine.compute * machine.speed_up)

    def scale(grid: CostGrid) -> CostGrid:
        least = grid.median_ms[:, :1]
        # the kv part of the first column is reading too, so bandwidth scales all of it
        median = least * fixed + (grid.median_ms - least) * rest
        return replace(grid, median_ms=median, spread_ms=grid.spread_ms * fixed)

    grids = {key: scale(grid) for key, grid in table.grids.items()}
    narrow = {columns: scale(grid) for columns, grid in table.narrow.items()}
    return replace(table, grids=grids, draft=scale(table.draft), narrow=narrow)


def for_width(table: CostTable, measured: int, width: int) -> CostTable:
    """The table of an engine set up for another K: uniform graphs of width + 1 rows a request.

    Full-width steps are interpolated between the measured ones. The drafter's time is that of as
    many columns where the table has narrower passes (a CPU's), and stays where it has none: a block
    is one pass through the layers, whose time depends little on K on a GPU.
    """
    if width == measured:
        return table

    def moved(grid: CostGrid) -> CostGrid:
        requests = sorted({max(size // (measured + 1), 1) for size in grid.sizes})
        sizes = tuple(n * (width + 1) for n in requests)

        def at(cells: Cells) -> Cells:
            return np.stack([np.interp(sizes, grid.sizes, row) for row in cells])

        counts = np.full((len(grid.kv_tokens), len(sizes)), int(grid.count.min()))
        return CostGrid(sizes, grid.kv_tokens, at(grid.median_ms), at(grid.spread_ms), counts)

    grids = {
        (mode, shape): moved(grid) if shape is StepShape.NATIVE and mode.padded else grid
        for (mode, shape), grid in table.grids.items()
    }
    shares = DraftShares(table.draft, table.narrow, measured)
    share = np.array([shares.of(requests, width) for requests in table.draft.sizes])
    cells = {"median_ms": table.draft.median_ms * share, "spread_ms": table.draft.spread_ms * share}
    narrow = {columns: grid for columns, grid in table.narrow.items() if columns < width}
    return replace(table, grids=grids, draft=replace(table.draft, **cells), narrow=narrow)


def with_overhead(table: CostTable, overhead_ms: float) -> CostTable:
    """The table with so much time per step beside the forward pass, instead of its own."""
    if not overhead_ms >= 0.0:
        raise SimulationError(f"an overhead of {overhead_ms} ms; it must be at least 0")
    return replace(table, overhead_ms=overhead_ms)


def example_table(width: int, max_requests: int = 256) -> CostTable:
    """A table of the shape that an H200 with an 8B model shows, for trials without a profile.

    Full graphs; 5 ms for reading weights, 9 us a token, 40 ns per KV token, a drafter of
    0.6 to 1.4 ms.
    """
    sizes = np.array([1, 2, 4, *range(8, 256, 8), *range(256, 2049, 64)])
    uniform = np.array([1, 2, 4, *range(8, max_requests + 1, 8)])

    def grid(sizes: np.ndarray) -> CostGrid:  # type: ignore[type-arg]
        kv = (0, 65_536, 1_048_576)
        ms = np.stack([5.0 + 0.009 * sizes + node * 4e-5 / 10 for node in kv])
        cells = np.full(ms.shape, 5, dtype=np.int64)
        return CostGrid(tuple(sizes.tolist()), kv, ms, ms * 0.01, cells)

    draft = np.array([[0.6, 1.4]])
    full = StepMode.FULL
    return CostTable(
        {
            (full, StepShape.RAGGED): grid(sizes),
            (full, StepShape.NATIVE): grid(uniform * (width + 1)),
            (full, StepShape.SINGLE): grid(uniform),
        },
        CostGrid((1, 256), (0,), draft, draft * 0.01, np.full((1, 2), 5, dtype=np.int64)),
        allocation_ms=0.05,
    )
