"""Quantise a tiny checkpoint's linear layers in place, in compressed-tensors' formats."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def _is_linear(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in LINEAR


def int8(folder: Path) -> None:
    """Weights in 8 bits with a scale per output channel, activations in 8 bits per token."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if _is_linear(name)]:
        weight = tensors.pop(name)
        scale = weight.abs().amax(1, keepdim=True) / 127
        tensors[name] = (weight / scale).round().clamp(-128, 127).to(torch.int8)
        tensors[f"{name}_scale"] = scale
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True},
        "input_activations": {
            "num_bits": 8,
            "type": "int",
            "strategy": "token",
            "dynamic": True,
            "symmetric": True,
        },
    }
    _write(folder, tensors, "int-quantized", group)


def _write(folder: Path, tensors: dict[str, torch.Tensor], layout: str, group: dict) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "fc"],
    }
    path.write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
