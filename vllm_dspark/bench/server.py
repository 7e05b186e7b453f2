"""A mode as an HTTP server with streaming clients, in the load generator's terms."""

from __future__ import annotations

import queue
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vllm_dspark.bench.drive import Arrival, Counters, drive, summarise
from vllm_dspark.bench.modes import BenchError, EngineLaunch, Mode, server_arguments
from vllm_dspark.bench.process import outrank, session_cpu_seconds
from vllm_dspark.bench.workload import Ask, CellOrder
from vllm_dspark.demo.client import MODEL, Client, ServerError
from vllm_dspark.demo.server import ServerProcess

_IDLE_S = 60.0
_COUNTED = ("vllm:spec_decode_", "vllm:dspark_", "vllm:num_preemptions", "vllm:prompt_tokens")
_GAUGE_WORDS = ("_created", "_bucket")


class HttpEngine:
    """Requests to one server, a thread each; arrivals come back through a queue."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._arrived: queue.Queue[Arrival | Exception] = queue.Queue()
        self._running: dict[int, threading.Thread] = {}
        self._cancelled = threading.Event()

    def add(self, request: int, ask: Ask, temperature: float) -> None:
        """Send one request."""
        thread = threading.Thread(target=self._stream, args=(request, ask, temperature))
        self._running[request] = thread
        thread.start()

    def _stream(self, request: int, ask: Ask, temperature: float) -> None:
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": ask.max_tokens,
            "temperature": temperature,
            "ignore_eos": True,
            "stream": True,
            "return_token_ids": True,
        }
        if isinstance(ask.prompt, str):
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": ask.prompt}]
        else:
            path, body["prompt"] = "/v1/completions", ask.prompt
        try:
            for event in self._client.events(path, body):
                if self._cancelled.is_set():
                    return
                tokens = sum(len(c.get("token_ids") or ()) for c in event.get("choices") or ())
                if tokens:
                    self._arrived.put(Arrival(request, tokens, done=False))
            self._arrived.put(Arrival(request, 0, done=True))
        except (OSError, ServerError) as error:
            self._arrived.put(error)

    def step(self) -> list[Arrival]:
        """Wait for the next arrival; all that have come by then."""
        found = [self._arrived.get()]
        while True:
            try:
                found.append(self._arrived.get_nowait())
            except queue.Empty:
                break
        arrivals = []
        for item in found:
            if isinstance(item, Exception):
                raise BenchError(f"a request to the server failed: {item}") from item
            arrivals.append(item)
        return arrivals

    def cancel(self, requests: Sequence[int]) -> None:
        """Break all streams off and wait until the server runs nothing."""
        self._cancelled.set()
        for thread in self._running.values():
            thread.join()
        self._running.clear()
        while not self._arrived.empty():
            self._arrived.get_nowait()
        self._cancelled.clear()
        deadline = time.monotonic() + _IDLE_S
        while sum(_samples(self._client.metrics(), ("vllm:num_requests_running",)).values()) > 0:
            if time.monotonic() > deadline:
                raise BenchError(
                    f"the server is still busy {_IDLE_S:.0f} s after its streams ended"
                )
            time.sleep(0.05)

    def pause(self) -> None:
        """Not for servers: their streams do not stand still (ServerHost.begin says so)."""

    def resume(self) -> None:
        """As `pause`."""

    def counters(self) -> Counters:
        """Running sums from /metrics."""
        return _samples(self._client.metrics(), _COUNTED)

    def verified(self) -> tuple[int, int] | None:
        """Not step by step: a client does not see steps."""
        return None


def _samples(text: str, prefixes: tuple[str, ...]) -> Counters:
    """Samples of some families, by name and labels (without model name and engine)."""
    found: Counters = {}
    for line in text.splitlines():
        if not line.startswith(prefixes):
            continue
        name, _, value = line.rpartition(" ")
        family, _, labels = name.partition("{")
        if family.endswith(_GAUGE_WORDS[0]):
            continue
        kept = [
            part.replace('"', "")
            for part in labels.rstrip("}").split('",')
            if part and not part.startswith(("model_name=", "engine="))
        ]
        key = f"{family}{{{','.join(sorted(kept))}}}" if kept else family
        found[key] = found.get(key, 0.0) + float(value)
    return found


class ServerHost:
    """`vllm-dspark serve` with one mode's arguments, and clients of it in this process."""

    def __init__(
        self,
        launch: EngineLaunch,
        environment: dict[str, str],
        folder: Path,
        *,
        favoured: bool = False,
    ) -> None:
        """As WorkerHost."""
        if launch.shared:
            names = ", ".join(mode.name for mode in launch.shared)
            raise BenchError(f"servers cannot share an engine ({names}): leave out --share-engines")
        self._launch = launch
        self._favoured = favoured
        self._environment = {**environment, **launch.environment}
        self._folder = folder
        self._scratch = tempfile.TemporaryDirectory(prefix="dspark-bench-")  # sockets: short paths
        self._server: ServerProcess | None = None
        self._engine: HttpEngine | None = None
        self.facts: dict[str, Any] = {}

    def start(self) -> None:
        """Start the server and wait until it answers."""
        name = self._launch.mode.name
        socket_path = Path(self._scratch.name) / f"{name}.sock"
        command = [sys.executable, "-m", "vllm_dspark.cli", "serve"]
        command += server_arguments(self._launch.arguments)
        command += ["--uds", str(socket_path), "--served-model-name", MODEL]
        self._server = ServerProcess(
            name, command, self._environment, socket_path, self._folder / f"{name}.log"
        )
        if self._favoured:
            outrank(self._server.pid)
        self.facts = {"start_s": self._server.wait_until_ready()}
        self._engine = HttpEngine(self._server.client)

    def run(self, mode: Mode, order: CellOrder) -> dict[str, Any]:
        """One cell's figures."""
        if self._engine is None:
            raise BenchError(f"mode {mode.name}: the server was not started")
        return summarise(drive(self._engine, order))

    def begin(self, mode: Mode, order: CellOrder, seconds: float) -> dict[str, Any] | None:
        """Not for servers: their streams do not stand still."""
        raise BenchError("servers cannot run cells in slices: leave out --slices")

    def proceed(self, seconds: float) -> dict[str, Any] | None:
        """As `begin`."""
        raise BenchError("servers cannot run cells in slices: leave out --slices")

    def cpu_seconds(self) -> float:
        """CPU time of the server's processes."""
        return session_cpu_seconds(self._server.pid) if self._server is not None else 0.0

    def stop(self) -> None:
        """Stop the server."""
        if self._server is not None:
            self._server.stop()
            self._server = None
        self._scratch.cleanup()
