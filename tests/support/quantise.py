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
    _write(folder, tensors, "int-quantized", group, ("lm_head",))


def int4(
    folder: Path, plain: tuple[str, ...] = (), ignore: tuple[str, ...] = ()
) -> dict[str, torch.Tensor]:
    """Weights in 4 bits with a scale per group of inputs (w4a16); returns what they stand for.

    plain: layers that stay as they are; ignore: what the config says about that.
    """
    meant = load_file(folder / "model.safetensors")
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if _is_linear(name)]:
        module = name.removesuffix(".weight")
        if module in plain:
            continue
        weight = tensors.pop(name)
        out, into = weight.shape
        groups = weight.view(out, into // GROUP, GROUP)
        scale = groups.abs().amax(-1) / 7
        codes = (groups / scale.unsqueeze(-1)).round().clamp(-8, 7).view(out, into) + 8
        meant[name] = ((codes.view_as(groups) - 8) * scale.unsqueeze(-1)).view(out, into)
        words = codes.to(torch.int64).view(out, into // 8, 8) << (4 * torch.arange(8))
        tensors[f"{module}.weight_packed"] = words.sum(-1).to(torch.int32)  # lowest bits first
        tensors[f"{module}.weight_scale"] = scale
        tensors[f"{module}.weight_shape"] = torch.tensor([out, into])
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": {**weights, "symmetric": True}}
    _write(folder, tensors, "pack-quantized", group, ignore)
    return meant


def fp8(folder: Path, per_channel: bool = True) -> None:
    """Weights as float8_e4m3 with a scale per output channel or tensor, activations per token."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if _is_linear(name)]:
        weight = tensors[name].float()
        size = weight.abs().amax(1, keepdim=True) if per_channel else weight.abs().max().view(1)
        scale = size / torch.finfo(torch.float8_e4m3fn).max
        tensors[name] = (weight / scale).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale"] = scale
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": {
            **number,
            "strategy": "channel" if per_channel else "tensor",
            "dynamic": False,
        },
        "input_activations": {**number, "strategy": "token", "dynamic": True},
    }
    _write(folder, tensors, "float-quantized", group, ("lm_head", "fc"))


def _write(
    folder: Path,
    tensors: dict[str, torch.Tensor],
    layout: str,
    group: dict,
    ignore: tuple[str, ...],
) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": list(ignore),
    }
    path.write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
