"""Engine-core side of verification scheduling: request table, planner and what feeds them.

Knows vLLM's `Request` objects by their attributes only and imports nothing of vLLM, so that it is
tested with plain stand-ins. One conductor per engine, called by the scheduler around its own
`schedule` and `update_from_output`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.artifacts.freshness import Resolution, planner_options
from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.metrics_totals import RowTotals, StepTimes
from vllm_dspark.integration.outcomes import StepOutcomes
from vllm_dspark.integration.report import StepOrder, StepReport
from vllm_dspark.planning.cost import CostTable, StepMode
from vllm_dspark.planning.facts import StepFacts
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, request_digest
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.survival import stamp_next
from vllm_dspark.planning.table import RequestTable

IntArray = npt.NDArray[np.int32]

# A temperature below this is greedy for vLLM (vllm.sampling_params._SAMPLING_EPS).
_GREEDY_BELOW = 1e-5
# Where nothing is planned, learning only feeds metrics: one step in this many is enough (on an
# H200 host each costs 0.2 ms, which a small model's step shows).
_IDLE_PERIOD = 8


@dataclass(frozen=True, slots=True)
class StepOutlook:
    """What the scheduler knows of a step before it schedules it."""

    mixed: bool  # prefill rows are expected in the step
    num_waiting: int
    kv_tokens: int  # computed tokens of the requests that will verify


class Conductor:
    """Makes the plan of each step and keeps what plans are made from."""

    def __init__(
        self,
        table: RequestTable,
        resolution: Resolution,
        options: DSparkConfig,
        mode: StepMode,
        *,
        device_windows: bool,
        native_mode: StepMode | None = None,
    ) -> None:
        self.table = table
        self.planner: Planner | None = None  # made when a cost table is there
        self.rows = RowTotals()
        self.times = StepTimes()
        self.step_id = 0
        self._resolution = resolution
        self._options = options
        self.device_windows = device_windows
        self._mode = mode  # of ragged steps
        self._native_mode = mode if native_mode is None else native_mode
        self._draft_stamp = np.zeros(0, dtype=np.int32)  # by slot: pass that made its drafts
        self._reserved = np.zeros(0, dtype=np.bool_)  # by slot: keeps its full window
        self._generation: dict[str, int] = {}
        self._num_arrived = 0
        if resolution.scheduling and resolution.cost_table is not None:
            self._start_planning(resolution.cost_table)
        elif options.test_windows is not None:
            self._start_planning(None)

    @property
    def off_reason(self) -> str:
        """Why nothing is scheduled in this engine; empty if scheduling is on."""
        return self._resolution.off_reason

    def _start_planning(self, table: CostTable | None) -> None:
        options = planner_options(self._options, self._resolution, self.device_windows)
        cost = CostModel(table, online=self._options.online_cost) if table is not None else None
        self.planner = Planner(cost, options)

    # ---- before vLLM schedules

    def order(self, drafting: Sequence[Any], outlook: StepOutlook) -> StepOrder:
        """The order for the step about to be scheduled.

        drafting: requests that may have drafts, in scheduler order; the plan's windows follow it.
        """
        self.step_id = stamp_next(self.step_id)
        ids = [request.request_id for request in drafting]
        slots = self.table.slots(ids)
        draft_stamps = self._stamps(slots)
        # vLLM keeps placeholders also after a step that drafted nothing.
        counts = np.array([len(request.spec_token_ids) for request in drafting], dtype=np.int32)
        counts[draft_stamps == 0] = 0
        drafted = dict(zip(ids, counts.tolist(), strict=True))
        stamps = dict(zip(ids, draft_stamps.tolist(), strict=True))
        if self.planner is None or not ids:
            return StepOrder(self.step_id, None, drafted, stamps)
        facts = self._facts(outlook)
        plan = self.planner.shortcut(facts, self.table.owners(slots), counts)
        if plan is None:
            batch = self.table.batch(slots, counts, draft_stamps, self._reserved[slots])
            self.rows.add(batch)
            plan = self.planner.plan(facts, batch)
        if plan.kind is not PlanKind.TRIM or not self.device_windows:
            return StepOrder(self.step_id, plan, drafted, stamps)
        ranking = self.table.ranking_parameters()
        sampled = frozenset(r.request_id for r in drafting if _is_sampled(r))
        floors, ceilings = self._limits(drafting, slots)
        return StepOrder(self.step_id, plan, drafted, stamps, ranking, sampled, floors, ceilings)

    def settled(self, order: StepOrder, scheduled: Mapping[str, Sequence[int]]) -> StepOrder:
        """The order for what vLLM really scheduled; scheduled: drafts by request id.

        Under async scheduling vLLM leaves out requests that are about to end, after the plan was
        made. Their share of the budget goes to the others.
        """
        plan = order.plan
        if plan is None or plan.kind is not PlanKind.TRIM or not self.device_windows:
            return order
        names = [name for name, drafts in scheduled.items() if drafts]
        if len(names) == plan.num_requests or not names:
            return order
        budget = plan.budget
        if plan.windows:
            given = dict(zip(order.drafted, plan.windows, strict=True))
            budget = sum(given.get(name, 1) - 1 for name in names)
        digest = request_digest(self.table.owners(self.table.slots(names)))
        settled = replace(plan, digest=digest, num_requests=len(names), budget=budget)
        return replace(order, plan=settled)

    def _limits(
        self, drafting: Sequence[Any], slots: npt.NDArray[np.int64]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Requests that keep all their drafts, and those that cannot emit all of them."""
        width = self.table.num_positions
        floors, ceilings = {}, {}
        for request, reserved in zip(drafting, self._reserved[slots].tolist(), strict=True):
            left = request.max_tokens - request.num_output_tokens - 1
            if left < width:
                ceilings[request.request_id] = max(left, 0)
            if reserved:
                floors[request.request_id] = width
        return floors, ceilings

    def _facts(self, outlook: StepOutlook) -> StepFacts:
        mode = StepMode.MIXED if outlook.mixed else self._mode
        native_mode = StepMode.MIXED if outlook.mixed else self._native_mode
        arrived, self._num_arrived = self._num_arrived, 0
        return StepFacts(
            step_id=self.step_id,
            mode=mode,
            native_mode=native_mode,
            kv_tokens=outlook.kv_tokens,
            num_waiting=outlook.num_waiting,
            num_arrived=arrived,
        )

    # ---- after vLLM scheduled

    def scheduled(
        self,
        started: Iterable[Any],
        preempted: Iterable[str],
        finished: Iterable[str],
        sampling_ids: Sequence[str],
        draft_next: bool,
    ) -> None:
        """Follow one scheduler output.

        started: requests that enter (or re-enter) the batch; sampling_ids: requests whose step
        ends with a draft pass, if `draft_next`.
        """
        for request_id in finished:
            self.table.remove(request_id)
            self._generation.pop(request_id, None)
        for request_id in preempted:
            self.table.remove(request_id)
            self._generation[request_id] = self._generation.get(request_id, 0) + 1
        for request in started:
            self._add(request)
        known = [request_id for request_id in sampling_ids if request_id in self.table]
        slots = self.table.slots(known)
        self._stamps(slots)
        self._draft_stamp[slots] = self.step_id if draft_next else 0

    def _add(self, request: Any) -> None:
        slot = self.table.add(
            request.request_id,
            sampled=_is_sampled(request),
            untouched=is_untouched(request),
            remaining=max(0, request.max_tokens - request.num_output_tokens),
            generation=self._generation.get(request.request_id, 0),
        )
        self._stamps(np.array([slot]))
        self._draft_stamp[slot] = 0
        # The noise of a seeded request is keyed by position and draft column: its tokens repeat
        # only if its windows do, so they stay full whatever the load.
        self._reserved[slot] = _is_sampled(request) and request.sampling_params.seed is not None
        self._num_arrived += 1

    def _stamps(self, slots: npt.NDArray[np.int64]) -> IntArray:
        """Draft stamps of slots; makes room for slots never seen."""
        top = int(slots.max(initial=-1))
        if top >= self._draft_stamp.size:
            grown = np.zeros(max(top + 1, 2 * self._draft_stamp.size), dtype=np.int32)
            grown[: self._draft_stamp.size] = self._draft_stamp
            self._draft_stamp = grown
            self._reserved = np.append(
                self._reserved, np.zeros(grown.size - self._reserved.size, dtype=np.bool_)
            )
        stamps: IntArray = self._draft_stamp[slots]
        return stamps

    # ---- when a step's output has come back

    def learn(self, report: StepReport | None, outcomes: StepOutcomes | None) -> None:
        """Take in outcomes, rows and times of a step that has come back."""
        # Outcomes before rows: on a CPU a report brings the rows of the pass after the judged one,
        # which would overwrite the rows that these outcomes are about.
        if outcomes is not None and (self.planner is not None or not self.step_id % _IDLE_PERIOD):
            self._take_outcomes(outcomes)
        if report is not None:
            if report.refused:
                self.withdraw(report.refused)
            self._take_rows(report)
            waiting = self.planner is None or self.planner.cost is None
            if report.cost_table is not None and waiting and not self.off_reason:
                record = CostTableRecord.model_validate_json(report.cost_table)
                self._start_planning(record.to_table())
            if self.planner is not None and self.planner.cost is not None:
                for timing in report.timings:
                    self.times.add(timing, self.planner.cost)
                    self.planner.cost.observe(timing)

    def withdraw(self, reason: str) -> None:
        """Plan nothing from now on: the worker's start-up check failed, so it trims no step."""
        self._resolution = replace(self._resolution, off_reason=reason, cost_table=None)
        self.planner = None

    def _take_outcomes(self, outcomes: StepOutcomes) -> None:
        # Nothing is known of drafts behind a stop: to the learner they were never verified.
        verified, accepted, stamps = outcomes.before_stop, outcomes.accepted, outcomes.stamps
        keep = [i for i, name in enumerate(outcomes.request_ids) if name in self.table]
        if not keep:
            return
        slots = self.table.slots(outcomes.request_ids[i] for i in keep)
        verified, accepted, stamps = verified[keep], accepted[keep], stamps[keep]
        first = int(stamps[0])
        if (stamps == first).all():
            self.table.record_outcomes(slots, first, verified, accepted)
            return
        for stamp in np.unique(stamps).tolist():
            of = stamps == stamp
            self.table.record_outcomes(slots[of], stamp, verified[of], accepted[of])

    def _take_rows(self, report: StepReport) -> None:
        if report.stamp == 0:
            return
        keep = [i for i, name in enumerate(report.request_ids) if name in self.table]
        if not keep:
            return
        slots = self.table.slots([report.request_ids[i] for i in keep])
        self.table.record_rows(slots, report.owners[keep], report.stamp, report.confidences[keep])


def _is_sampled(request: Any) -> bool:
    params = request.sampling_params
    return params is not None and params.temperature >= _GREEDY_BELOW


def is_untouched(request: Any) -> bool:
    """Whether nothing but temperature and truncation alters the request's target distribution.

    Only such requests may teach the calibration: others accept what their rules let through.
    """
    params = request.sampling_params
    if params is None or request.use_structured_output:
        return False
    neutral = (
        params.presence_penalty == 0.0
        and params.frequency_penalty == 0.0
        and params.repetition_penalty == 1.0
    )
    rules = (
        params.bad_words,
        params.logit_bias,
        params.allowed_token_ids,
        params.min_tokens,
        params.extra_args,
    )
    return neutral and not any(rules)
