"""Waiting for a quiet machine: a command that holds some lock while its own command runs.

    vllm-dspark bench --gate 'flock /tmp/machine.lock'

The gate command is started with a small shell behind it; when that says it runs, the gate is open
and the machine ours, until the shell's input ends.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

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
