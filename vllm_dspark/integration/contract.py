"""What the plugin relies on inside vLLM, checked from source text (no import, no GPU).

Each entry names a private symbol of vLLM and the facts about it that our code needs. The check
parses the installed files, or those inside a wheel, so `vllm-dspark doctor --wheel` and the
start-up check are the same code. Checked on: vLLM 0.32.0 and 0.33.0.
"""

import ast
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from vllm_dspark.errors import ContractError

SUPPORTED = ">=0.32,<0.34"
CHECKED_VERSIONS = ("0.32.0", "0.33.0")

ReadSource = Callable[[str], str]


@dataclass(frozen=True)
class Symbol:
    """A class, method or function of vLLM.

    path: file inside the vllm package; name: "Class", "Class.method" or "function".
    params: parameters that must exist, by name. fields: names that must be assigned on self (or
    declared in the class body) somewhere in the class. bases: names the class must derive from.
    """

    path: str
    name: str
    params: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    bases: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path.removesuffix('.py').replace('/', '.')}:{self.name}"


_RUNNER = "v1/worker/gpu/model_runner.py"
_SPEC = "v1/worker/gpu/spec_decode"

CONTRACT: tuple[Symbol, ...] = (
    Symbol(
        "engine/arg_utils.py",
        "EngineArgs.create_speculative_config",
        params=("target_model_config", "target_parallel_config"),
    ),
    Symbol(
        "engine/arg_utils.py",
        "EngineArgs",
        fields=("speculative_config", "worker_cls", "scheduler_cls", "additional_config"),
    ),
    Symbol("v1/worker/gpu_worker.py", "Worker._make_model_runner"),
    Symbol("v1/worker/gpu_worker.py", "Worker.load_model"),
    Symbol(
        _RUNNER,
        "GPUModelRunner",
        fields=(
            "speculator",
            "rejection_sampler",
            "sampler",
            "req_states",
            "num_speculative_steps",
            "execute_model_state",
            "adaptive_verification",
            "decode_query_len",
        ),
    ),
    Symbol(_RUNNER, "GPUModelRunner", fields=("step_timing", "cudagraph_manager", "input_buffers")),
    Symbol(_RUNNER, "GPUModelRunner.gather_batch_req_state", params=("scheduler_output",)),
    Symbol(
        "v1/worker/gpu/async_utils.py",
        "StepTimingCollector.record_batch",
        params=("input_batch", "full_cudagraph"),
    ),
    Symbol("v1/worker/gpu/async_utils.py", "StepTimingCollector.forward_start"),
    Symbol("v1/worker/gpu/cudagraph_utils.py", "CudaGraphManager._init_candidates"),
    Symbol(
        "v1/worker/gpu/cudagraph_utils.py",
        "CudaGraphManager",
        fields=("_candidates", "_capture_descs", "graphs", "lora_capture_cases", "cudagraph_mode"),
    ),
    Symbol(
        "v1/worker/gpu/cudagraph_utils.py",
        "BatchExecutionDescriptor",
        fields=("num_tokens", "num_reqs", "uniform_token_count", "max_query_len", "num_ubatches"),
    ),
    Symbol(
        "v1/worker/gpu/cudagraph_utils.py",
        "ModelCudaGraphManager",
        bases=("CudaGraphManager",),
    ),
    Symbol(
        f"{_SPEC}/dflash/cudagraph.py",
        "DFlashCudaGraphManager",
        bases=("CudaGraphManager",),
    ),
    Symbol("v1/worker/gpu/attn_utils.py", "get_query_lens_mismatch_unsupported_backend"),
    Symbol(
        "v1/worker/gpu/attn_utils.py",
        "get_varlen_cudagraph_unsupported_backend",
        params=("attn_groups", "vllm_config", "max_query_len", "checked_layer_names"),
    ),
    Symbol(_RUNNER, "GPUModelRunner.__init__", params=("vllm_config", "device")),
    Symbol(_RUNNER, "GPUModelRunner.load_model"),
    Symbol(_RUNNER, "GPUModelRunner.initialize_kv_cache", params=("kv_cache_config",)),
    Symbol(_RUNNER, "GPUModelRunner.execute_model", params=("scheduler_output",)),
    Symbol(_RUNNER, "GPUModelRunner.sample_tokens", params=("grammar_output",)),
    Symbol(
        _RUNNER,
        "GPUModelRunner.sample",
        params=("hidden_states", "input_batch", "grammar_output"),
    ),
    Symbol("v1/worker/gpu/sample/states.py", "SamplingStates", fields=("seeds_set", "temperature")),
    Symbol(_RUNNER, "GPUModelRunner.finish_requests", params=("scheduler_output",)),
    Symbol(
        f"{_SPEC}/dspark/speculator.py",
        "DSparkSpeculator",
        fields=("sample_from_anchor", "_anchor_idx"),
        bases=("DFlashSpeculator",),
    ),
    Symbol(
        f"{_SPEC}/dspark/speculator.py",
        "DSparkSpeculator._sample_sequential",
        params=("num_reqs", "head_hidden"),
    ),
    Symbol(
        f"{_SPEC}/dspark/speculator.py",
        "DSparkSpeculator.load_draft_model",
        params=("target_model", "target_attn_layer_names"),
    ),
    Symbol(
        f"{_SPEC}/dflash/speculator.py",
        "DFlashSpeculator",
        fields=("sample_indices", "sample_pos", "sample_idx_mapping", "num_query_per_req"),
    ),
    Symbol(
        f"{_SPEC}/dflash/speculator.py",
        "DFlashSpeculator._precompute_context_kv",
        params=("start", "end", "dummy_run"),
    ),
    Symbol(f"{_SPEC}/speculator.py", "DraftModelSpeculator._build_uniform_attn_metadata"),
    Symbol(
        f"{_SPEC}/rejection_sampler.py",
        "RejectionSampler._verify_in_chunks",
        params=("logits", "input_batch", "max_chunk_logits", "max_num_logprobs"),
    ),
    Symbol("v1/outputs.py", "AsyncModelRunnerOutput.get_output"),
    Symbol(
        f"{_SPEC}/dflash/speculator.py",
        "DFlashSpeculator.propose",
        params=("input_batch", "num_sampled", "num_rejected", "num_speculative_tokens"),
    ),
    Symbol(
        f"{_SPEC}/speculator.py",
        "DraftModelSpeculator",
        fields=("draft_tokens", "draft_logits", "temperature", "seeds", "draft_model_config"),
    ),
    Symbol(
        f"{_SPEC}/rejection_sampler.py",
        "RejectionSampler._verify",
        params=(
            "logits",
            "draft_logits",
            "draft_sampled",
            "pos",
            "cu_num_logits",
            "idx_mapping",
            "expanded_idx_mapping",
            "expanded_local_pos",
            "verify_draft_sampled",
        ),
    ),
    Symbol(
        f"{_SPEC}/rejection_sampler.py",
        "RejectionSampler",
        fields=("sampler", "num_speculative_steps", "use_block_verification"),
    ),
    Symbol(
        "model_executor/models/qwen3_dflash.py",
        "DFlashQwen3Model",
        fields=("_normalize_context_k", "_k_norm_weights", "_build_fused_kv_buffers"),
    ),
    Symbol(
        "model_executor/models/qwen3_dflash.py", "DFlashQwen3ForCausalLM", fields=("model_cls",)
    ),
    Symbol("v1/core/sched/scheduler.py", "Scheduler.schedule", params=("throttle_prefills",)),
    Symbol(
        "v1/core/sched/scheduler.py",
        "Scheduler.update_from_output",
        params=("scheduler_output", "model_runner_output"),
    ),
    Symbol(
        "v1/core/sched/scheduler.py",
        "Scheduler.make_spec_decoding_stats",
        params=("num_draft_tokens", "num_accepted_tokens", "request_id"),
    ),
    Symbol(
        "v1/core/sched/scheduler.py",
        "Scheduler.update_draft_token_ids",
        params=("draft_token_ids",),
    ),
    Symbol("v1/outputs.py", "DraftTokenIds", fields=("req_ids", "draft_token_ids")),
    Symbol(
        "v1/core/sched/scheduler.py",
        "Scheduler",
        fields=(
            "running",
            "waiting",
            "requests",
            "num_spec_tokens",
            "max_num_scheduled_tokens",
            "finished_req_ids",
        ),
    ),
    Symbol("v1/core/sched/scheduler.py", "Scheduler.finish_requests"),
    Symbol("v1/engine/__init__.py", "EngineCoreOutput", fields=("request_id", "new_token_ids")),
    Symbol("v1/engine/__init__.py", "EngineCoreOutputs", fields=("outputs",)),
    Symbol("v1/core/sched/async_scheduler.py", "AsyncScheduler", bases=("Scheduler",)),
    Symbol(
        "v1/core/sched/output.py",
        "SchedulerOutput",
        fields=(
            "scheduled_spec_decode_tokens",
            "num_scheduled_tokens",
            "preempted_req_ids",
            "num_spec_tokens_to_schedule",
        ),
    ),
    Symbol("v1/outputs.py", "ModelRunnerOutput", fields=("req_ids", "sampled_token_ids")),
    # The CUSTOM attention backend (attention_backend.py).
    Symbol(
        "v1/attention/backends/registry.py", "register_backend", params=("backend", "class_path")
    ),
    Symbol("v1/attention/backends/registry.py", "AttentionBackendEnum", fields=("CUSTOM",)),
    Symbol("v1/attention/backends/registry.py", "AttentionBackendEnum.is_overridden"),
    Symbol(
        "v1/attention/backend.py",
        "AttentionBackend",
        fields=(
            "supported_dtypes",
            "supported_kv_cache_dtypes",
            "forward_includes_kv_cache_update",
            "supports_device_cpu_query_lens_mismatch",
            "supports_non_causal",
        ),
    ),
    Symbol(
        "v1/attention/backend.py",
        "CommonAttentionMetadata",
        fields=(
            "query_start_loc",
            "seq_lens",
            "num_reqs",
            "num_actual_tokens",
            "max_query_len",
            "block_table_tensor",
            "slot_mapping",
            "causal",
        ),
    ),
    Symbol(
        "v1/attention/backend.py",
        "AttentionMetadataBuilder",
        fields=("_cudagraph_support", "supports_draft_decode_metadata_update"),
    ),
    Symbol("v1/attention/backend.py", "AttentionMetadataBuilder.build_for_cudagraph_capture"),
    Symbol("v1/attention/backend.py", "max_decode_query_len", params=("vllm_config",)),
    Symbol(
        "v1/attention/ops/triton_reshape_and_cache_flash.py",
        "triton_reshape_and_cache_flash",
        params=("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype"),
    ),
    Symbol(
        "v1/request.py",
        "Request",
        fields=(
            "spec_token_ids",
            "num_computed_tokens",
            "resumable",
            "cache_salt",
            "lora_request",
        ),
    ),
)


_V4 = "models/deepseek_v4/nvidia/dspark.py"
_V41 = "models/deepseek_v41/nvidia/dspark.py"

# What only drafters embedded in DeepSeek-V4 and V4.1 need; broken, it costs them their confidences.
EMBEDDED_CONTRACT: tuple[Symbol, ...] = (
    Symbol(_V4, "DSparkDeepseekV4Model", fields=("markov_head", "confidence_head")),
    Symbol(_V4, "DSparkDeepseekV4ForCausalLM", fields=("logits_processor", "model")),
    Symbol(_V4, "DSparkDeepseekV4ForCausalLM.compute_draft_logits", params=("hidden_states",)),
    Symbol(_V41, "DSparkDeepseekV4Model", fields=("markov_head", "confidence_head")),
    Symbol(_V41, "DSparkDeepseekV4ForCausalLM.compute_draft_logits", params=("hidden_states",)),
    Symbol(
        "model_executor/models/qwen3_dspark.py",
        "DSparkMarkovHead",
        fields=("markov_w1", "markov_w2"),
    ),
    Symbol(
        "model_executor/models/qwen3_dspark.py",
        "DSparkConfidenceHead",
        fields=("with_markov", "proj"),
    ),
)


def installed_source(path: str) -> str:
    """Text of a file of the installed vllm package, found without importing it."""
    return (_package_root() / path).read_text(encoding="utf-8")


@cache
def _package_root() -> Path:
    spec = find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        raise ContractError("vLLM is not installed; install vllm-dspark[cuda] or vllm-dspark[cpu]")
    return Path(next(iter(spec.submodule_search_locations)))


def wheel_source(wheel: Path) -> ReadSource:
    """Reader of vllm's files inside a wheel; nothing is installed or executed."""
    archive = zipfile.ZipFile(wheel)

    def read(path: str) -> str:
        try:
            return archive.read(f"vllm/{path}").decode("utf-8")
        except KeyError:
            raise FileNotFoundError(path) from None

    return read


def declared_fields(path: str, name: str, read: ReadSource = installed_source) -> frozenset[str]:
    """Names that a class's body declares with a type; empty where there is no such class.

    Raises ContractError if no vLLM is installed.
    """
    module = _parse(read, path)
    node = _member(module, name)
    return frozenset(
        child.target.id
        for child in getattr(node, "body", ())
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    )


def violations(
    read: ReadSource = installed_source, contract: tuple[Symbol, ...] = CONTRACT
) -> list[str]:
    """One line per broken promise, naming the symbol; empty when the contract holds."""
    found: list[str] = []
    modules: dict[str, ast.Module | None] = {}
    for symbol in contract:
        if symbol.path not in modules:
            modules[symbol.path] = _parse(read, symbol.path)
        module = modules[symbol.path]
        problem = "file is missing" if module is None else _check(module, symbol)
        if problem:
            found.append(f"{symbol}: {problem}")
    return found


def _parse(read: ReadSource, path: str) -> ast.Module | None:
    try:
        return ast.parse(read(path))
    except (FileNotFoundError, SyntaxError):
        return None


def _check(module: ast.Module, symbol: Symbol) -> str | None:
    node: ast.AST | None = module
    for part in symbol.name.split("."):
        node = _member(node, part)
        if node is None:
            return f"{part!r} is missing"
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        absent = set(symbol.params) - _parameters(node)
        if absent and node.args.kwarg is None:
            return f"parameters missing: {sorted(absent)}"
    if isinstance(node, ast.ClassDef):
        if absent := set(symbol.fields) - _fields(node):
            return f"attributes missing: {sorted(absent)}"
        if absent := set(symbol.bases) - {_last_name(base) for base in node.bases}:
            return f"no longer derives from {sorted(absent)}"
    return None


def _member(node: ast.AST | None, name: str) -> ast.AST | None:
    kinds = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for child in getattr(node, "body", ()):
        if isinstance(child, kinds) and child.name == name:
            return child
    return None


def _parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    arguments = node.args
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}


def _fields(node: ast.ClassDef) -> set[str]:
    """Names declared in the class body or assigned to self anywhere in it."""
    names = {
        child.target.id
        for child in node.body
        if isinstance(child, ast.AnnAssign) and isinstance(child.target, ast.Name)
    }
    for statement in node.body:
        if isinstance(statement, ast.Assign):
            names |= {target.id for target in statement.targets if isinstance(target, ast.Name)}
    names |= {child.name for child in node.body if isinstance(child, ast.FunctionDef)}
    for child in ast.walk(node):
        if not (isinstance(child, ast.Attribute) and isinstance(child.ctx, ast.Store)):
            continue
        if isinstance(child.value, ast.Name) and child.value.id == "self":
            names.add(child.attr)
    return names


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
