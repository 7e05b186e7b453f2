"""A local Ray cluster for tests, and a client that retries until a request has been answered."""

import json
import os
import shutil
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.support.patience import PATIENCE_S


@contextmanager
def local_ray(cpus: int) -> Iterator[Any]:
    """A one-node cluster of `cpus` logical CPUs, gone at exit; yields the module `ray`."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    import ray

    folder = tempfile.mkdtemp(prefix="ray-")  # short: Ray's sockets live below it
    ray.init(
        address="local",  # never one that somebody else has started on this machine
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=80 << 20,
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=folder,
    )
    try:
        yield ray
    finally:
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Ledger:
    """What a retrying client saw: whole answers by request id, and how often it had to retry."""

    answers: dict[str, list[str]] = field(default_factory=dict)
    retries: list[str] = field(default_factory=list)


class RetryingClient:
    """Sends each request until it has one whole answer; a broken one is thrown away.

    A stream counts as whole only if it ended with `[DONE]`.
    """

    def __init__(self, base: str, model: str, deadline_s: float = PATIENCE_S) -> None:
        self._base, self._model = base, model
        self._deadline = time.monotonic() + deadline_s
        self._lock = threading.Lock()
        self.ledger = Ledger()

    def run(self, requests: Sequence[tuple[str, dict[str, Any]]], threads: int) -> Ledger:
        """Complete all (id, body) pairs, `threads` at a time."""
        with ThreadPoolExecutor(threads) as pool:
            for _ in pool.map(lambda item: self._complete(*item), requests):
                pass
        return self.ledger

    def completed(self) -> int:
        """Whole answers so far."""
        with self._lock:
            return sum(map(len, self.ledger.answers.values()))

    def _complete(self, request_id: str, body: dict[str, Any]) -> None:
        while True:
            try:
                text = self._send(request_id, body)
            except (OSError, ValueError, LookupError) as error:
                if time.monotonic() > self._deadline:
                    raise AssertionError(f"{request_id} was never answered: {error}") from error
                with self._lock:
                    self.ledger.retries.append(request_id)
                time.sleep(0.3)
                continue
            with self._lock:
                self.ledger.answers.setdefault(request_id, []).append(text)
            return

    def _send(self, request_id: str, body: dict[str, Any]) -> str:
        request = urllib.request.Request(
            f"{self._base}/v1/completions",
            json.dumps({"model": self._model, **body}).encode(),
            {"Content-Type": "application/json", "X-Request-Id": request_id},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
            if not body.get("stream"):
                return str(json.load(answer)["choices"][0]["text"])
            pieces, done = [], False
            for raw in answer:
                data = raw.decode().strip().removeprefix("data: ")
                if data == "[DONE]":
                    done = True
                elif data:
                    pieces.append(json.loads(data)["choices"][0]["text"])
            if not done:
                raise ValueError("the stream broke off")
            return "".join(pieces)
