"""/metrics of a real server: engine core in a process of its own, several API servers."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager

import pytest

from tests.support.engines import ENGINE_ENVIRONMENT, dspark
from tests.support.metrics_pages import check_catalog, scrape, total
from tests.support.pairs import PairSpec
from tests.support.patience import PATIENCE_S, free_port, wait_until

pytestmark = pytest.mark.engine

K = 4


@pytest.fixture(scope="module")
def pair(build):
    return build(PairSpec(kind="markov", block_size=K))


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
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _speculative(pair):
    speculative = dspark(pair.drafter, num_speculative_tokens=K)
    speculative["dspark"] |= {"log_interval_s": 1.0}
    return speculative


def _wait(process, base, log):
    def answers():
        assert process.poll() is None, f"the server ended:\n{log.read_text()[-4000:]}"
        try:
            urllib.request.urlopen(f"{base}/health", timeout=PATIENCE_S)
        except OSError:
            return False
        return True

    wait_until(f"the server that writes {log}", answers)


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
    with urllib.request.urlopen(request, timeout=PATIENCE_S) as answer:
        return json.load(answer)["usage"]["completion_tokens"]


def _stock(samples):
    return total(samples, "vllm:spec_decode_num_accepted_tokens_total")


def _ours(samples):
    return total(samples, "vllm:dspark_accepted_tokens_total")


def test_two_api_servers(pair, tmp_path):
    """Every metric of the catalog arrives with vLLM's labels, from every API server.

    One API server: tests/cli/test_serve_http.py. Metrics off: test_metrics_engine.py.
    """
    with server(pair, tmp_path, "--api-server-count", "2") as base:
        for _ in range(4):
            assert complete(base, 16) == 16
        time.sleep(1.1)  # a log interval
        assert complete(base, 1) == 1
        # vLLM's front end counts when an answer is on its way already
        wait_until("vLLM's own count", lambda: _stock(scrape(base)) == _ours(scrape(base)) > 0)
        for _ in range(6):  # the kernel picks the API server of each connection
            samples = scrape(base)
            assert total(samples, "vllm:dspark_emitted_tokens_total") == 4 * 15
            assert _stock(samples) == _ours(samples) > 0
            check_catalog(samples, K)
    assert list(tmp_path.glob("vllm-dspark-metrics-*")) == []
    lines = (tmp_path / "server.log").read_text().splitlines()
    assert any("dspark: " in line and "100 % unplanned), AL " in line for line in lines)
