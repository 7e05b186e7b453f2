r"""Correction of the cost table with step times measured while serving.

Table times were taken on an idle machine at start-up; clocks, neighbours and real
contexts move them. The model keeps, in log space, one factor g per execution mode
and one residual d per size:

    T = T_table * exp(g_mode + d_shape,size),   |g| <= BOUND_MODE, |d| <= BOUND_CELL

where d of sizes that were not measured in this run is interpolated between those that were
(served.py).

Each measured step moves both by a small share of its clipped innovation
clip(log(measured / T), +-CLIP), so one stalled step moves a price by well under one
per cent. The shared factor matters more than it looks: were only visited cells
corrected, a machine that slows down would make every unvisited cell look better than
it is, and the planner would run in circles. Where most of the last steps agree that
the machine has changed, the shared factor therefore follows at once (shift.py). A cell
whose factor passes the drift limit after enough samples is reported; `corrected_table`
is what gets persisted. Steps with prefill rows, of which tables have no cells, are
priced by their own times alone (mixed_cost.py).
"""

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.cost import (
    CostGrid,
    CostTable,
    GridKey,
    StepMode,
    StepShape,
    StepTiming,
    interpolate,
)
from vllm_dspark.planning.draft_cost import DraftShares
from vllm_dspark.planning.mixed_cost import MixedCosts
from vllm_dspark.planning.served import ServedSizes
from vllm_dspark.planning.shift import ShiftWatch

Float64Array = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

BOUND_MODE = math.log(4.0)
BOUND_CELL = math.log(1.5)
_CLIP = 0.2
_RATE_MODE = 0.02
_RATE_CELL = 0.05
_DRAFT: GridKey | None = None  # key of the drafter's curve among the corrections
_MIN_DRIFT_SAMPLES = 50
_KV_STEPS = 512  # distinct kv loads up to the last measured one
_REFRESH = 8  # observations between recomputations of the prices


@dataclass(frozen=True)
class Drift:
    """A cell whose measured times left the table."""

    grid: str  # "full/ragged", ..., or "draft"
    size: int
    table_ms: float
    ratio: float  # corrected over table
    samples: int


@dataclass
class _Correction:
    """Mutable state of one grid: residual and samples per size, and its current cells."""

    grid: CostGrid
    residual: Float64Array  # [sizes]
    samples: IntArray  # [sizes]
    cells: Float64Array  # [kv, sizes], corrected
    quantum: int  # kv loads are rounded to multiples of this, so prices can be kept
    served: ServedSizes
    spread: Float64Array  # [sizes], residuals that `cells` were computed with
    kv_tokens: int = -1  # load that `times` is for
    times: Float64Array | None = None  # [sizes]

    def place(self, size: int, padded: bool) -> int:
        """Index of the cell that a step is a sample of: the next; without padding the nearest."""
        sizes = self.grid.sizes
        j = min(bisect_left(sizes, size), len(sizes) - 1)
        if not padded and j and size * size < sizes[j - 1] * sizes[j]:
            j -= 1
        return j

    def at(self, kv_tokens: int) -> Float64Array:
        """Times of all sizes at a kv load, kept while the load is about the same."""
        rounded = kv_tokens // self.quantum
        if self.times is None or rounded != self.kv_tokens:
            self.times = self.grid.at(rounded * self.quantum, self.cells)
            self.kv_tokens = rounded
        return self.times


class _SharedFactor:
    """What all sizes of a mode, or all draft passes, take more than in the table; a logarithm."""

    def __init__(self) -> None:
        self.log = 0.0
        self._watch = ShiftWatch()

    def learn(self, ratio: float) -> bool:
        """Follow log(measured / predicted) of one step; whether the machine itself has changed."""
        shift = self._watch.observe(ratio)
        step = shift or _RATE_MODE * _bounded(ratio, _CLIP)
        self.log = _bounded(self.log + step, BOUND_MODE)
        return shift != 0.0


