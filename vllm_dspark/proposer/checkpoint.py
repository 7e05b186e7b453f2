"""Strict check of a drafter's tensors from the safetensors headers, before any weight is loaded.

vLLM drops what it does not know and sets a head whose tensors are missing to None without a word;
here every missing, unexpected or misshapen tensor is named, all of them in one error. What is
merely worth knowing (no confidence head in the file although the config has one) is a `Finding`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.heads import check_map
from vllm_dspark.proposer.inventory import (
    FLOATS,
    StoredTensor,
    listed,
    read_inventory,
    read_tensor,
)
from vllm_dspark.proposer.quantization import stored_types
from vllm_dspark.proposer.spec import DrafterSpec, TargetShape
from vllm_dspark.proposer.tensors import (
    IGNORED,
    Shape,
    expected_shapes,
    fused_with,
    layers_are_known,
    linear_layers,
)
from vllm_dspark.proposer.values import check_finite

# How offsets into a vocabulary may be stored, and how exporters store quantised weights.
OFFSETS = ("I64", "I32")
CODES = ("F8_E4M3", "F8_E5M2", "I8", "U8", "I32")

FindingKind = Literal["no_confidence_head", "layers_unchecked"]


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
    if spec.tied and spec.draft_vocab_size == spec.vocab_size:
        optional.add("lm_head.weight")  # the drafter's own embedding serves, if it has one
    optional.update(f"layers.{i}.layer_scalar" for i in range(spec.num_layers))  # 1 unless saved
    return optional


def check_checkpoint(folder: str | Path, spec: DrafterSpec, target: TargetShape) -> CheckedDrafter:
    """Refuse a checkpoint that is not exactly what its config and the target need."""
    spec.check_target(target)
    checked = check_tensors(read_inventory(folder), spec, target, str(folder))
    used = {name: tensor for name, tensor in checked.tensors.items() if name not in IGNORED}
    check_finite(used, str(folder))
    if checked.has("d2t"):
        limited = spec.limited_to(target.vocab_size)
        check_map(limited, read_tensor(checked.tensors["d2t"]), target.vocab_size)
    return checked


def check_tensors(
    tensors: dict[str, StoredTensor], spec: DrafterSpec, target: TargetShape, where: str
) -> CheckedDrafter:
    """The same for an inventory that is already read."""
    shapes = expected_shapes(spec)
    optional = _optional(spec, target)
    packed = _packed(tensors, spec)
    for name in packed.modules:
        shapes.pop(f"{name}.weight")
    layers_known = layers_are_known(spec)

    missing = [n for n in shapes if n not in tensors and n not in optional] + packed.missing
    unexpected = [
        n
        for n in tensors
        if n not in shapes
        and n not in packed.known
        and n not in IGNORED
        and (layers_known or not n.startswith("layers."))
    ]
    misshapen = packed.misshapen + [
        f"{n} {list(tensors[n].shape)}, expected {list(shape)}"
        for n, shape in shapes.items()
        if n in tensors and tensors[n].shape != shape
    ]
    mistyped = packed.mistyped + [
        f"{n} ({tensors[n].dtype})"
        for n in shapes
        if n in tensors and tensors[n].dtype not in (OFFSETS if n == "d2t" else FLOATS)
    ]
    problems = [
        f"{what}: {listed(names)}"
        for what, names in (
            ("missing", missing),
            ("unexpected", unexpected),
            ("wrong shape", misshapen),
            ("wrong type", mistyped),
            ("quantised in part", packed.halves),
        )
        if names
    ]
    if problems:
        raise DrafterError(
            f"{where} does not hold the tensors that its config.json describes; "
            + "; ".join(problems)
            + _hint(missing, unexpected, mistyped, spec)
        )
    return CheckedDrafter(spec, target, tensors, tuple(_findings(spec, tensors, layers_known)))


@dataclass(frozen=True)
class _Packed:
    """The quantised linear layers of a file."""

    modules: list[str]
    known: set[str]
    missing: list[str]
    misshapen: list[str]
    mistyped: list[str]
    # layers that vLLM fuses with others which are stored plain
    halves: list[str]


def _packed(tensors: dict[str, StoredTensor], spec: DrafterSpec) -> _Packed:
    """Check each linear layer that is not stored plain against the config's scheme.

    A scheme lists layers it leaves alone ("ignore"), by patterns; so what decides is whether the
    layer's plain, floating-point weight is there.
    """
    found = _Packed([], set(), [], [], [], [])
    if spec.quantization is None:
        return found
    for name, (out, into) in linear_layers(spec).items():
        plain = tensors.get(f"{name}.weight")
        stored = any(other.startswith(f"{name}.") for other in tensors)
        if not stored or (plain is not None and plain.dtype in FLOATS):
            continue
        required, optional = spec.quantization.tensors(out, into)
        found.modules.append(name)
        found.known.update(f"{name}.{suffix}" for suffix in (*required, *optional))
        for suffix, allowed in (required | optional).items():
            part = f"{name}.{suffix}"
            tensor = tensors.get(part)
            if tensor is None:
                found.missing.extend([part] if suffix in required else [])
                continue
            if tensor.shape not in allowed:
                found.misshapen.append(_mismatch(part, tensor, allowed))
            if tensor.dtype not in stored_types(suffix):
                types = " or ".join(stored_types(suffix))
                found.mistyped.append(f"{part} ({tensor.dtype}, expected {types})")
    for name in found.modules:
        others = [other for other in fused_with(spec, name) if other not in found.modules]
        if others:
            found.halves.append(f"{name} but not {', '.join(others)}, and vLLM makes one of them")
    return found


def _mismatch(name: str, tensor: StoredTensor, allowed: list[Shape]) -> str:
    return f"{name} {list(tensor.shape)}, expected {' or '.join(str(list(s)) for s in allowed)}"


def _findings(
    spec: DrafterSpec, tensors: dict[str, StoredTensor], layers_known: bool
) -> Iterable[Finding]:
    if "confidence_head.proj.weight" not in tensors:
        promised = "promises one that the file lacks" if spec.has_confidence else "has none either"
        yield Finding(
            "no_confidence_head",
            f"{spec.file}: no confidence head in the checkpoint (the config {promised}): windows "
            "stay full",
        )
    if not layers_known:
        yield Finding(
            "layers_unchecked",
            f"{spec.file}: the decoder layers of {spec.architecture} are not known here, so only "
            "the tensors outside them were checked",
        )


def _hint(missing: list[str], unexpected: list[str], mistyped: list[str], spec: DrafterSpec) -> str:
    """The likely cause, where the names give it away."""
    codes = tuple(f"({code})" for code in CODES)
    coded = any(n.endswith(codes) and not n.startswith("d2t ") for n in mistyped)
    if coded and spec.quantization is None:
        return ": the weights are quantised, but config.json has no quantization_config"
    if any(n.startswith("lm_head.") for n in unexpected + mistyped):
        return ': leave the lm_head plain when exporting ("ignore": ["lm_head"])'
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
