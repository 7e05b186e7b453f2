"""What scheduling an engine gets, found once from its config, options and artifacts.

Scheduler and worker call `resolve_scheduling` with equal configs and so find the same answer.
"""

import functools
import logging
import platform
from pathlib import Path
from typing import Any, Literal

import torch

import vllm_dspark
from vllm_dspark.artifacts.fingerprint import Fingerprint, hash_config
from vllm_dspark.artifacts.freshness import Resolution, resolve
from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.artifacts.store import ArtifactStore
from vllm_dspark.config import DSparkConfig
from vllm_dspark.cpu.build import is_cpu_build
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.integration.compat import vllm_version
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import StepMode

logger = logging.getLogger("vllm.vllm_dspark")


def resolve_scheduling(vllm_config: Any, options: DSparkConfig) -> Resolution:
    """Whether verification is scheduled, with what table and calibration, and if not why."""
    width = vllm_config.speculative_config.num_speculative_tokens
    mode, why = settle_windows(vllm_config, options)
    reason = unsupported(vllm_config) or (why if mode == "native" else "")
    if reason:
        return Resolution(reason, Calibration.identity(width))
    store = ArtifactStore(options.resolved_cache_dir())
    return resolve(options, live_fingerprint(vllm_config), store)


def unsupported(vllm_config: Any) -> str:
    """Why this engine's windows stay full, or "" if they can be scheduled."""
    speculative = vllm_config.speculative_config
    if not getattr(speculative.draft_model_config.hf_config, "enable_confidence_head", False):
        return "the drafter has no confidence head (enable_confidence_head in its config.json)"
    return ""


WindowMode = Literal["host", "device", "native"]


def settle_windows(vllm_config: Any, options: DSparkConfig) -> tuple[WindowMode, str]:
    """Who sets windows in this engine, and why; "native" means full windows always.

    | engine                                    | auto   | host | device                        |
    |-------------------------------------------|--------|------|-------------------------------|
    | CPU build                                 | host   | host | device                        |
    | data parallel, sampling replay            | native | native | native                      |
    | target with recurrent states (CUDA)       | native | native | native: not shown to be right |
    | LoRA, or pipeline parallel                | host   | host | native: lengths must be known |
    | CUDA, eager or piecewise graphs           | host   | host | native: nothing to gain       |
    | CUDA, full graphs, the backend can        | device | host | device                        |
    | CUDA, full graphs, it cannot (FA2, MLA)   | host   | host | host                          |
    | CUDA, full graphs, reference kernels, or  | host   | host | host                          |
    |   microbatches, sharded sampling, routing |        |      |                               |
    """
    wish = options.windows
    parallel = vllm_config.parallel_config
    refusal = ""
    if parallel.data_parallel_size > 1:
        refusal = f"data_parallel_size = {parallel.data_parallel_size}: ranks cannot agree"
    elif getattr(vllm_config.model_config, "enable_trace_replay", False):
        refusal = "enable_trace_replay needs the same windows in every run"
    elif vllm_config.model_config.is_hybrid:
        refusal = "recurrent states of the target were not tested with trimmed windows"
    if refusal:
        return "native", refusal
    host_lengths = ""
    if vllm_config.lora_config is not None:
        host_lengths = "LoRA needs lengths that the host knows"
    elif parallel.pipeline_parallel_size > 1:
        host_lengths = "pipeline ranks need lengths that the host knows"
    if host_lengths:
        return ("native", host_lengths) if wish == "device" else ("host", host_lengths)
    if is_cpu_build():
        return ("device", "asked for") if wish == "device" else ("host", "a CPU has no graphs")
    return _settle_cuda(vllm_config, options)


