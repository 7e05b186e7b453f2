"""Engine-core side of verification scheduling: request table, planner and what feeds them.

Knows vLLM's `Request` objects by their attributes only and imports nothing of vLLM, so that it is
tested with plain stand-ins. One conductor per engine, called by the scheduler around its own
`schedule` and `update_from_output`.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.artifacts.freshness import Resolution, planner_options
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.batches import Drafting
from vllm_dspark.integration.exclusions import exclusion
from vllm_dspark.integration.learning import LearningSteps
from vllm_dspark.integration.metrics_totals import RowTotals, StepTimes
from vllm_dspark.integration.recording import PairRecorder
from vllm_dspark.integration.report import StepOrder
from vllm_dspark.integration.request_traits import is_sampled, is_untouched, tenant_of
from vllm_dspark.integration.scheduled_step import ScheduledStep, StepOutlook
from vllm_dspark.planning.cost import CostTable, StepMode
from vllm_dspark.planning.facts import StepFacts
from vllm_dspark.planning.lookup import SlotLookup
from vllm_dspark.planning.observed import ObservedCosts
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.settle import settle
from vllm_dspark.planning.survival import stamp_next
from vllm_dspark.planning.table import NO_LIMIT, RequestTable

logger = logging.getLogger("vllm.vllm_dspark")

IntArray = npt.NDArray[np.int32]
SlotArray = npt.NDArray[np.int64]


class Conductor(LearningSteps):
    """Makes the plan of each step and keeps what plans are made from."""

    def __init__(
        self,
        table: RequestTable,
        resolution: Resolution,
        options: DSparkConfig,
        mode: StepMode,
        *,
        device_windows: bool,
        processors: tuple[str, ...] = (),
        max_model_len: int = NO_LIMIT,
        native_mode: StepMode | None = None,
        narrow_drafts: bool = False,
    ) -> None:
        """processors: custom logits processors that may count on uniform rows (exclusions.py).

        narrow_drafts: the engine can draft fewer than K columns (draft_width.py).
        """
        self._processors = processors
        self._max_model_len = max_model_len
        self.table = table
        self.planner: Planner | None = None  # made when a cost table is there
        self.rows = RowTotals()
        self.times = StepTimes()
        self.step_id = 0
        self._kv_tokens = 0  # of the step being planned
        self.restated = 0  # orders that vLLM's scheduling made different from their plans
        self._resolution = resolution
        self._options = options
        self.device_windows = device_windows
        self._narrow_drafts = narrow_drafts
        self._mode = mode  # of ragged steps
        self._native_mode = mode if native_mode is None else native_mode
        self._observed = ObservedCosts(mode, table.num_positions)  # where measuring was refused
        # By slot: pass that made the request's drafts, and whether it keeps its full window.
        self._draft_stamp = np.zeros(1, dtype=np.int32)
        self._reserved = np.zeros(1, dtype=np.bool_)
        self._num_reserved = 0
        self._sampled: tuple[SlotArray, frozenset[str]] | None = None  # of the slots asked for
        self._windows: tuple[tuple[int, ...], IntArray] | None = None  # of a plan, less one
        # Scheduler, outcomes and worker each have their own order of requests, mostly for long.
        self._scheduled, self._judged, self._drafted, self._rested = (
            SlotLookup(table) for _ in range(4)
        )
        self._generation: dict[str, int] = {}
        self._num_arrived = 0
        path = options.record_confidences
        self._recorder = PairRecorder(path, table.num_positions) if path is not None else None
        if resolution.scheduling and resolution.cost_table is not None:
            self._start_planning(resolution.cost_table)
        elif options.test_windows is not None or options.test_draft_width is not None:
            self._start_planning(None)

    @property
    def off_reason(self) -> str:
        """Why nothing is scheduled in this engine; empty if scheduling is on."""
        return self._resolution.off_reason

    def _start_planning(self, table: CostTable | None) -> None:
        narrow = self._narrow_drafts
        options = planner_options(self._options, self._resolution, self.device_windows, narrow)
        cost, width = None, self.table.num_positions
        if table is not None:
            cost = CostModel(table, online=self._options.online_cost, num_positions=width)
            if narrow and not cost.prices_widths:
                logger.info(
                    "vllm-dspark: draft passes keep full width: the cost table has no narrower "
                    "ones; measure a new one (`vllm-dspark profile`)"
                )
        self.planner = Planner(cost, options)

    # ---- before vLLM schedules

    def order(self, drafting: Drafting, outlook: StepOutlook) -> StepOrder:
        """The order for the step about to be scheduled; the plan's windows follow `drafting`."""
        self.step_id = stamp_next(self.step_id)
        ids, counts = drafting.ids, drafting.num_drafts
        slots = self._scheduled.of(ids).slots
        draft_stamps: IntArray = self._draft_stamp[slots]
        if np.count_nonzero(draft_stamps) < len(ids):
            # vLLM keeps placeholders also after a step that drafted nothing.
            counts = np.where(draft_stamps == 0, np.int32(0), counts)
        if self.planner is None or not ids:
            return StepOrder(self.step_id, None, ids, counts, draft_stamps)
        facts = self._facts(outlook)
        plan = self.planner.shortcut(facts, self.table.owners(slots), counts)
        repeats = plan is not None
        if plan is None:
            self._kv_tokens = drafting.kv_tokens()
            facts = replace(facts, kv_tokens=self._kv_tokens)
            reserved = self._reserved[slots] if self._num_reserved else None
            batch = self.table.batch(slots, counts, draft_stamps, reserved)
            self.rows.add(batch)
            plan = self.planner.plan(facts, batch)
        if plan.kind is not PlanKind.TRIM or not self.device_windows:
            return StepOrder(self.step_id, plan, ids, counts, draft_stamps, repeats=repeats)
        floors, ceilings = self._limits(drafting.requests, slots)
        return StepOrder(
            self.step_id,
            plan,
            ids,
            counts,
            draft_stamps,
            repeats=repeats,
            ranking=self.table.ranking_parameters(),
            sampled=self._sampled_among(drafting.requests, slots),
            floors=floors,
            ceilings=ceilings,
        )

    def _sampled_among(self, drafting: Sequence[Any], slots: SlotArray) -> frozenset[str]:
        if self._sampled is None or self._sampled[0] is not slots:
            found = frozenset(r.request_id for r in drafting if is_sampled(r))
            self._sampled = (slots, found)
        return self._sampled[1]

    def _limits(
        self, drafting: Sequence[Any], slots: SlotArray
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Requests that keep all their drafts, and those that cannot emit all of them."""
        width = self.table.num_positions
        floors: dict[str, int] = {}
        ceilings: dict[str, int] = {}
        ends = self.table.ends_within(slots, width)
        if not self._num_reserved and not np.count_nonzero(ends):
            return floors, ceilings
        reserved = self._reserved[slots]
        for i in np.flatnonzero(reserved | ends).tolist():
            request = drafting[i]
            left = self._remaining(request) - 1
            if reserved[i]:
                floors[request.request_id] = width
            elif left < width:
                ceilings[request.request_id] = max(left, 0)
        return floors, ceilings

    def _facts(self, outlook: StepOutlook) -> StepFacts:
        mode = StepMode.MIXED if outlook.mixed else self._mode
        native_mode = StepMode.MIXED if outlook.mixed else self._native_mode
        arrived, self._num_arrived = self._num_arrived, 0
        # A step with prompts is of a size that only scheduling will tell.
        cost = self.planner.cost if self.planner is not None else None
        prefill_rows = cost.prefill_rows if outlook.mixed and cost is not None else 0
        return StepFacts(
            step_id=self.step_id,
            mode=mode,
            native_mode=native_mode,
            kv_tokens=self._kv_tokens,
            reserved_rows=prefill_rows,
            num_waiting=outlook.num_waiting,
            num_arrived=arrived,
        )

    # ---- after vLLM scheduled

    def scheduled(self, order: StepOrder, step: ScheduledStep) -> StepOrder:
        """Follow one scheduler output; the order about the step that really runs."""
        for request_id in step.finished:
            self.table.remove(request_id)
            self._generation.pop(request_id, None)
            if self._recorder is not None:
                self._recorder.remove_request(request_id)
        for request_id in step.preempted:
            self.table.remove(request_id)
            self._generation[request_id] = self._generation.get(request_id, 0) + 1
        for request in step.started:
            self._add(request)
        slots = self._scheduled.of(step.sampling_ids).slots
        if order.plan is None:
            counts = order.num_drafts
            if step.tokens_as_ordered(order.request_ids, int(np.add.reduce(counts))):
                order.num_scheduled = counts
        else:
            order = self._settled(order, order.plan, step)
            partial = not order.draft_next or order.draft_width is not None
            if order.plan is not None and partial and self._reserves(slots):
                # Neither a pause of drafting nor a narrow pass must reach a seeded request that
                # has just joined.
                plan = replace(order.plan, draft_next=True, draft_width=None)
                order = replace(order, plan=plan)
        self._draft_stamp[slots] = self.step_id if order.draft_next else 0
        return order

    def _reserves(self, slots: SlotArray) -> bool:
        return self._num_reserved > 0 and bool(self._reserved[slots].any())

    def _settled(self, order: StepOrder, plan: VerifyPlan, step: ScheduledStep) -> StepOrder:
        """The order restated where vLLM left requests out, cut drafts or added prefill rows."""
        ids = order.request_ids
        trims_on_device = plan.kind is PlanKind.TRIM and self.device_windows
        all_there = int(np.add.reduce(order.num_drafts))
        expected = all_there if trims_on_device else plan.budget
        as_planned = step.tokens_as_ordered(ids, expected)
        if trims_on_device and np.count_nonzero(order.num_drafts) < len(ids):
            as_planned = False  # workers know the requests of the plan by their drafts
        if as_planned:
            order.num_scheduled = self.kept(order)
            return order
        rows = [i for i, name in enumerate(ids) if name in step.tokens and name in self.table]
        names = [ids[i] for i in rows]
        drafts = np.array([len(step.drafts.get(name, ())) for name in names], dtype=np.int32)
        others = step.num_tokens - len(names) - int(drafts.sum())
        mixed = others > 0
        trims_mixed = self.planner is not None and self.planner.trims_mixed
        if mixed and trims_on_device and not trims_mixed and plan.reason is not Reason.FORCED:
            # Nothing has been cut yet, and nothing says that trimming such a step pays.
            plan = replace(plan, kind=PlanKind.NATIVE, reason=Reason.MIXED)
            trims_on_device = False
        if not trims_on_device:
            about, counts = names, drafts
        else:
            about = [name for name, n in zip(names, drafts.tolist(), strict=True) if n]
            counts = drafts[drafts > 0]
        mode = StepMode.MIXED if mixed else self._mode
        facts = StepFacts(
            step_id=plan.step_id,
            mode=mode,
            native_mode=StepMode.MIXED if mixed else self._native_mode,
            kv_tokens=self._kv_tokens,
            reserved_rows=others,
        )
        owner = self.table.owners(self.table.slots(about))
        cost = self.planner.cost if self.planner is not None else None
        kind, budget, windows = plan.kind, plan.budget, plan.windows
        plan = replace(settle(plan, cost, facts, owner, counts), kind=kind)
        if trims_on_device:  # shares of the budget, or prescribed windows, are the worker's matter
            plan = replace(
                plan,
                budget=min(budget, int(counts.sum())),
                windows=tuple(windows[i] for i in rows) if windows else (),
            )
        self.restated += 1
        return replace(
            order,
            plan=plan,
            request_ids=names,
            num_drafts=order.num_drafts[rows],
            draft_stamps=order.draft_stamps[rows],
        )

    def kept(self, order: StepOrder) -> npt.NDArray[np.integer]:
        """[n] drafts that the plan leaves to be scheduled."""
        plan = order.plan
        if plan is not None and plan.kind is PlanKind.SKIP_DRAFT:
            return np.zeros_like(order.num_drafts)
        if plan is not None and plan.kind is PlanKind.TRIM and not self.device_windows:
            if self._windows is None or self._windows[0] is not plan.windows:
                kept = np.array(plan.windows, dtype=np.int32) - np.int32(1)
                self._windows = (plan.windows, kept)
            return self._windows[1]
        return order.num_drafts

    def _remaining(self, request: Any) -> int:
        """Tokens that the request can still emit: what goes beyond need not be verified."""
        wanted: int = request.max_tokens - request.num_output_tokens
        left: int = max(0, min(wanted, self._max_model_len - request.num_tokens))
        return left

    def _add(self, request: Any) -> None:
        sampled, untouched = is_sampled(request), is_untouched(request)
        if self._recorder is not None:
            self._recorder.add_request(request.request_id, sampled=sampled, untouched=untouched)
        slot = self.table.add(
            request.request_id,
            sampled=sampled,
            untouched=untouched,
            excluded=bool(exclusion(request, self._processors)),
            tenant=tenant_of(request),
            # less the token of the step that ends its prefill, which is no verification's outcome
            remaining=max(0, self._remaining(request) - 1),
            generation=self._generation.get(request.request_id, 0),
        )
        if slot >= self._draft_stamp.size:
            room = np.zeros(max(slot + 1, self._draft_stamp.size), dtype=np.int32)
            self._draft_stamp = np.append(self._draft_stamp, room)
            self._reserved = np.append(self._reserved, room.astype(np.bool_))
        self._draft_stamp[slot] = 0
        # The noise of a seeded request is keyed by position and draft column: its tokens repeat
        # only if its windows do, so they stay full whatever the load.
        self._reserved[slot] = sampled and request.sampling_params.seed is not None
        self._num_reserved = int(np.count_nonzero(self._reserved))
        self._num_arrived += 1

    def close(self) -> None:
        """Close what is being recorded."""
        if self._recorder is not None:
            self._recorder.close()

    def withdraw(self, reason: str) -> None:
        """Plan nothing from now on: the worker's start-up check failed, so it trims no step."""
        self._resolution = replace(self._resolution, off_reason=reason, cost_table=None)
        self.planner = None
