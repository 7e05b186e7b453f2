"""A command on a terminal of its own: what it shows can be read while it runs."""

import os
import pty
import re
import signal
import subprocess
import threading
from collections.abc import Sequence
from types import TracebackType

from tests.support.patience import PATIENCE_S

# Colours, cursor movements and the like (ECMA-48, "CSI").
_CONTROLS = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_SIZE = {"TERM": "xterm", "COLUMNS": "120", "LINES": "60"}


class OnTerminal:
    """A context manager; standard error is no terminal and is kept apart."""

    def __init__(self, command: Sequence[str]) -> None:
        self._terminal, theirs = pty.openpty()
        self.process = subprocess.Popen(
            command,
            env={**os.environ, **_SIZE},
            # A suite in the background of a shell ignores SIGINT, and so would its children.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(theirs)
        self._seen = bytearray()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        try:
            while part := os.read(self._terminal, 1 << 16):
                self._seen += part
        except OSError:  # how Linux says that nobody writes any more
            pass

    def shown(self) -> str:
        """All that was shown so far, without control sequences."""
        return _CONTROLS.sub("", bytes(self._seen).decode(errors="replace"))

    def interrupt(self) -> tuple[int, str]:
        """What Ctrl-C does; exit code and standard error once the command has ended."""
        self.process.send_signal(signal.SIGINT)
        _, errors = self.process.communicate(timeout=PATIENCE_S)
        self._reader.join()
        return self.process.returncode, errors

    def __enter__(self) -> "OnTerminal":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        os.close(self._terminal)
