"""Write and read the drafter as a DeepSpec checkpoint (`Qwen3DSparkModel`).

    python -m examples.train_drafter.export --state state.pt --out FOLDER

Embedding and head are left out: vLLM's loader then shares the target's.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from examples.train_drafter.config import DrafterConfig
from examples.train_drafter.model import DSparkDrafter

MAX_BYTES = 24_000_000


def config_dict(c: DrafterConfig) -> dict[str, Any]:
    """The checkpoint's config.json."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "vocab_size": c.vocab_size,
        "max_position_embeddings": c.max_positions,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * c.num_layers,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "num_target_layers": c.num_target_layers,
        "block_size": c.block_size,
        "num_anchors": 512,
        "mask_token_id": c.mask_token_id,
        "target_layer_ids": list(c.target_layer_ids),
        "markov_rank": c.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def drafter_config(config: dict[str, Any]) -> DrafterConfig:
    """The inverse of `config_dict`."""
    return DrafterConfig(
        hidden_size=config["hidden_size"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        vocab_size=config["vocab_size"],
        block_size=config["block_size"],
        target_layer_ids=tuple(config["target_layer_ids"]),
        num_target_layers=config["num_target_layers"],
        markov_rank=config["markov_rank"],
        mask_token_id=config["mask_token_id"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_theta=config["rope_parameters"]["rope_theta"],
        max_positions=config["max_position_embeddings"],
    )


def checkpoint_tensors(model: DSparkDrafter, dtype: torch.dtype) -> dict[str, Tensor]:
    """The checkpoint's tensors; the feature scale is folded into `fc`."""
    tensors = dict(model.state_dict())
    scale = tensors.pop("feature_scale")
    tensors["fc.weight"] = tensors["fc.weight"] * scale
    return {name: t.to(dtype).cpu().contiguous() for name, t in sorted(tensors.items())}


def export(model: DSparkDrafter, folder: Path, dtype: torch.dtype = torch.bfloat16) -> int:
    """Write config.json and model.safetensors, return the latter's size in bytes."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    weights = folder / "model.safetensors"
    save_file(checkpoint_tensors(model, dtype), str(weights), metadata={"format": "pt"})
    weights.chmod(0o644)
    text = json.dumps(config_dict(model.config), indent=2) + "\n"
    (folder / "config.json").write_text(text)
    return weights.stat().st_size


def load_checkpoint(folder: Path, device: str | torch.device = "cpu") -> DSparkDrafter:
    """Rebuild a drafter from a checkpoint folder, strictly."""
    from safetensors.torch import load_file

    model = DSparkDrafter(drafter_config(json.loads((folder / "config.json").read_text())))
    tensors = {k: v.float() for k, v in load_file(str(folder / "model.safetensors")).items()}
    tensors["feature_scale"] = torch.ones_like(model.feature_scale)
    model.load_state_dict(tensors)
    return model.to(device).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--state", type=Path, required=True, help="state file of train.py")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    state = torch.load(args.state, map_location="cpu", weights_only=False)
    model = DSparkDrafter(state["drafter_config"])
    model.load_state_dict(state["ema"])
    size = export(model, args.out)
    print(f"{args.out}: {size} bytes, step {state['step']}")
    if size > MAX_BYTES:
        raise SystemExit(f"larger than the {MAX_BYTES} bytes that ship inside the package")


if __name__ == "__main__":
    main()
