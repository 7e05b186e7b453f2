"""Two pipeline ranks on two cores: host windows, the same output as one rank without drafts."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.costs import write_cost_table
from tests.support.engines import ENGINE_ENVIRONMENT, dspark, engine, token_lists
from tests.support.pairs import PairSpec
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.engine

SPEC = PairSpec(kind="markov", noise=0.2, layers=4)
PROMPTS = [{"prompt_token_ids": [10 + i, 20, 30]} for i in range(6)]

SCRIPT = """
import json, sys
from vllm import LLM, SamplingParams
given = json.loads(sys.argv[1])
llm = LLM(**given["llm"])
params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
outputs = llm.generate(given["prompts"], params, use_tqdm=False)
accepted = [m.values for m in llm.get_metrics()
            if m.name == "vllm:spec_decode_num_accepted_tokens_per_pos"]
print("RESULT" + json.dumps({"tokens": [list(o.outputs[0].token_ids) for o in outputs],
                             "accepted": accepted}))
"""


@dataclass(frozen=True)
class Case:
    """Options of an engine with two pipeline ranks, and whether windows are short there."""

    options: dict[str, Any]
    dear: bool = False


CASES = {
    "not scheduled": Case({"scheduling": False}),
    "planned": Case({"scheduling": True, "online_cost": False}, dear=True),
}


@pytest.fixture(scope="module")
def expected(build: Callable) -> list[list[int]]:
    from vllm import SamplingParams

    with engine(build(SPEC).target) as llm:
        params = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
        return token_lists(llm.generate(PROMPTS, params, use_tqdm=False))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_say_what_one_says(
    build: Callable, expected: list, tmp_path: Path, name: str
) -> None:
    """Catches drafts scheduled before the tokens they follow (the first rank stops there), and
    hidden states of the first rank's layers that never reach the drafter.
    """
    if (os.cpu_count() or 1) < 2:
        pytest.skip("two ranks need two cores")
    pair, case, log = build(SPEC), CASES[name], tmp_path / "outcomes.jsonl"
    options = {**case.options, "record_outcomes": str(log)}
    if case.dear:  # every row costs a tenth of an empty step
        table = write_cost_table(tmp_path / "table.json", base_ms=10.0, per_token_ms=1.0)
        options["cost_table"] = str(table)
    found = _run(
        {
            "model": str(pair.target),
            "speculative_config": dspark(pair.drafter, options, num_speculative_tokens=7),
            "pipeline_parallel_size": 2,
            "distributed_executor_backend": "mp",
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 256,
            "max_num_seqs": 8,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False,
        },
        PROMPTS,
    )
    assert found["tokens"] == expected
    assert found["accepted"][0][0] > 0
    steps = [json.loads(line)["requests"] for line in log.read_text().splitlines()]
    admitted = [row[2] for step in steps for row in step if row[1]]
    short = sum(drafts < 7 for drafts in admitted) / len(admitted)
    assert (short > 0.5) if case.dear else (short < 0.2), admitted


def _run(settings: dict[str, Any], prompts: list[Any]) -> dict[str, Any]:
    environment = {
        **os.environ,
        **ENGINE_ENVIRONMENT,
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
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
    return json.loads(lines[-1].removeprefix("RESULT"))
