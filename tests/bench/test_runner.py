"""The order of cells, resuming, and who runs what, on hosts that need no engine."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.bench.fakes import FakeHost
from vllm_dspark.bench import gate
from vllm_dspark.bench.modes import BenchError, EngineLaunch, Mode
from vllm_dspark.bench.progress import Progress
from vllm_dspark.bench.report import header_and_lines, make_report, markdown
from vllm_dspark.bench.runner import Gates, Grid, run
from vllm_dspark.bench.store import Cell, CellStore
from vllm_dspark.bench.workload import WORKLOADS, Question, Sizes

SPEEDS = {"off": 1, "fixed3": 2, "fixed7": 3, "ours": 4}
QUESTIONS = [Question(d, f"{d} {i}") for d in ("chat", "code", "math") for i in range(9)]
PRINT = {"device": "a CPU"}


def grid(repeats: int = 3, modes: tuple[str, ...] = tuple(SPEEDS)) -> Grid:
    return Grid(
        (WORKLOADS["short"],),
        (1, 4),
        (0.0,),
        repeats,
        tuple(map(Mode.parse, modes)),
        Sizes(8, 16),
    )


def engines(modes: tuple[str, ...] = tuple(SPEEDS)) -> list[EngineLaunch]:
    found = [EngineLaunch(Mode.parse(m), {}, {}) for m in modes if m != "fixed7"]
    ours = EngineLaunch(Mode.parse("ours"), {}, {}, (Mode.parse("fixed7"),))
    return [*(e for e in found if e.mode.name != "ours"), ours]


def measure(
    path: Path,
    what: Grid,
    progress: Progress | None = None,
    gates: Gates = Gates(),  # noqa: B008
) -> list[str]:
    log: list[str] = []
    run(
        what,
        QUESTIONS,
        engines(),
        lambda launch: FakeHost(launch, SPEEDS, log),
        CellStore(path, PRINT),
        progress or Progress(),
        gates,
    )
    return log


def timed(log: list[str]) -> list[str]:
    """Modes of the cells, without warm-up."""
    last = max(i for i, line in enumerate(log) if line.startswith("start"))
    runs = [line.split()[1] for line in log[last + 1 :] if line.startswith("run")]
    return runs[2 * 2 :]  # the last engine's own warm-up: two loads, two modes


def test_modes_take_turns_and_the_order_rotates(tmp_path: Path) -> None:
    """Catches modes measured one after the other, or always in the same order."""
    found = timed(measure(tmp_path / "c", grid(repeats=2)))
    assert found[:4] == ["off", "fixed3", "fixed7", "ours"]
    assert found[4:8] == ["fixed3", "fixed7", "ours", "off"]
    assert len(found) == 4 * 2 * 2


def test_slices_change_the_order_and_nothing_else(tmp_path: Path) -> None:
    """Catches a clock that runs while other modes have their turn, or cells that lose tokens."""
    log: list[str] = []
    modes = ("off", "fixed3", "ours")
    what = grid(repeats=2, modes=modes)
    for name, slice_s in (("whole", 0.0), ("sliced", 0.25)):
        log.clear()
        launches = [EngineLaunch(Mode.parse(m), {}, {}) for m in modes]
        store = CellStore(tmp_path / name, PRINT)
        run(
            replace(what, slice_s=slice_s),
            QUESTIONS,
            launches,
            lambda launch: FakeHost(launch, SPEEDS, log),
            store,
            Progress(),
        )
    whole, sliced = (CellStore(tmp_path / n, PRINT).cells for n in ("whole", "sliced"))
    assert whole.keys() == sliced.keys()
    for key, cell in whole.items():
        other = sliced[key]
        assert other.figures["tokens"] == cell.figures["tokens"]
        assert other.figures["seconds"] == pytest.approx(cell.figures["seconds"])
        assert other.figures["tpot_ms"] == pytest.approx(cell.figures["tpot_ms"])
    turns = [line for line in log if line.startswith(("begin", "proceed"))]
    assert turns[:5] == ["begin off", "begin fixed3", "begin ours", "proceed off", "proceed fixed3"]


def test_every_engine_is_stopped(tmp_path: Path) -> None:
    log = measure(tmp_path / "c", grid(repeats=1))
    assert {line for line in log if line.startswith("stop")} == {
        "stop off",
        "stop fixed3",
        "stop ours",
    }


class _Interrupted(Progress):
    def __init__(self, after: int) -> None:
        self.left = after

    def cell(self, cell: Cell) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def test_interrupted_run_is_taken_up_where_it_was(tmp_path: Path) -> None:
    """Catches cells measured twice or never after an interruption, and engines left behind."""
    with pytest.raises(KeyboardInterrupt):
        measure(tmp_path / "c", grid(), _Interrupted(after=5))
    store = CellStore(tmp_path / "c", PRINT)
    assert len(store.cells) == 5
    measure(tmp_path / "c", grid())
    lines = (tmp_path / "c").read_text().splitlines()
    assert len(lines) - 1 == len(set(lines)) - 1 == 4 * 2 * 3
    assert measure(tmp_path / "c", grid()) == []  # nothing is missing: no engine starts


def test_engines_of_finished_modes_do_not_start(tmp_path: Path) -> None:
    measure(tmp_path / "c", grid(modes=("off", "fixed3")))
    log = measure(tmp_path / "c", grid())
    assert [line for line in log if line.startswith("start")] == ["start ours"]


def test_report_of_a_run(tmp_path: Path) -> None:
    """Catches rows without the keys that others read, and ratios that miss the faster mode."""
    measure(tmp_path / "c", grid())
    found = make_report(PRINT, CellStore(tmp_path / "c", PRINT).cells.values())
    row = found["rows"][0]
    assert {
        "workload",
        "concurrency",
        "temperature",
        "off",
        "fixed",
        "stock_adaptive",
        "ours",
    } <= row.keys()
    assert row["fixed"].keys() == {"3", "7"} and row["stock_adaptive"] is None
    assert row["ours"] > row["fixed"]["7"] > row["fixed"]["3"] > row["off"] > 0
    ratio = row["ours_over_best_fixed"]
    assert ratio["value"] == pytest.approx(row["ours"] / row["fixed"]["7"], rel=0.2)
    assert ratio["chosen"] == {"fixed7": 3}
    assert found["overall"][0]["ours_over_best_single_fixed_k"]["value"] > 1.0
    header, lines = header_and_lines(found)
    assert header[3:7] == ["off", "fixed3", "fixed7", "ours"]
    assert lines[0][6].startswith("**")
    assert markdown(header, lines).count("\n") == 1 + len(found["rows"])


def test_gate_is_held_over_as_many_chunks_as_fit(tmp_path: Path) -> None:
    """Catches a gate that is opened for every cell, or kept beyond its time."""
    log = tmp_path / "log"
    script = tmp_path / "gate.sh"
    script.write_text(f'#!/bin/sh\necho open >> {log}\n"$@"\necho shut >> {log}\n')
    script.chmod(0o755)
    measure(tmp_path / "a", grid(), gates=Gates(chunk=str(script)))
    assert log.read_text().split() == ["open", "shut"] * 6
    log.unlink()
    measure(tmp_path / "b", grid(), gates=Gates(chunk=str(script), seconds=600.0))
    assert log.read_text().split() == ["open", "shut"]


def test_broken_gates_are_named() -> None:
    with pytest.raises(BenchError, match="cannot be run"), gate.hold("/nowhere/gate"):
        pass
    with (
        pytest.raises(BenchError, match="without running the command behind it"),
        gate.hold("true"),
    ):
        pass


BURN = """
import os, time
from vllm_dspark.bench.process import machine_cpu_seconds, session_cpu_seconds
before, machine = session_cpu_seconds(os.getsid(0)), machine_cpu_seconds()
end = time.process_time() + 0.5
while time.process_time() < end:
    pass
print(session_cpu_seconds(os.getsid(0)) - before, machine_cpu_seconds() - machine)
"""


def test_cpu_time_is_read() -> None:
    """Catches wrong fields of /proc, by burning a known amount.

    In a session of its own: what others have used is gone from a session when they end.
    """
    done = subprocess.run(
        [sys.executable, "-c", BURN],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        start_new_session=True,
    )
    own, machine = map(float, done.stdout.split())
    assert 0.4 <= own <= 0.6
    assert machine >= 0.4
