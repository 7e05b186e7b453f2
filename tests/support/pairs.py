"""Tiny target and drafter checkpoints for engine tests, written in seconds.

`build_pair` writes two folders: a Llama-shaped target and a DSpark drafter in DeepSpec's format.

- `kind="random"`: weights of both are noise; almost no draft is accepted.
- `kind="markov"`: the target's logits depend mostly on the last token, and the drafter's Markov
  head holds that dependence (W1 = normed embeddings, W2 = output head), perturbed by `noise`; so
  drafts are accepted at a realistic, adjustable rate, and every accepted length occurs.
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

SPECIALS = ("<bos>", "<eos>", "<pad>", "<mask>")
BYTES = 256


@dataclass(frozen=True)
class PairSpec:
    """Shapes and seeds of one pair."""

    kind: str = "random"  # "random" or "markov"
    seed: int = 0
    hidden: int = 64
    heads: int = 2
    kv_heads: int = 2
    head_dim: int = 32
    layers: int = 3
    intermediate: int = 128
    draft_layers: int = 2
    block_size: int = 7
    markov_rank: int = 64
    head_type: str = "vanilla"
    confidence: bool = True
    confidence_with_markov: bool = True
    noise: float = 0.35  # relative perturbation of the drafter's head ("markov")
    sharpness: float = 6.0  # scale of the target's logits ("markov")
    max_positions: int = 1024
    symbols: int = BYTES  # ordinary tokens; fewer make the exact law of several tokens countable

    @property
    def vocab_size(self) -> int:
        return self.symbols + len(SPECIALS)

    @property
    def special_ids(self) -> dict[str, int]:
        return {name: self.symbols + i for i, name in enumerate(SPECIALS)}

    def with_(self, **changes: object) -> "PairSpec":
        return replace(self, **changes)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Pair:
    target: Path
    drafter: Path
    spec: PairSpec


def build_pair(folder: Path, spec: PairSpec | None = None) -> Pair:
    """Write target and drafter below `folder` (reused when already written with this spec)."""
    spec = spec or PairSpec()
    pair = Pair(folder / "target", folder / "drafter", spec)
    generator = torch.Generator().manual_seed(spec.seed)
    target = _target_weights(spec, generator)
    _write(pair.target, _target_config(spec), target)
    write_tokenizer(pair.target, spec)
    _write(pair.drafter, drafter_config(spec), _drafter_weights(spec, target, generator))
    return pair


def write_drafter(folder: Path, spec: PairSpec, target: dict[str, torch.Tensor]) -> None:
    """Write a drafter for a target whose input embedding and lm_head `target` holds."""
    generator = torch.Generator().manual_seed(spec.seed + 1)
    _write(folder, drafter_config(spec), _drafter_weights(spec, target, generator))


def _write(folder: Path, config: dict, weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({k: v.contiguous() for k, v in weights.items()}, folder / "model.safetensors")


def _attention_shape(spec: PairSpec) -> dict:
    return {
        "hidden_size": spec.hidden,
        "num_attention_heads": spec.heads,
        "num_key_value_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "intermediate_size": spec.intermediate,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "bos_token_id": spec.special_ids["<bos>"],
        "eos_token_id": spec.special_ids["<eos>"],
        "pad_token_id": spec.special_ids["<pad>"],
        "torch_dtype": "float32",
    }


def _target_config(spec: PairSpec) -> dict:
    return {
        **_attention_shape(spec),
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": spec.layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
    }


def drafter_config(spec: PairSpec) -> dict:
    config = {
        **_attention_shape(spec),
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "num_hidden_layers": spec.draft_layers,
        "num_target_layers": spec.layers,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "layer_types": ["full_attention"] * spec.draft_layers,
        "block_size": spec.block_size,
        "mask_token_id": spec.special_ids["<mask>"],
        "target_layer_ids": list(range(spec.layers)),
        "num_anchors": 512,
        "markov_rank": spec.markov_rank,
        "markov_head_type": spec.head_type,
        "enable_confidence_head": spec.confidence,
    }
    if spec.confidence:
        config["confidence_head_with_markov"] = spec.confidence_with_markov
    return config


def _layer_weights(
    spec: PairSpec, prefix: str, scale: float, generator: torch.Generator, qk_norm: bool
) -> dict[str, torch.Tensor]:
    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    q, kv, h = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim, spec.hidden
    weights = {
        "self_attn.q_proj.weight": noise(q, h),
        "self_attn.k_proj.weight": noise(kv, h),
        "self_attn.v_proj.weight": noise(kv, h),
        "self_attn.o_proj.weight": noise(h, q),
        "mlp.gate_proj.weight": noise(spec.intermediate, h),
        "mlp.up_proj.weight": noise(spec.intermediate, h),
        "mlp.down_proj.weight": noise(h, spec.intermediate),
        "input_layernorm.weight": torch.ones(h),
        "post_attention_layernorm.weight": torch.ones(h),
    }
    if qk_norm:
        weights |= {
            "self_attn.q_norm.weight": torch.ones(spec.head_dim),
            "self_attn.k_norm.weight": torch.ones(spec.head_dim),
        }
    return {prefix + name: value for name, value in weights.items()}


def _target_weights(spec: PairSpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    markov = spec.kind == "markov"
    embed = torch.randn(spec.vocab_size, spec.hidden, generator=generator)
    head = torch.randn(spec.vocab_size, spec.hidden, generator=generator) / spec.hidden**0.5
    head[spec.symbols :] *= 0.2  # special tokens stay rare
    weights = {
        "model.embed_tokens.weight": embed if markov else embed * 0.5,
        "model.norm.weight": torch.ones(spec.hidden),
        "lm_head.weight": head * (spec.sharpness if markov else 2.0),
    }
    # Weak layers keep the markov target close to a function of its last token.
    scale = 0.04 if markov else 0.25
    for i in range(spec.layers):
        weights |= _layer_weights(spec, f"model.layers.{i}.", scale, generator, qk_norm=False)
    return weights


def _drafter_weights(
    spec: PairSpec, target: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    h, rank = spec.hidden, spec.markov_rank
    weights = {
        "embed_tokens.weight": target["model.embed_tokens.weight"].clone(),
        "norm.weight": torch.ones(h),
        "fc.weight": torch.randn(h, spec.layers * h, generator=generator) * 0.05,
        "hidden_norm.weight": torch.ones(h),
        "lm_head.weight": target["lm_head.weight"].clone(),
    }
    for i in range(spec.draft_layers):
        weights |= _layer_weights(spec, f"layers.{i}.", 0.05, generator, qk_norm=True)
    if rank:
        weights |= _markov_weights(spec, target, generator)
    if spec.kind == "markov":
        # A silent backbone: base logits are 0 and the Markov head speaks alone.
        weights["norm.weight"] = torch.full((h,), 1e-3)
    if spec.confidence:
        width = h + (rank if spec.confidence_with_markov else 0)
        scale = 1.0 if spec.kind == "markov" else 0.1
        weights["confidence_head.proj.weight"] = (
            torch.randn(1, width, generator=generator) * scale / width**0.5
        )
        weights["confidence_head.proj.bias"] = torch.full((1,), 1.0)
    return weights


def _markov_weights(
    spec: PairSpec, target: dict[str, torch.Tensor], generator: torch.Generator
) -> dict[str, torch.Tensor]:
    rank = spec.markov_rank
    if spec.kind == "markov":
        if rank != spec.hidden:
            raise ValueError(f"a markov pair needs rank == hidden, got {rank} != {spec.hidden}")
        embed, head = target["model.embed_tokens.weight"], target["lm_head.weight"]
        w1 = embed * embed.pow(2).mean(-1, keepdim=True).add(1e-5).rsqrt()
        w2 = head + torch.randn(head.shape, generator=generator) * head.std() * spec.noise
    else:
        w1 = torch.randn(spec.vocab_size, rank, generator=generator) * 0.5
        w2 = torch.randn(spec.vocab_size, rank, generator=generator) * 0.5
    weights = {"markov_head.markov_w1.weight": w1, "markov_head.markov_w2.weight": w2}
    if spec.head_type == "gated":
        weights["markov_head.gate_proj.weight"] = (
            torch.randn(rank, spec.hidden + rank, generator=generator) * 0.05
        )
        weights["markov_head.gate_proj.bias"] = torch.full((rank,), 4.0)
    elif spec.head_type == "rnn":
        scale = 0.01 if spec.kind == "markov" else 0.05
        joint = torch.randn(3 * rank, 2 * rank + spec.hidden, generator=generator) * scale
        if spec.kind == "markov":
            # The output repeats the embedding (tanh(0.3 e) / 0.3 is nearly e), the state disturbs.
            joint[2 * rank :, rank : 2 * rank] += 0.3 * torch.eye(rank)
            weights["markov_head.markov_w2.weight"] = w2 / 0.3
        weights["markov_head.joint_proj.weight"] = joint
        weights["markov_head.joint_proj.bias"] = torch.zeros(3 * rank)
    return weights


def write_tokenizer(folder: Path, spec: PairSpec) -> None:
    """Byte-level tokenizer without merges: token i (< symbols) is one byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet[: spec.symbols])}
    vocab |= spec.special_ids
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=SPECIALS[0],
        eos_token=SPECIALS[1],
        pad_token=SPECIALS[2],
        mask_token=SPECIALS[3],
        model_max_length=spec.max_positions,
    )
    fast.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    fast.save_pretrained(folder)
