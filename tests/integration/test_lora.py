"""LoRA on the target, plans executed by host windows: vLLM wants lengths that the host knows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_planning import DEAR, SPEC, greedy, options, prompts, watch_plans
from tests.support.adapters import RANK, write_adapter
from tests.support.costs import write_cost_table
from tests.support.engines import dspark, engine, runner_of, scheduler_of, token_lists
from tests.support.pairs import Pair
from tests.support.schedulers import bare_scheduler
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.planning.plan import PlanKind

pytestmark = pytest.mark.engine

LORA = {
    "enable_lora": True,
    "max_lora_rank": RANK,
    "max_loras": 2,
    "lora_target_modules": ["q_proj", "v_proj"],
}


@pytest.mark.usefixtures("runner_choice")
@pytest.mark.parametrize("modules", [None, ["q_proj", "lm_head"]])
def test_adapters_of_the_head_are_refused_at_start(pair: Pair, modules: list[str] | None) -> None:
    """Catches an engine that starts and fails in its first verified step (vLLM's CPU kernels)."""
    with pytest.raises(DSparkConfigError, match="without lm_head"):
        bare_scheduler(pair, {"scheduling": False}, enable_lora=True, lora_target_modules=modules)


def test_trimmed_windows_keep_the_output_of_adapters(build: Callable, tmp_path: Path) -> None:
    """Catches windows that mix rows of requests with and without an adapter."""
    from vllm.lora.request import LoRARequest

    pair = build(SPEC)
    adapter = LoRARequest("tiny", 1, str(write_adapter(tmp_path / "adapter", pair)))
    mixture = [adapter if i % 2 else None for i in range(8)]

    def run(llm: Any) -> list[list[int]]:
        found = llm.generate(prompts(8), greedy(), lora_request=mixture, use_tqdm=False)
        return token_lists(found)

    with engine(pair.target, **LORA) as llm:
        expected = run(llm)
        plain = token_lists(llm.generate(prompts(8), greedy(), use_tqdm=False))
    assert [a == b for a, b in zip(expected, plain, strict=True)] == [True, False] * 4

    table = write_cost_table(tmp_path / "table.json", **DEAR)
    speculative = dspark(pair.drafter, options(table, windows="auto"))
    with engine(pair.target, speculative, **LORA) as llm:
        plans = watch_plans(llm)
        assert run(llm) == expected
        assert runner_of(llm)._windows is None
        assert not scheduler_of(llm).conductor.device_windows
        totals = scheduler_of(llm).dspark_totals
    trimmed = [plan for plan in plans if plan.kind is PlanKind.TRIM]
    assert len(trimmed) > 5, [plan.reason for plan in plans]
    assert totals.accepted.sum() > 0 and totals.verified.sum() < totals.drafted.sum()
