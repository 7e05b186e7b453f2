"""The planner: one VerifyPlan per step, from what is known before the step.

    plan(facts, batch) -> VerifyPlan

is called once per step in the engine core. It holds three pieces of state: the kind
of step it is in (hysteresis.py), whether the batch is draining (drain.py), and where
a pause of drafting stands. All else comes in with the call, so equal calls in equal
order give equal plans.

A pause of drafting (skip-draft): the step that decides it still uses the drafts it
finds (SKIP_LEFTOVER) and makes no new ones; then steps are SINGLE. Every
`probe_interval` steps one of them drafts (PROBE_DRAFT) and the next verifies the few
drafts that fit the next padded size (PROBE_VERIFY), so acceptance stays measured.
When drafting pays again, the step that notices drafts (NO_DRAFTS) and the next one
verifies: speculation is back within two steps.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.allocation import allocate
from vllm_dspark.planning.budget import Option, StepRows, best_ragged, uniform
from vllm_dspark.planning.cost import StepMode, StepShape
from vllm_dspark.planning.drain import DrainWatch, delay_ms
from vllm_dspark.planning.hysteresis import KindSelector
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan, request_digest
from vllm_dspark.planning.survival import survival
from vllm_dspark.planning.table import RequestBatch

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int32]

# After this many native decisions in a row on an unchanged batch, only every
# _LAZY_PERIOD-th step is worked out: native steps should cost nothing.
_LAZY_AFTER = 16
_LAZY_PERIOD = 8


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The planner's share of DSparkConfig (which explains the options)."""

    min_gain: float = 0.04
    hysteresis_steps: int = 4
    drain_guard: bool = True
    skip_draft: bool = True
    probe_interval: int = 32
    request_floor: int = 0
    device_windows: bool = False  # windows are set on device: plans carry none
    mixed: bool = False  # evidence allows to trim steps with prefill rows
    lazy: bool = True  # see _LAZY_AFTER


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the engine knows about a step before it runs. Filled by integration/."""

    step_id: int
    mode: StepMode  # that a ragged step would run in
    native_mode: StepMode  # that a full-width step would run in
    kv_tokens: int  # KV tokens that attention will read
    reserved_rows: int = 0  # rows of prefill chunks and whatever else is not in the batch
    reserved_sampling: int = 0  # of the requests behind those rows, how many emit a token
    num_waiting: int = 0
    num_arrived: int = 0  # requests that joined since the previous plan
    max_tokens: int = 2**31 - 1  # rows a step may have


@dataclass(slots=True)
class _Evaluation:
    """The options of one step; `trim`, `skip` are None where not on offer."""

    native: Option | None
    trim: Option | None
    skip: Option | None
    survival: FloatArray  # [K, n]
    counts_ahead: bool  # drafts are missing: priced as if every request had K


@dataclass
class Planner:
    """State machine of one engine; call `plan` once per step."""

    cost: CostModel
    options: PlannerOptions = field(default_factory=PlannerOptions)

    def __post_init__(self) -> None:
        self.selector = KindSelector(self.options.min_gain, self.options.hysteresis_steps)
        self._drain = DrainWatch()
        self._since_draft = 0  # steps since the drafter last ran
        self._probing = False  # the last step drafted only to look
        self._native_streak = 0
        self._last: VerifyPlan | None = None

    def plan(self, facts: StepFacts, batch: RequestBatch) -> VerifyPlan:
        """Decide one step."""
        draining = self._drain.update(batch.owner.size, facts.num_arrived, facts.num_waiting)
        if (reason := self._standing_aside(facts, batch)) is not None:
            self._native_streak = 0
            return self._finish(native_plan(facts, batch, reason, self.options.device_windows))
        if (repeated := self._repeat(facts, batch)) is not None:
            return self._finish(repeated)
        seen = self._evaluate(facts, batch)
        if seen.native is None or (seen.trim is None and seen.skip is None):
            self.selector.reset()
            plan = native_plan(facts, batch, Reason.UNPRICED, self.options.device_windows)
            return self._finish(plan)
        kind, reason = self.selector.select(
            seen.native.goodput,
            seen.trim.goodput if seen.trim else 0.0,
            seen.skip.goodput if seen.skip else 0.0,
        )
        return self._finish(self._execute(facts, batch, seen, kind, reason, draining))

    # ---- before any arithmetic

    def _standing_aside(self, facts: StepFacts, batch: RequestBatch) -> Reason | None:
        """Why this step is native whatever the numbers say, if so."""
        if batch.owner.size == 0:
            return Reason.EMPTY
        if batch.excluded.any():
            return Reason.EXCLUDED
        if (facts.reserved_rows or facts.mode is StepMode.MIXED) and not self.options.mixed:
            return Reason.MIXED
        if not batch.known.any():
            return Reason.UNKNOWN
        return None

    def _repeat(self, facts: StepFacts, batch: RequestBatch) -> VerifyPlan | None:
        """The last native decision again, while nothing has changed for long."""
        last = self._last
        if not self.options.lazy or last is None or last.num_requests != batch.owner.size:
            self._native_streak = 0
            return None
        streak = self._native_streak
        if streak < _LAZY_AFTER or streak % _LAZY_PERIOD == 0 or facts.num_arrived:
            return None
        again = native_plan(facts, batch, last.reason, self.options.device_windows)
        return replace(
            again,
            padded_tokens=last.padded_tokens,
            predicted_ms=last.predicted_ms,
            predicted_tokens=last.predicted_tokens,
            native_ms=last.native_ms,
            native_tokens=last.native_tokens,
        )

    # ---- what each kind promises

    def _evaluate(self, facts: StepFacts, batch: RequestBatch) -> _Evaluation:
        """Goodput of the three kinds, as if every request had its K drafts.

        A step right after a pause has none; what it should do next is a matter of
        what drafts would give, not of what happens to be there.
        """
        num_requests, width = batch.owner.size, batch.num_positions
        alive = survival(batch.acceptance)
        ahead = bool((batch.num_drafts < width).any())
        capacity = batch.capacity
        scheduled = num_requests * width
        draft_ms = self.cost.draft_ms(num_requests)
        overhead = self.cost.table.overhead_ms
        rows = self._rows(facts, batch)
        native = uniform(
            self.cost,
            facts.native_mode,
            StepShape.NATIVE,
            rows,
            scheduled,
            float(within(alive, capacity).sum()),
            draft_ms + overhead,
        )
        trim = best_ragged(
            self.cost,
            facts.mode,
            rows,
            alive,
            capacity,
            self._floor(batch, capacity),
            draft_ms + overhead + self._allocation_ms(),
        )
        skip = None
        if self.options.skip_draft and not facts.reserved_rows and not batch.reserved.any():
            skip = uniform(self.cost, facts.mode, StepShape.SINGLE, rows, 0, 0.0, overhead)
        return _Evaluation(native, trim, skip, alive, ahead)

    def _rows(self, facts: StepFacts, batch: RequestBatch) -> StepRows:
        num_requests = batch.owner.size
        return StepRows(
            base=facts.reserved_rows + num_requests,
            num_requests=num_requests,
            num_sampling=facts.reserved_sampling + num_requests,
            kv_tokens=facts.kv_tokens,
            max_tokens=facts.max_tokens,
        )

    def _floor(self, batch: RequestBatch, capacity: IntArray) -> IntArray:
        floor = np.minimum(capacity, np.int32(self.options.request_floor))
        if batch.reserved.any():
            np.copyto(floor, capacity, where=batch.reserved)
        return floor

    def _allocation_ms(self) -> float:
        return self.cost.table.allocation_ms if self.options.device_windows else 0.0

    # ---- from kind to plan

    def _execute(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        seen: _Evaluation,
        kind: PlanKind,
        reason: Reason,
        draining: bool,
    ) -> VerifyPlan:
        """The plan of the chosen kind for the drafts that really are there."""
        have = bool(batch.num_drafts.any())
        if kind is PlanKind.SKIP_DRAFT:
            return self._pause(facts, batch, seen, have)
        if not have:
            plan = self._single(facts, batch, seen, Reason.NO_DRAFTS)
            return replace(plan, draft_next=True)
        if kind is PlanKind.TRIM:
            option = seen.trim
            if seen.counts_ahead:
                option = self._best_here(facts, batch, seen, drafting=True)
            if option is not None:
                plan = self._trim(facts, batch, seen, option, reason)
                if not (draining and self.options.drain_guard and self._delays(batch, seen, plan)):
                    return plan
                reason = Reason.DRAIN_GUARD
        plan = native_plan(facts, batch, reason, self.options.device_windows)
        return self._priced(plan, seen.native, seen.native)

    def _pause(
        self, facts: StepFacts, batch: RequestBatch, seen: _Evaluation, have: bool
    ) -> VerifyPlan:
        """A step while drafting is skipped."""
        if have:
            probe = self._probing
            option = self._best_here(facts, batch, seen, drafting=False, probe=probe)
            if option is not None and option.budget > 0:
                reason = Reason.PROBE_VERIFY if probe else Reason.SKIP_LEFTOVER
                plan = self._trim(facts, batch, seen, option, reason)
                return replace(plan, draft_next=False)
        if self._since_draft + 1 >= self.options.probe_interval:
            plan = self._single(facts, batch, seen, Reason.PROBE_DRAFT)
            return replace(plan, draft_next=True)
        return self._single(facts, batch, seen, Reason.SKIP_GAIN)

    def _best_here(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        seen: _Evaluation,
        drafting: bool,
        probe: bool = False,
    ) -> Option | None:
        """Best budget for the drafts at hand; a probe fills just the next size."""
        capacity = np.minimum(batch.capacity, batch.num_drafts)
        fixed = self.cost.table.overhead_ms + self._allocation_ms()
        if drafting:
            fixed += self.cost.draft_ms(batch.owner.size)
        rows = self._rows(facts, batch)
        floor = self._floor(batch, capacity)
        if probe:
            enough = min(batch.num_positions, int(capacity.sum()))
            priced = self.cost.step_ms(
                facts.mode, StepShape.RAGGED, facts.kv_tokens, rows.base + enough
            )
            if priced is None:
                return None
            budget = min(priced[0] - rows.base, int(capacity.sum()))
            rows = replace(rows, max_tokens=min(rows.max_tokens, rows.base + budget))
            floor = allocate(seen.survival, capacity, np.zeros_like(capacity), budget)
        return best_ragged(self.cost, facts.mode, rows, seen.survival, capacity, floor, fixed)

    def _trim(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        seen: _Evaluation,
        option: Option,
        reason: Reason,
    ) -> VerifyPlan:
        windows: tuple[int, ...] = ()
        if not self.options.device_windows:
            windows = tuple((self._admitted(batch, seen, option.budget) + 1).tolist())
        plan = VerifyPlan(
            step_id=facts.step_id,
            digest=request_digest(batch.owner),
            num_requests=batch.owner.size,
            num_positions=batch.num_positions,
            kind=PlanKind.TRIM,
            reason=reason,
            budget=option.budget,
            padded_tokens=0,
            draft_next=True,
            windows=windows,
            predicted_ms=0.0,
            predicted_tokens=0.0,
            native_ms=0.0,
            native_tokens=0.0,
        )
        return self._priced(plan, option, seen.native)

    def _admitted(self, batch: RequestBatch, seen: _Evaluation, budget: int) -> IntArray:
        capacity = np.minimum(batch.capacity, batch.num_drafts)
        return allocate(seen.survival, capacity, self._floor(batch, capacity), budget)

    def _delays(self, batch: RequestBatch, seen: _Evaluation, plan: VerifyPlan) -> bool:
        """Whether a trimmed step loses more in the tail of the batch than it saves now."""
        admitted = self._admitted(batch, seen, plan.budget)
        width = batch.num_positions
        tail = self.cost.table.overhead_ms + self.cost.draft_ms(1)
        for mode in (StepMode.FULL, StepMode.PIECEWISE, StepMode.EAGER):
            priced = self.cost.step_ms(mode, StepShape.NATIVE, 0, width + 1)
            if priced is not None:
                tail += priced[1]
                break
        native = np.minimum(batch.capacity, batch.num_drafts)
        later = delay_ms(seen.survival, native, admitted, batch.remaining, tail)
        return plan.native_ms - plan.predicted_ms <= later

    def _single(
        self, facts: StepFacts, batch: RequestBatch, seen: _Evaluation, reason: Reason
    ) -> VerifyPlan:
        windows = () if self.options.device_windows else (1,) * batch.owner.size
        plan = native_plan(facts, batch, reason, True)
        plan = replace(plan, kind=PlanKind.SKIP_DRAFT, budget=0, windows=windows, draft_next=False)
        return self._priced(plan, seen.skip, seen.native)

    def _priced(self, plan: VerifyPlan, own: Option | None, native: Option | None) -> VerifyPlan:
        return replace(
            plan,
            padded_tokens=own.padded_tokens if own else 0,
            predicted_ms=own.ms if own else 0.0,
            predicted_tokens=own.tokens if own else 0.0,
            native_ms=native.ms if native else 0.0,
            native_tokens=native.tokens if native else 0.0,
        )

    def _finish(self, plan: VerifyPlan) -> VerifyPlan:
        """Advance what depends on the plan that was made."""
        self._probing = plan.reason is Reason.PROBE_DRAFT
        self._since_draft = 0 if plan.draft_next else self._since_draft + 1
        settled = plan.reason is Reason.NATIVE_BEST
        self._native_streak = self._native_streak + 1 if settled else 0
        self._last = plan
        return plan


def native_plan(
    facts: StepFacts, batch: RequestBatch, reason: Reason, device_windows: bool
) -> VerifyPlan:
    """Every scheduled draft is verified and the drafter runs."""
    num_drafts = batch.num_drafts
    return VerifyPlan(
        step_id=facts.step_id,
        digest=request_digest(batch.owner),
        num_requests=batch.owner.size,
        num_positions=batch.num_positions,
        kind=PlanKind.NATIVE,
        reason=reason,
        budget=int(np.add.reduce(num_drafts)),
        padded_tokens=0,
        draft_next=True,
        windows=() if device_windows else tuple((num_drafts + 1).tolist()),
        predicted_ms=0.0,
        predicted_tokens=0.0,
        native_ms=0.0,
        native_tokens=0.0,
    )


def within(alive: FloatArray, capacity: IntArray) -> FloatArray:
    """Survivals [K, n] with those at or above each request's capacity set to zero."""
    positions = np.arange(alive.shape[0], dtype=np.int32)[:, None]
    return np.where(positions < capacity, alive, np.float32(0.0))
