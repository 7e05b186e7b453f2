"""Servers of the demo: `vllm-dspark serve` as child processes, on Unix sockets."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from vllm_dspark.config import process_environment
from vllm_dspark.demo.client import MODEL, Client, ServerError
from vllm_dspark.demo.target import calibration_path

if TYPE_CHECKING:
    from typing_extensions import Self

START_TIMEOUT_S = 900.0
STOP_TIMEOUT_S = 30.0
_LOG_TAIL = 25  # lines of the server's log that an error shows

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


@dataclass(frozen=True)
class EngineSpec:
    """One way to serve the target. `environment` is added to the caller's."""

    name: str
    title: str
    environment: dict[str, str]
    drafter: Path | None = None


@dataclass(frozen=True)
class ServeSettings:
    """What all engines of one run have in common."""

    target: Path
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    max_num_seqs: int = 8
    kv_cache_bytes: int = 256 << 20
    num_speculative_tokens: int = 7
    extra_arguments: tuple[str, ...] = ()


# The plugin is installed beside vLLM, so "as installed, without us" has to be asked for: no
# general plugins, none of our Triton backend, the V1 runner.
V1 = EngineSpec(
    "v1",
    "V1 plain",
    {"VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_PLUGINS": "", "TRITON_BACKENDS_IN_TREE": "1"},
)
V2 = EngineSpec("v2", "V2 plain", {"VLLM_USE_V2_MODEL_RUNNER": "1"})


def dspark(drafter: Path) -> EngineSpec:
    """The plugin with its default options and this drafter."""
    return EngineSpec("dspark", "DSpark", {}, drafter)


def serve_command(spec: EngineSpec, settings: ServeSettings, socket_path: Path) -> list[str]:
    """The command line of one server."""
    command = [sys.executable, "-m", "vllm_dspark.cli", "serve", str(settings.target)]
    command += ["--uds", str(socket_path), "--served-model-name", MODEL]
    command += ["--dtype", settings.dtype, "--max-model-len", str(settings.max_model_len)]
    command += ["--max-num-seqs", str(settings.max_num_seqs)]
    command += ["--kv-cache-memory-bytes", str(settings.kv_cache_bytes)]
    command += settings.extra_arguments
    if spec.drafter is not None:
        # Defaults throughout, but step costs are measured by this run: those that an earlier one
        # left in the user's cache may come from a busier machine.
        options = {"cache_dir": str(socket_path.parent / "artifacts")}
        calibration = calibration_path(spec.drafter, settings.num_speculative_tokens)
        if calibration is not None:
            options["calibration"] = str(calibration)
        speculative = {
            "method": "dspark",
            "model": str(spec.drafter),
            "num_speculative_tokens": settings.num_speculative_tokens,
            "dspark": options,
        }
        command += ["--speculative-config", json.dumps(speculative)]
    return command


class ServerProcess:
    """A server that a command started; use it as a context manager, or call `stop`."""

    def __init__(
        self,
        title: str,
        command: list[str],
        environment: dict[str, str],
        socket_path: Path,
        log_path: Path,
    ) -> None:
        """Start it. socket_path: where the command makes it listen (short: ~100 bytes)."""
        self.title = title
        self.log_path = log_path
        socket_path.unlink(missing_ok=True)  # of an earlier run with the same folder
        self.client = Client(socket_path)
        with self.log_path.open("w") as log:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # so that `stop` reaches engine core and worker too
            )

    @property
    def pid(self) -> int:
        """Process id, which is also that of the session of all its processes."""
        return self._process.pid

    def wait_until_ready(self) -> float:
        """Block until the server answers; returns the seconds it took."""
        started = time.monotonic()
        while not self.client.is_ready():
            code = self._process.poll()
            if code is not None:
                raise ServerError(
                    f"the server '{self.title}' ended with code {code} before it was ready; "
                    f"the end of its log ({self.log_path}):\n{self._log_tail()}"
                )
            if time.monotonic() - started > START_TIMEOUT_S:
                raise ServerError(
                    f"the server '{self.title}' was not ready after {START_TIMEOUT_S:.0f} s; "
                    f"the end of its log ({self.log_path}):\n{self._log_tail()}"
                )
            time.sleep(0.2)
        return time.monotonic() - started

    def stop(self) -> None:
        """Ask for a clean shutdown; kill what is left of the process group after a while."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _log_tail(self) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_TAIL:])

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()


class Server(ServerProcess):
    """One of the demo's engines as a running server."""

    def __init__(self, spec: EngineSpec, settings: ServeSettings, folder: Path) -> None:
        """Start it. folder: where socket and log go (a short path: sockets allow ~100 bytes)."""
        self.spec = spec
        socket_path = folder / f"{spec.name}.sock"
        environment = {**process_environment(), **OFFLINE, **spec.environment}
        # Each engine decides anew; a value of the caller would turn all of them into one kind.
        if "VLLM_USE_V2_MODEL_RUNNER" not in spec.environment:
            environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
        super().__init__(
            spec.title,
            serve_command(spec, settings, socket_path),
            environment,
            socket_path,
            folder / f"{spec.name}.log",
        )
