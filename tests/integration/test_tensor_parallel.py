"""Two tensor-parallel ranks on two cores: one decision, same windows, same output as one rank."""

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
from tests.support.pairs import Pair, PairSpec
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.engine

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
given = json.loads(sys.argv[1])
llm = LLM(**given["llm"])
params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
outputs = llm.generate(given["prompts"], params, use_tqdm=False)
seen = llm.collective_rpc("windows_seen")
print("RESULT" + json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs],
                             "seen": seen}))
"""


PROMPTS = [{"prompt_token_ids": [10 + i, 20, 30]} for i in range(6)]


@pytest.fixture(scope="module")
def pair(build: Callable) -> Pair:
    return build(PairSpec(kind="markov", noise=0.2))


@pytest.fixture(scope="module")
def expected(pair: Pair) -> list[list[int]]:
    """Tokens of one rank without speculation."""
    with engine(pair.target) as llm:
        from vllm import SamplingParams

        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        return token_lists(llm.generate(PROMPTS, params, use_tqdm=False))


@pytest.mark.parametrize("windows", ["host", "device"])
def test_ranks_agree_though_their_confidences_do_not(
    pair: Pair, expected: list[list[int]], tmp_path: Path, windows: str
) -> None:
    """Catches rank-local decisions: rank 1 sees every confidence one float step higher."""
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    table = write_cost_table(tmp_path / "table.json", base_ms=10.0, per_token_ms=1.0)
    options = {
        "scheduling": "auto",
        "cost_table": str(table),
        "online_cost": False,
        "windows": windows,
    }
    result = _run(
        {
            "model": str(pair.target),
            "speculative_config": dspark(pair.drafter, options),
            "tensor_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "worker_cls": "tests.support.perturbed.PerturbedWorker",
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
        }
    )
    assert result["tokens"] == expected
    first, second = result["seen"]
    assert first == second
    if windows == "device":
        assert len(first) > 3, "no step was trimmed on the device"
        assert any(len(set(step.values())) > 1 for step in first), "windows were never ragged"


def _run(settings: dict[str, Any]) -> dict[str, Any]:
    environment = {
        **os.environ,
        **ENGINE_ENVIRONMENT,
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    given = json.dumps({"llm": settings, "prompts": PROMPTS})
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, given],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
    assert lines, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix("RESULT"))
