"""Checks of the drafter and of how it fits its target; the rules are proposer/'s own."""

import difflib
from collections.abc import Iterator
from pathlib import Path

from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Subject, missing_path, ownerless
from vllm_dspark.errors import ContractError, DrafterError
from vllm_dspark.integration.contract import installed_source
from vllm_dspark.proposer.checkpoint import check_checkpoint
from vllm_dspark.proposer.embedded import StageSpec, check_stages, read_stages
from vllm_dspark.proposer.inventory import FLOATS, INDEX, SINGLE, read_inventory
from vllm_dspark.proposer.spec import (
    GEMMA4_NAMES,
    QWEN3_NAMES,
    DrafterSpec,
    TargetShape,
    read_spec,
)

_MODEL = '"model" in --speculative-config'
_K = "--speculative-config '{\"num_speculative_tokens\": %d, ...}'"


def check_drafter(subject: Subject) -> Iterator[Finding]:
    """Format, width, agreement with the target, tensors."""
    if subject.drafter_folder is None:
        if subject.drafter_name is not None:
            yield _absent(subject.drafter_name)
        given = subject.arguments.speculative.get("num_speculative_tokens")
        if given is not None and given < 1:  # with a drafter its block says what is allowed
            message = f"num_speculative_tokens = {given} must be at least 1"
            yield Finding("draft_width", "error", message, flag=_K % 7)
        return
    try:
        spec = _read(subject)
    except DrafterError as error:
        yield _error("drafter_config", error, f"{_MODEL}: a complete DSpark checkpoint")
        return
    subject.spec = spec
    yield Finding("drafter_config", "ok", _described(subject))
    yield from _check_class(spec)
    yield from _check_width(subject)
    yield from _check_match(subject)


def _absent(name: str) -> Finding:
    """A drafter whose files are not here: a path that leads nowhere, or a hub id."""
    if not (missing_path(name) or ownerless(name) or Path(name).is_file()):
        return Finding(
            "drafter_files",
            "warning",
            f"{name} is no local folder and not in the hub's cache",
            "its config and tensors can only be checked when vLLM has fetched them",
            f"hf download {name}",
        )
    tilde = "; ~ is not replaced inside JSON" if name.startswith("~") else ""
    return Finding(
        "drafter_files",
        "error",
        f"{name} is a file, not the folder of a checkpoint"
        if Path(name).is_file()
        else f"{name} is no folder here, and no hub id OWNER/NAME"
        if ownerless(name) and not tilde
        else f"the folder {name} does not exist{tilde}",
        "vLLM would take it for a hub id, and fail",
        f"{_MODEL}: an existing folder, or a hub id OWNER/NAME",
    )


def _read(subject: Subject) -> DrafterSpec | StageSpec:
    if subject.is_embedded:
        return read_stages(subject.target_config, str(subject.target_folder))
    assert subject.drafter_folder is not None
    return read_spec(subject.drafter_folder)


def _described(subject: Subject) -> str:
    spec = subject.spec
    assert spec is not None
    if isinstance(spec, DrafterSpec):
        kind = {"deepspec": "DeepSpec", "speculators": "speculators"}[spec.format]
        return (
            f"{kind} drafter {spec.architecture}: block {spec.block_size}"
            f"{'' if spec.sample_from_anchor else ' (anchor included)'}, {spec.num_layers} layers, "
            f"target layers {list(spec.target_layer_ids)}, mask id {spec.mask_token_id}, Markov "
            f"head {spec.markov_kind or 'none'}"
        )
    version = "V4.1" if spec.is_v41 else "V4"
    return (
        f"drafter embedded in DeepSeek-{version}: block {spec.block_size}, {spec.num_stages} "
        f"stages, target layers {list(spec.target_layer_ids)}, noise id {spec.noise_token_id}"
    )


