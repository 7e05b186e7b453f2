"""Public reports of what went wrong with DSpark and its neighbours, and the check that sees it.

One row per report: either the name of a finding that a start-up check gives in that situation, or
why no start-up check can. docs/doctor.md shows the same table.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ReportRow:
    """A report. Exactly one of `check` and `not_at_start` is filled."""

    symptom: str
    check: str = ""
    not_at_start: str = ""


def _seen(symptom: str, check: str) -> ReportRow:
    return ReportRow(symptom, check=check)


def _not(symptom: str, why: str) -> ReportRow:
    return ReportRow(symptom, not_at_start=why)


REPORTS: tuple[ReportRow, ...] = (
    _seen("acceptance of 4 % at all positions: K is not the trained block", "draft_width"),
    _not(
        "DSpark paths missing where code tests for method dflash only",
        "a defect of code, not of settings; the engine tests run the method by its name",
    ),
    _seen("acceptance collapses, then a hang on drain, adaptive verification", "stock_adaptive"),
    _seen("tensor-parallel ranks diverge and hang: budgets made by each rank", "stock_adaptive"),
    _not(
        "one tenant's altered target distribution is learned as acceptance",
        "requests decide; only untouched requests teach, and each tenant's weight is capped",
    ),
    _seen("acceptance collapses with prefix caching", "prefix_caching"),
    _seen("prefix hits vetoed with offload connectors", "sliding_cache"),
    _not(
        "grammar automaton fails to advance in guided decoding",
        "requests decide whether a grammar is used; an engine test covers structured output",
    ),
    _seen("tool call accepted before </think>", "reasoning_tools"),
    _seen("thinking budget ignored", "thinking_budget"),
    _seen("accepted length of 1.0 without a message, NVFP4 target", "fp4_target"),
    _seen("KeyError w13_weight_scale: FP4 scales taken for embedded experts", "fp4_target"),
    _seen("crash in F.linear on quantised drafter weights", "draft_quantization"),
    _seen("bf16 drafter beside a quantised target does not load", "draft_quantization"),
    _seen("DSparkDraftModel taken for DeepSeek-V4's class (hc_mult)", "drafter_config"),
    _seen("confidence head in the file, not in the config, or the reverse", "drafter_tensors"),
    _seen("adaptive verification without a head: its weights were dropped", "no_confidence_head"),
    _seen("block beyond max_model_len, hang near the limit", "context_end"),
    _seen("positions beyond the drafter's rotary table", "drafter_context"),
    _seen("max_num_scheduled_tokens below zero", "token_budget"),
    _seen("draft width by batch size ignored, or an assertion", "dynamic_width"),
    _seen("MNNVL all-reduce buffer overrun at large K times batch", "all_reduce"),
    _seen("illegal memory access on long prompts, FlashMLA assertions", "mla_device"),
    _seen("NIXL layer mismatch, FA3 crash in prefill/decode disaggregation", "kv_transfer"),
    _seen("mixed-length error, deadlock above 64 rows", "attention_backend"),
    _seen("n-gram state (Engram) against ragged rows", "ngram_state"),
    _seen("wrong graph geometry when the captured size changes", "graph_ladder"),
    _not(
        "buffers of a replay freed too early (record_stream)",
        "a defect of code; nothing in the settings leads to it",
    ),
    _seen("mRoPE or GDN targets with ragged rows", "target_kind"),
    _not(
        "budgets pinned for a profiler are ignored",
        "a defect of code; an engine test pins windows (planning/forced.py) and counts them",
    ),
    _seen("start-up deadlock or divergence on two nodes", "several_nodes"),
    _seen("74 % slower with an FP8 draft KV cache", "draft_kv_dtype"),
    _not(
        "top_p and top_k ignored, seeded requests not validated",
        "requests decide; the sampling law is tested for every filter, seeded requests keep full "
        "windows",
    ),
    _seen("the drafter knows nothing of a LoRA adapter", "lora"),
    _seen("corrupt text with pipeline parallelism on the V1 runner", "pipeline_parallel"),
    _seen("the V1 runner was chosen by environment", "runner"),
    _seen("Markov embedding used although confidence_head_with_markov is false", "drafter_tensors"),
    _seen("stale attention-DP agreement, one rank hangs", "data_parallel"),
    _seen("logits processors refused after the forward pass", "logits_processors"),
    _not(
        "int32 draft stamp overflows after long uptime",
        "it takes 2^31 steps; stamps wrap (planning/survival.py) and a test starts near the end",
    ),
    _not(
        "a CPU test that patches torch.zeros alone, a stale verify length without a test",
        "defects of another engine's tests",
    ),
    _seen("slower than without: costs of verification are not those of the machine", "cost_table"),
    _not(
        "off from four requests on, TPOT misread per chunk",
        "a mistake in measuring; `vllm-dspark bench` counts tokens, not chunks",
    ),
)
