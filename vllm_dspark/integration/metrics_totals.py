"""Running sums of an engine that metrics and the summary log line are made from.

Each class gathers one kind of event where it is seen and holds float64 arrays that are only ever
changed in place, so that the record of all metrics is one concatenation of them.
"""

import math
from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from vllm_dspark.integration.metrics_catalog import (
    FALLBACKS,
    RATIO_BOUNDS,
    STEP_KINDS,
    STEP_REASONS,
    UNPLANNED,
    WIDTH_REASONS,
)
from vllm_dspark.planning.cost import StepTiming
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan
from vllm_dspark.planning.table import RequestBatch
from vllm_dspark.planning.width import WidthReason

Values = npt.NDArray[np.float64]

_KIND_INDEX = {kind: i * len(STEP_REASONS) for i, kind in enumerate(PlanKind)}
_REASON_INDEX = {reason: i for i, reason in enumerate(Reason)}
_WIDTH_REASON_INDEX = {reason: i for i, reason in enumerate(WidthReason)}
_UNPLANNED = len(STEP_KINDS) * len(STEP_REASONS) - 1
_FALLBACK_INDEX = {name: i for i, name in enumerate(FALLBACKS)}
_FALLBACK_OF = {
    reason: _FALLBACK_INDEX[reason.value] for reason in Reason if reason.value in FALLBACKS
}


class RowTotals:
    """What became of confidence rows at planning."""

    def __init__(self) -> None:
        self.states: Values = np.zeros(3)  # ROW_STATES
        self.neutral: Values = np.zeros(1)
        self.invalid: Values = np.zeros(1)

    def add(self, batch: RequestBatch) -> None:
        """Count one batch that was gathered for planning."""
        counts, size = batch.counts, batch.owner.size
        neutral = counts.stale + counts.current
        states = self.states
        states[0] += size - neutral
        if neutral:
            states[1] += counts.stale
            states[2] += counts.current
            self.neutral[0] += neutral
        if counts.invalid:
            self.invalid[0] += counts.invalid


class StepTimes:
    """Measured step times against what the cost model said before it learned of them."""

    def __init__(self) -> None:
        self.timed: Values = np.zeros(1)
        self.measured_s: Values = np.zeros(1)
        self.predicted_s: Values = np.zeros(1)
        self.draft_s: Values = np.zeros(1)
        self.ratio: Values = np.zeros(len(RATIO_BOUNDS) + 1)  # buckets, then the sum

    def add(self, timing: StepTiming, cost: CostModel) -> None:
        """Count one measured step; call before the cost model observes it."""
        priced = cost.step_ms(timing.mode, timing.shape, timing.kv_tokens, timing.num_tokens)
        if priced is None:
            return
        predicted, measured, draft = priced[1], timing.forward_ms, timing.draft_ms
        if draft is not None:
            predicted += cost.draft_ms(timing.num_requests, timing.draft_width)
            measured += draft
        if not (math.isfinite(measured) and timing.forward_ms > 0.0 and predicted > 0.0):
            return
        self.timed[0] += 1.0
        self.draft_s[0] += (draft or 0.0) * 1e-3
        self.measured_s[0] += measured * 1e-3
        self.predicted_s[0] += predicted * 1e-3
        ratio = measured / predicted
        self.ratio[bisect_left(RATIO_BOUNDS, ratio)] += 1.0
        self.ratio[-1] += ratio


class PlanTotals:
    """Steps by kind and reason, draft passes, and what plans promised; width: K."""

    def __init__(self, width: int) -> None:
        self.pass_width: Values = np.zeros(width + 2)  # by columns, then none (+Inf), then the sum
        self.width_reasons: Values = np.zeros(len(WIDTH_REASONS))
        self.steps: Values = np.zeros(len(STEP_KINDS) * len(STEP_REASONS))  # kind-major
        self.drafted: Values = np.zeros(1)
        self.skipped: Values = np.zeros(1)
        self.probes: Values = np.zeros(1)
        self.predicted: Values = np.zeros(1)
        self.realised: Values = np.zeros(1)
        self.fallbacks: Values = np.zeros(len(FALLBACKS))

    def add(self, plan: VerifyPlan | None, emitted: float, steps: int = 1) -> None:
        """Count executed steps of equal plans; emitted: tokens that they added to outputs."""
        if plan is None:
            self.steps[_UNPLANNED] += steps
            self._drafted(self.pass_width.size - 2, WidthReason.FULL, steps)
            return
        self.steps[_KIND_INDEX[plan.kind] + _REASON_INDEX[plan.reason]] += steps
        if plan.draft_next:
            self._drafted(plan.columns, plan.width_reason, steps)
        else:
            self.skipped[0] += steps
        if plan.reason is Reason.PROBE_DRAFT:
            self.probes[0] += steps
        if plan.predicted_tokens > 0.0:
            self.predicted[0] += plan.predicted_tokens * steps
            self.realised[0] += emitted
        declined = _FALLBACK_OF.get(plan.reason)
        if declined is not None:
            self.fallbacks[declined] += steps

    def _drafted(self, columns: int, reason: WidthReason, passes: int) -> None:
        self.drafted[0] += passes
        self.pass_width[columns - 1] += passes
        self.pass_width[-1] += columns * passes
        self.width_reasons[_WIDTH_REASON_INDEX[reason]] += passes

    def decline(self, reason: str, times: int = 1) -> None:
        """Count something the plugin declined; reason: a key of FALLBACKS."""
        self.fallbacks[_FALLBACK_INDEX[reason]] += times

    def by_kind(self) -> dict[str, float]:
        """Steps per kind of plan."""
        sums = self.steps.reshape(len(STEP_KINDS), -1).sum(axis=1).tolist()
        return dict(zip(STEP_KINDS, sums, strict=True))


assert STEP_KINDS[-1] == STEP_REASONS[-1] == UNPLANNED, "unplanned is the last cell of steps"
