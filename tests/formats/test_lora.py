"""LoRA on the target: windows on the host, answers as without speculation, drafts accepted."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.integration.scenarios import Answer, answers, make_prompts, params
from tests.integration.test_equality import expect_equal
from tests.support.engines import dspark, engine, scheduler_of
from tests.support.pairs import PairSpec

pytestmark = pytest.mark.engine

SPEC = PairSpec(kind="markov", symbols=94, seed=13)
RANK = 8


def write_adapter(folder: Path, seed: int, scale: float) -> Path:
    """An adapter of the attention and MLP inputs, strong enough to change answers."""
    gen = torch.Generator().manual_seed(seed)
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": ["q_proj", "v_proj", "up_proj"],
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    sizes = {"self_attn.q_proj": 64, "self_attn.v_proj": 64, "mlp.up_proj": SPEC.intermediate}
    tensors = {}
    for layer in range(SPEC.layers):
        for module, out in sizes.items():
            name = f"base_model.model.model.layers.{layer}.{module}"
            tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, SPEC.hidden, generator=gen) * scale
            tensors[f"{name}.lora_B.weight"] = torch.randn(out, RANK, generator=gen) * scale
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def run(llm: Any, adapters: list[Path]) -> list[Answer]:
    """Requests of both adapters and of none, in one batch."""
    from vllm.lora.request import LoRARequest

    prompts = make_prompts(SPEC.symbols)[:6]
    loras = [None, *(LoRARequest(a.name, i + 1, str(a)) for i, a in enumerate(adapters))]
    chosen = [loras[i % len(loras)] for i in range(len(prompts))]
    outputs = llm.generate(prompts, params(32), lora_request=chosen, use_tqdm=False)
    return [answer for output in outputs for answer in answers(output)]


def test_adapters_on_the_target(build: Callable, tmp_path: Path) -> None:
    """Catches rows of one request computed with another's adapter after windows of any length."""
    pair = build(SPEC)
    adapters = [write_adapter(tmp_path / f"lora{i}", i, 0.3) for i in range(2)]
    settings = {"enable_lora": True, "max_loras": 2, "max_lora_rank": RANK}
    with engine(pair.target, v2=True, **settings) as llm:
        wanted = run(llm, adapters)
    options = {"test_windows": "random", "test_windows_seed": 6}
    speculative = dspark(pair.drafter, options, num_speculative_tokens=7)
    with engine(pair.target, speculative, **settings) as llm:
        found = run(llm, adapters)
        scheduler = scheduler_of(llm)
        assert not scheduler.conductor.device_windows
        totals = scheduler.dspark_totals
    expect_equal(found, wanted)
    assert totals.accepted[0] > 0, totals
    assert len({a.tokens[:8] for a in found}) > 3
