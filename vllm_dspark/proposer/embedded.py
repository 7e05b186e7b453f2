"""DSpark drafters inside a DeepSeek-V4 or V4.1 checkpoint: `dspark_*` keys and `mtp.{i}.*` tensors.

The speculative config needs no "model": the stages are in the target's own files, and embedding
and lm_head are the target's. Each stage is a decoder layer of the target's kind (MLA over a
window, MoE, hyper-connections); the first one also reads the target's hidden states, the last one
carries the heads. V4 names the Markov factors markov_w1 and markov_w2 and collapses the streams by
a learned head; V4.1 names them embed and head and has no such head.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.checkpoint import Finding
from vllm_dspark.proposer.inventory import FLOATS, StoredTensor, listed, read_inventory
from vllm_dspark.proposer.keys import Keys
from vllm_dspark.proposer.spec import MAX_BLOCK
from vllm_dspark.proposer.values import check_finite

Shape = tuple[int, ...]

STAGE = re.compile(r"^mtp\.(\d+)\.(.+)$")
MODEL_TYPES = ("deepseek_v4", "deepseek_v41")
MAX_STAGES = 64
MAX_EXPERTS = 1 << 14
# Types in which those are stored.
CODED = (*FLOATS, "F8_E4M3", "F8_E5M2", "I8", "U8")
# Weights of these may be stored in fewer bits, with a `.scale` beside them.
_LINEAR = re.compile(r"(attn\.(wq_a|wq_b|wkv|wo_a|wo_b)|\.w[123]|main_proj)\.weight$")


@dataclass(frozen=True)
class StageSpec:
    """An embedded drafter, from the target's config. `file` names it in error messages."""

    file: str
    is_v41: bool
    block_size: int
    num_stages: int
    noise_token_id: int
    # zero-based layers; V4: their outputs, V4.1: the streams that enter them
    target_layer_ids: tuple[int, ...]
    markov_rank: int
    has_confidence: bool
    vocab_size: int
    hidden_size: int
    num_heads: int
    head_dim: int
    rope_dim: int
    q_rank: int
    o_rank: int
    o_groups: int
    window: int
    num_experts: int
    active_experts: int
    expert_width: int
    shared_experts: int
    routed_scale: float
    swiglu_limit: float | None
    streams: int
    sinkhorn_rounds: int
    stream_eps: float
    norm_eps: float
    rope_theta: float
    has_gate_bias: bool

    @property
    def default_drafts(self) -> int:
        """K when the user gives none: the block starts with the anchor, which predicts too."""
        return self.block_size

    def check_width(self, num_drafts: int) -> None:
        """Refuse a K that the block cannot serve."""
        if not 1 <= num_drafts <= self.block_size:
            raise DrafterError(
                f"num_speculative_tokens = {num_drafts}, but the drafter in {self.file} was "
                f"trained with dspark_block_size = {self.block_size}: set num_speculative_tokens "
                f"to 1..{self.block_size}"
            )


@dataclass(frozen=True)
class CheckedStages:
    """An embedded drafter whose tensors are all there."""

    spec: StageSpec
    tensors: dict[str, StoredTensor]
    findings: tuple[Finding, ...]

    @property
    def has_confidence_head(self) -> bool:
        return f"mtp.{self.spec.num_stages - 1}.confidence_head.proj.weight" in self.tensors


def embeds_drafter(config: Mapping[str, Any]) -> bool:
    """Whether a target's config describes a drafter inside it."""
    return config.get("dspark_block_size") is not None


