"""The demo's HTTP client against a small server of our own on a Unix socket."""

import json
import socketserver
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from vllm_dspark.demo.client import Client, ServerError, SpeculationCounters, parse_counters

METRICS = """\
# HELP vllm:spec_decode_num_drafts_total Number of drafts.
vllm:spec_decode_num_drafts_total{engine="0",model_name="demo"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="demo"} 5.0
vllm:spec_decode_num_draft_tokens_total{engine="0"} 105.0
vllm:spec_decode_num_accepted_tokens_total{engine="0"} 30.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 12.0
"""


def chunk(text: str, tokens: list[int], **more: Any) -> bytes:
    event = {"choices": [{"delta": {"content": text}, "token_ids": tokens}], **more}
    return b"data: " + json.dumps(event).encode() + b"\n\n"


GOOD = [
    chunk("", [], prompt_token_ids=[1, 2]),
    chunk("He", [3]),
    chunk("llo", [4, 5, 6]),
    b"data: [DONE]\n\n",
]


class Handler(BaseHTTPRequestHandler):
    """Answers every chat request with `server.events`."""

    def do_GET(self) -> None:
        self._answer(200, METRICS.encode())

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.server.bodies.append(json.loads(self.rfile.read(length)))  # type: ignore[attr-defined]
        self._answer(self.server.status, b"".join(self.server.events))  # type: ignore[attr-defined]

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        return "unix"

    def log_message(self, *_: object) -> None:
        pass


class UnixServer(socketserver.ThreadingUnixStreamServer):
    status = 200
    events: list[bytes] = GOOD

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), Handler)
        self.bodies: list[dict[str, Any]] = []


@pytest.fixture
def server(tmp_path: Path) -> Iterator[UnixServer]:
    with UnixServer(tmp_path / "s") as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def client(server: UnixServer) -> Client:
    return Client(Path(str(server.server_address)))


def test_stream_collects_tokens_and_steps(client: Client, server: UnixServer) -> None:
    """Catches lost tokens, and chunks without tokens counted as steps."""
    seen: list[int] = []
    done = client.stream(
        "Hi", 16, temperature=1.0, seed=3, on_step=lambda c: seen.append(len(c.token_ids))
    )
    assert (done.text, done.token_ids, done.steps) == ("Hello", [3, 4, 5, 6], [1, 3])
    assert done.prompt_token_ids == [1, 2]
    assert seen == [1, 4]
    assert done.tokens_per_s == pytest.approx(4 / done.elapsed_s)
    [body] = server.bodies
    assert body["messages"] == [{"role": "user", "content": "Hi"}]
    assert (body["max_tokens"], body["temperature"], body["seed"]) == (16, 1.0, 3)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        (GOOD[:3], "without \\[DONE\\]"),
        ([GOOD[0], GOOD[3]], "without a single token"),
        ([GOOD[1], b'data: {"error": {"message": "engine died"}}\n\n'], "engine died"),
    ],
)
def test_broken_stream_is_an_error(
    client: Client, server: UnixServer, events: list[bytes], message: str
) -> None:
    """Catches a server that dies half-way being measured as a fast one."""
    server.events = events
    with pytest.raises(ServerError, match=message):
        client.stream("Hi", 16)


def test_refused_request_is_an_error(client: Client, server: UnixServer) -> None:
    """Catches a refusal whose reason is thrown away."""
    server.status, server.events = 400, [b"max_tokens is too large"]
    with pytest.raises(ServerError, match="400: max_tokens is too large"):
        client.stream("Hi", 16)


def test_top_two_of_each_step(client: Client, server: UnixServer) -> None:
    """Catches logprobs that lose their token ids."""
    logprobs = {
        "tokens": ["token_id:5"],
        "top_logprobs": [{"token_id:5": -0.5, "token_id:9": -0.75}],
    }
    server.events = [json.dumps({"choices": [{"logprobs": logprobs}]}).encode()]
    [step] = client.greedy_steps([1, 2], 1)
    assert step.token_id == 5
    assert step.gap(5, 9) == pytest.approx(0.25)
    assert step.gap(5, 7) is None


def test_counters_sum_engines_and_ignore_other_series(client: Client) -> None:
    """Catches the per-position series being added, or only one engine's being read."""
    counters = client.counters()
    assert counters == SpeculationCounters(request_steps=15, drafted=105, accepted=30)
    assert counters.accepted_length == pytest.approx(3.0)
    assert counters.window == pytest.approx(8.0)
    assert parse_counters("") == SpeculationCounters()
    assert SpeculationCounters().accepted_length is None


def test_nobody_listens(tmp_path: Path) -> None:
    """Catches a readiness check that raises before the server has made its socket."""
    assert not Client(tmp_path / "absent").is_ready()
