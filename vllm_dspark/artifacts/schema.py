"""Versioned records as they are written to JSON.

`kind` and `version` come first in each record. A reader refuses versions it does not
know; a field is never given another meaning within a version. Records translate to
planning's own types, whose checks (finite, positive, monotone, ...) then apply.
"""

from datetime import UTC, datetime
from typing import Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, field_validator

from vllm_dspark.artifacts.fingerprint import Fingerprint
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostGrid, CostTable, StepMode, StepShape
from vllm_dspark.planning.quality import PositionQuality

VERSION = 1

_Floats = tuple[float, ...]


class _Record(BaseModel):
    # Strict would refuse JSON's lists for tuples; types are checked all the same.
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class GridRecord(_Record):
    """Cells over (kv tokens, size)."""

    sizes: tuple[int, ...] = Field(min_length=1)
    kv_tokens: tuple[int, ...] = Field(min_length=1)
    median_ms: tuple[_Floats, ...]
    spread_ms: tuple[_Floats, ...]
    count: tuple[tuple[int, ...], ...]

    @field_validator("median_ms", "spread_ms", "count")
    @classmethod
    def _rectangular(cls, cells: tuple[tuple[float, ...], ...]) -> tuple[tuple[float, ...], ...]:
        if not cells or any(len(row) != len(cells[0]) for row in cells):
            raise ValueError("rows of cells differ in length")
        return cells

    def to_grid(self) -> CostGrid:
        """The planning layer's grid."""
        return CostGrid(
            self.sizes,
            self.kv_tokens,
            np.array(self.median_ms, dtype=np.float64),
            np.array(self.spread_ms, dtype=np.float64),
            np.array(self.count, dtype=np.int64),
        )

    @staticmethod
    def cells_of(grid: CostGrid) -> dict[str, object]:
        """Field values for a grid."""
        return {
            "sizes": grid.sizes,
            "kv_tokens": grid.kv_tokens,
            "median_ms": grid.median_ms.tolist(),
            "spread_ms": grid.spread_ms.tolist(),
            "count": grid.count.tolist(),
        }


class StepGridRecord(GridRecord):
    """Cells of one execution mode and step shape."""

    mode: Literal["full", "piecewise", "eager", "mixed"]
    shape: Literal["ragged", "native", "single"]


class NarrowDraftRecord(GridRecord):
    """Draft passes of fewer than K columns; sizes are request counts."""

    columns: int = Field(ge=1)


class CostTableRecord(_Record):
    """Measured step times of one machine and model.

    narrow_draft: absent from tables of earlier versions, with which draft passes keep full width.
    """

    kind: Literal["cost_table"] = "cost_table"
    version: Literal[1] = 1
    created: str
    fingerprint: Fingerprint
    grids: tuple[StepGridRecord, ...] = Field(min_length=1)
    draft: GridRecord
    allocation_ms: float
    overhead_ms: float
    narrow_draft: tuple[NarrowDraftRecord, ...] = ()

    def to_table(self) -> CostTable:
        """The table, checked; raises CostTableError if it cannot rank budgets."""
        grids = {
            (StepMode(grid.mode), StepShape(grid.shape)): grid.to_grid() for grid in self.grids
        }
        narrow = {grid.columns: grid.to_grid() for grid in self.narrow_draft}
        table = CostTable(grids, self.draft.to_grid(), self.allocation_ms, self.overhead_ms, narrow)
        table.validate()
        return table

    @classmethod
    def from_table(cls, table: CostTable, fingerprint: Fingerprint) -> "CostTableRecord":
        """Record of a table measured just now."""
        grids = [
            {"mode": mode.value, "shape": shape.value, **GridRecord.cells_of(grid)}
            for (mode, shape), grid in table.grids.items()
        ]
        return cls.model_validate(
            {
                "created": now(),
                "fingerprint": fingerprint,
                "grids": grids,
                "draft": GridRecord.cells_of(table.draft),
                "allocation_ms": table.allocation_ms,
                "overhead_ms": table.overhead_ms,
                "narrow_draft": [
                    {"columns": columns, **GridRecord.cells_of(grid)}
                    for columns, grid in table.narrow.items()
                ],
            }
        )


class PositionRecord(_Record):
    """Forecast quality of the survival at one position, before and after calibration."""

    position: int
    count: int
    base_rate: float
    ece_before: float
    ece_after: float
    brier_before: float
    brier_after: float
    brier_of_base_rate: float
    auc: float

    @classmethod
    def of(cls, before: PositionQuality, after: PositionQuality) -> "PositionRecord":
        """Both measurements of one position; the AUC is that of the calibrated survival."""
        return cls(
            position=after.position,
            count=after.count,
            base_rate=after.base_rate,
            ece_before=before.ece,
            ece_after=after.ece,
            brier_before=before.brier,
            brier_after=after.brier,
            brier_of_base_rate=after.brier_of_base_rate,
            auc=after.auc,
        )


class CalibrationRecord(_Record):
    """Temperatures per request class, and how well they fit."""

    kind: Literal["calibration"] = "calibration"
    version: Literal[1] = 1
    created: str
    fingerprint: Fingerprint | None  # None: taken from another engine's file
    greedy: _Floats = Field(min_length=1)
    sampled: _Floats = Field(min_length=1)
    greedy_offset: _Floats = ()
    sampled_offset: _Floats = ()
    dataset: str = ""
    num_samples: int = Field(default=0, ge=0)
    greedy_quality: tuple[PositionRecord, ...] = ()
    sampled_quality: tuple[PositionRecord, ...] = ()

    def to_calibration(self) -> Calibration:
        """The calibration, checked; raises CalibrationError if illegal."""
        return Calibration(self.greedy, self.sampled, self.greedy_offset, self.sampled_offset)

    @classmethod
    def from_calibration(
        cls,
        calibration: Calibration,
        fingerprint: Fingerprint | None,
        *,
        dataset: str = "",
        num_samples: int = 0,
        greedy_quality: tuple[PositionRecord, ...] = (),
        sampled_quality: tuple[PositionRecord, ...] = (),
    ) -> "CalibrationRecord":
        """Record of a calibration fitted or learned just now."""
        return cls(
            created=now(),
            fingerprint=fingerprint,
            greedy=calibration.greedy,
            sampled=calibration.sampled,
            greedy_offset=calibration.greedy_offset,
            sampled_offset=calibration.sampled_offset,
            dataset=dataset,
            num_samples=num_samples,
            greedy_quality=greedy_quality,
            sampled_quality=sampled_quality,
        )


class AdmissionRecord(_Record):
    """Evidence that scheduling gained on a workload, against the best fixed setting."""

    kind: Literal["admission"] = "admission"
    version: Literal[1] = 1
    created: str
    fingerprint: Fingerprint
    scope: Literal["decode", "mixed"] = "decode"  # mixed: steps with prefill rows were trimmed
    workload: str = Field(min_length=1)
    num_runs: int = Field(ge=3)
    baseline_tokens_per_s: float = Field(gt=0.0)
    scheduled_tokens_per_s: float = Field(gt=0.0)
    gain_low: float = Field(gt=-1.0)  # lower end of the 95 % interval of the relative gain

    @property
    def positive(self) -> bool:
        """Whether the gain is beyond doubt, and the figures agree with each other."""
        gain = self.scheduled_tokens_per_s / self.baseline_tokens_per_s - 1.0
        return 0.0 < self.gain_low <= gain


Record = CostTableRecord | CalibrationRecord | AdmissionRecord


def now() -> str:
    """Time stamp of a record, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")
