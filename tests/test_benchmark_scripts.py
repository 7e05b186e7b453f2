"""The measuring scripts behind docs/benchmarks/, at sizes of a second: that they run, not what for.

Pages mark their commands with this file (tests/support/doc_commands.py). The figures on a page come
from a quiet machine; here a script only must not have fallen behind the code that it measures.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import metrics_cost, planner_micro, simulator_validation
from tests.artifacts.records import calibration_record, cost_record
from tests.cli.test_calibrate import record as record_pairs
from tests.support.doc_commands import ROOT
from tests.support.engines import ENGINE_ENVIRONMENT
from vllm_dspark.artifacts.store import write_record


def test_planner_micro(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Catches a part of the planner that the script no longer calls as it is called."""
    monkeypatch.setattr("sys.argv", ["x", "--repeats", "3", "--json", str(tmp_path / "x.json")])
    planner_micro.main()
    found = json.loads((tmp_path / "x.json").read_text())
    assert len([key for key in found if "/" in key]) == 8
    assert all(row["best_us"] > 0 for key in found if "/" in key for row in found[key])
    assert "256 requests" in capsys.readouterr().out


def test_metrics_cost(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    """Catches metrics that are no longer opened or published as the script does it."""
    monkeypatch.setattr(metrics_cost, "REPEATS", 1)
    monkeypatch.setattr(metrics_cost, "CALLS", 20)
    metrics_cost.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["1", "64", "256"]
    assert all("both files" in line for line in lines)


@pytest.mark.engine
def test_scheduler_cost(tmp_path: Path) -> None:
    """Catches a scheduler that the script can no longer drive; in a process of its own, since it
    wraps methods of vLLM's.
    """
    words = ["--requests", "1", "--steps", "3", "--json", str(tmp_path / "x.json")]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scheduler_cost", *words],
        cwd=ROOT, env={**os.environ, **ENGINE_ENVIRONMENT},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads((tmp_path / "x.json").read_text()).values()
    assert {"stock"} < found.keys()
    assert all("added_us" in variant for variant in found.values())


@pytest.mark.engine
def test_scheduler_churn() -> None:
    """Catches a script that ends at its start, or a load under which nothing is planned."""
    words = ["--requests", "4", "--turns", "1"]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.scheduler_churn", *words],
        cwd=ROOT, env={**os.environ, **ENGINE_ENVIRONMENT},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("4 requests, stock: schedule", "4 requests, ours: schedule", "net:", "plans: {'"):
        assert name in done.stdout


def _cells(path: Path) -> Path:
    """Cells of a benchmark in which every mode made its tokens at 100 a second and request."""
    counters = {simulator_validation.EMITTED: 300.0, simulator_validation.STEPS: 100.0}
    lines = [
        {
            "key": {"workload": "decode", "temperature": t, "concurrency": n, "mode": mode},
            "figures": {
                "counters": {} if mode == "off" else counters,
                "tokens_per_s": 100.0 * n * (1.0 if mode == "off" else 2.0),
            },
        }
        for t in (0.0, 1.0)
        for n in (1, 4)
        for mode in ("off", "fixed3", "ours")
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_simulator_validation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Catches a comparison that cannot be repeated, or that compares other figures."""
    write_record(tmp_path / "table.json", cost_record())
    write_record(tmp_path / "calibration.json", calibration_record())
    pairs = record_pairs(tmp_path / "pairs.jsonl", prompts=8)
    options = {
        "cells": _cells(tmp_path / "cells.jsonl"),
        "pairs": pairs,
        "cost-table": tmp_path / "table.json",
        "calibration": tmp_path / "calibration.json",
    }
    words = [word for name, path in options.items() for word in (f"--{name}", str(path))]
    monkeypatch.setattr("sys.argv", ["x", *words])
    simulator_validation.main()
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if re.match(r"\| [01] \| ", line)]
    assert len(rows) == 12
    assert sum("| fixed3 | 3.00 |" in row for row in rows) == 4, "measured accepted length"
    for name in ("accepted length", "time per step", "tokens/s"):
        assert f"{name}: typical error" in out