def _check_width(subject: Subject) -> Iterator[Finding]:
    spec, given = subject.spec, subject.arguments.speculative.get("num_speculative_tokens")
    assert spec is not None
    if given is None:
        yield Finding(
            "draft_width",
            "info",
            f"num_speculative_tokens is not given: the plugin takes {spec.default_drafts}",
            "vLLM's own default is one too many for blocks that start with the anchor",
            _K % spec.default_drafts,
        )
        return
    try:
        spec.check_width(int(given))
    except DrafterError as error:
        yield _error("draft_width", error, _K % spec.default_drafts)
        return
    yield Finding("draft_width", "ok", f"K = {given} of a block of {spec.block_size}")


def _check_match(subject: Subject) -> Iterator[Finding]:
    """The drafter against the target's config, then its tensors."""
    spec, folder = subject.spec, subject.drafter_folder
    assert spec is not None
    assert folder is not None
    has_weights = (folder / SINGLE).is_file() or (folder / INDEX).is_file()
    if isinstance(spec, DrafterSpec):
        if not subject.target_config:
            if subject.target_is_nowhere:  # check_target_files says so
                return
            yield Finding(
                "target_match",
                "warning",
                f"the config of {subject.arguments.target} is not at hand",
                "vocabulary, hidden size and layer ids cannot be compared",
                f"hf download {subject.arguments.target} config.json",
            )
            return
        try:
            target = TargetShape.from_config(subject.target_config, "the target's config")
            spec.check_target(target)
        except DrafterError as error:
            trained_for = spec.verifier or "the model that the drafter was trained for"
            yield _error("target_match", error, f"{trained_for} as TARGET, or another {_MODEL}")
            return
        yield Finding("target_match", "ok", "vocabulary, hidden size and layer ids agree")
    if not has_weights:
        yield _without_weights(subject, folder)
        return
    try:
        if isinstance(spec, DrafterSpec):
            findings = check_checkpoint(folder, spec, target).findings
        else:
            findings = check_stages(folder, spec).findings
    except DrafterError as error:
        yield _error("drafter_tensors", error, f"{_download(subject)}, or another {_MODEL}")
        return
    yield Finding("drafter_tensors", "ok", "all tensors are there and of the right shape")
    for found in findings:
        if found.kind == "no_confidence_head":
            yield _headless(folder, spec)
        else:
            yield Finding(found.kind, "info", found.message)


def _headless(folder: Path, spec: DrafterSpec | StageSpec) -> Finding:
    """What integration/startup.py makes of a checkpoint without a confidence head."""
    promised = isinstance(spec, DrafterSpec) and spec.has_confidence
    return Finding(
        "no_confidence_head",
        "warning",
        f"{folder} holds no confidence head"
        + (", though its config.json promises one" if promised else "")
        + ": windows stay full",
        "nothing says which drafts will be accepted, so verification is not scheduled; "
        '"scheduling": true would end the start',
        f"{_MODEL}: a checkpoint with its confidence head",
    )


def _source(subject: Subject) -> str:
    """The checkpoint that holds the drafter's weights, as the user named it."""
    return subject.drafter_name or subject.arguments.target


def _download(subject: Subject) -> str:
    """The command that brings the weights."""
    name = _source(subject)
    return (
        f"hf download OWNER/NAME --local-dir {name}"
        if Path(name).is_dir()
        else (f"hf download {name}")
    )


def _without_weights(subject: Subject, folder: Path) -> Finding:
    """A config alone: fatal in a folder of the user's, to be fetched yet in the hub's cache."""
    message = f"{folder} holds neither {SINGLE} nor {INDEX}"
    if Path(_source(subject)).is_dir():
        reason = "the engine would end while it loads the drafter"
        return Finding("drafter_tensors", "error", message, reason, _download(subject))
    reason = "names and shapes of the weights are checked once they are there"
    return Finding("drafter_tensors", "warning", message, reason, _download(subject))


