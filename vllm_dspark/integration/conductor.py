"""Engine-core side of verification scheduling: request table, planner and what feeds them.

Knows vLLM's `Request` objects by their attributes only and imports nothing of vLLM, so that it is
tested with plain stand-ins. One conductor per engine, called by the scheduler around its own
`schedule` and `update_from_output`.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.artifacts.freshness import Resolution, planner_options
from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.batches import Drafting
from vllm_dspark.integration.exclusions import exclusion
from vllm_dspark.integration.metrics_totals import RowTotals, StepTimes
from vllm_dspark.integration.outcomes import StepOutcomes
from vllm_dspark.integration.recording import PairRecorder
from vllm_dspark.integration.report import StepOrder, StepReport
from vllm_dspark.integration.resting import RestingBatch, off_rest
from vllm_dspark.planning.cost import CostTable, StepMode, StepTiming
from vllm_dspark.planning.facts import StepFacts
from vllm_dspark.planning.lookup import SlotLookup
from vllm_dspark.planning.observed import ObservedCosts
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan, owner_id
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.settle import settle
from vllm_dspark.planning.survival import stamp_next
from vllm_dspark.planning.table import NO_LIMIT, RequestTable

logger = logging.getLogger("vllm.vllm_dspark")

IntArray = npt.NDArray[np.int32]
SlotArray = npt.NDArray[np.int64]

# Of large steps one in so many corrects prices, as on CUDA one in so many of all is timed: the
# correction is slow anyway, and in the engine core's time it is not free.
_MANY_REQUESTS, _TIMED_PERIOD = 64, 4
# A temperature below this is greedy for vLLM (vllm.sampling_params._SAMPLING_EPS).
_GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class StepOutlook:
    """What the scheduler knows of a step before it schedules it."""

    mixed: bool  # prefill rows are expected in the step
    num_waiting: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What vLLM scheduled.

    started: requests that enter (or re-enter) the batch; sampling_ids: requests whose step ends
    with a draft pass, if there is one; ids: all requests; tokens: rows by request id, drafts: their
    drafts.
    """

    started: Sequence[Any]
    preempted: Iterable[str]
    finished: Iterable[str]
    sampling_ids: list[str]
    ids: list[str]
    tokens: Mapping[str, int]
    num_tokens: int
    drafts: Mapping[str, list[int]]

    def tokens_as_ordered(self, request_ids: list[str], num_drafts: int) -> bool:
        """Whether just these requests run, and with all of `num_drafts` drafts together.

        Nobody has more than were left, so that the sum is right means that each count is.
        """
        return self.num_tokens == len(request_ids) + num_drafts and self.ids == request_ids


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
        self._resting: RestingBatch | None = None
        self._sampled: tuple[SlotArray, frozenset[str]] | None = None  # of the slots asked for
        self._windows: tuple[tuple[int, ...], IntArray] | None = None  # of a plan, less one
        self._num_timings = 0
        # Scheduler, outcomes and worker each have their own order of requests, mostly for long.
        self._scheduled, self._judged, self._drafted = (SlotLookup(table) for _ in range(3))
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
        if plan is None:
            self._kv_tokens = drafting.kv_tokens()
            facts = replace(facts, kv_tokens=self._kv_tokens)
            reserved = self._reserved[slots] if self._num_reserved else None
            batch = self.table.batch(slots, counts, draft_stamps, reserved)
            self.rows.add(batch)
            plan = self.planner.plan(facts, batch)
        if plan.kind is not PlanKind.TRIM or not self.device_windows:
            return StepOrder(self.step_id, plan, ids, counts, draft_stamps)
        floors, ceilings = self._limits(drafting.requests, slots)
        return StepOrder(
            self.step_id,
            plan,
            ids,
            counts,
            draft_stamps,
            ranking=self.table.ranking_parameters(),
            sampled=self._sampled_among(drafting.requests, slots),
            floors=floors,
            ceilings=ceilings,
        )

    def _sampled_among(self, drafting: Sequence[Any], slots: SlotArray) -> frozenset[str]:
        if self._sampled is None or self._sampled[0] is not slots:
            found = frozenset(r.request_id for r in drafting if _is_sampled(r))
            self._sampled = (slots, found)
        return self._sampled[1]

    def _limits(
        self, drafting: Sequence[Any], slots: SlotArray
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Requests that keep all their drafts, and those that cannot emit all of them."""
        width = self.table.num_positions
        floors, ceilings = {}, {}
        reserved = self._reserved[slots]
        for i in np.flatnonzero(reserved | self.table.ends_within(slots, width)).tolist():
            request = drafting[i]
            left = self._remaining(request) - 1
            if reserved[i]:
                floors[request.request_id] = width
            elif left < width:
                ceilings[request.request_id] = max(left, 0)
        return floors, ceilings

    # ---- steps that nothing has to be done for

    def rest(self, running: Sequence[Any], num_waiting: int, has_room: bool) -> StepOrder | None:
        """The order of a step in which all running requests rest; None: call `order`.

        has_room: what waits may be scheduled.
        """
        batch = self._resting
        if batch is None:
            return None
        if (
            batch.done == batch.steps
            or batch.version != self.table.version
            or batch.planner is not self.planner
            or (num_waiting and has_room)
            or running != batch.running
        ):
            self.wake()
            return None
        self.step_id = stamp_next(self.step_id)
        return batch.order(self.step_id)

    def rested(self, order: StepOrder, output: Any) -> bool:
        """Whether the step of `rest` was scheduled as expected; if not, the rest is over.

        output: vLLM's scheduler output. If not, go on with `disturbed` and `scheduled`.
        """
        batch = self._resting
        if batch is None or not batch.was_scheduled(output):
            self.wake()
            return False
        batch.advance(order.step_id)
        return True

    def disturbed(self, order: StepOrder, drafts: Mapping[str, list[int]]) -> StepOrder:
        """The order of a step that was to rest and did not go as expected; then see `scheduled`."""
        counts = [len(drafts.get(name, ())) for name in order.request_ids]
        return replace(
            order,
            num_drafts=np.array(counts, dtype=np.int32),
            num_scheduled=None,
            at_rest=False,
        )

    def resting_batch(self) -> RestingBatch | None:
        """The requests that rest, if they do."""
        return self._resting

    def settle_down(self, order: StepOrder, running: Sequence[Any], max_tokens: int) -> None:
        """After a step: let its requests rest from the next one on, if nothing speaks against it.

        max_tokens: rows that a step can have; with fewer than rest needs vLLM would cut drafts.
        """
        planner, plan = self.planner, order.plan
        if self._recorder is not None or not order.draft_next or order.draft_width is not None:
            return
        steps = 0
        if planner is None:
            steps = off_rest(stamp_next(order.step_id)) - 1 if self.off_reason else 0
        elif plan is not None and plan.kind is PlanKind.NATIVE:
            steps = planner.rest_ahead
        if steps <= 0 or order.num_scheduled is None:
            return
        slots = self._scheduled.of(order.request_ids).slots
        remaining = self.table.remaining(slots)
        version = self.table.version
        batch = RestingBatch.begin(order, running, slots, remaining, version, planner, steps)
        full = batch is not None and batch.width == self.table.num_positions
        if batch is not None and full and batch.num_tokens <= max_tokens:
            self._resting = batch

    def wake(self) -> None:
        """Make up for what was left out while requests rested."""
        batch, self._resting = self._resting, None
        if batch is None:
            return
        if batch.planner is not None:
            batch.planner.repeated(batch.done)
        self._draft_stamp[batch.slots] = batch.stamp
        left = [self._remaining(request) for request in batch.running]
        if batch.version == self.table.version:
            self.table.set_remaining(batch.slots, np.array(left, dtype=np.int64))

    def _facts(self, outlook: StepOutlook) -> StepFacts:
        mode = StepMode.MIXED if outlook.mixed else self._mode
        native_mode = StepMode.MIXED if outlook.mixed else self._native_mode
        arrived, self._num_arrived = self._num_arrived, 0
        return StepFacts(
            step_id=self.step_id,
            mode=mode,
            native_mode=native_mode,
            kv_tokens=self._kv_tokens,
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
            order.num_scheduled = self._kept(order, plan)
            return order
        rows = [i for i, name in enumerate(ids) if name in step.tokens and name in self.table]
        names = [ids[i] for i in rows]
        drafts = np.array([len(step.drafts.get(name, ())) for name in names], dtype=np.int32)
        others = step.num_tokens - len(names) - int(drafts.sum())
        mixed = others > 0
        if (
            mixed
            and trims_on_device
            and not self._resolution.mixed
            and plan.reason is not Reason.FORCED
        ):
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

    def _kept(self, order: StepOrder, plan: VerifyPlan) -> npt.NDArray[np.integer]:
        """[n] drafts that a plan leaves to be scheduled."""
        if plan.kind is PlanKind.SKIP_DRAFT:
            return np.zeros_like(order.num_drafts)
        if plan.kind is PlanKind.TRIM and not self.device_windows:
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
        sampled, untouched = _is_sampled(request), is_untouched(request)
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

    # ---- when a step's output has come back

    def learn(self, report: StepReport | None, outcomes: StepOutcomes | None) -> None:
        """Take in outcomes, rows and times of a step that has come back."""
        if self._recorder is not None:
            self._recorder.record(self.step_id, report, outcomes)
        rest = self._rest()
        # Outcomes before rows: on a CPU a report brings the rows of the pass after the judged one,
        # which would overwrite the rows that these outcomes are about.
        if outcomes is not None:
            self._take_outcomes(outcomes, rest > 0)
        if report is None:
            return
        if report.refused:
            self.withdraw(report.refused)
        if rest < 2:  # the last rows before outcomes are learned from again pair with those
            self._take_rows(report)
        waiting = self.planner is None or self.planner.cost is None
        if report.cost_table is not None and waiting and not self.off_reason:
            record = CostTableRecord.model_validate_json(report.cost_table)
            self._start_planning(record.to_table())
        for timing in report.timings if not rest else ():
            self._take_timing(timing)

    def close(self) -> None:
        """Close what is being recorded."""
        if self._recorder is not None:
            self._recorder.close()

    def withdraw(self, reason: str) -> None:
        """Plan nothing from now on: the worker's start-up check failed, so it trims no step."""
        self._resolution = replace(self._resolution, off_reason=reason, cost_table=None)
        self.planner = None

    def _take_timing(self, timing: StepTiming) -> None:
        planner = self.planner
        self._num_timings += 1
        if timing.num_requests >= _MANY_REQUESTS and self._num_timings % _TIMED_PERIOD:
            return
        if planner is not None and planner.cost is not None:
            self.times.add(timing, planner.cost)
            planner.cost.observe(timing)
        elif not self.off_reason:
            table = self._observed.add(timing)
            if table is not None:
                logger.info("vllm-dspark: steps are priced from what was served from now on")
                self._start_planning(table)

    def _rest(self) -> int:
        """Steps from now on in which nothing that comes in is needed for a decision soon.

        Where nothing is ever scheduled, some steps still serve the quality metrics.
        """
        if self._resting is not None:
            return 2
        if self.off_reason:
            return off_rest(self.step_id)
        return self.planner.rest if self.planner is not None else 0

    def _take_outcomes(self, outcomes: StepOutcomes, resting: bool) -> None:
        # Nothing is known of drafts behind a stop: to the learner they were never verified.
        verified, accepted, stamps = outcomes.before_stop, outcomes.accepted, outcomes.stamps
        found = self._judged.of(outcomes.request_ids)
        slots = found.slots
        if found.known is not None:
            keep = found.known
            verified, accepted, stamps = verified[keep], accepted[keep], stamps[keep]
        if resting:
            self.table.count_emitted(slots, accepted)
        if resting or not slots.size:
            return
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
        owners, rows = report.owners, report.confidences
        found = self._drafted.of(report.request_ids)
        if found.known is not None:
            owners, rows = owners[found.known], rows[found.known]
        if found.slots.size:
            self.table.record_rows(found.slots, owners, report.stamp, rows)


def tenant_of(request: Any) -> int | None:
    """Whose influence on shared learning a request counts towards; None: its own.

    vLLM knows no users. A cache salt, which separates users by design, or an adapter names one;
    the request ids of one client have nothing in common that it could not make up.
    """
    if request.cache_salt:
        return owner_id(f"salt:{request.cache_salt}")
    if request.lora_request is not None:
        return owner_id(f"lora:{request.lora_request.lora_name}")
    return None


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
