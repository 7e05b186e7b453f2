"""Every metric of the plugin: name, type, labels, meaning, and its place in the metrics record.

One record of float64 per engine holds all values, family after family in the order of `catalog`.
Engine core, front end, documentation and dashboard test all read this list, so a metric exists
everywhere or nowhere. All metrics also carry the labels `model_name` and `engine`, as vLLM's do.
"""

import math
from dataclasses import dataclass
from functools import cache
from itertools import product
from typing import Literal

from vllm_dspark.planning.cost import StepMode, StepShape
from vllm_dspark.planning.plan import PlanKind, Reason
from vllm_dspark.planning.width import WidthReason

ENGINE_LABELS = ("model_name", "engine")
PREFIX = "vllm:dspark_"

# A step without a plan: scheduling is off, no cost table yet, or no request had drafts.
UNPLANNED = "unplanned"
STEP_KINDS = (*(kind.value for kind in PlanKind), UNPLANNED)
STEP_REASONS = (*(reason.value for reason in Reason), UNPLANNED)

WIDTH_REASONS = tuple(reason.value for reason in WidthReason)

# Upper bounds of measured / predicted step time.
RATIO_BOUNDS = (0.5, 0.67, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0, math.inf)

COST_GRIDS = (*(f"{m.value}/{s.value}" for m, s in product(StepMode, StepShape)), "draft")

ROW_STATES = ("used", "stale", "current_refused")

# What the plugin declined. Steps are counted for the first group, engine starts for the second.
STEP_FALLBACKS = {
    "excluded": "a request of the step must not be scheduled",
    "mixed": "prefill rows in the step, and no evidence that trimming such steps pays",
    "unpriced": "the cost table has no cell for the step",
    "unknown": "nothing was known yet about any request of the step",
    "scheduling_off": "scheduling is off in this engine (reason: `vllm:dspark_scheduling`)",
    "no_cost_table": "the cost table has not been measured yet, or its measurement failed",
    "plan_refused": "the worker dropped a plan that was not about its step",
}
START_FALLBACKS = {
    "stood_aside": "vLLM does not keep the contract: vLLM's own DSpark runs",
    "foreign_worker": "the user's `worker_cls` was kept",
    "foreign_scheduler": "the user's `scheduler_cls` was kept",
}
FALLBACKS = {**STEP_FALLBACKS, **START_FALLBACKS}

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True)
class Family:
    """One metric: its cells are the label combinations (or buckets) that have a value.

    name: without the prefix and, for counters, without `_total`. A sparse family shows no cells
    that are 0; a gauge shows none that are NaN. A histogram has one cell per bucket, each with its
    own count (not cumulative), and one more for the sum.
    """

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    cells: tuple[tuple[str, ...], ...] = ((),)
    bounds: tuple[float, ...] = ()
    sparse: bool = False

    @property
    def full_name(self) -> str:
        """Name of the family as Prometheus knows it (samples of counters end in `_total`)."""
        return PREFIX + self.name

    @property
    def size(self) -> int:
        """Values in the record."""
        return len(self.bounds) + 1 if self.kind == "histogram" else len(self.cells)

    @property
    def sample_names(self) -> tuple[str, ...]:
        """Names of the time series it makes."""
        if self.kind == "counter":
            return (f"{self.full_name}_total",)
        if self.kind == "histogram":
            return tuple(f"{self.full_name}_{end}" for end in ("bucket", "count", "sum"))
        return (self.full_name,)


def _per_position(width: int, name: str, text: str, kind: Kind = "counter") -> Family:
    cells = tuple((str(k),) for k in range(width))
    return Family(name, kind, text, ("position",), cells)


def _counter(name: str, text: str) -> Family:
    return Family(name, "counter", text)


def _labelled(
    name: str, text: str, label: str, values: tuple[str, ...], kind: Kind = "counter"
) -> Family:
    return Family(name, kind, text, (label,), tuple((v,) for v in values), sparse=kind == "counter")


@cache
def catalog(width: int, off_reason: str = "") -> tuple[Family, ...]:
    """All families of an engine of draft width K; off_reason: why its scheduling is off."""
    return (
        *_token_families(width),
        *_step_families(width),
        *_quality_families(width),
        *_cost_families(),
        Family(
            "scheduling",
            "gauge",
            "1 if verification is scheduled in this engine; `reason` says why not (empty if on).",
            ("reason",),
            ((off_reason,),),
        ),
        _counter_of_fallbacks(),
    )


