"""Tiny targets of many architectures, each with a drafter that is copied from it.

Weights come from transformers' own classes, so names and shapes are those of real checkpoints.
Layers are weak and the embedding strong: a target's next token is mostly a function of its last
one, and the drafter's Markov head holds that function (W1 = normed embeddings, W2 = output head,
perturbed). So drafts are accepted at a realistic rate whatever the layers in between are.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.support.pairs import Pair, PairSpec, write_drafter, write_tokenizer

# Standard deviation of layer weights: small against embeddings of norm 8, not nothing.
LAYER_SCALE = 0.04


@dataclass(frozen=True)
class Family:
    """A kind of target: transformers' `model_type` and what its config needs beyond the common."""

    model_type: str
    extra: dict[str, Any] = field(default_factory=dict, hash=False)
    # Llava around the text model; its vision tower is configured and has no weights
    wrapped: bool = False


_LINEAR = {
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

FAMILIES: dict[str, Family] = {
    "llama": Family("llama"),
    "qwen3": Family("qwen3"),
    "qwen3_moe": Family("qwen3_moe", {**_EXPERTS, "norm_topk_prob": True}),
    "gemma4_text": Family(
        "gemma4_text",
        {
            "global_head_dim": 32,
            "num_global_key_value_heads": 2,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 98,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"],
            "sliding_window": 16,
            "final_logit_softcapping": 30.0,
            "num_kv_shared_layers": 0,
        },
    ),
}

# Started with `language_model_only`, so that nothing of the vision tower is needed.
WRAPPED = Family("llama", wrapped=True)
# Targets with recurrent states.
HYBRIDS: dict[str, Family] = {
    "qwen3_next": Family(
        "qwen3_next", {**_LINEAR, **_EXPERTS, "shared_expert_intermediate_size": 32}
    ),
}


def build_target_pair(folder: Path, family: str, spec: PairSpec) -> Pair:
    """Write a target of `family` and its drafter (DeepSpec format) below `folder`."""
    pair = Pair(folder / "target", folder / "drafter", spec)
    embed, head = build_target(pair.target, family, spec)
    write_drafter(pair.drafter, spec, {"model.embed_tokens.weight": embed, "lm_head.weight": head})
    return pair


def build_target(folder: Path, family: str, spec: PairSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Write a target with its tokenizer; returns input embedding and output head, both [V, H]."""
    kinds = {**FAMILIES, **HYBRIDS, "llava": WRAPPED}
    made = _write_target(folder, kinds[family], spec)
    if kinds[family].wrapped:
        _wrap(folder)
    write_tokenizer(folder, spec)
    return made


def text_config(kind: Family, spec: PairSpec) -> dict[str, Any]:
    """Keys of the text model's config."""
    return {
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-5,
        "num_hidden_layers": spec.layers,
        "tie_word_embeddings": False,
        "bos_token_id": spec.special_ids["<bos>"],
        "eos_token_id": spec.special_ids["<eos>"],
        "pad_token_id": spec.special_ids["<pad>"],
        **kind.extra,
    }


def _write_target(folder: Path, kind: Family, spec: PairSpec) -> tuple[torch.Tensor, torch.Tensor]:
    """Save the target; returns its input embedding and output head, both [V, H]."""
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    torch.manual_seed(spec.seed)
    # Random targets speak through their layers, markov ones hardly.
    scale = LAYER_SCALE if spec.kind == "markov" else 0.25
    config = CONFIG_MAPPING[kind.model_type](initializer_range=scale, **text_config(kind, spec))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(spec.seed)
    embed = torch.randn(spec.vocab_size, spec.hidden, generator=generator)
    head = torch.randn(spec.vocab_size, spec.hidden, generator=generator) / spec.hidden**0.5
    head[spec.symbols :] *= 0.2  # special tokens stay rare
    head *= spec.sharpness
    tied = bool(config.tie_word_embeddings)
    if tied:
        # One matrix for both: a token's best successor would be itself, so layers must speak up.
        head = embed
    state = model.state_dict()
    state["model.embed_tokens.weight"].copy_(embed)
    state["lm_head.weight"].copy_(head)
    model.save_pretrained(folder)
    if tied:
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return embed, head


def _wrap(folder: Path) -> None:
    """Turn a text target into the language model of a Llava checkpoint."""
    path = folder / "config.json"
    text = json.loads(path.read_text())
    config = {
        "architectures": ["LlavaForConditionalGeneration"],
        "model_type": "llava",
        "text_config": text,
        "vision_config": {
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
            "projection_dim": 32,
        },
        "image_token_index": text["vocab_size"] - 1,
        "projector_hidden_act": "gelu",
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
        "torch_dtype": "float32",
    }  # fmt: skip
    path.write_text(json.dumps(config, indent=1))
    tensors = load_file(folder / "model.safetensors")
    renamed = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
