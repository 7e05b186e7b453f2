"""The GPU page and README's table: from cells and from nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import h200_serving
from vllm_dspark.bench.store import Cell, CellKey, CellStore

RATES = {"off": 100.0, "fixed3": 150.0, "fixed7": 140.0, "adaptive": 120.0, "ours": 160.0}
PRINT = {"device": "a GPU", "versions": {"vllm": "0.32.0"}, "cores": 16}


def figures(rate: float, tpot: float, settled: int | None = 4) -> dict[str, Any]:
    return {
        "tokens_per_s": rate,
        "seconds": 2.0,
        "counters": {},
        "tpot_ms": {"p50": tpot / 2, "p99": tpot, "count": 9.0},
        "ttft_ms": None,
        "phases": [{"tokens": rate, "seconds": 1.0}] * 2,
        "settling": [
            {"load": 1, "final_window": 8.0, "settled_after": 0},
            {"load": 256, "final_window": 3.0, "settled_after": settled},
        ],
        "cpu_s": {"engine": 1.0, "idle_engines": 0.0, "foreign": 0.0},
    }


def measured(folder: Path, rates: dict[str, float] = RATES, settled: int | None = 4) -> Path:
    store = CellStore(folder / "cells.jsonl", PRINT)
    for workload in ("short", "burst"):
        for load in (32, 128):
            for repeat in range(3):
                for mode, rate in rates.items():
                    key = CellKey(workload, load, 0.0, mode, repeat)
                    found = figures(rate + load + 0.1 * repeat, 1e3 / rate, settled)
                    store.add(Cell(key, found))
    (folder / "command.txt").write_text("vllm-dspark bench --out DIR\n")
    (folder / "notes.md").write_text("It loses at 128, because.\n")
    engines = {
        "ours": {"start_s": 41.2, "gpu_gib": 31.5},
        "off": {"start_s": 30.0},
        "fixed1": {"error": "no memory; the end of its log (/machine/log):\nlast words"},
    }
    saved = {"settings": {}, "conditions": {"engines": engines}}
    (folder / "bench.json").write_text(json.dumps(saved))
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "docs" / "benchmarks").mkdir(parents=True)
    (tmp_path / "README.md").write_text("# T\n<!-- cpu-demo: end -->\nrest\n")
    return tmp_path


def write(root: Path, **runs: Path) -> dict[str, Any]:
    h200_serving.write([h200_serving.read_run(n, folder) for n, folder in runs.items()], root)
    found: dict[str, Any] = json.loads((root / "docs/benchmarks/h200-serving.json").read_text())
    return found


def test_rows_say_what_was_measured(root: Path, tmp_path: Path) -> None:
    """Catches a JSON without the keys that others read, and figures that no cell holds."""
    found = write(root, demo=measured(tmp_path / "a"), shape=measured(tmp_path / "b"))
    row = next(
        r for r in found["rows"] if r["workload"] == "demo: short" and r["concurrency"] == 32
    )
    assert row["off"] == pytest.approx(132.1) and row["ours"] == pytest.approx(192.1)
    assert row["fixed"] == {"3": pytest.approx(182.1), "7": pytest.approx(172.1)}
    assert row["stock_adaptive"] == pytest.approx(152.1) and row["temperature"] == 0.0
    assert len(found["rows"]) == 2 * 2 * 2 and len(found["cells"]) == 2 * 60
    text = (root / "docs/benchmarks/h200-serving.md").read_text()
    assert "| short | 0 | 32 | 132.1 | 182.1 | 172.1 | 152.1 | **192.1** |" in text
    assert "vllm-dspark bench --out DIR" in text and "vllm 0.32.0" in text
    assert "| ours | 41 | 31.50 |\n| off | 30 |  |" in text
    assert text.count("It loses at 128, because.") == 2
    assert "Left out: fixed1 (no memory)." in text
    assert "/machine" not in (root / "docs/benchmarks/h200-serving.json").read_text()
    assert (root / "docs/benchmarks/h200-serving-2-frontier.svg").exists()


def test_readme_table_is_replaced_in_place(root: Path, tmp_path: Path) -> None:
    for rates in (RATES, {**RATES, "ours": 300.0}):
        folder = measured(tmp_path / f"{rates['ours']:.0f}", rates)
        write(root, demo=folder)
        text = (root / "README.md").read_text()
        assert text.startswith("# T\n<!-- cpu-demo: end -->\n") and text.endswith("\nrest\n")
        assert text.count("<!-- h200-serving: begin -->") == 1
        line = f"| demo, short, T = 0 | 32 | 132 | 182 (K = 3) | 152 | {rates['ours'] + 32.1:.0f} |"
        assert line in text


@pytest.mark.parametrize(
    ("ours", "settled", "missed"),
    [
        (200.0, 4, []),
        (200.0, 30, ["burst: windows"]),
        (200.0, None, ["burst: windows"]),
        (90.0, 4, ["every load", "128 and 256", "geometric mean", "p99", "burst: no phase"]),
    ],
)
def test_goals_are_judged_by_the_cells(
    root: Path, tmp_path: Path, ours: float, settled: int | None, missed: list[str]
) -> None:
    """Catches a goal that is called reached because nobody looked."""
    folder = measured(tmp_path / "a", {**RATES, "ours": ours}, settled)
    goals = write(root, demo=folder)["goals"]
    assert len(goals) == 6
    found = [g["goal"] for g in goals if not g["met"]]
    assert len(found) == len(missed)
    assert all(any(goal.startswith(start) for goal in found) for start in missed)


def test_nothing_is_written_without_data(root: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()  # conditions without a cell
    header = json.dumps({"schema": 1, "fingerprint": PRINT})
    (tmp_path / "empty" / "cells.jsonl").write_text(header + "\n")
    elsewhere = measured(tmp_path / "cpu")  # by "a GPU", whatever that is
    before = sorted(root.rglob("*"))
    assert h200_serving.main(["--run", f"x={tmp_path / 'empty'}"]) == 2
    assert h200_serving.main(["--run", "no folder"]) == 2
    assert h200_serving.main(["--run", f"x={elsewhere}"]) == 2
    assert sorted(root.rglob("*")) == before
