"""A small HTTP client for a vLLM server on a Unix socket: streaming completions and counters.

Standard library only. The demo measures from outside, as a user of the server would: the clock
starts when the request is sent and stops at the last streamed chunk.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MODEL = "demo"  # the name under which the demo's servers serve their target
REQUEST_TIMEOUT_S = 600.0
# The engine's counters reach /metrics a moment after the last token reached the client.
_SETTLE_S = 0.02

OnStep = Callable[["Completion"], None]


class ServerError(RuntimeError):
    """The server refused a request, broke off a stream or answered something unreadable."""


@dataclass
class Completion:
    """One streamed answer. `steps` holds the tokens of each chunk: one chunk per engine step."""

    prompt_token_ids: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    text: str = ""
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Seconds from sending the request to the last chunk."""
        return self.ended_s - self.started_s

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second, prefill included."""
        return len(self.token_ids) / self.elapsed_s if self.elapsed_s > 0 else 0.0


@dataclass(frozen=True)
class Step:
    """What a server without speculation says about one step: the two likeliest tokens."""

    token_id: int
    logprobs: dict[int, float]

    def gap(self, first: int, second: int) -> float | None:
        """Logit gap of two tokens, None when one of them is not among those returned."""
        if first not in self.logprobs or second not in self.logprobs:
            return None
        return self.logprobs[first] - self.logprobs[second]


@dataclass(frozen=True)
class SpeculationCounters:
    """Counters of /metrics since the server started; subtract two readings."""

    request_steps: int = 0
    drafted: int = 0
    accepted: int = 0

    def __sub__(self, other: SpeculationCounters) -> SpeculationCounters:
        return SpeculationCounters(
            self.request_steps - other.request_steps,
            self.drafted - other.drafted,
            self.accepted - other.accepted,
        )

    def __add__(self, other: SpeculationCounters) -> SpeculationCounters:
        return SpeculationCounters(
            self.request_steps + other.request_steps,
            self.drafted + other.drafted,
            self.accepted + other.accepted,
        )

    @property
    def accepted_length(self) -> float | None:
        """Tokens emitted per request and verification step, the target's own included."""
        return 1 + self.accepted / self.request_steps if self.request_steps else None

    @property
    def window(self) -> float | None:
        """Tokens verified per request and step."""
        return 1 + self.drafted / self.request_steps if self.request_steps else None


_COUNTERS = {
    "vllm:spec_decode_num_drafts_total": "request_steps",
    "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}


class Client:
    """Talks to one server; every request has its own connection, so threads may share it."""

    def __init__(self, socket_path: Path) -> None:
        self._socket_path = socket_path

    def is_ready(self) -> bool:
        """Whether the server answers /health with 200."""
        try:
            return self._get("/health")[0] == http.client.OK
        except (OSError, http.client.HTTPException):
            return False

    def stream(
        self,
        message: str,
        max_tokens: int,
        temperature: float = 0.0,
        seed: int | None = None,
        on_step: OnStep | None = None,
    ) -> Completion:
        """Send one chat message and collect the streamed answer."""
        body: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": message}],
            "max_tokens": max_tokens,
            "temperature": temperature,
            "stream": True,
            "return_token_ids": True,
        }
        if seed is not None:
            body["seed"] = seed
        completion = Completion(started_s=time.perf_counter())
        for chunk in self.events("/v1/chat/completions", body):
            if not _take_chunk(chunk, completion):
                continue
            completion.ended_s = time.perf_counter()
            if on_step is not None:
                on_step(completion)
        if not completion.token_ids:
            raise ServerError("the server ended the stream without a single token")
        return completion

    def greedy_steps(self, prompt: list[int], max_tokens: int) -> list[Step]:
        """Greedy continuation of token ids, with the two likeliest tokens of each step."""
        body = {
            "model": MODEL,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "logprobs": 2,
            "return_tokens_as_token_ids": True,
        }
        answer = self._post("/v1/completions", body)
        logprobs = answer["choices"][0]["logprobs"]
        return [
            Step(_token_id(token), {_token_id(k): float(v) for k, v in top.items()})
            for token, top in zip(logprobs["tokens"], logprobs["top_logprobs"], strict=True)
        ]

    def counters(self) -> SpeculationCounters:
        """Speculation counters, read until two readings agree."""
        last = self._read_counters()
        for _ in range(50):
            time.sleep(_SETTLE_S)
            now = self._read_counters()
            if now == last:
                return now
            last = now
        raise ServerError("the speculation counters keep changing: is somebody else a client?")

    def _read_counters(self) -> SpeculationCounters:
        return parse_counters(self.metrics())

    def metrics(self) -> str:
        """The server's metrics as Prometheus text."""
        status, text = self._get("/metrics")
        if status != http.client.OK:
            raise ServerError(f"/metrics answered {status}")
        return text

    def _connection(self) -> http.client.HTTPConnection:
        return _UnixConnection(self._socket_path)

    def _get(self, path: str) -> tuple[int, str]:
        connection = self._connection()
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read().decode()
        finally:
            connection.close()

    def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        connection = self._connection()
        try:
            response = _send(connection, path, body)
            answer: dict[str, Any] = json.loads(response.read())
            return answer
        finally:
            connection.close()

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events of one request, up to `[DONE]`; closing the iterator breaks it off."""
        connection = self._connection()
        try:
            response = _send(connection, path, body)
            for line in response:
                if not line.startswith(b"data: "):
                    continue
                data = line[len(b"data: ") :].strip()
                if data == b"[DONE]":
                    return
                event: dict[str, Any] = json.loads(data)
                if "error" in event:
                    raise ServerError(f"the server broke off: {event['error']}")
                yield event
            raise ServerError("the stream ended without [DONE]: did the server die?")
        finally:
            connection.close()


def parse_counters(metrics: str) -> SpeculationCounters:
    """Read the counters from Prometheus text; absent ones (no speculation) are 0."""
    totals = dict.fromkeys(_COUNTERS.values(), 0)
    for line in metrics.splitlines():
        name = line.split("{", 1)[0].split(" ", 1)[0]
        if name in _COUNTERS:
            totals[_COUNTERS[name]] += int(float(line.rsplit(" ", 1)[1]))
    return SpeculationCounters(**totals)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=REQUEST_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def _send(
    connection: http.client.HTTPConnection, path: str, body: dict[str, Any]
) -> http.client.HTTPResponse:
    connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
    response = connection.getresponse()
    if response.status != http.client.OK:
        raise ServerError(f"{path} answered {response.status}: {response.read().decode()[:500]}")
    return response


def _take_chunk(chunk: dict[str, Any], completion: Completion) -> bool:
    """Add one event to the completion; False when it carries no token."""
    if chunk.get("prompt_token_ids"):
        completion.prompt_token_ids = chunk["prompt_token_ids"]
    if not chunk.get("choices"):
        return False
    choice = chunk["choices"][0]
    completion.text += choice["delta"].get("content") or ""
    tokens = choice.get("token_ids") or []
    if not tokens:
        return False
    completion.token_ids += tokens
    completion.steps.append(len(tokens))
    return True


def _token_id(text: str) -> int:
    """ "token_id:17" -> 17 (vLLM's form with `return_tokens_as_token_ids`)."""
    return int(text.removeprefix("token_id:"))
