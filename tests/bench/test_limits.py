"""Runs with little time: what is started at once, what is left out, and what a failure costs."""

import os
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.bench.fakes import FakeHost
from tests.bench.test_runner import PRINT, QUESTIONS, SPEEDS, grid
from tests.support.patience import PATIENCE_S
from vllm_dspark.bench import fleet, runner
from vllm_dspark.bench.fleet import Limits
from vllm_dspark.bench.modes import BenchError, EngineLaunch, Mode
from vllm_dspark.bench.process import WorkerHost
from vllm_dspark.bench.progress import Progress
from vllm_dspark.bench.runner import run
from vllm_dspark.bench.store import CellStore
from vllm_dspark.bench.workload import CellOrder

MODES = ("off", "fixed3", "fixed7", "ours")


class Clock:
    """Stands in for the module `time` in what watches the time limit."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (fleet, runner):
        monkeypatch.setattr(module, "time", made)
    return made


class SlowHost(FakeHost):
    """Notes when it starts and stops; some starts or cells fail.

    meeting: those that may start at once wait there for each other.
    """

    together = 0
    most = 0
    lock = threading.Lock()
    meeting: threading.Barrier | None = None

    def __init__(self, launch: EngineLaunch, log: list[str], broken: str = "") -> None:
        super().__init__(launch, SPEEDS, log)
        self.broken = broken == launch.mode.name

    def start(self) -> None:
        with SlowHost.lock:
            SlowHost.together += 1
            SlowHost.most = max(SlowHost.most, SlowHost.together)
        if SlowHost.meeting is not None and not self.launch.times_steps:
            SlowHost.meeting.wait(PATIENCE_S)
        super().start()
        self.log.append(f"with {SlowHost.together}")
        with SlowHost.lock:
            SlowHost.together -= 1
        if self.broken:
            raise BenchError("no memory")


class Told(Progress):
    """Remembers what it was told."""

    def __init__(self) -> None:
        self.failures: dict[str, str] = {}
        self.left = 0

    def failed(self, mode: Mode, error: BenchError) -> None:
        self.failures[mode.name] = str(error)

    def out_of_time(self, cells: int) -> None:
        self.left = cells


def measure(path: Path, limits: Limits, make: Any, told: Progress) -> dict[str, Any]:
    launches = [EngineLaunch(Mode.parse(name), {}, {}) for name in MODES]
    store = CellStore(path, PRINT)
    return run(grid(), QUESTIONS, launches, make, store, told, limits=limits)


def test_engines_that_time_their_steps_start_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a cost table measured beside other engines that load and compile."""
    log: list[str] = []
    monkeypatch.setattr(SlowHost, "most", 0)
    monkeypatch.setattr(SlowHost, "meeting", threading.Barrier(3))
    limits = Limits(parallel_starts=3)
    measure(tmp_path / "c", limits, lambda launch: SlowHost(launch, log), Told())
    assert SlowHost.most == 3
    assert log[log.index("start ours") + 1] == "with 1"
    assert max(log.index(f"start {m}") for m in MODES[:3]) < log.index("start ours")
    assert {line for line in log if line.startswith("stop")} == {f"stop {m}" for m in MODES}


@pytest.mark.parametrize("at_once", [1, 3])
def test_a_mode_that_does_not_start_costs_only_itself(tmp_path: Path, at_once: int) -> None:
    log: list[str] = []

    def make(launch: EngineLaunch) -> SlowHost:
        return SlowHost(launch, log, broken="fixed3")

    with pytest.raises(BenchError, match="no memory"):
        measure(tmp_path / "a", Limits(parallel_starts=at_once), make, Told())
    told = Told()
    limits = Limits(parallel_starts=at_once, keep_going=True)
    facts = measure(tmp_path / "b", limits, make, told)
    assert told.failures == {"fixed3": "no memory"} and told.left == 2 * 3
    assert facts["fixed3"] == {"error": "no memory"} and facts["ours"] == {"start_s": 1.0}
    cells = CellStore(tmp_path / "b", PRINT).cells
    assert len(cells) == 3 * 2 * 3
    assert {line for line in log if line.startswith("stop")} == {f"stop {m}" for m in MODES}