def check_quantization(subject: Subject) -> Iterator[Finding]:
    """Quantised targets and drafters, where public reports say it hurts."""
    target = subject.quantization
    spec = subject.standalone
    if "nvfp4" in target or "fp4" in target:
        yield _fp4(subject)
    if subject.arguments.speculative.get("quantization") and not _stored_scheme(subject):
        yield Finding(
            "draft_quantization",
            "error",
            '"quantization" is set in the speculative config, but the drafter\'s weights are plain',
            "vLLM would look for scales that the file lacks (KeyError, or noise as weights)",
            'leave "quantization" out of --speculative-config',
        )
    elif target and spec is not None and spec.quantization is None:
        yield Finding(
            "draft_quantization",
            "info",
            f"the target is quantised ({target}), the drafter is not",
            "the drafter keeps its own dtype as long as the speculative config names no "
            "quantization",
        )
    if spec is not None and spec.quantization is not None:
        yield _quantized(subject, spec.quantization.layout)


def _quantized(subject: Subject, layout: str) -> Finding:
    """A drafter whose config names a scheme; what its file holds decides."""
    stored = _holds_packed(subject.drafter_folder)
    if stored is False:
        return Finding(
            "draft_quantization",
            "warning",
            f"the drafter's config promises {layout} (quantization_config), its file holds plain "
            "weights",
            "the plugin loads what is stored; vLLM by itself looks for scales that the file lacks",
            f'leave "quantization_config" out of {subject.drafter_folder}/config.json',
        )
    return Finding(
        "draft_quantization",
        "warning",
        f"the drafter's linear layers are stored as {layout}"
        if stored
        else f"the drafter's config promises linear layers stored as {layout}",
        "the fused context KV takes plain weights; reports name crashes in F.linear, and "
        "acceptance of quantised drafters is unknown",
        f"{_MODEL}: the drafter in bf16",
    )


def _holds_packed(folder: Path | None) -> bool | None:
    """Whether any weight of the drafter is stored as codes; None if its tensors are not at hand."""
    if folder is None:
        return None
    try:
        tensors = read_inventory(folder)
    except (DrafterError, OSError):
        return None  # the check of its tensors says why
    return any(t.dtype not in FLOATS for name, t in tensors.items() if name not in ("d2t", "t2d"))


def _stored_scheme(subject: Subject) -> bool:
    config = subject.drafter_config
    return bool(config.get("quantization_config") or config.get("compression_config"))


def _fp4(subject: Subject) -> Finding:
    if subject.is_embedded:
        return Finding(
            "fp4_target",
            "error",
            "the embedded drafter's experts would take the target's FP4 scales",
            "vLLM fails with KeyError w13_weight_scale or w13_input_scale",
            "an FP8 or bf16 checkpoint as TARGET",
        )
    return Finding(
        "fp4_target",
        "warning",
        "the target is quantised to FP4",
        "drafters trained on bf16 hidden states were reported to accept nothing (AL 1.0), without "
        "a message",
        "an FP8 or bf16 checkpoint as TARGET, if vllm-dspark top shows an accepted length of 1",
    )


def _check_class(spec: DrafterSpec | StageSpec) -> Iterator[Finding]:
    """A class of layers that neither the plugin nor the installed vLLM has."""
    if not isinstance(spec, DrafterSpec) or spec.backbone != "other":
        return
    try:
        registry = installed_source("model_executor/models/registry.py")
    except (ContractError, OSError):
        return  # without vLLM nothing is known about its classes
    if f'"{spec.architecture}"' in registry:
        return
    near = difflib.get_close_matches(spec.architecture, (*QWEN3_NAMES, *GEMMA4_NAMES), n=1)
    yield Finding(
        "drafter_class",
        "error",
        f'{spec.file}: "architectures" = [{spec.architecture!r}] is no class of this vLLM'
        + (f"; did you mean {near[0]!r}?" if near else ""),
        "vLLM would not start: it has nothing to load the drafter's layers with",
        f'"architectures": ["{(near or QWEN3_NAMES)[0]}"] in that file, if its layers are those, '
        f"or another {_MODEL}",
    )


def _error(check: str, error: Exception, flag: str) -> Finding:
    """An error of proposer/, whose messages read `where: what: remedy`."""
    return Finding(check, "error", str(error), flag=flag)
