"""A pair of the Qwen3-8B shape with random weights, for measuring speed with fixed acceptance.

    python -m benchmarks.random_pair --out PAIR [--device cuda] [--layers 36 ...]
    vllm-dspark bench --target PAIR/target --drafter PAIR/drafter --modes off,fixed3,fixed7,ours \\
      --pair "$(cat PAIR/bench.json)"

The target is a config only (vLLM makes random weights of it: `load_format` dummy), the drafter a
real checkpoint, since its loader fuses weights. Its confidence head has no weights and the bias
logit(0.85); with synthetic acceptance of 0.85 per draft (as `bench.json` asks) it is perfectly
calibrated. This is the setting of DESIGN.md's table.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ACCEPTANCE = 0.85
_MASK_TOKEN = 151669  # an unused id of Qwen3's vocabulary
_SCALE = 0.02  # of random weights, as transformers initialises them


@dataclass(frozen=True)
class Shape:
    """Sizes of target and drafter; the defaults are Qwen3-8B and a five-layer drafter."""

    hidden: int = 4096
    layers: int = 36
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    intermediate: int = 12288
    vocab: int = 151936
    draft_layers: int = 5
    width: int = 7
    markov_rank: int = 256
    max_positions: int = 4096


def common_config(shape: Shape) -> dict[str, Any]:
    """What the two configs share."""
    return {
        "model_type": "qwen3",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": shape.vocab - 3,
        "eos_token_id": shape.vocab - 2,
    }


def target_config(shape: Shape) -> dict[str, Any]:
    """Config of the target."""
    return {
        **common_config(shape),
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": shape.layers,
    }


def drafter_config(shape: Shape) -> dict[str, Any]:
    """Config of the drafter, in DeepSpec's format: target layers spread evenly."""
    step = (shape.layers - 1) / max(shape.draft_layers - 1, 1)
    return {
        **common_config(shape),
        "architectures": ["Qwen3DSparkModel"],
        "num_hidden_layers": shape.draft_layers,
        "num_target_layers": shape.layers,
        "layer_types": ["full_attention"] * shape.draft_layers,
        "target_layer_ids": [round(i * step) for i in range(shape.draft_layers)],
        "block_size": shape.width,
        "mask_token_id": min(_MASK_TOKEN, shape.vocab - 1),
        "num_anchors": 512,
        "markov_rank": shape.markov_rank,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }


def drafter_weights(shape: Shape, device: str, seed: int = 0) -> dict[str, torch.Tensor]:
    """Random bf16 weights; the confidence head says ACCEPTANCE whatever it sees."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def random(*size: int) -> torch.Tensor:
        made = torch.randn(size, generator=generator, device=device, dtype=torch.float32)
        return (made * _SCALE).to(torch.bfloat16)

    def ones(size: int) -> torch.Tensor:
        return torch.ones(size, device=device, dtype=torch.bfloat16)

    h, kv, q = shape.hidden, shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    weights = {
        "norm.weight": ones(h),
        "hidden_norm.weight": ones(h),
        "fc.weight": random(h, shape.draft_layers * h),
        "markov_head.markov_w1.weight": random(shape.vocab, shape.markov_rank),
        "markov_head.markov_w2.weight": random(shape.vocab, shape.markov_rank),
        "confidence_head.proj.weight": torch.zeros(1, h + shape.markov_rank, dtype=torch.bfloat16),
        "confidence_head.proj.bias": torch.full(
            (1,), math.log(ACCEPTANCE / (1.0 - ACCEPTANCE)), dtype=torch.bfloat16
        ),
    }
    for i in range(shape.draft_layers):
        layer = {
            "self_attn.q_proj.weight": random(q, h),
            "self_attn.k_proj.weight": random(kv, h),
            "self_attn.v_proj.weight": random(kv, h),
            "self_attn.o_proj.weight": random(h, q),
            "self_attn.q_norm.weight": ones(shape.head_dim),
            "self_attn.k_norm.weight": ones(shape.head_dim),
            "mlp.gate_proj.weight": random(shape.intermediate, h),
            "mlp.up_proj.weight": random(shape.intermediate, h),
            "mlp.down_proj.weight": random(h, shape.intermediate),
            "input_layernorm.weight": ones(h),
            "post_attention_layernorm.weight": ones(h),
        }
        weights |= {f"layers.{i}.{name}": value for name, value in layer.items()}
    return weights


def graph_sizes(largest: int) -> list[int]:
    """Graphs to capture: steps of an eighth of the next power of two, some fifty up to 2048.

    vLLM's own ladder (every 16) takes a minute more per engine; a size between two of these wastes
    a tenth at most. All modes have the same.
    """
    sizes = [1, 2, 4]
    size = 8
    while size <= largest:
        sizes.append(size)
        size += max(8, (1 << (size.bit_length() - 1)) // 8)
    return sizes if sizes[-1] == largest or largest < 8 else [*sizes, largest]


# No torch.compile, and no graphs of mixed steps, which need it: saves a minute per engine.
FAST_START = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}


def bench_settings(
    shape: Shape, *, kv_gib: float, seqs: int, eager: bool, fast_start: bool
) -> dict[str, Any]:
    """The `--pair` argument of `vllm-dspark bench` for this pair.

    Synthetic acceptance rates of vLLM are unconditional: the k-th is ACCEPTANCE^k.
    """
    rates = [ACCEPTANCE ** (k + 1) for k in range(shape.width)]
    sizes = graph_sizes(seqs * (shape.width + 1))
    compilation: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
    graphs = {"compilation_config": compilation | (FAST_START if fast_start else {})}
    return {
        "width": shape.width,
        "max_model_len": min(2048, shape.max_positions),
        "max_num_seqs": seqs,
        "kv_cache_bytes": int(kv_gib * 2**30),  # several engines share the GPU
        "speculative": {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": rates,
            "draft_load_config": {"load_format": "auto"},
        },
        "engine": {"load_format": "dummy", **({"enforce_eager": True} if eager else graphs)},
    }


def write_pair(out: Path, shape: Shape, device: str, settings: dict[str, Any]) -> None:
    """Write target, drafter and bench.json (`settings`) below `out`."""
    for name, config in (("target", target_config(shape)), ("drafter", drafter_config(shape))):
        folder = out / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
    weights = {k: v.cpu().contiguous() for k, v in drafter_weights(shape, device).items()}
    save_file(weights, out / "drafter" / "model.safetensors")
    (out / "bench.json").write_text(json.dumps(settings))


def main() -> int:
    """Write a pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cpu", help="where random numbers are made")
    sizes = ("layers", "draft_layers", "hidden", "intermediate", "vocab")
    sizes += ("heads", "kv_heads", "head_dim")
    for name in sizes:
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=getattr(Shape, name))
    parser.add_argument("--kv-gib", type=float, default=12.0, help="KV cache of each engine")
    parser.add_argument("--seqs", type=int, default=256, help="requests in flight at most")
    parser.add_argument("--eager", action="store_true", help="no graphs, no compilation (a CPU)")
    parser.add_argument("--fast-start", action="store_true", help="graphs without torch.compile")
    args = parser.parse_args()
    shape = Shape(**{name: getattr(args, name) for name in sizes})
    settings = bench_settings(
        shape,
        kv_gib=args.kv_gib,
        seqs=args.seqs,
        eager=args.eager,
        fast_start=args.fast_start,
    )
    write_pair(args.out, shape, args.device, settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
