"""When a set of step timings is good enough to be a cost table, and what to measure again.

Every cell (size x KV node) keeps its newest `repeats` samples. A cell is settled when they
scatter by no more than `max_spread` of their median (half the distance between the 20th and 80th
percentile, as in cost.py) and that median is no further than that above the fastest times the
cell ever showed. Measuring until a handful of samples agree would alone be sure to end, by chance;
but other work on a machine only ever makes a step slower, so samples that agree at the bottom agree
on the cost of the step. Only unsettled cells are measured again: a disturbance that passes costs
the cells it hit a few more samples, and one that stays never lets them settle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dspark.errors import CostTableError
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape, StepTiming, build_cost_table

# A table may hold this share of cells that never settled, if all others did: one busy moment of
# the machine hits few cells, and the planner interpolates over them.
_UNSETTLED_SHARE = 0.1


@dataclass(frozen=True, order=True)
class Cell:
    """One kind of step to time."""

    num_tokens: int
    kv_tokens: int
    num_requests: int
    mode: str = StepMode.EAGER.value
    shape: str = StepShape.RAGGED.value
    draft_width: int = 0  # columns of the draft pass behind it; 0: all K

    @staticmethod
    def of(timing: StepTiming) -> Cell:
        """The cell that a timing is a sample of."""
        return Cell(
            timing.num_tokens,
            timing.kv_tokens,
            timing.num_requests,
            timing.mode.value,
            timing.shape.value,
            timing.draft_width or 0,
        )


class CellSamples:
    """Collects samples of cells and says which need more."""

    def __init__(self, cells: Iterable[Cell], repeats: int, max_spread: float) -> None:
        self.repeats = repeats
        self.max_spread = max_spread
        self._samples: dict[Cell, deque[StepTiming]] = {
            cell: deque(maxlen=repeats) for cell in cells
        }
        # The two fastest times of each cell; the second counts, so that one freak sample does not.
        self._fastest = {cell: [float("inf"), float("inf")] for cell in self._samples}
        self.num_samples = 0  # ever added, those that were replaced included

    def add(self, samples: Iterable[StepTiming]) -> None:
        """Add samples; each belongs to the cell of its requests, tokens and KV node."""
        for sample in samples:
            cell = Cell.of(sample)
            if cell not in self._samples:
                raise CostTableError("incomplete", f"{cell} was timed, but nobody asked for it")
            self._samples[cell].append(sample)
            self._fastest[cell] = sorted([*self._fastest[cell], _total(sample)])[:2]
            self.num_samples += 1

    def __len__(self) -> int:
        return len(self._samples)

    def missing(self) -> int:
        """Samples that are wanted yet, if every cell settles at once."""
        return sum(self.repeats - len(samples) for samples in self._samples.values())

    def spread(self, cell: Cell) -> float:
        """Relative scatter of a cell's samples; infinite while there are too few."""
        samples = self._samples[cell]
        if len(samples) < self.repeats:
            return float("inf")
        low, median, high = np.percentile([_total(sample) for sample in samples], (20, 50, 80))
        if median <= 0:
            return float("inf")
        above = median / self._fastest[cell][1] - 1.0
        return float(max((high - low) / 2.0 / median, above))

    def unsettled(self) -> list[Cell]:
        """Cells to measure (again), in ascending order."""
        return [cell for cell in sorted(self._samples) if self.spread(cell) > self.max_spread]

    def median_spread(self) -> float:
        """Scatter of the typical cell."""
        return float(np.median([self.spread(cell) for cell in self._samples]))

    def table(self, allocation_ms: float = 0.0) -> CostTable:
        """The table of the newest samples; CostTableError where it must not be used."""
        unsettled = self.unsettled()
        if len(unsettled) > _UNSETTLED_SHARE * len(self._samples):
            few = sum(len(samples) < self.repeats for samples in self._samples.values())
            if few:  # their spread says nothing
                raise CostTableError(
                    "few_samples",
                    f"time was up when {few} of {len(self._samples)} kinds of step had been timed "
                    f"fewer than {self.repeats} times",
                )
            worst = max(unsettled, key=self.spread)
            raise CostTableError(
                "noisy",
                f"{len(unsettled)} of {len(self._samples)} kinds of step scatter by more than "
                f"{self.max_spread:.0%} (the worst, {worst.num_tokens} tokens, by "
                f"{self.spread(worst):.0%}); the machine is busy with something else",
            )
        samples = [sample for cell in self._samples.values() for sample in cell]
        return build_cost_table(samples, allocation_ms=allocation_ms)


def _total(sample: StepTiming) -> float:
    return sample.forward_ms + (sample.draft_ms or 0.0)


def rounds_of(cells: Sequence[Cell], size: int) -> list[list[Cell]]:
    """Cells in portions of at most `size`, for progress and for spreading over replicas."""
    return [list(cells[start : start + size]) for start in range(0, len(cells), size)]