class CostModel:
    """A cost table that follows what steps really take; prices whole size axes at once."""

    def __init__(self, table: CostTable, online: bool = True, num_positions: int = 0) -> None:
        """num_positions: K; without it draft passes are priced at full width only."""
        table.validate()
        self.table = table
        self.online = online
        self._mode_factor = {mode: _SharedFactor() for mode in StepMode}
        self._draft_factor = _SharedFactor()
        self._mixed = MixedCosts()
        self._has_mixed_grid = table.resolve(StepMode.MIXED, StepShape.RAGGED) is not None
        self._until_refresh = _REFRESH
        # by request count and columns (None: all), until the next refresh
        self._draft_ms: dict[tuple[int, int | None], float] = {}
        self._shares = DraftShares(
            table.draft, table.narrow if num_positions else {}, num_positions
        )
        grids: dict[GridKey | None, CostGrid] = dict(table.grids.items())
        grids[_DRAFT] = table.draft
        self._corrections = {
            key: _Correction(
                grid,
                np.zeros(len(grid.sizes)),
                np.zeros(len(grid.sizes), dtype=np.int64),
                np.maximum.accumulate(grid.median_ms, axis=1),
                max(1, grid.kv_tokens[-1] // _KV_STEPS),
                ServedSizes(grid.size_array),
                np.zeros(len(grid.sizes)),
            )
            for key, grid in grids.items()
        }

        self._served = {
            mode: [
                state.served
                for key, state in self._corrections.items()
                if key is not None and key[0] is mode
            ]
            for mode in StepMode
        }

    def axis(
        self, mode: StepMode, shape: StepShape, kv_tokens: int
    ) -> tuple[tuple[int, ...], IntArray, Float64Array] | None:
        """Sizes, twice, and their verification times at a kv load; None if never measured."""
        key = self.table.resolve(mode, shape)
        if key is None:
            return self._mixed.axis() if mode is StepMode.MIXED else None
        state = self._corrections[key]
        return state.grid.sizes, state.grid.size_array, state.at(kv_tokens)

    def step_ms(
        self, mode: StepMode, shape: StepShape, kv_tokens: int, num_tokens: int
    ) -> tuple[int, float] | None:
        """Padded size and verification time of one step; None if it cannot be priced."""
        key = self.table.resolve(mode, shape)
        if key is None:
            learned = self._mixed.step_ms(num_tokens) if mode is StepMode.MIXED else None
            return None if learned is None else (num_tokens, learned)
        state = self._corrections[key]
        if not mode.padded:
            times = state.at(kv_tokens)
            return num_tokens, interpolate(state.grid.size_array, times, num_tokens)
        index = bisect_left(state.grid.sizes, num_tokens)
        if index == len(state.grid.sizes):
            return None
        return state.grid.sizes[index], float(state.at(kv_tokens)[index])

    @property
    def prices_widths(self) -> bool:
        """Whether draft passes narrower than K have prices of their own."""
        return self._shares.available

    @property
    def prices_mixed(self) -> bool:
        """Whether steps with prefill rows have prices."""
        return self._has_mixed_grid or self._mixed.ready

    @property
    def prefill_rows(self) -> int:
        """Prefill rows that prices of mixed steps are about: the mean of those timed lately."""
        return round(self._mixed.prefill_rows)

    def prompts_ms(self, mode: StepMode) -> float:
        """Time of the prefill rows in a step of this mode, as far as it is known apart."""
        if mode is not StepMode.MIXED or self._has_mixed_grid:
            return 0.0
        return self._mixed.prompts_ms

    def served_mixed(self, rows: int) -> bool:
        """Whether mixed steps with about so many rows of decoding requests have been timed."""
        return self._has_mixed_grid or self._mixed.served(rows)

    def draft_ms(
        self, num_requests: int, columns: int | None = None, mode: StepMode | None = None
    ) -> float:
        """Time of one draft pass of some columns (None: all K) in a step of this mode."""
        if mode is StepMode.MIXED:
            learned = self._mixed.draft_ms(num_requests)
            if learned is not None:
                share = 1.0 if columns is None else self._shares.of(num_requests, columns)
                return learned * share
        known = self._draft_ms.get((num_requests, columns))
        if known is None:
            state = self._corrections[_DRAFT]
            known = interpolate(state.grid.size_array, state.cells[0], num_requests)
            if columns is not None:
                known *= self._shares.of(num_requests, columns)
            self._draft_ms[num_requests, columns] = known
        return known

    def observe(self, timing: StepTiming) -> None:
        """Correct prices with one measured step."""
        if not self.online:
            return
        if timing.mode is StepMode.MIXED and not self._has_mixed_grid:
            full = timing.draft_ms if timing.draft_width is None else None
            self._mixed.observe(
                timing.num_tokens - timing.prefill_rows,
                timing.prefill_rows,
                timing.num_requests,
                timing.forward_ms,
                full,
            )
            return
        shifted = self._observe_forward(timing)
        if timing.draft_ms is not None:
            shifted |= self._observe_draft(timing, timing.draft_ms)
        self._until_refresh -= 1
        if shifted or self._until_refresh <= 0:
            self._refresh()

    def _observe_forward(self, timing: StepTiming) -> bool:
        """Learn from a verification; whether all prices of its mode have moved."""
        mode = timing.mode
        key = self.table.resolve(mode, timing.shape)
        predicted = self.step_ms(mode, timing.shape, timing.kv_tokens, timing.num_tokens)
        if key is None or predicted is None:
            return False
        ratio = _log_ratio(timing.forward_ms, predicted[1])
        state = self._corrections[key]
        j = state.place(timing.num_tokens, mode.padded)
        if self._known(mode) and not state.served.fresh(j):
            off = state.served.judge(j, ratio)
            if off is None:
                return False
            state.residual[j] = _bounded(float(state.spread[j]) + off, BOUND_CELL)
            return True
        state.served.note(j)
        if self._mode_factor[mode].learn(ratio):
            for served in self._served[mode]:
                served.machine_changed(j if served is state.served else None)
            return True
        self._move(state, j, _bounded(ratio, _CLIP))
        return False

    def doubt(self, mode: StepMode, num_tokens: int) -> float:
        """Log factor by which a ragged step's price may be off, as no like one was measured lately.

        0 where prices do not follow measured steps, and before the first ones.
        """
        key = self.table.resolve(mode, StepShape.RAGGED)
        if key is None or not self.online or not self._known(mode):
            return 0.0
        state = self._corrections[key]
        return state.served.doubt(state.place(num_tokens, mode.padded))

    def _known(self, mode: StepMode) -> bool:
        """Whether any price of a mode is known from steps of this run."""
        return any(served.any for served in self._served[mode])

    def _observe_draft(self, timing: StepTiming, draft_ms: float) -> bool:
        """The same for the draft pass of the step."""
        columns = timing.draft_width
        ratio = _log_ratio(draft_ms, self.draft_ms(timing.num_requests, columns))
        if self._draft_factor.learn(ratio):
            return True
        if columns is None:
            state = self._corrections[_DRAFT]
            self._move(state, state.place(timing.num_requests, True), _bounded(ratio, _CLIP))
        else:
            self._shares.correct(columns, _bounded(ratio, _CLIP))
        return False

    def drift(self, limit: float) -> list[Drift]:
        """Cells whose correction exceeds `limit` (0.25 = 25 % either way), worst first."""
        found = []
        for key, state in self._corrections.items():
            ratios = np.exp(state.residual + self._factor(key))  # of cells that were measured
            off = (np.abs(np.log(ratios)) > math.log1p(limit)) & (
                state.samples >= _MIN_DRIFT_SAMPLES
            )
            name = "draft" if key is None else f"{key[0].value}/{key[1].value}"
            for j in np.flatnonzero(off):
                table_ms = float(state.grid.median_ms[0, j])
                found.append(
                    Drift(
                        name, state.grid.sizes[j], table_ms, float(ratios[j]), int(state.samples[j])
                    )
                )
        return sorted(found, key=lambda item: -abs(math.log(item.ratio)))

    def corrected_table(self) -> CostTable:
        """The table with corrections applied, for persisting."""
        self._refresh()
        grids = {
            key: replace(grid, median_ms=self._corrections[key].cells.copy())
            for key, grid in self.table.grids.items()
        }
        draft = replace(self.table.draft, median_ms=self._corrections[_DRAFT].cells.copy())
        narrow = {
            columns: replace(
                grid, median_ms=np.array([[self.draft_ms(size, columns) for size in grid.sizes]])
            )
            for columns, grid in self.table.narrow.items()
        }
        return replace(self.table, grids=grids, draft=draft, narrow=narrow)

    def _factor(self, key: GridKey | None) -> float:
        return (self._draft_factor if key is None else self._mode_factor[key[0]]).log

    def _move(self, state: _Correction, j: int, innovation: float) -> None:
        """Shift the residual of a cell by a small part of a clipped log ratio."""
        state.samples[j] += 1
        moved = state.residual[j] + _RATE_CELL * innovation
        state.residual[j] = _bounded(float(moved), BOUND_CELL)

    def _refresh(self) -> None:
        """Recompute all prices; more tokens never cost less."""
        self._until_refresh = _REFRESH
        for key, state in self._corrections.items():
            state.spread = state.served.spread(state.residual)
            scaled = state.grid.median_ms * np.exp(state.spread + self._factor(key))
            np.maximum.accumulate(scaled, axis=1, out=state.cells)
            state.times = None
        self._draft_ms.clear()


def _log_ratio(measured_ms: float, predicted_ms: float) -> float:
    """Log of measured over predicted; a time that is no time moves nothing."""
    if not (math.isfinite(measured_ms) and measured_ms > 0.0):
        return 0.0
    return math.log(measured_ms / predicted_ms)


def _bounded(value: float, bound: float) -> float:
    return max(-bound, min(bound, value))
