"""Raw cells on disk: one JSON line each, appended as soon as it is measured.

The first line is the header with the run's fingerprint, written with the first cell: a run that
failed before leaves nothing that another one would have to agree with. A run that is started again
with the same file measures what is missing, provided that its fingerprint is the same; a torn last
line (the process was killed while writing) is dropped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_dspark.bench.modes import BenchError

SCHEMA = 1


@dataclass(frozen=True)
class CellKey:
    """What a cell is a measurement of."""

    workload: str
    concurrency: int
    temperature: float
    mode: str
    repeat: int


@dataclass(frozen=True)
class Cell:
    """One measurement. figures: `drive.summarise`, with what the run adds to it."""

    key: CellKey
    figures: dict[str, Any] = field(compare=False)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second."""
        return float(self.figures["tokens_per_s"])


def fingerprint_differences(
    first: dict[str, Any], second: dict[str, Any], ignore: Iterable[str] = ()
) -> list[str]:
    """One line per entry in which two fingerprints differ."""
    skipped = set(ignore)
    return [
        f"{name}: {first.get(name)!r} and {second.get(name)!r}"
        for name in sorted(first.keys() | second.keys())
        if name not in skipped and first.get(name) != second.get(name)
    ]


class CellStore:
    """The file of one run."""

    def __init__(self, path: Path, fingerprint: dict[str, Any]) -> None:
        """Open or begin the file; BenchError if it belongs to another kind of run."""
        self.path = path
        self.cells: dict[CellKey, Cell] = {}
        self._header = json.dumps({"schema": SCHEMA, "fingerprint": fingerprint}) + "\n"
        if path.exists() and path.stat().st_size:
            header, cells, whole = _read(path)
            if not cells:
                return
            changed = fingerprint_differences(header["fingerprint"], fingerprint)
            if changed:
                raise BenchError(
                    f"{path} was measured under other conditions, so its cells cannot stand "
                    f"beside new ones ({'; '.join(changed)}); choose another file, or remove it"
                )
            self.cells = {cell.key: cell for cell in cells}
            with path.open("r+", encoding="utf-8") as file:
                file.truncate(whole)

    def __contains__(self, key: CellKey) -> bool:
        return key in self.cells

    def add(self, cell: Cell) -> None:
        """Append one cell; the first one begins the file."""
        if not self.cells:
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a" if self.cells else "w", encoding="utf-8") as file:
            if not self.cells:
                file.write(self._header)
            file.write(json.dumps({"key": asdict(cell.key), "figures": cell.figures}) + "\n")
        self.cells[cell.key] = cell


def read_cells(
    paths: Iterable[Path], ignore: Iterable[str] = ()
) -> tuple[dict[str, Any], list[Cell]]:
    """Fingerprint and cells of one or more files; BenchError if they cannot be compared."""
    header: dict[str, Any] | None = None
    found: dict[CellKey, Cell] = {}
    for path in paths:
        if not path.exists():
            raise BenchError(f"{path} does not exist")
        other, cells, _ = _read(path)
        if header is None:
            header = other
        changed = fingerprint_differences(header["fingerprint"], other["fingerprint"], ignore)
        if changed:
            raise BenchError(f"{path} cannot be compared with the others: {'; '.join(changed)}")
        twice = [cell.key for cell in cells if cell.key in found]
        if twice:
            raise BenchError(f"{path} holds a cell that another file has too: {twice[0]}")
        found.update((cell.key, cell) for cell in cells)
    if header is None:
        raise BenchError("no file of cells was given")
    return header["fingerprint"], list(found.values())


def _read(path: Path) -> tuple[dict[str, Any], list[Cell], int]:
    """Header, whole cells, and the length in bytes of what is whole."""
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    if not whole:
        raise BenchError(f"{path} is empty, or holds no whole line: no cell was measured")
    try:
        lines = raw[:whole].decode("utf-8").splitlines()
        header = json.loads(lines[0])
        if header.get("schema") != SCHEMA:
            raise BenchError(f"{path} has schema {header.get('schema')!r}, this reads {SCHEMA}")
        objects = [json.loads(line) for line in lines[1:]]
        cells = [Cell(CellKey(**obj["key"]), obj["figures"]) for obj in objects]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise BenchError(f"{path} is not a file of benchmark cells: {_said(error)}") from error
    return header, cells, whole


def _said(error: Exception) -> str:
    """What was wrong, without Python's name for it."""
    return f"{error} is missing" if isinstance(error, KeyError) else str(error)
