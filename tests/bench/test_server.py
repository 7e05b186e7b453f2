"""The HTTP transport of the harness against a small streaming server in this process."""

import http.server
import json
import socketserver
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from vllm_dspark.bench.drive import drive, summarise
from vllm_dspark.bench.modes import BenchError
from vllm_dspark.bench.server import HttpEngine, _samples
from vllm_dspark.bench.workload import Ask, CellOrder, Phase
from vllm_dspark.demo.client import Client

METRICS = """# HELP vllm:dspark_steps_total Steps.
vllm:dspark_steps_total{engine="0",kind="trim",model_name="demo",reason="trim_gain"} 3.0
vllm:dspark_steps_total{engine="1",kind="trim",model_name="demo",reason="trim_gain"} 4.0
vllm:dspark_steps_created{engine="0"} 1e9
vllm:num_requests_running{engine="0",model_name="demo"} 0.0
vllm:other_total 5.0
"""


class Handler(http.server.BaseHTTPRequestHandler):
    """Streams two tokens a chunk until max_tokens; `running` counts open streams."""

    running = 0
    lock = threading.Lock()
    refuse = False

    def address_string(self) -> str:
        return "unix"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(METRICS.replace("} 0.0", f"}} {float(Handler.running)}").encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(500 if Handler.refuse else 200)
        self.end_headers()
        left = body["max_tokens"]
        Handler.count(1)
        try:
            while left > 0:
                number = min(2, left)
                left -= number
                event = {"choices": [{"delta": {"content": "x"}, "token_ids": [1] * number}]}
                self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.flush()
                time.sleep(0.002)
            self.wfile.write(b"data: [DONE]\n\n")
        except BrokenPipeError:
            pass
        finally:
            Handler.count(-1)

    @classmethod
    def count(cls, change: int) -> None:
        with cls.lock:
            cls.running += change


class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[HttpEngine]:
    Handler.refuse = False
    with Server(str(tmp_path / "s.sock"), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield HttpEngine(Client(tmp_path / "s.sock"))
        server.shutdown()


LOAD, LENGTH = 3, 9


def cell(tokens: int) -> CellOrder:
    # (many: as long as one of the first wave has no token yet, the others are replaced)
    asks = tuple(Ask("q" if i % 2 else [1, 2], LENGTH) for i in range(10_000))
    return CellOrder(asks, (Phase(LOAD, tokens),), 0.0)


def test_streams_are_driven_and_broken_off(engine: HttpEngine) -> None:
    """Catches tokens that get lost between chunks, and streams that outlive their cell."""
    for _ in range(2):
        trace = drive(engine, cell(60))
        figures = summarise(trace)
        # what arrives while the driver does something else counts: at most all that is in flight
        assert 60 <= figures["tokens"] < 60 + LOAD * LENGTH
        assert figures["ttft_ms"]["count"] >= 3
        received = [sum(n for _, n in arrivals) for arrivals in trace.arrivals.values()]
        assert max(received) == LENGTH
        assert received.count(LENGTH) >= len(trace.submitted) - LOAD
        assert Handler.running == 0


def test_refused_request_ends_the_cell(engine: HttpEngine) -> None:
    """Catches a driver that waits for ever for a request that the server has refused."""
    Handler.refuse = True
    with pytest.raises(BenchError, match="answered 500"):
        drive(engine, cell(10))


def test_samples_are_summed_over_engines_and_keep_their_labels() -> None:
    found = _samples(METRICS, ("vllm:dspark_",))
    assert found == {"vllm:dspark_steps_total{kind=trim,reason=trim_gain}": 7.0}
