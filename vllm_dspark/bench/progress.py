"""What a run tells whoever watches it."""

from __future__ import annotations

from typing import Any

from vllm_dspark.bench.modes import BenchError, EngineLaunch, Mode
from vllm_dspark.bench.store import Cell


class Progress:
    """Told about what happens; does nothing itself."""

    def starting(self, launch: EngineLaunch) -> None:
        """An engine is about to start."""

    def started(self, launch: EngineLaunch, facts: dict[str, Any]) -> None:
        """An engine is up."""

    def failed(self, mode: Mode, error: BenchError) -> None:
        """A mode is left out from now on."""

    def total(self, cells: int) -> None:
        """So many cells are to be measured."""

    def cell(self, cell: Cell) -> None:
        """A cell was measured."""

    def out_of_time(self, cells: int) -> None:
        """So many cells are left for another run."""