def _token_families(width: int) -> tuple[Family, ...]:
    return (
        _per_position(width, "drafted_tokens", "Draft tokens that the drafter had proposed."),
        _per_position(
            width, "admitted_tokens", "Draft tokens that were let through to the target."
        ),
        _per_position(
            width,
            "trimmed_tokens",
            "Draft tokens left out by the plan, or by vLLM where they did not fit "
            "(max_model_len, token budget).",
        ),
        _per_position(width, "verified_tokens", "Draft tokens that the target scored."),
        _per_position(
            width,
            "judged_tokens",
            "Verified draft tokens whose acceptance was decided: neither behind the first "
            "rejection nor behind a stop. accepted / judged is the acceptance of a position.",
        ),
        _per_position(
            width, "accepted_tokens", "Draft tokens that were accepted and became output."
        ),
        Family(
            "window",
            "histogram",
            "Window of a request and step: tokens the target verifies, its own included.",
            bounds=(*(float(v) for v in range(1, width + 2)), math.inf),
        ),
        _counter("request_steps", "Verification steps, each request counted."),
        _counter("emitted_tokens", "Tokens that verification steps added to outputs."),
        _counter(
            "discarded_tokens", "Sampled tokens behind a stop (EOS, stop token, length) in a step."
        ),
        Family("draft_width", "gauge", "K, draft tokens per request and step."),
    )


def _step_families(width: int) -> tuple[Family, ...]:
    return (
        Family(
            "steps",
            "counter",
            "Engine steps by kind of plan and its reason.",
            ("kind", "reason"),
            tuple(product(STEP_KINDS, STEP_REASONS)),
            sparse=True,
        ),
        _counter("draft_passes", "Steps that ended with a draft pass."),
        Family(
            "draft_pass_width",
            "histogram",
            "Columns that a draft pass drafted, of K (`vllm:dspark_draft_width`).",
            bounds=(*(float(v) for v in range(1, width + 1)), math.inf),
        ),
        _labelled(
            "draft_pass_reasons",
            "Draft passes by why they had their width: full (the step is native, or nothing "
            "narrower is on offer), best, held (another width pays more, not yet for long enough), "
            "probe (full width, to see what the columns beyond are worth), explore (a width whose "
            "steps were not measured lately), forced.",
            "reason",
            WIDTH_REASONS,
        ),
        _counter("skipped_draft_passes", "Steps that left drafting out."),
        _counter("probes", "Draft passes made only to see whether drafting pays again."),
    )


def _quality_families(width: int) -> tuple[Family, ...]:
    return (
        _per_position(
            width,
            "paired_drafts",
            "Drafts in the sample for calibration quality: confidence and outcome both known.",
        ),
        _per_position(
            width, "predicted_accepted", "Of the paired drafts, how many were predicted accepted."
        ),
        _per_position(width, "realised_accepted", "Of the paired drafts, how many were accepted."),
        _per_position(
            width,
            "ece",
            "Live expected calibration error of the predicted survival.",
            "gauge",
        ),
        _counter("predicted_tokens", "Tokens that priced plans promised."),
        _counter("realised_tokens", "Tokens that the steps of priced plans emitted."),
        _labelled(
            "confidence_rows",
            "Confidence rows at planning: used, stale (other owner, never written or too old), "
            "or refused because the row belongs to the very pass being verified (sampled "
            "requests).",
            "state",
            ROW_STATES,
        ),
        _counter("neutral_requests", "Requests ranked without a confidence row, at planning."),
        _counter("invalid_confidences", "Confidences that are no probabilities (NaN, inf)."),
        _counter(
            "unpaired_outcomes", "Outcomes whose confidence row never came, of one step in eight."
        ),
        _counter("calibration_updates", "Online corrections of the calibration."),
    )


def _cost_families() -> tuple[Family, ...]:
    return (
        _counter("timed_steps", "Steps whose time was measured and priced."),
        _counter("measured_step_seconds", "Measured time of timed steps, drafting included."),
        _counter("predicted_step_seconds", "Price of timed steps before they were learned from."),
        _counter("measured_draft_seconds", "Of the measured time, the draft passes."),
        Family(
            "step_time_ratio",
            "histogram",
            "Measured over predicted step time.",
            bounds=RATIO_BOUNDS,
        ),
        Family(
            "cost_ratio",
            "gauge",
            "Corrected over tabled time of the cell that drifted furthest, by grid of the cost "
            "table; absent until a cell has 50 samples.",
            ("grid",),
            tuple((grid,) for grid in COST_GRIDS),
        ),
        Family("cost_drifted_cells", "gauge", "Cost cells that drifted past `cost_drift_limit`."),
    )


def _counter_of_fallbacks() -> Family:
    return _labelled(
        "fallbacks",
        "What the plugin declined, by reason: steps that ran native although they had drafts, "
        "and parts that were off from the start.",
        "reason",
        tuple(FALLBACKS),
    )
