"""Waiting for a quiet machine: a command that holds some lock while its own command runs.

    vllm-dspark bench --gate 'flock /tmp/machine.lock'

The gate command is started with a small shell behind it; when that says it runs, the gate is open
and the machine ours, until the shell's input ends.
"""

from __future__ import annotations

import shlex
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from vllm_dspark.bench.modes import BenchError

_HOLD = ["sh", "-c", "echo open; cat >/dev/null"]


@contextmanager
def hold(command: str) -> Iterator[None]:
    """Hold the gate; an empty command is no gate."""
    if not command:
        yield
        return
    try:
        process = subprocess.Popen(
            [*shlex.split(command), *_HOLD],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    except OSError as error:
        raise BenchError(f"the gate command {command!r} cannot be run: {error}") from error
    with process:
        if process.stdout is None or process.stdout.readline().strip() != "open":
            raise BenchError(
                f"the gate command {command!r} ended (code {process.wait()}) without running the "
                "command behind it; it must be a prefix like 'flock FILE'"
            )
        try:
            yield
        finally:
            if process.stdin is not None:
                process.stdin.close()


class HeldGate:
    """Opens a gate for a chunk and keeps it open for further ones while there is time."""

    def __init__(self, command: str, seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._stack = ExitStack()
        self._opened = 0.0
        self._longest = 0.0  # chunk so far

    def __enter__(self) -> HeldGate:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._opened = 0.0

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """The gate is open inside; afterwards only if another chunk as long would fit."""
        if not self._opened:
            self._stack.enter_context(hold(self._command))
            self._opened = time.monotonic()
        begun = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - begun)
        if time.monotonic() - self._opened + self._longest > self._seconds:
            self.__exit__()