def test_a_mode_that_fails_while_measured_is_dropped(tmp_path: Path) -> None:
    """Catches a dead engine that is asked again and again, or takes the others' cells with it."""
    log: list[str] = []

    class Dying(FakeHost):
        cells = 0

        def run(self, mode: Mode, order: CellOrder) -> dict[str, Any]:
            Dying.cells += mode.name == "fixed7"
            if mode.name == "fixed7" and Dying.cells > 4:  # after warm-up and two cells
                raise BenchError("its process ended")
            return super().run(mode, order)

    told = Told()
    limits = Limits(keep_going=True)
    facts = measure(tmp_path / "c", limits, lambda launch: Dying(launch, SPEEDS, log), told)
    assert facts["fixed7"] == {"start_s": 1.0, "error": "its process ended"}
    assert Dying.cells == 5
    keys = CellStore(tmp_path / "c", PRINT).cells.keys()
    assert sum(key.mode == "fixed7" for key in keys) == 2
    assert sum(key.mode == "ours" for key in keys) == 2 * 3


def test_nothing_is_begun_that_would_not_be_done_in_time(tmp_path: Path, clock: Clock) -> None:
    """Catches a run that the machine's own limit cuts off, and one that cannot go on later."""
    log: list[str] = []

    class Tiring(FakeHost):
        def run(self, mode: Mode, order: CellOrder) -> dict[str, Any]:
            if order.phases[0].concurrency == 4:
                clock.now += 0.1
            return super().run(mode, order)

    told = Told()
    make = lambda launch: Tiring(launch, SPEEDS, log)  # noqa: E731
    measure(tmp_path / "c", Limits(seconds=1.3), make, told)
    cells = CellStore(tmp_path / "c", PRINT).cells
    # four warm-ups of 0.1 s, then chunks of 0.4 s at a load of 4: the third would end at 1.6 s
    assert sum(k.concurrency == 4 for k in cells) == 4 * 2 and told.left == 4
    # what is short still fits behind what is long
    assert sum(k.concurrency == 1 for k in cells) == 4 * 3
    told = Told()
    measure(tmp_path / "c", Limits(), make, told)
    assert told.left == 0 and len(CellStore(tmp_path / "c", PRINT).cells) == 4 * 2 * 3


def test_no_engine_starts_when_the_time_is_over(tmp_path: Path, clock: Clock) -> None:
    log: list[str] = []
    told = Told()
    limits = Limits(seconds=0.1, keep_going=True)

    class Late(FakeHost):
        def start(self) -> None:
            clock.now += 0.2
            super().start()

    measure(tmp_path / "c", limits, lambda launch: Late(launch, SPEEDS, log), told)
    assert [line for line in log if line.startswith("start")] == ["start off"]
    assert told.failures.keys() == {"fixed3", "fixed7", "ours"}


@pytest.mark.parametrize(
    ("script", "said"), [("kill -ILL $$", "ended by SIGILL"), ("exit 3", "ended with code 3")]
)
def test_the_way_a_worker_ended_is_said(tmp_path: Path, script: str, said: str) -> None:
    """Catches "its process ended" where the signal would have told why."""
    host = WorkerHost(EngineLaunch(Mode.parse("ours"), {}, {}), {}, tmp_path)
    (tmp_path / "ours.log").write_text("last words\n")
    host._process = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE)
    for_nobody, commands = os.pipe()
    answers, from_nobody = os.pipe()
    os.close(from_nobody)
    host._commands, host._answers = os.fdopen(commands, "w"), os.fdopen(answers)
    with pytest.raises(BenchError, match=f"{said}.*\n?last words"):
        host.proceed(1.0)
    os.close(for_nobody)
    host._process.wait()
    host._commands.close()
    host._answers.close()
