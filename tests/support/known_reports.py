"""What docs/known-reports.md says: public reports on DSpark and its neighbours, one a row.

Each report is answered by tests, or by a limit that is said aloud. Patterns are as in matrix.py.
"""

from typing import Any

from tests.support.matrix import CONFIGS, DRAFTS, EQUAL, FORMATS, REFUSED, Row, evidence

I = "tests/integration/"  # noqa: E741 - every row has it
REQUESTS = f"{FORMATS}test_requests.py::*"
CORE = f"{I}test_scheduler_core.py::*"

GPU_ONLY = "needs a GPU and kernels that vLLM chooses"

REPORTS: tuple[Row, ...] = (
    Row(
        "acceptance of 4 %: K beyond the trained block",
        "error with the largest K; K comes from the block when none is given",
        (f"{CONFIGS}test_default_width*", f"{FORMATS}test_semantics.py::test_width_by_layout*"),
    ),
    Row(
        'checks that know only "dflash"',
        "the method may be named, recognised or given by flags",
        (f"{I}test_settle.py::test_method_may*", f"{I}test_settle.py::test_flags_instead*"),
    ),
    Row(
        "acceptance collapses, then a hang while the batch drains",
        "nothing stuck over bursts, aborts and drains; the cause on H20 was never found",
        (f"{FORMATS}test_soak.py::*",),
    ),
    Row(
        "tensor parallel ranks diverge and hang",
        "one plan, made in the engine core",
        (f"{I}test_tensor_parallel.py::*", f"{I}test_planning.py::test_a_plan_of_another*"),
    ),
    Row(
        "estimator poisoned by allowed tokens, penalties, bad words of one tenant",
        "altered distributions teach nothing; influence is capped",
        (
            "tests/planning/test_calibration.py::*altered*",
            "tests/planning/test_calibration.py::*hostile*",
            f"{CORE}hostile*",
        ),
    ),
    Row(
        "acceptance collapses with prefix caching",
        "the drafts behind a hit are the reference's",
        (f"{DRAFTS}*", f"{FORMATS}test_requests.py::*prefix hits*"),
    ),
    Row(
        "prefix hits vetoed: windows of the drafter's cache group",
        "hits with sliding-window drafters; offload connectors: not tested",
        (f"{DRAFTS}[[]speculators*",),
    ),
    Row(
        "grammar fails to advance",
        "works: choice, regex, JSON over windows of any length",
        (f"{EQUAL}*structured*",),
    ),
    Row(
        "tool call accepted before </think>",
        "thinking that ends inside a block is judged token by token",
        (f"{FORMATS}test_requests.py::*thinking that ends*",),
    ),
    Row("thinking budget ignored", "kept", (f"{FORMATS}test_requests.py::*thinking budgets*",)),
    Row(
        "accepted length 1.0, silently (NVFP4 target)",
        "shown per position on /metrics; the target itself: GPU only",
        (f"{I}test_metrics_engine.py::*",),
    ),
    Row(
        "KeyError w13_weight_scale (experts of an NVFP4 DeepSeek-V4)",
        "quantised stages are checked before loading; the CUDA path was not run",
        (f"{FORMATS}test_embedded.py::test_quantised*",),
    ),
    Row(
        "F.linear on quantised qkv, fp8 lm_head",
        "4-bit and fp8 drafters serve; a quantised head is refused",
        (
            f"{FORMATS}test_quantised_engine.py::*",
            f"{FORMATS}test_quantised.py::test_a_quantised_head*",
        ),
    ),
    Row(
        "plain drafter beside a quantised target does not load; hc_mult AttributeError",
        "loads; a generic architecture with another model_type is refused",
        (f"{FORMATS}test_quantised_engine.py::*bf16*", f"{CONFIGS}test_generic*"),
    ),
    Row(
        "param.size assert, confidence_head not registered",
        "every tensor that config and file disagree on is named",
        (REFUSED, f"{I}test_bad_inputs.py::test_confidence_head_left_out*"),
    ),
    Row(
        'adaptive "works" without a head',
        "full windows and one warning; an error with scheduling = true",
        (
            f"{CONFIGS}test_scheduling_demanded*",
            f"{I}test_bad_inputs.py::test_confidence_head_left_out*",
        ),
    ),
    Row(
        "blocks at max_model_len",
        "works at every place of a block",
        (f"{I}test_pressure.py::test_context_ends*", f"{CORE}cannot_be_emitted*"),
    ),
    Row(
        "max_num_scheduled_tokens = -240",
        "small budgets work; what leaves no room is an error at start",
        (f"{EQUAL}[[]chunked*", REQUESTS, f"{CONFIGS}test_a_token_budget*"),
    ),
    Row(
        "per-batch-size K ignored",
        "refused: the plugin decides step by step",
        (f"{CONFIGS}test_a_width_per*",),
    ),
    Row("MNNVL all-reduce buffer too small", GPU_ONLY),
    Row("illegal access on long prompts, FlashMLA asserts, capture crash", GPU_ONLY),
    Row("NIXL layer mismatch, FA3 crash with P/D", "not tested: KV connectors"),
    Row(
        "mixed lengths: ValueError; more than 64 verified rows deadlock",
        "works; no limit on rows",
        (
            f"{EQUAL}*mixed_prompt*",
            f"{EQUAL}*late_arrivals*",
            f"{I}test_planning.py::test_budget_is_not*",
            f"{I}test_sampling_law.py::*",
        ),
    ),
    Row(
        "V4.1: n-gram tables against ragged rows",
        "checked before loading; CUDA: vLLM's class, not run; CPU: refused",
        (f"{FORMATS}test_embedded.py::*", f"{CONFIGS}test_an_embedded*"),
    ),
    Row(
        "wrong graph for ragged rows, illegal access when sizes change",
        "each step gets a graph of its own family",
        (f"{I}test_cuda_parts.py::*", "tests/kernels/test_device_windows.py::*"),
    ),
    Row(
        "forced budgets ignored by profiling; M-RoPE; recurrent states",
        "profiling forces its graph; hybrids: refused on a CPU, full windows on CUDA; M-RoPE: "
        "not tested",
        (
            f"{I}test_cuda_parts.py::test_profiling_forces*",
            f"{CONFIGS}test_a_hybrid*",
            f"{I}test_windows_table.py::*recurrent*",
        ),
    ),
    Row("start-up deadlock on two nodes", "not tested: one host"),
    Row("-74 % with an fp8 cache of the drafter", "vLLM's kernels; not measured here"),
    Row(
        "top_p and top_k ignored, seeds",
        "exact law; seeded requests do not depend on their batch",
        (
            f"{I}test_sampling_law.py::*",
            "tests/sampling/test_lossless.py::*",
            f"{I}test_seeded.py::*",
        ),
    ),
    Row(
        "LoRA",
        "on the target: works, host windows; the drafter has none",
        (f"{I}test_lora.py::*",),
    ),
    Row(
        "pipeline parallel: corrupt text",
        "works, host windows",
        (f"{FORMATS}test_pipeline_parallel.py::*", f"{I}test_pipeline.py::*"),
    ),
    Row(
        "Markov embedding used although confidence_head_with_markov = false",
        "the config decides",
        (f"{DRAFTS}*", f"{EQUAL}[[]confidence-without*"),
    ),
    Row(
        "a stale agreement is taken for this step's",
        "a plan of another step is refused",
        (f"{I}test_planning.py::test_a_plan_of_another*",),
    ),
    Row(
        "custom logits processors end the whole step",
        "such steps are planned native before they run",
        (f"{CORE}processors_must*", f"{CORE}planned_native_before*", f"{REQUESTS}processors*"),
    ),
    Row(
        "the stamp overflows int32",
        "wraps, 0 left out",
        ("tests/planning/test_survival.py::test_stamps_wrap*",),
    ),
    Row(
        "verify lengths stay behind when the budget is 0",
        "pauses keep the output and end",
        (f"{I}test_planning.py::test_skipped_drafting*",),
    ),
    Row(
        "slower than without speculation",
        "steps that do not pay are not drafted",
        ("tests/planning/test_episode.py::*",),
    ),
    Row(
        "time per token misread: chunks of a stream counted as tokens",
        "bench counts tokens",
        ("tests/bench/test_drive.py::*",),
    ),
    Row(
        "(no report) min_tokens, stop strings, aborts in a trimmed step, preemption",
        "works",
        (
            f"{EQUAL}*stop_*",
            f"{EQUAL}*abort_in_flight*",
            f"{I}test_pressure.py::*",
        ),
    ),
)


def render_reports(record: dict[str, Any]) -> str:
    """The page, from the recorded outcomes (see matrix.render)."""
    lines = [
        "# Known reports",
        "",
        "What has gone wrong for people with DSpark and its neighbours (vLLM, SGLang, llama.cpp),",
        "and what happens here. Generated by `tools/support_matrix.py` from",
        "`tests/support/known_reports.py`; do not edit.",
        "",
        "| report | here | tests | outcome |",
        "| --- | --- | --- | --- |",
    ]
    for row in REPORTS:
        names = "<br>".join(f"`{_short(pattern)}`" for pattern in row.tests) or "-"
        lines.append(f"| {row.what} | {row.result} | {names} | {evidence(row, record)} |")
    return "\n".join(lines) + "\n"


def _short(pattern: str) -> str:
    """A pattern as one would give it to pytest: file and a part of the test's name."""
    file, _, name = pattern.partition("::")
    name = name.replace("[[]", "[").strip("*")
    return f"{file.removeprefix('tests/')}::{name}" if name else file.removeprefix("tests/")
