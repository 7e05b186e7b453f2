"""The parent's side of worker processes: start, ask for cells, stop."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Protocol

from vllm_dspark.bench.modes import BenchError, EngineLaunch, Mode
from vllm_dspark.bench.workload import CellOrder

_STOP_S = 20.0
_LOG_TAIL = 20


class Host(Protocol):
    """Something that runs cells of one engine; a worker process or a server."""

    facts: dict[str, Any]

    def start(self) -> None:
        """Bring the engine up; blocks."""

    def run(self, mode: Mode, order: CellOrder) -> dict[str, Any]:
        """One cell's figures."""

    def begin(self, mode: Mode, order: CellOrder, seconds: float) -> dict[str, Any] | None:
        """The first slice of a cell; its figures if that was all."""

    def proceed(self, seconds: float) -> dict[str, Any] | None:
        """A further slice of the cell that was begun."""

    def cpu_seconds(self) -> float:
        """CPU time that the engine's processes have used so far."""

    def stop(self) -> None:
        """End it."""


class WorkerHost:
    """An offline engine in a process of its own."""

    def __init__(
        self,
        launch: EngineLaunch,
        environment: dict[str, str],
        folder: Path,
        *,
        favoured: bool = False,
    ) -> None:
        """environment: of this process, to which the launch's is added; favoured: see outrank."""
        self._launch = launch
        self._favoured = favoured
        self._environment = {**environment, **launch.environment}
        self._log = folder / f"{launch.mode.name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._commands: IO[str] | None = None
        self._answers: IO[str] | None = None
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Start process and engine."""
        for_child, ours = os.pipe()
        from_child, theirs = os.pipe()
        command = [sys.executable, "-m", "vllm_dspark.bench.worker", str(for_child), str(theirs)]
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=self._environment,
                pass_fds=(for_child, theirs),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        if self._favoured:
            outrank(self._process.pid)
        os.close(for_child)
        os.close(theirs)
        self._commands, self._answers = os.fdopen(ours, "w"), os.fdopen(from_child)
        self.facts = self._ask(
            {"arguments": self._launch.arguments, "switchable": bool(self._launch.shared)}
        )

    def run(self, mode: Mode, order: CellOrder) -> dict[str, Any]:
        """One cell's figures; of `ours` or of a mode that shares its engine."""
        figures = self._begin(mode, order, None)
        if figures is None:
            raise BenchError(f"mode {mode.name}: a whole cell came back unfinished")
        return figures

    def begin(self, mode: Mode, order: CellOrder, seconds: float) -> dict[str, Any] | None:
        """The first slice of a cell; its figures if that was all."""
        return self._begin(mode, order, seconds)

    def proceed(self, seconds: float) -> dict[str, Any] | None:
        """A further slice of the cell that was begun."""
        figures: dict[str, Any] | None = self._ask({"seconds": seconds})["figures"]
        return figures

    def _begin(self, mode: Mode, order: CellOrder, seconds: float | None) -> dict[str, Any] | None:
        scheduling = mode == self._launch.mode
        command = {"scheduling": scheduling, "cell": order.as_json(), "seconds": seconds}
        figures: dict[str, Any] | None = self._ask(command)["figures"]
        return figures

    def _ask(self, command: dict[str, Any]) -> dict[str, Any]:
        if self._commands is None or self._answers is None:
            raise BenchError(f"mode {self._launch.mode.name}: the engine was not started")
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            self._commands.write(json.dumps(command) + "\n")
            self._commands.flush()
        line = self._answers.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._how_it_ended()}
        if "error" in answer:
            raise BenchError(
                f"mode {self._launch.mode.name}: {answer['error']}; the end of its log "
                f"({self._log}):\n{self._log_tail()}"
            )
        return answer

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(_STOP_S) if self._process is not None else None
        except subprocess.TimeoutExpired:
            return "its process closed its pipe without an answer"
        if code is not None and code < 0:
            return f"its process was ended by {signal.Signals(-code).name}"
        return f"its process ended with code {code}"

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_LOG_TAIL:])

    def cpu_seconds(self) -> float:
        """CPU time of the session's processes so far."""
        return session_cpu_seconds(self._process.pid) if self._process is not None else 0.0

    def stop(self) -> None:
        """Close the pipe, wait, then kill what is left of the process group."""
        if self._process is None:
            return
        for pipe in (self._commands, self._answers):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None

    def __enter__(self) -> WorkerHost:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


def outrank(session: int) -> None:
    """Let a session's processes go before those of other sessions, as far as Linux allows.

    Where autogroups are on, `nice` only ranks processes within a session: the session itself is
    what has to be favoured. BenchError without the right to do so (root).
    """
    path = Path(f"/proc/{session}/autogroup")
    try:
        if path.exists():
            path.write_text("-20")
        os.setpriority(os.PRIO_PGRP, session, -20)
    except OSError as error:
        raise BenchError(f"--outrank: {error}; run as root, or leave the option out") from error


def session_cpu_seconds(session: int) -> float:
    """User and system time of all processes of a session (proc(5), stat fields 6, 14, 15)."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == session:
                ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_cpu_seconds() -> float:
    """CPU time that the whole machine has used so far, idle and waiting left out."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq = (int(value) for value in fields[:7])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