def _settle_cuda(vllm_config: Any, options: DSparkConfig) -> tuple[WindowMode, str]:
    """The rows of the table that depend on graphs and attention backend."""
    wish = options.windows
    if wish == "host":
        return "host", "asked for"
    if not vllm_config.compilation_config.cudagraph_mode.has_full_cudagraphs():
        reason = "no full graphs, so lengths on the host cost nothing"
        return ("native", reason) if wish == "device" else ("host", reason)
    refusal = _needs_host_lengths(vllm_config, options) or ragged_graph_refusal(vllm_config)
    if refusal:
        return "host", refusal
    return "device", "full graphs replay variable rows"


def _needs_host_lengths(vllm_config: Any, options: DSparkConfig) -> str:
    """What, besides the attention backend, wants lengths on the host; "" if nothing does."""
    parallel = vllm_config.parallel_config
    reasons = {
        "the reference kernels have no allocation for the device": options.kernels == "reference",
        "microbatches are split by lengths that the host knows": parallel.use_ubatching,
        "batch-sharded sampling is planned from lengths that the host knows": (
            parallel.enable_batch_sharded_sampling
        ),
        "returned routed experts are cut by lengths that the host knows": (
            # not in every supported vLLM
            getattr(getattr(vllm_config, "aux_output_config", None), "enabled", False)
        ),
        "kv_sharing_fast_prefill keeps vLLM's own graphs": (
            vllm_config.cache_config.kv_sharing_fast_prefill
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def ragged_graph_refusal(vllm_config: Any) -> str:
    """Why full graphs of this engine's attention cannot replay variable rows; "" if they can.

    Known from the config, so that engine core and workers agree; the worker checks the backends
    that were really built before anything is captured.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backend import AttentionCGSupport
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    model = vllm_config.model_config
    if model.use_mla:
        return "MLA backends plan on lengths that the host knows, as far as was checked"
    backend = vllm_config.attention_config.backend
    if backend is None:
        if not current_platform.is_device_capability(90):
            return "only on Hopper is the default attention backend known to replay variable rows"
        backend = AttentionBackendEnum.FLASH_ATTN
    found = backend.get_class()
    support = found.get_builder_cls()._cudagraph_support
    if support is not AttentionCGSupport.ALWAYS:
        return f"{backend.name} replays uniform batches only (FlashAttention 2 for one)"
    if not found.supports_device_cpu_query_lens_mismatch():
        return f"{backend.name} plans on lengths that the host knows"
    return ""


def step_modes(vllm_config: Any) -> tuple[StepMode, StepMode]:
    """How ragged and native steps of this engine run, where their size is within its graphs."""
    graphs = vllm_config.compilation_config.cudagraph_mode
    if is_cpu_build():
        return StepMode.EAGER, StepMode.EAGER
    ungraphed = StepMode.EAGER
    if graphs.requires_piecewise_compilation():
        ungraphed = StepMode.PIECEWISE
    if not graphs.has_full_cudagraphs():
        return ungraphed, ungraphed
    ragged = ungraphed if ragged_graph_refusal(vllm_config) else StepMode.FULL
    return ragged, StepMode.FULL


def require_schedulable(reason: str, options: DSparkConfig) -> None:
    """Raise when the user demanded scheduling (`"scheduling": true`) that cannot be had."""
    if options.scheduling is True and reason:
        raise DSparkConfigError(
            f'dspark.scheduling = true, but {reason}; drop the option ("auto" verifies full '
            "windows then) or remove the cause"
        )


def require_servable(vllm_config: Any) -> None:
    """Raise for what would fail in the first verified step, whoever sets windows."""
    lora = vllm_config.lora_config
    if not is_cpu_build() or lora is None:
        return
    if not lora.target_modules or "lm_head" in lora.target_modules:
        raise DSparkConfigError(
            f"enable_lora with lora_target_modules = {lora.target_modules!r}: on a CPU "
            "vLLM applies adapters of lm_head to one row of logits per request, and verification "
            "has several; name the modules that your adapters change, without lm_head "
            '(lora_target_modules = ["q_proj", "v_proj", ...])'
        )


def live_fingerprint(vllm_config: Any) -> Fingerprint:
    """Identity of this engine for artifacts; equal in every process of the engine."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    draft = speculative.draft_model_config
    compilation = vllm_config.compilation_config
    backend = vllm_config.attention_config.backend
    return Fingerprint(
        device=device_name(),
        device_count=parallel.world_size,
        driver=_driver(),
        cuda=torch.version.cuda or "",
        triton=_triton_version(),
        torch=torch.__version__,
        vllm=vllm_version(),
        plugin=vllm_dspark.__version__,
        model_hash=_config_hash(model),
        drafter_hash=_config_hash(draft, is_drafter=True),
        quantization=str(model.quantization or ""),
        dtype=str(model.dtype).removeprefix("torch."),
        kv_cache_dtype=str(vllm_config.cache_config.cache_dtype),
        tensor_parallel=parallel.tensor_parallel_size,
        data_parallel=parallel.data_parallel_size,
        pipeline_parallel=parallel.pipeline_parallel_size,
        attention_backend=backend.name if backend is not None else "default",
        num_speculative_tokens=speculative.num_speculative_tokens,
        acceptance_rule=f"{speculative.rejection_sample_method}/{speculative.draft_sample_method}",
        ladder=tuple(sorted(compilation.cudagraph_capture_sizes or ())),
        # Not the graph mode: a worker may lower it, and all processes must agree.
        compilation=str(getattr(compilation.mode, "name", compilation.mode)),
    )


def keep_table(record: CostTableRecord, folder: Path) -> None:
    """Keep a measured table for the next start; a folder that cannot be written costs only that."""
    try:
        path = ArtifactStore(folder).save(record)
    except OSError as error:
        logger.warning(
            "vllm-dspark: the cost table is used but not kept, the next start measures again: %s; "
            "name a folder that can be written (dspark.cache_dir)",
            error,
        )
    else:
        logger.info("vllm-dspark: cost table measured and kept in %s", path)


def describe_config(vllm_config: Any, options: DSparkConfig) -> dict[str, Any]:
    """Identity of an engine as JSON values, for the measuring commands.

    unused_because: why an engine of this config would not use a cost table, or "".
    """
    mode, why = settle_windows(vllm_config, options)
    speculative = vllm_config.speculative_config
    return {
        "fingerprint": live_fingerprint(vllm_config).model_dump(mode="json"),
        "cache_dir": str(options.resolved_cache_dir().absolute()),
        "windows": mode,
        "unused_because": unsupported(vllm_config) or (why if mode == "native" else ""),
        "num_speculative_tokens": speculative.num_speculative_tokens,
        "model": str(vllm_config.model_config.model),
        "drafter": str(speculative.draft_model_config.model),
    }


def _config_hash(model_config: Any, is_drafter: bool = False) -> str:
    """Digest of a model's config and of its weight files' sizes (contents would take minutes)."""
    config = dict(model_config.hf_config.to_dict())
    # vLLM's drafter classes write this into the config when they are built, so that a worker would
    # find another digest than the engine core, which builds none.
    if is_drafter and config.get("draft_vocab_size") is None:
        config["draft_vocab_size"] = config.get("vocab_size")
    folder = Path(model_config.model)
    if folder.is_dir():
        config["_files"] = sorted((p.name, p.stat().st_size) for p in folder.glob("*.safetensors"))
    # What merely names a version of the library or the way of loading is no part of the model.
    for name in ("transformers_version", "_name_or_path", "architectures"):
        config.pop(name, None)
    return hash_config(config)


@functools.cache
def device_name() -> str:
    """Name of the accelerator, or of the CPU."""
    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


@functools.cache
def _driver() -> str:
    if not torch.cuda.is_available():
        return ""
    import pynvml

    pynvml.nvmlInit()
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    finally:
        pynvml.nvmlShutdown()


def _triton_version() -> str:
    if not torch.cuda.is_available():
        return ""
    import triton

    return str(triton.__version__)
