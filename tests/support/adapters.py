"""A LoRA adapter for a tiny target, in PEFT's format."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.pairs import Pair

RANK = 8


def write_adapter(folder: Path, pair: Pair, scale: float = 0.3) -> Path:
    """Random low-rank changes of the queries and values of every layer."""
    spec, generator = pair.spec, torch.Generator().manual_seed(11)
    widths = {"q_proj": spec.heads * spec.head_dim, "v_proj": spec.kv_heads * spec.head_dim}
    tensors = {}
    for layer in range(spec.layers):
        for name, width in widths.items():
            key = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            down = torch.randn(RANK, spec.hidden, generator=generator)
            tensors[f"{key}.lora_A.weight"] = down / spec.hidden**0.5
            tensors[f"{key}.lora_B.weight"] = scale * torch.randn(width, RANK, generator=generator)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": RANK,
        "target_modules": list(widths),
        "base_model_name_or_path": str(pair.target),
        "bias": "none",
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder
