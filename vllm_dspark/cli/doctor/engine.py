"""Checks of the engine's settings: room for windows, context, graphs, parallelism, features."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from vllm_dspark.cli.doctor.findings import Finding, Level
from vllm_dspark.cli.doctor.subject import DEFAULT_BATCHED_TOKENS, Subject
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import DSparkConfigError

# All-reduce buffers of one node's NVLink domain hold this much per step (64 MiB in
# FlashInfer's and vLLM's tables for two ranks; fewer for more).
_ALL_REDUCE_BYTES = 64 << 20
_LADDER_TOP = 512  # vLLM's largest captured size by default
# Kinds of layers that carry state from token to token.
RECURRENT_LAYERS = ("linear_attention", "mamba", "gated_delta_net", "short_conv", "recurrent")


def check_options(subject: Subject) -> Iterator[Finding]:
    """The plugin's own options."""
    try:
        options = DSparkConfig.from_mapping(dict(subject.arguments.options), subject.width)
    except DSparkConfigError as error:
        for line in str(error).splitlines():
            option = line.partition(" = ")[0].removeprefix("dspark.")
            flag = f'"{option}" in "dspark" of --speculative-config'
            yield Finding("options", "error", line, flag=flag)
        return
    if not options.enabled:
        yield Finding(
            "scheduling",
            "info",
            'the plugin is off ("enabled": false)',
            "vLLM's own DSpark drafts and verifies full windows; no other option of the plugin "
            "applies, and there are no vllm:dspark_* metrics",
            'leave "enabled" out of "dspark" to have verification scheduled',
        )
    elif options.scheduling is False:
        yield Finding(
            "scheduling",
            "info",
            'scheduling is off ("scheduling": false)',
            "full windows are verified in every step, whatever the load",
            'leave "scheduling" out of "dspark" to have verification scheduled',
        )


def check_room(subject: Subject) -> Iterator[Finding]:
    """Whether a step has room for the windows of a full batch."""
    width = subject.width
    if width is None:
        return
    seqs = subject.max_num_seqs
    given = subject.arguments.get("max-num-batched-tokens")
    limit, need = int(given or DEFAULT_BATCHED_TOKENS), seqs * (width + 1)
    assumed = "" if given is not None else " (vLLM's usual default)"
    if limit <= seqs * width:
        yield Finding(
            "token_budget",
            "error",
            f"max_num_batched_tokens = {limit}{assumed}, drafts of {seqs} requests take "
            f"{seqs * width}",
            "vLLM subtracts the draft slots from the budget: nothing, or less than nothing, is "
            "left to schedule",
            f"--max-num-batched-tokens {need} or --max-num-seqs {max(limit // (width + 1), 1)}",
        )
    elif limit < need:
        yield Finding(
            "token_budget",
            "warning",
            f"max_num_batched_tokens = {limit}{assumed} is less than {seqs} full windows of "
            f"{width + 1} ({need})",
            "at full load some requests wait for a step, and prompts never get in beside them",
            f"--max-num-batched-tokens {need} or --max-num-seqs {max(limit // (width + 1), 1)}",
        )
    else:
        yield Finding("token_budget", "ok", f"{need} tokens of full windows fit into {limit}")
    yield from _all_reduce(subject, seqs * (width + 1))


def _all_reduce(subject: Subject, tokens: int) -> Iterator[Finding]:
    ranks = subject.arguments.integer("tensor-parallel-size", 1)
    hidden = subject.text_config.get("hidden_size")
    if ranks < 2 or not isinstance(hidden, int):
        return
    size = tokens * hidden * 2
    fitting = max(_ALL_REDUCE_BYTES // (2 * hidden) * subject.max_num_seqs // tokens, 1)
    if size > _ALL_REDUCE_BYTES:
        yield Finding(
            "all_reduce",
            "warning",
            f"a full step all-reduces {size >> 20} MiB over {ranks} ranks",
            "more than fused all-reduce buffers hold (64 MiB); large K times batch was reported to "
            "overrun them on MNNVL",
            f"--max-num-seqs {fitting}",
        )


def check_context(subject: Subject) -> Iterator[Finding]:
    """Positions: the drafter's rotary table and the last block of a request."""
    length, width = subject.max_model_len, subject.width
    own = subject.text_config.get("max_position_embeddings")
    if length is None:
        return
    spec = subject.standalone
    if spec is not None and spec.max_context is not None and spec.max_context < length:
        yield Finding(
            "drafter_context",
            "warning",
            f"the drafter's rotary table ends at {spec.max_context} tokens, max_model_len is "
            f"{length}",
            "positions beyond it have no rotary entry, so the plugin lowers max_model_len",
            f"--max-model-len {spec.max_context}",
        )
    if isinstance(own, int) and width is not None and length + width > own:
        yield Finding(
            "context_end",
            "info",
            f"max_model_len = {length} leaves no room for a block of {width} drafts behind the "
            f"target's {own} positions",
            "drafts past the limit are cut; hangs near it were reported for other versions with "
            "data parallelism",
            f"--max-model-len {max(own - width, 1)}",
        )


def check_graphs(subject: Subject) -> Iterator[Finding]:
    """Whether captured graphs cover full windows of every batch size."""
    width = subject.width
    if width is None or subject.machine.cpu_build or subject.arguments.on("enforce-eager"):
        return
    compilation = subject.arguments.mapping("compilation-config")
    sizes = compilation.get("cudagraph_capture_sizes") or _sizes(subject)
    top = max(sizes) if sizes else compilation.get("max_cudagraph_capture_size", _LADDER_TOP)
    need = subject.max_num_seqs * (width + 1)
    if top < need:
        yield Finding(
            "graph_ladder",
            "warning",
            f"captured graphs end at {top} tokens, full windows of {subject.max_num_seqs} requests "
            f"take {need}",
            "larger steps run piecewise or eager, and no price of theirs is in the cost table",
            f"--compilation-config '{{\"max_cudagraph_capture_size\": {need}}}'",
        )
    missing = [n for n in (1, 2, 4) if sizes and n * (width + 1) not in sizes]
    if missing:
        whole = {*sizes, *(n * (width + 1) for n in missing)}
        yield Finding(
            "graph_ladder",
            "warning",
            f"no captured size for full windows of {missing} requests (multiples of {width + 1})",
            "native steps are padded to the next size; wrong geometry at changes of size was "
            "reported where sizes and windows did not agree",
            f"--cudagraph-capture-sizes {' '.join(map(str, sorted(whole)))}",
        )


def _sizes(subject: Subject) -> list[int]:
    given = subject.arguments.get("cudagraph-capture-sizes")
    parts = given if isinstance(given, list) else [given or ""]
    sizes = [size for part in parts for size in str(part).replace(",", " ").split()]
    return [int(size) for size in sizes if size.isdigit()]


def check_windows(subject: Subject) -> Iterator[Finding]:
    """Who sets windows in this engine; integration/startup.py's own answer."""
    options = subject.options
    if subject.width is None or options is None:
        return
    if not options.enabled or options.scheduling is False:
        return  # check_options says so
    from vllm_dspark.integration.startup import settle_windows

    try:
        mode, reason = settle_windows(_stand_in(subject), options)
    except AttributeError as error:  # it has come to look at more than is known here
        yield Finding("windows", "info", f"decided when the engine starts ({error})")
        return
    asked = options.windows
    if mode == "native":
        level: Level = "warning" if asked != "auto" else "info"
        yield Finding(
            "windows",
            level,
            f"windows stay full: {reason}",
            "" if asked == "auto" else f'"windows": "{asked}" cannot be had here',
            '"windows": "host"' if "not released" in reason else "",
        )
    else:
        yield Finding("windows", "ok", f"windows are set on the {mode}: {reason}")


def _stand_in(subject: Subject) -> Any:
    """What `settle_windows` looks at of a VllmConfig."""
    arguments = subject.arguments
    mode = str(arguments.mapping("compilation-config").get("cudagraph_mode", "FULL_AND_PIECEWISE"))
    full = "FULL" in mode.upper() and not arguments.on("enforce-eager")
    graphs = SimpleNamespace(has_full_cudagraphs=lambda: full)
    backend = _backend(subject)
    kinds = [str(kind) for kind in subject.text_config.get("layer_types") or ()]
    return SimpleNamespace(
        model_config=SimpleNamespace(
            is_hybrid=any(word in kind for kind in kinds for word in RECURRENT_LAYERS)
        ),
        parallel_config=SimpleNamespace(
            data_parallel_size=arguments.integer("data-parallel-size", 1),
            pipeline_parallel_size=arguments.integer("pipeline-parallel-size", 1),
            tensor_parallel_size=arguments.integer("tensor-parallel-size", 1),
        ),
        lora_config=SimpleNamespace() if arguments.on("enable-lora") else None,
        compilation_config=SimpleNamespace(cudagraph_mode=graphs),
        attention_config=SimpleNamespace(
            backend=SimpleNamespace(name=backend) if backend else None
        ),
    )


def _backend(subject: Subject) -> str:
    """The attention backend that was asked for, in capitals; empty if vLLM chooses."""
    given = subject.arguments.get("attention-backend")
    given = given or subject.arguments.mapping("attention-config").get("backend")
    return str(given or "").upper()


# Backends whose decode graphs take rows of one length only: trimmed steps leave full graphs.
_UNIFORM_BACKENDS = {
    "FLASHMLA": "uniform batches only",
    "FLASHINFER": "uniform batches only with its TRT-LLM kernels, single tokens else",
    "FLASHINFER_MLA": "uniform batches only",
    "CUTLASS_MLA": "single-token decode only",
    "TRITON_MLA": "uniform batches only",
    "ROCM_AITER_FA": "uniform batches only",
    "ROCM_AITER_MLA": "uniform batches only",
    "TREE_ATTN": "no graphs",
    "TURBOQUANT": "uniform batches only",
    "FLASH_ATTN_2": "uniform batches only",
}
# FlashMLA and the sparse MLA kernels exist for these; elsewhere shapes of a window were reported
# to fail (SM120, SM89).
_MLA_CAPABILITIES = (90, 100, 103)


def check_backend(subject: Subject) -> Iterator[Finding]:
    """Backends that cannot run rows of different length inside full graphs, and MLA by GPU."""
    backend = _backend(subject)
    capability = subject.machine.capability
    if not backend and capability is not None and capability < 90 and not _is_mla(subject):
        backend = "FLASH_ATTN_2"  # what vLLM takes on these GPUs
    if backend in _UNIFORM_BACKENDS:
        yield Finding(
            "attention_backend",
            "warning" if subject.arguments.options.get("windows") == "device" else "info",
            f"attention backend {backend}: {_UNIFORM_BACKENDS[backend]}",
            "trimmed steps with rows of different length cannot run inside its full graphs (other "
            "engines stopped with a mixed-length error, or hung, on such batches)",
            '"windows": "host" in "dspark", or --attention-backend FLASH_ATTN on SM90 and up',
        )
    if _is_mla(subject) and capability is not None and capability not in _MLA_CAPABILITIES:
        yield Finding(
            "mla_device",
            "warning",
            f"an MLA target on SM{capability}",
            "kernels for windows of K + 1 rows are made for SM90 and SM100; illegal memory "
            "accesses on long prompts and failed assertions were reported elsewhere",
            "--attention-backend TRITON_MLA",
        )


def _is_mla(subject: Subject) -> bool:
    return subject.text_config.get("kv_lora_rank") is not None or subject.is_embedded
