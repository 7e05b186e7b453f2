"""`--distributed-executor-backend ray`: our worker as tensor-parallel ranks in Ray actors.

vLLM's CPU platform refuses the Ray executor, and no run on two GPUs has been made. What can be
shown on a CPU is shown: `tests/support/ray_cpu.py` replaces the three places that ask for GPU ids,
and vLLM's executor then starts real actors that construct our worker by its name.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.costs import write_cost_table
from tests.support.engines import ENGINE_ENVIRONMENT, dspark, engine, token_lists
from tests.support.pairs import PairSpec
from tests.support.patience import PATIENCE_S
from vllm_dspark.config import DSparkConfig

pytest.importorskip("ray", reason="Ray is an extra: vllm-dspark[ray]")

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from tests.support.ray_cluster import local_ray
given = json.loads(sys.argv[1])
with local_ray(cpus=4):
    from vllm import LLM, SamplingParams
    llm = LLM(**given["llm"])
    params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
    outputs = llm.generate(given["prompts"], params, use_tqdm=False)
    result = {
        "tokens": [list(o.outputs[0].token_ids) for o in outputs],
        "seen": llm.collective_rpc("windows_seen"),
        "actors": llm.collective_rpc("actor_facts"),
        "executor": type(llm.llm_engine.engine_core.engine_core.model_executor).__mro__[1].__name__,
    }
    print("RESULT" + json.dumps(result), flush=True)
    llm.llm_engine.engine_core.shutdown()
"""


def test_ranks_in_ray_actors_run_our_worker_and_one_plan(build: Callable, tmp_path: Path) -> None:
    """Catches a worker class or options that do not survive the way into a Ray actor, and ranks
    that decide for themselves (rank 1 sees every confidence one float step higher).
    """
    pair = build(PairSpec(kind="markov", noise=0.2))
    prompts = [{"prompt_token_ids": [10 + i, 20, 30]} for i in range(6)]
    with engine(pair.target) as llm:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        expected = token_lists(llm.generate(prompts, params, use_tqdm=False))
    table = write_cost_table(tmp_path / "table.json", base_ms=10.0, per_token_ms=1.0)
    options = {
        "scheduling": "auto",
        "cost_table": str(table),
        "online_cost": False,
        "windows": "device",
    }
    result = _run(
        {
            "model": str(pair.target),
            "speculative_config": dspark(pair.drafter, options),
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "tests.support.ray_cpu.CpuRayExecutor",
            "worker_cls": "tests.support.ray_cpu.RankInActor",
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
        },
        prompts,
    )
    assert result["executor"] == "RayExecutorV2"
    assert result["tokens"] == expected
    first, second = result["seen"]
    assert first == second
    assert len(first) > 3, "no step was trimmed on the device"
    facts = result["actors"]
    assert len({fact["pid"] for fact in facts}) == 2
    for rank, fact in enumerate(facts):
        assert fact["rank"] == rank
        assert fact["actor"], "the rank does not live in a Ray actor"
        assert fact["runner"] == "DSparkCPUModelRunner"
        assert fact["hooked"], "the entry point was not loaded in the actor"
        assert fact["options"] == DSparkConfig.from_mapping(options).to_mapping()


def test_the_cpu_platform_refuses_the_ray_executor() -> None:
    """The reason for the stand-in above; when this fails, vLLM has learned it: use the real one."""
    from vllm.platforms import current_platform

    assert current_platform.ray_device_key == ""


def _run(settings: dict[str, Any], prompts: list[Any]) -> dict[str, Any]:
    environment = {
        **os.environ,
        **ENGINE_ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps({"llm": settings, "prompts": prompts})],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return dict(json.loads(lines[-1].removeprefix("RESULT")))
