"""Steps that repeat a settled decision about an unchanged batch, without a look at its requests.

Where full windows have been best for many steps, where a budget that devices spread has been found
the right one again, or nothing is ever scheduled, most steps need nothing of ours: vLLM schedules
what it would by itself, and what comes back is only counted. At 256 requests a single pass over
them in Python costs as much as planning, so a resting step makes none: that the batch is the
expected one is seen from its list, its size and its sum of tokens. What has been left out (stamps
of drafts, tokens that remain) is made up for when the rest ends.

Nobody looks whether a request still has its drafts, so rest is only begun while none can run out of
tokens; vLLM would then cut them.

Host windows rest likewise, but for one pass that leaves each request the drafts of its window. They
follow what each request accepts, so the outcomes of such steps are kept, and learned all at once
when the rest ends; and workers go on reporting, since the next plan uses the newest rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.integration.batches import Cuts, cut_drafts
from vllm_dspark.integration.report import StepOrder
from vllm_dspark.integration.rested_counts import VerifiedDrafts
from vllm_dspark.planning.lookup import SlotLookup
from vllm_dspark.planning.plan import PlanKind
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.survival import stamp_next
from vllm_dspark.planning.table import RequestTable

IntArray = npt.NDArray[np.integer]
PlaceArray = npt.NDArray[np.int64]
SlotArray = npt.NDArray[np.int64]

# Where nothing is ever scheduled: of so many steps the last ones serve the quality metrics.
_OFF_PERIOD, _OFF_AWAKE = 32, 8
# Steps that may be under way when rest begins (async scheduling), whose tokens are not counted yet.
_UNDER_WAY = 3

_HAS_GRAMMAR = attrgetter("use_structured_output")


def off_rest(step_id: int) -> int:
    """Steps from this one on that need no look at what comes back; where nothing is scheduled."""
    return max(_OFF_PERIOD - _OFF_AWAKE - step_id % _OFF_PERIOD, 0)


@dataclass(slots=True)
class RestingBatch:
    """Requests that rest: all that run, with `width` drafts each, for at most `steps` steps more.

    running: the scheduler's list as it was; model: the order that the others are like; version: of
    the request table; planner: whose decision is repeated, None where there is none; stamp: draft
    pass that made the drafts at hand; done: steps rested so far; worker_ids: requests in the
    worker's order, known with the first step that comes back; verified: drafts that host windows
    leave them, in that order; lengths: of each such step that has not been learned from, the tokens
    that each of them emitted.
    """

    running: list[Any]
    model: StepOrder
    slots: SlotArray
    width: int
    version: int
    planner: Planner | None
    stamp: int
    steps: int
    done: int = 0
    worker_ids: Sequence[str] | None = None
    verified: VerifiedDrafts | None = None
    lengths: list[bytes] = field(default_factory=list)

    @staticmethod
    def begin(
        order: StepOrder,
        running: Sequence[Any],
        slots: SlotArray,
        remaining: npt.NDArray[np.integer],  # [n] tokens that requests can emit
        version: int,
        planner: Planner | None,
        steps: int,
    ) -> "RestingBatch | None":
        """After a step that went as ordered; None if its requests cannot be left alone.

        steps: at most; fewer if a request may have emitted all it can before.
        """
        drafts = order.num_drafts
        if order.num_scheduled is None or len(running) != drafts.size or not drafts.size:
            return None
        width = int(drafts[0])
        if not width or np.count_nonzero(drafts == width) < drafts.size:
            return None
        steps = min(steps, int(remaining.min()) // (width + 1) - _UNDER_WAY)
        if steps <= 0:
            return None
        if order.cuts is not None and any(map(_HAS_GRAMMAR, running)):
            return None  # a grammar may leave it fewer drafts, which cut ones do not show
        return RestingBatch(
            list(running), order, slots, width, version, planner, order.step_id, steps
        )

    @property
    def request_ids(self) -> list[str]:
        """In scheduler order."""
        return self.model.request_ids

    @property
    def cuts(self) -> Cuts | None:
        """What host windows leave of drafts; None without."""
        return self.model.cuts

    @property
    def size(self) -> int:
        """Requests."""
        return len(self.running)

    @property
    def num_tokens(self) -> int:
        """Rows of each of its steps."""
        plan = self.model.plan
        if self.cuts is not None and plan is not None:
            return self.size + plan.budget
        return self.size * (self.width + 1)

    def order(self, step_id: int) -> StepOrder:
        """The order of its next step."""
        plan = self.model.plan
        if plan is not None:
            plan = plan.at_step(step_id)
        stamps = np.empty(self.size, dtype=np.int32)
        stamps.fill(self.stamp)
        return self.model.repeated(step_id, plan, stamps, at_rest=self.cuts is None)

    def was_scheduled(self, output: Any) -> bool:
        """Whether vLLM scheduled just that: each request at most its rows, so the sum tells."""
        return (
            output.total_num_scheduled_tokens == self.num_tokens
            and len(output.num_scheduled_tokens) == self.size
            and not output.scheduled_new_reqs
            and not output.preempted_req_ids
            and not output.finished_req_ids
        )

    def advance(self, step_id: int) -> None:
        """A step of it was scheduled, which drafts again."""
        self.stamp = step_id
        self.done += 1

    def ran_in_order(self, worker_ids: Sequence[str]) -> bool:
        """Whether a step that came back lists the requests as the steps of this rest before it."""
        if self.worker_ids is None:
            self.worker_ids = list(worker_ids)
            return True
        return worker_ids == self.worker_ids

    def windows(self, places: PlaceArray | None) -> VerifiedDrafts | None:
        """Drafts that host windows leave; places: of the requests in the worker's order."""
        if self.verified is None and self.cuts is not None and self.model.num_scheduled is not None:
            counts = np.empty(self.size, dtype=np.uint8)
            counts[slice(None) if places is None else places] = self.model.num_scheduled
            self.verified = VerifiedDrafts.of(counts, self.width)
        return self.verified

    def accepted(self) -> IntArray:
        """[steps, n] accepted drafts of all steps that are to be learned from."""
        steps = np.frombuffer(b"".join(self.lengths), dtype=np.uint8).reshape(-1, self.size)
        return steps.astype(np.int64) - 1  # of each step one token is the target's own


