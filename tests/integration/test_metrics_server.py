"""/metrics of a real server: engine core in a process of its own, several API servers."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest

from tests.support.engines import ENGINE_ENVIRONMENT, dspark
from tests.support.metrics_pages import check_catalog, scrape, total
from tests.support.pairs import PairSpec

pytestmark = pytest.mark.engine

K = 4
START_S = 400


@pytest.fixture(scope="module")
def pair(build):
    return build(PairSpec(kind="markov", block_size=K))


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def server(pair, folder, *arguments):
    """A server whose temporary files live in `folder`; yields its base address."""
    port = free_port()
    command = [
        *(sys.executable, "-m", "vllm_dspark.integration.serving", str(pair.target)),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--enforce-eager"),
        *("--max-model-len", "128", "--max-num-seqs", "4", "--served-model-name", "tiny"),
        *("--kv-cache-memory-bytes", str(64 << 20)),
        *("--speculative-config", json.dumps(_speculative(pair))),
        *arguments,
    ]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_USE_V2_MODEL_RUNNER"}
    environment |= ENGINE_ENVIRONMENT | {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_LOGGING_LEVEL": "INFO",
        "TMPDIR": str(folder),
    }
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env=environment)
    base = f"http://127.0.0.1:{port}"
    try:
        _wait(process, base, log)
        yield base
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _speculative(pair):
    speculative = dspark(pair.drafter, num_speculative_tokens=K)
    speculative["dspark"] |= {"log_interval_s": 1.0}
    return speculative


def _wait(process, base, log):
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the server ended:\n{log.read_text()[-4000:]}")
        try:
            urllib.request.urlopen(f"{base}/health", timeout=5)
        except OSError:
            time.sleep(1.0)
        else:
            return
    raise AssertionError(f"the server did not come up:\n{log.read_text()[-4000:]}")


def complete(base, tokens):
    body = {
        "model": "tiny",
        "prompt": [1, 2, 3, 4],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    request = urllib.request.Request(
        f"{base}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def test_two_api_servers(pair, tmp_path):
    """Every metric of the catalog arrives with vLLM's labels, from every API server.

    One API server: tests/cli/test_serve_http.py. Metrics off: test_metrics_engine.py.
    """
    with server(pair, tmp_path, "--api-server-count", "2") as base:
        for _ in range(4):
            assert complete(base, 16) == 16
        time.sleep(1.1)  # a log interval
        assert complete(base, 1) == 1
        for _ in range(6):  # the kernel picks the API server of each connection
            samples = scrape(base)
            assert total(samples, "vllm:dspark_emitted_tokens_total") == 4 * 15
            assert total(samples, "vllm:dspark_accepted_tokens_total") > 0
            check_catalog(samples, K)
        stock = total(samples, "vllm:spec_decode_num_accepted_tokens_total")
        assert stock == total(samples, "vllm:dspark_accepted_tokens_total")
    assert list(tmp_path.glob("vllm-dspark-metrics-*")) == []
    lines = (tmp_path / "server.log").read_text().splitlines()
    assert any("dspark: " in line and "100 % unplanned), AL " in line for line in lines)
