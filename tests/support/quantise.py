"""Quantise a tiny checkpoint's linear layers in place, in compressed-tensors' formats."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

LINEAR = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
GROUP = 32


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


def int4(folder: Path) -> None:
    """Weights in 4 bits with a scale per group of inputs (w4a16)."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if _is_linear(name)]:
        weight, module = tensors.pop(name), name.removesuffix(".weight")
        out, into = weight.shape
        groups = weight.view(out, into // GROUP, GROUP)
        scale = groups.abs().amax(-1) / 7
        codes = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7).view(out, into) + 8
        shifted = codes.to(torch.int64).view(out, into // 8, 8) << (4 * torch.arange(8))
        packed = shifted.sum(-1)  # eight numbers to a word, lowest bits first
        tensors[f"{module}.weight_packed"] = packed.to(torch.int64).to(torch.int32)
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.weight_shape"] = torch.tensor([out, into])
    group = {
        "targets": ["Linear"],
        "weights": {
            "num_bits": 4,
            "type": "int",
            "strategy": "group",
            "group_size": GROUP,
            "symmetric": True,
        },
    }
    _write(folder, tensors, "pack-quantized", group)


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