class RestingSteps:
    """The conductor's part of it; it has what is declared here."""

    step_id: int
    table: RequestTable
    planner: Planner | None
    _recorder: Any
    _draft_stamp: npt.NDArray[np.int32]  # by slot
    _scheduled: SlotLookup
    _rested: SlotLookup
    device_windows: bool
    _resting: RestingBatch | None = None

    @property
    def off_reason(self) -> str:
        """Why nothing is scheduled in this engine."""
        raise NotImplementedError

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
        if batch.cuts is not None:
            cut_drafts(batch.cuts)
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
        kept = order.num_scheduled
        order = replace(order, num_scheduled=None, at_rest=False, unseen=False)
        counts = np.array([len(drafts.get(name, ())) for name in order.request_ids], dtype=np.int32)
        if order.sets_windows and kept is not None:
            counts = np.where(counts == kept, order.num_drafts, counts)
        order.num_drafts = counts
        return order

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
        elif plan is not None and plan.kind in (PlanKind.NATIVE, PlanKind.TRIM):
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
        self._catch_up(batch)

    def catch_up(self) -> None:
        """Learn from the steps at rest that have come back, before another one is learned from."""
        if self._resting is not None:
            self._catch_up(self._resting)

    def _catch_up(self, batch: RestingBatch) -> None:
        if batch.worker_ids is None or not batch.lengths:
            return
        if batch.version == self.table.version:
            accepted, slots = batch.accepted(), self._rested.of(batch.worker_ids).slots
            if batch.verified is not None:
                self.table.record_repeated(slots, batch.verified.counts.astype(np.int64), accepted)
            else:
                self.table.count_emitted(slots, np.add.reduce(accepted), len(accepted))
        batch.lengths.clear()
