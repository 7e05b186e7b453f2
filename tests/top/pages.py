"""Metrics pages as a server shows them: our own collector's text, and a few lines of vLLM's."""

import http.server
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client import CollectorRegistry, generate_latest

from vllm_dspark.integration.metrics_catalog import catalog
from vllm_dspark.integration.metrics_collector import DSparkCollector
from vllm_dspark.integration.metrics_files import RecordFile, RecordHeader

K = 3

_VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{{engine="{engine}",model_name="{model}"}} {running}
# HELP vllm:num_requests_waiting Number of requests waiting to be processed.
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{{engine="{engine}",model_name="{model}"}} {waiting}
# HELP vllm:kv_cache_usage_perc KV-cache usage. 1 means 100 percent usage.
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{{engine="{engine}",model_name="{model}"}} 0.25
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{{engine="{engine}",model_name="{model}"}} {tokens}
"""
_SERVER = """\
# HELP python_info Python platform information
# TYPE python_info gauge
python_info{implementation="CPython"} 1.0
# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",engine="0"} 1.0
"""


def values_of(width: int, off_reason: str = "", **given: Any) -> np.ndarray:
    """A record of metrics: families by name, a number, a list, or cells by label values."""
    parts = []
    for family in catalog(width, off_reason):
        part = np.zeros(family.size)
        value = given.pop(family.name, 0.0)
        if isinstance(value, Mapping):
            for cell, number in value.items():
                part[family.cells.index(cell if isinstance(cell, tuple) else (cell,))] = number
        else:
            part[:] = value
        parts.append(part)
    assert not given, f"no such metrics: {sorted(given)}"
    return np.concatenate(parts)


def vllm_lines(engine: str = "0", model: str = "m", **values: float) -> str:
    """vLLM's own part of a page, for one engine."""
    shown = {"running": 0.0, "waiting": 0.0, "tokens": 0.0, **values}
    return _VLLM.format(engine=engine, model=model, **shown)


def merged(*texts: str) -> str:
    """Several engines on one page: samples of a family stand together."""
    families: dict[str, list[str]] = {}
    name = ""
    for line in "".join(texts).splitlines():
        if line.startswith("# HELP "):
            name = line
        lines = families.setdefault(name, [])
        if line not in lines:
            lines.append(line)
    return "\n".join(line for lines in families.values() for line in lines) + "\n"


def page(
    folder: Path, engines: Mapping[str, np.ndarray], *others: str, off_reason: str = ""
) -> str:
    """The text of a page with our records of `engines` and other lines."""
    files = []
    for engine, values in engines.items():
        header = RecordHeader("m", engine, K, off_reason, 1, time.time())
        file = RecordFile(folder, header, values.size)
        file.publish(values)
        files.append(file)
    registry = CollectorRegistry()
    registry.register(DSparkCollector(folder))
    text = generate_latest(registry).decode()
    for file in files:
        file.close()
    return text + merged(*others) + _SERVER


@contextmanager
def served(pages: list[str | int]) -> Iterator[str]:
    """A server that answers /metrics with one page after another; a number is an HTTP error."""
    left = list(pages)

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, int) or self.path != "/metrics":
                self.send_error(answer if isinstance(answer, int) else 404)
                return
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