def read_stages(config: Mapping[str, Any], file: str = "config.json") -> StageSpec:
    """Validate the `dspark_*` keys of a target's config."""
    keys = Keys(file, config)
    model_type = keys.text("model_type", "deepseek_v4")
    if model_type not in MODEL_TYPES:
        raise keys.bad("model_type", model_type, f"known are {', '.join(MODEL_TYPES)}")
    kind = keys.text("dspark_markov_head_type", "vanilla")
    if kind != "vanilla":
        raise keys.bad("dspark_markov_head_type", kind, "embedded drafters have vanilla heads")
    is_v41 = model_type == "deepseek_v41"
    stages = "n_mtp_layers"
    if keys.config.get(stages) is None:
        stages = "num_nextn_predict_layers"
    experts = "dspark_n_routed_experts"
    if keys.config.get(experts) is None:
        experts = "n_routed_experts"
    eps = keys.number("rms_norm_eps") or 1e-6
    spec = StageSpec(
        file=file,
        is_v41=is_v41,
        block_size=keys.integer("dspark_block_size", 1, high=MAX_BLOCK),
        num_stages=keys.integer(stages, 1, 3, high=MAX_STAGES),
        noise_token_id=keys.integer("dspark_noise_token_id", 0),
        target_layer_ids=keys.layer_ids("dspark_target_layer_ids"),
        markov_rank=keys.integer("dspark_markov_rank", 1),
        has_confidence=keys.flag("enable_confidence_head", True),
        vocab_size=keys.integer("vocab_size", 1),
        hidden_size=keys.integer("hidden_size", 1),
        num_heads=keys.integer("num_attention_heads", 1),
        head_dim=keys.integer("head_dim", 1),
        rope_dim=keys.integer("qk_rope_head_dim", 1, 64),
        q_rank=keys.integer("q_lora_rank", 1),
        o_rank=keys.integer("o_lora_rank", 1),
        o_groups=keys.integer("o_groups", 1),
        window=keys.integer("sliding_window", 1, 128),
        num_experts=keys.integer(experts, 1, high=MAX_EXPERTS),
        active_experts=keys.integer("num_experts_per_tok", 1),
        expert_width=keys.integer("moe_intermediate_size", 1),
        shared_experts=keys.integer("n_shared_experts", 0, 0),
        routed_scale=keys.number("routed_scaling_factor") or 1.0,
        swiglu_limit=keys.number("swiglu_limit"),
        streams=keys.integer("hc_mult", 1),
        sinkhorn_rounds=keys.integer("hc_sinkhorn_iters", 1, 20),
        stream_eps=keys.number("hc_eps") or 1e-6,
        norm_eps=eps,
        rope_theta=keys.number("rope_theta") or 10000.0,
        has_gate_bias=keys.text("topk_method", "") == "noaux_tc",
    )
    _validate(spec, keys)
    return spec


def _validate(spec: StageSpec, keys: Keys) -> None:
    if spec.noise_token_id >= spec.vocab_size:
        raise keys.bad(
            "dspark_noise_token_id",
            spec.noise_token_id,
            f"lies outside the vocabulary of {spec.vocab_size}",
        )
    layers = keys.integer("num_hidden_layers", 1)
    ids = spec.target_layer_ids
    if ids[0] < 0 or ids[-1] >= layers:
        raise keys.bad("dspark_target_layer_ids", list(ids), f"must be layers 0..{layers - 1}")
    if spec.num_heads % spec.o_groups:
        raise keys.bad("o_groups", spec.o_groups, f"must divide the {spec.num_heads} heads")
    if not 0 < spec.rope_dim <= spec.head_dim or spec.rope_dim % 2:
        raise keys.bad("qk_rope_head_dim", spec.rope_dim, "must be even and fit into head_dim")
    if spec.active_experts > spec.num_experts:
        raise keys.bad(
            "num_experts_per_tok", spec.active_experts, f"exceeds {spec.num_experts} experts"
        )


def stage_shapes(spec: StageSpec) -> dict[str, Shape]:
    """Name and shape of every tensor of the drafter as it is without quantisation."""
    h, last = spec.hidden_size, spec.num_stages - 1
    shapes: dict[str, Shape] = {
        "mtp.0.main_proj.weight": (h, len(spec.target_layer_ids) * h),
        "mtp.0.main_norm.weight": (h,),
        f"mtp.{last}.norm.weight": (h,),
    }
    for stage in range(spec.num_stages):
        layer = {**_attention(spec), **_streams(spec), **_experts(spec)}
        shapes.update({f"mtp.{stage}.{name}": shape for name, shape in layer.items()})
    if not spec.is_v41:
        wide = spec.streams * h
        shapes[f"mtp.{last}.hc_head_fn"] = (spec.streams, wide)
        shapes[f"mtp.{last}.hc_head_base"] = (spec.streams,)
        shapes[f"mtp.{last}.hc_head_scale"] = (1,)
    first, second = ("embed", "head") if spec.is_v41 else ("markov_w1", "markov_w2")
    factor = (spec.vocab_size, spec.markov_rank)
    shapes[f"mtp.{last}.markov_head.{first}.weight"] = factor
    shapes[f"mtp.{last}.markov_head.{second}.weight"] = factor
    if spec.has_confidence:
        shapes[f"mtp.{last}.confidence_head.proj.weight"] = (1, h + spec.markov_rank)
    return shapes


