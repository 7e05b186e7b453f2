"""Strict check of a drafter's tensors from the safetensors headers, before any weight is loaded.

vLLM drops what it does not know and sets a head whose tensors are missing to None without a word;
here every missing, unexpected or misshapen tensor is named, all of them in one error. What is
merely worth knowing (no confidence head in the file although the config has one) is a `Finding`.
"""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.spec import DrafterSpec, TargetShape

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Far above any real header; a corrupt length must not make us read gigabytes.
MAX_HEADER_BYTES = 100 * 1024 * 1024
# Training-only tensors that exporters leave in the file.
IGNORED = ("t2d", "mask_embedding")
# Architectures whose decoder layers follow Qwen3's names.
QWEN_LAYERS = ("Qwen3DSparkModel", "DSparkSpeculator", "DSparkDraftModel")
# Names listed before an error is cut short.
MAX_NAMED = 12

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}

FindingKind = Literal["no_confidence_head", "layers_unchecked"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    # byte range in the file
    start: int
    stop: int


@dataclass(frozen=True)
class Finding:
    """Something about a usable checkpoint that its user should know."""

    kind: FindingKind
    message: str


@dataclass(frozen=True)
class CheckedDrafter:
    """A checkpoint whose tensors are all there."""

    spec: DrafterSpec
    target: TargetShape
    tensors: dict[str, StoredTensor]
    findings: tuple[Finding, ...]

    def has(self, name: str) -> bool:
        return name in self.tensors

    @property
    def has_confidence_head(self) -> bool:
        return self.has("confidence_head.proj.weight")

    @property
    def shares_embedding(self) -> bool:
        """Whether the target's input embedding is used."""
        return not self.has("embed_tokens.weight")

    @property
    def shares_lm_head(self) -> bool:
        """Whether the target's output projection is used."""
        return not self.has("lm_head.weight")


def read_inventory(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder, from a single file or the shards of an index."""
    folder = Path(folder)
    if (folder / INDEX).is_file():
        weight_map: dict[str, str] = json.loads((folder / INDEX).read_text())["weight_map"]
        inventory: dict[str, StoredTensor] = {}
        for shard in sorted(set(weight_map.values())):
            inventory.update(_read_header(folder / shard))
        absent = [name for name in weight_map if name not in inventory]
        if absent:
            raise DrafterError(
                f"{folder / INDEX} lists tensors that its shards lack: {_listed(absent)}: "
                "fetch the checkpoint again"
            )
        return inventory
    if (folder / SINGLE).is_file():
        return _read_header(folder / SINGLE)
    raise DrafterError(
        f"{folder} holds neither {SINGLE} nor {INDEX}: give a safetensors checkpoint "
        "(convert a pytorch_model.bin first)"
    )


def _read_header(file: Path) -> dict[str, StoredTensor]:
    if not file.is_file():
        raise DrafterError(f"{file} does not exist: fetch the checkpoint again")
    size = file.stat().st_size
    with file.open("rb") as stream:
        prefix = stream.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise DrafterError(
                f"{file} is not a safetensors file (its header claims {length} of {size} bytes): "
                "it is truncated or a Git LFS pointer; fetch it again"
            )
        header = json.loads(stream.read(length))
    inventory = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        start, stop = (8 + length + offset for offset in entry["data_offsets"])
        if stop > size:
            raise DrafterError(
                f"{file} ends at byte {size}, before the end of {name} at {stop}: "
                "the download is incomplete; fetch it again"
            )
        inventory[name] = StoredTensor(tuple(entry["shape"]), entry["dtype"], file, start, stop)
    return inventory


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Load one tensor to the CPU, in its stored dtype."""
    if stored.dtype not in DTYPES:
        raise DrafterError(
            f"{stored.file}: a tensor has dtype {stored.dtype}: this reader knows "
            f"{', '.join(DTYPES)}; quantised head weights are not supported"
        )
    with stored.file.open("rb") as stream:
        stream.seek(stored.start)
        raw = bytearray(stream.read(stored.stop - stored.start))
    flat = torch.frombuffer(raw, dtype=DTYPES[stored.dtype]) if raw else torch.empty(0)
    return flat.view(stored.shape)


def expected_shapes(spec: DrafterSpec) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the config promises, shared ones included."""
    h, r = spec.hidden_size, spec.markov_rank
    shapes: dict[str, tuple[int, ...]] = {
        "embed_tokens.weight": (spec.vocab_size, h),
        "lm_head.weight": (spec.draft_vocab_size, h),
        "fc.weight": (h, len(spec.target_layer_ids) * spec.target_hidden_size),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    if r:
        shapes["markov_head.markov_w1.weight"] = (spec.vocab_size, r)
        shapes["markov_head.markov_w2.weight"] = (spec.draft_vocab_size, r)
    if spec.markov_kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (r, h + r)
        shapes["markov_head.gate_proj.bias"] = (r,)
    if spec.markov_kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + h)
        shapes["markov_head.joint_proj.bias"] = (3 * r,)
    if spec.has_confidence:
        shapes["confidence_head.proj.weight"] = (1, spec.confidence_width)
        shapes["confidence_head.proj.bias"] = (1,)
    if spec.draft_vocab_size < spec.vocab_size:
        shapes["d2t"] = (spec.draft_vocab_size,)
    if spec.architecture in QWEN_LAYERS:
        for layer in range(spec.num_layers):
            shapes.update(_layer_shapes(spec, f"layers.{layer}."))
    return shapes


def _layer_shapes(spec: DrafterSpec, prefix: str) -> dict[str, tuple[int, ...]]:
    h, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention: dict[str, tuple[int, ...]] = {
        "q_proj.weight": (q, h),
        "k_proj.weight": (kv, h),
        "v_proj.weight": (kv, h),
        "o_proj.weight": (h, q),
        "q_norm.weight": (spec.head_dim,),
        "k_norm.weight": (spec.head_dim,),
    }
    if spec.attention_bias:
        attention.update(
            {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,), "o_proj.bias": (h,)}
        )
    shapes = {f"{prefix}self_attn.{name}": shape for name, shape in attention.items()}
    shapes[f"{prefix}mlp.gate_proj.weight"] = (f, h)
    shapes[f"{prefix}mlp.up_proj.weight"] = (f, h)
    shapes[f"{prefix}mlp.down_proj.weight"] = (h, f)
    shapes[f"{prefix}input_layernorm.weight"] = (h,)
    shapes[f"{prefix}post_attention_layernorm.weight"] = (h,)
    return shapes


def _optional(spec: DrafterSpec, target: TargetShape) -> set[str]:
    """Promised tensors that may be absent: shared with the target, or a confidence head."""
    optional = {"confidence_head.proj.weight", "confidence_head.proj.bias"}
    if spec.draft_vocab_size >= target.vocab_size:
        optional.add("d2t")  # an expanded input vocabulary; drafted ids are target ids already
    same_width = spec.hidden_size == target.hidden_size
    if spec.vocab_size == target.vocab_size and same_width:
        optional.add("embed_tokens.weight")
    if spec.draft_vocab_size == target.vocab_size and same_width:
        optional.add("lm_head.weight")
    return optional


def check_checkpoint(folder: str | Path, spec: DrafterSpec, target: TargetShape) -> CheckedDrafter:
    """Refuse a checkpoint that is not exactly what its config and the target need."""
    spec.check_target(target)
    tensors = read_inventory(folder)
    shapes = expected_shapes(spec)
    optional = _optional(spec, target)
    layers_checked = spec.architecture in QWEN_LAYERS

    missing = [n for n in shapes if n not in tensors and n not in optional]
    unexpected = [
        n
        for n in tensors
        if n not in shapes and n not in IGNORED and (layers_checked or not n.startswith("layers."))
    ]
    misshapen = [
        f"{n} {list(tensors[n].shape)}, expected {list(shape)}"
        for n, shape in shapes.items()
        if n in tensors and tensors[n].shape != shape
    ]
    problems = [
        f"{what}: {_listed(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", misshapen),
        )
        if names
    ]
    if problems:
        raise DrafterError(
            f"{folder} does not hold the tensors that its config.json describes; "
            + "; ".join(problems)
            + _hint(missing, unexpected, spec)
        )
    return CheckedDrafter(spec, target, tensors, tuple(_findings(spec, tensors, layers_checked)))


def _findings(
    spec: DrafterSpec, tensors: dict[str, StoredTensor], layers_checked: bool
) -> Iterable[Finding]:
    if "confidence_head.proj.weight" not in tensors:
        promised = "promises one that the file lacks" if spec.has_confidence else "has none either"
        yield Finding(
            "no_confidence_head",
            f"{spec.file}: no confidence head in the checkpoint (the config {promised}): plans "
            "rank drafts by running acceptance instead",
        )
    if not layers_checked:
        yield Finding(
            "layers_unchecked",
            f"{spec.file}: the decoder layers of {spec.architecture} are not known here, so only "
            "the tensors outside them were checked",
        )


def _hint(missing: list[str], unexpected: list[str], spec: DrafterSpec) -> str:
    """The likely cause, where the names give it away."""
    if unexpected and all(name.startswith("model.") for name in unexpected):
        return ": the names carry a 'model.' prefix; export them without it"
    if "d2t" in missing or "lm_head.weight" in missing:
        return (
            f": a draft vocabulary of {spec.draft_vocab_size} needs its own lm_head and d2t, the "
            "target's cannot be shared"
        )
    if any("markov_head." in name for name in missing + unexpected):
        return f": markov_head_type = {spec.markov_kind!r} may not be what was trained"
    return ": fetch the checkpoint again or correct its config.json"


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMED
    return ", ".join(names[:MAX_NAMED]) + (f" and {more} more" if more > 0 else "")


def parameter_count(tensors: dict[str, StoredTensor]) -> int:
    """Stored numbers, for logs."""
    return sum(math.prod(tensor.shape) for tensor in tensors.values())
