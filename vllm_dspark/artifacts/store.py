"""Reading, writing and finding records.

Files are written beside their target, flushed and renamed, so a reader sees the old
record or the new one, never half of one, whoever is killed when. Several engines may
share a cache folder: the last writer of equal fingerprints wins, with equal right.
"""

import contextlib
import json
import math
import os
import tempfile
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from vllm_dspark.artifacts.fingerprint import MODEL_FIELDS, Fingerprint
from vllm_dspark.artifacts.schema import (
    VERSION,
    AdmissionRecord,
    CalibrationRecord,
    CostTableRecord,
    Record,
    now,
)
from vllm_dspark.errors import ArtifactError, CalibrationError

_RecordType = TypeVar("_RecordType", CostTableRecord, CalibrationRecord, AdmissionRecord)
# Keys under which other engines keep their temperatures.
_FOREIGN_KEYS = ("temperatures", "sts_temperatures")


def read_cost_table(path: Path) -> CostTableRecord:
    """A cost table file; raises ArtifactError (CostTableError if it cannot rank budgets)."""
    record = _parse(CostTableRecord, _read(path), path)
    record.to_table()
    return record


def read_admission(path: Path) -> AdmissionRecord:
    """An admission evidence file; raises ArtifactError."""
    return _parse(AdmissionRecord, _read(path), path)


def read_calibration(path: Path, num_positions: int) -> CalibrationRecord:
    """Our own calibration, or another engine's temperatures, for K drafts.

    Raises CalibrationError for another K or illegal temperatures, ArtifactError for
    anything else that is wrong with the file.
    """
    obj = _read(path)
    if any(key in obj for key in _FOREIGN_KEYS) and "kind" not in obj:
        record = _foreign_calibration(obj, path)
    else:
        record = _parse(CalibrationRecord, obj, path)
    calibration = record.to_calibration()
    if calibration.num_positions != num_positions:
        raise CalibrationError(
            f"{path} calibrates {calibration.num_positions} draft positions, but "
            f"num_speculative_tokens is {num_positions}; fit one with `vllm-dspark calibrate`"
        )
    return record


def _foreign_calibration(obj: dict[str, object], path: Path) -> CalibrationRecord:
    """Other engines keep one vector, which here serves greedy and sampled requests alike."""
    present = [key for key in _FOREIGN_KEYS if key in obj]
    values = obj[present[0]]
    if any(obj[key] != values for key in present):
        raise CalibrationError(f"{path}: {' and '.join(present)} disagree")
    if not isinstance(values, list) or not values:
        raise CalibrationError(f"{path}: {present[0]} = {values!r} is no list of numbers")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise CalibrationError(f"{path}: {present[0]} holds {value!r}, which is no number")
        if not math.isfinite(value):
            raise CalibrationError(f"{path}: {present[0]} holds {value!r}")
    temperatures = tuple(float(value) for value in values)
    num_samples = obj.get("num_samples", 0)
    return CalibrationRecord(
        created=now(),
        fingerprint=None,
        greedy=temperatures,
        sampled=temperatures,
        dataset=str(obj.get("dataset", "")),
        num_samples=num_samples if isinstance(num_samples, int) and num_samples >= 0 else 0,
    )


class ArtifactStore:
    """The cache folder: one file per kind and fingerprint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def cost_table_path(self, fingerprint: Fingerprint) -> Path:
        """Where the cost table of this machine and model belongs."""
        return self.folder / f"cost-table-{fingerprint.digest()}.json"

    def calibration_path(self, fingerprint: Fingerprint) -> Path:
        """Where the calibration of these models belongs."""
        return self.folder / f"calibration-{fingerprint.digest(MODEL_FIELDS)}.json"

    def load_cost_table(self, fingerprint: Fingerprint) -> CostTableRecord | None:
        """The cached cost table of exactly this fingerprint, or None.

        A file that is there but unreadable raises: the caller reports it and measures anew.
        """
        path = self.cost_table_path(fingerprint)
        if not path.exists():
            return None
        record = read_cost_table(path)
        return None if record.fingerprint.differences(fingerprint) else record

    def load_calibration(self, fingerprint: Fingerprint) -> CalibrationRecord | None:
        """The cached calibration of exactly these models, or None; raises like load_cost_table."""
        path = self.calibration_path(fingerprint)
        if not path.exists():
            return None
        record = read_calibration(path, fingerprint.num_speculative_tokens)
        recorded = record.fingerprint
        if recorded is None or recorded.differences(fingerprint, MODEL_FIELDS):
            return None
        return record

    def save(self, record: CostTableRecord | CalibrationRecord) -> Path:
        """Write a record to its place in the cache."""
        if record.fingerprint is None:
            raise ArtifactError("a calibration without fingerprint cannot be found again")
        if isinstance(record, CostTableRecord):
            path = self.cost_table_path(record.fingerprint)
        else:
            path = self.calibration_path(record.fingerprint)
        write_record(path, record)
        return path


def write_record(path: Path, record: Record) -> None:
    """Write a record atomically, creating folders as needed."""
    write_atomic(path, record.model_dump_json(indent=1) + "\n")


def write_atomic(path: Path, text: str) -> None:
    """Replace a file's content in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp's 0600 would hide a shared cache from its other users
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def why_unwritable(path: Path) -> str:
    """Why a file cannot be made or added to at `path`; empty if nothing is known against it.

    Nothing is written, so a full disk is not seen.
    """
    try:
        if path.is_dir():
            return f"{path} is a folder, a file name is needed"
        place = path.absolute()
        while not place.exists():
            place = place.parent
        if place != path.absolute() and not place.is_dir():
            return f"{place} is no folder"
        needed = os.W_OK | os.X_OK if place.is_dir() else os.W_OK
        return "" if os.access(place, needed) else f"no permission to write to {place}"
    except OSError as error:  # a name that is too long
        return str(error.strerror)


def _read(path: Path) -> dict[str, object]:
    try:
        obj = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ArtifactError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also invalid UTF-8, and absurd nesting
        raise ArtifactError(f"{path} is not JSON: {error}") from error
    if not isinstance(obj, dict):
        raise ArtifactError(f"{path} holds a {type(obj).__name__}, not a JSON object")
    return obj


def _what(obj: dict[str, object]) -> str:
    """What a JSON object is, as far as it says."""
    if "kind" in obj:
        return f"kind {obj['kind']!r}"
    if "command" in obj:
        return f"a result of `vllm-dspark {obj['command']}`, not an artifact"
    return f"an object with the keys {', '.join(sorted(obj)[:5]) or '(none)'}"


def _parse(kind: type[_RecordType], obj: dict[str, object], path: Path) -> _RecordType:
    """Check kind and version first, so that the error names the real mistake."""
    wanted = kind.model_fields["kind"].default
    if obj.get("kind") != wanted:
        raise ArtifactError(f"{path} holds {_what(obj)}, wanted {wanted!r}")
    if obj.get("version") != VERSION:
        raise ArtifactError(
            f"{path} has version {obj.get('version')!r}; this release reads version {VERSION}"
        )
    try:
        return kind.model_validate(obj)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise ArtifactError(f"{path}: {where}: {first['msg']}") from error