def _attention(spec: StageSpec) -> dict[str, Shape]:
    wide = spec.num_heads * spec.head_dim
    return {
        "attn_norm.weight": (spec.hidden_size,),
        "attn.wq_a.weight": (spec.q_rank, spec.hidden_size),
        "attn.q_norm.weight": (spec.q_rank,),
        "attn.wq_b.weight": (wide, spec.q_rank),
        "attn.wkv.weight": (spec.head_dim, spec.hidden_size),
        "attn.kv_norm.weight": (spec.head_dim,),
        "attn.attn_sink": (spec.num_heads,),
        "attn.wo_a.weight": (spec.o_groups * spec.o_rank, wide // spec.o_groups),
        "attn.wo_b.weight": (spec.hidden_size, spec.o_groups * spec.o_rank),
    }


def _streams(spec: StageSpec) -> dict[str, Shape]:
    mixes = (2 + spec.streams) * spec.streams
    shapes: dict[str, Shape] = {}
    for part in ("attn", "ffn"):
        shapes[f"hc_{part}_fn"] = (mixes, spec.streams * spec.hidden_size)
        shapes[f"hc_{part}_base"] = (mixes,)
        shapes[f"hc_{part}_scale"] = (3,)
    return shapes


def _experts(spec: StageSpec) -> dict[str, Shape]:
    h, width = spec.hidden_size, spec.expert_width
    shapes: dict[str, Shape] = {
        "ffn_norm.weight": (h,),
        "ffn.gate.weight": (spec.num_experts, h),
    }
    if spec.has_gate_bias:
        shapes["ffn.gate.bias"] = (spec.num_experts,)
    groups = [(f"ffn.experts.{e}", width) for e in range(spec.num_experts)]
    if spec.shared_experts:
        groups.append(("ffn.shared_experts", width * spec.shared_experts))
    for prefix, wide in groups:
        shapes[f"{prefix}.w1.weight"] = (wide, h)
        shapes[f"{prefix}.w2.weight"] = (h, wide)
        shapes[f"{prefix}.w3.weight"] = (wide, h)
    return shapes


def check_stages(folder: str | Path, spec: StageSpec) -> CheckedStages:
    """Refuse a checkpoint whose `mtp.*` tensors are not exactly those of its config."""
    inventory = read_inventory(folder)
    tensors = {name: tensor for name, tensor in inventory.items() if STAGE.match(name)}
    shapes = stage_shapes(spec)
    confidence = f"mtp.{spec.num_stages - 1}.confidence_head.proj.weight"
    optional = {confidence, f"mtp.{spec.num_stages - 1}.confidence_head.proj.bias"}
    linear = {name for name in shapes if _LINEAR.search(name)}
    scales = {f"{name.removesuffix('.weight')}.scale" for name in linear}
    missing = [name for name in shapes if name not in tensors and name not in optional]
    unexpected = [n for n in tensors if n not in shapes and n not in scales and n not in optional]
    misshapen = [
        f"{name} {list(tensors[name].shape)}, expected {list(shape)}"
        for name, shape in shapes.items()
        if name in tensors and not _fits(tensors[name], shape, name in linear)
    ]
    mistyped = [
        f"{name} ({tensors[name].dtype})"
        for name in shapes
        if name in tensors and tensors[name].dtype not in (CODED if name in linear else FLOATS)
    ]
    groups = (
        ("missing", missing),
        ("unexpected", unexpected),
        ("wrong shape", misshapen),
        ("wrong type", mistyped),
    )
    problems = [f"{what}: {listed(names)}" for what, names in groups if names]
    if problems:
        hint = "fetch the checkpoint again or correct its dspark_* keys"
        if not any(".main_proj." in name for name in tensors):
            hint = "it holds no DSpark drafter; name a standalone one as the speculative model"
        raise DrafterError(
            f"{folder} does not hold the mtp.* tensors that its config.json describes; "
            f"{'; '.join(problems)}: {hint}"
        )
    # Linear layers are left out: they hold nearly all of the bytes, tens of gigabytes.
    check_finite({name: t for name, t in tensors.items() if name not in linear}, str(folder))
    return CheckedStages(spec, tensors, tuple(_findings(spec, confidence in tensors)))


def _fits(tensor: StoredTensor, shape: Shape, may_be_packed: bool) -> bool:
    """The shape itself or, for a linear layer, two 4-bit numbers to a byte."""
    if tensor.shape == shape:
        return True
    packed = may_be_packed and tensor.dtype in ("I8", "U8")
    return packed and tensor.shape == (shape[0], shape[1] // 2)


def _findings(spec: StageSpec, has_confidence: bool) -> list[Finding]:
    if has_confidence:
        return []
    return [
        Finding(
            "no_confidence_head",
            f"{spec.file}: no confidence head among the mtp.* tensors: windows stay full",
        )
    ]
