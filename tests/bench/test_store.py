"""Cells on disk: resuming, torn files, and runs that must not be mixed."""

import json
from pathlib import Path

import pytest

from vllm_dspark.bench.modes import BenchError
from vllm_dspark.bench.store import Cell, CellKey, CellStore, read_cells

PRINT = {"device": "a CPU", "source": "1"}


def cell(mode: str = "off", repeat: int = 0, rate: float = 5.0) -> Cell:
    return Cell(CellKey("short", 4, 0.0, mode, repeat), {"tokens_per_s": rate})


def test_cells_survive_a_restart(tmp_path: Path) -> None:
    store = CellStore(tmp_path / "c.jsonl", PRINT)
    store.add(cell())
    again = CellStore(tmp_path / "c.jsonl", PRINT)
    assert cell().key in again and cell("ours").key not in again
    assert again.cells[cell().key].tokens_per_s == 5.0


def test_torn_line_is_dropped_and_measured_again(tmp_path: Path) -> None:
    """Catches a resumed run that glues its next cell to half a line."""
    path = tmp_path / "c.jsonl"
    store = CellStore(path, PRINT)
    store.add(cell())
    with path.open("a") as file:
        file.write('{"key": {"workload": "sho')
    again = CellStore(path, PRINT)
    assert list(again.cells) == [cell().key]
    again.add(cell("ours"))
    assert len(CellStore(path, PRINT).cells) == 2


def test_other_conditions_are_refused(tmp_path: Path) -> None:
    """Catches a resume on another machine, or after the code has changed."""
    CellStore(tmp_path / "c.jsonl", PRINT).add(cell())
    with pytest.raises(BenchError, match=r"device: 'a CPU' and 'a GPU'"):
        CellStore(tmp_path / "c.jsonl", {**PRINT, "device": "a GPU"})
    with pytest.raises(BenchError, match="source"):
        CellStore(tmp_path / "c.jsonl", {**PRINT, "source": "2"})


def test_a_run_without_cells_binds_nobody(tmp_path: Path) -> None:
    """Catches conditions kept from a run that measured nothing, also one of an older release."""
    path = tmp_path / "c.jsonl"
    CellStore(path, PRINT)
    assert not path.exists()
    path.write_text(json.dumps({"schema": 1, "fingerprint": PRINT}) + "\n")
    store = CellStore(path, {"device": "a GPU"})
    store.add(cell())
    assert read_cells([path])[0] == {"device": "a GPU"}


def test_comparison_refuses_other_machines_but_not_other_sources(tmp_path: Path) -> None:
    """Catches a table that mixes machines; code may differ, that is what one compares."""
    for name, changes in (("a", {}), ("b", {"source": "2"}), ("c", {"device": "a GPU"})):
        CellStore(tmp_path / name, {**PRINT, **changes}).add(cell(mode=f"fixed{ord(name)}"))
    found, cells = read_cells([tmp_path / "a", tmp_path / "b"], ignore=["source"])
    assert found == PRINT and len(cells) == 2
    with pytest.raises(BenchError, match="c cannot be compared"):
        read_cells([tmp_path / "a", tmp_path / "c"], ignore=["source"])


def test_comparison_refuses_a_cell_twice(tmp_path: Path) -> None:
    for name in ("a", "b"):
        CellStore(tmp_path / name, PRINT).add(cell())
    with pytest.raises(BenchError, match="holds a cell that another file has too"):
        read_cells([tmp_path / "a", tmp_path / "b"])


def test_foreign_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "x").write_text(json.dumps({"schema": 99}) + "\n")
    with pytest.raises(BenchError, match="schema 99"):
        CellStore(tmp_path / "x", PRINT)
    (tmp_path / "x").write_text("not JSON\n")
    with pytest.raises(BenchError, match="not a file of benchmark cells"):
        read_cells([tmp_path / "x"])
    with pytest.raises(BenchError, match="does not exist"):
        read_cells([tmp_path / "nothing"])
