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
verifies: speculation is back within two steps. Steps with prefill rows are native,
but do not end a pause unless there are `probe_interval` of them in a row.
"""

from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import PlanError
from vllm_dspark.planning.allocation import Ranking, rank
from vllm_dspark.planning.budget import Option, StepRows, best_ragged, uniform
from vllm_dspark.planning.cost import StepMode, StepShape
from vllm_dspark.planning.drain import DrainWatch, delay_ms
from vllm_dspark.planning.facts import PlannerOptions, StepFacts
from vllm_dspark.planning.forced import forced_windows
from vllm_dspark.planning.hysteresis import KindSelector
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan, request_digest
from vllm_dspark.planning.repeat import Repetition
from vllm_dspark.planning.survival import survival
from vllm_dspark.planning.table import RequestBatch

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]
OwnerArray = npt.NDArray[np.int64]

_MODES = (StepMode.FULL, StepMode.PIECEWISE, StepMode.EAGER)


@dataclass(slots=True)
class _Evaluation:
    """What the kinds promise in one step; None where a kind is not on offer."""

    native: Option | None
    trim: Option | None
    skip: Option | None
    survival: FloatArray  # [K, n]
    ranking: Ranking  # of the drafts the promises are about
    incomplete: bool  # some drafts are missing, so the promises are about later steps


@dataclass
class Planner:
    """State machine of one engine; call `plan` once per step."""

    cost: CostModel | None = None  # None until a table was measured: steps are native
    options: PlannerOptions = field(default_factory=PlannerOptions)

    def __post_init__(self) -> None:
        self.selector = KindSelector(self.options.min_gain, self.options.hysteresis_steps)
        self._drain = DrainWatch()
        self._since_draft = 0  # steps since the drafter last ran
        self._probing = False  # the last step drafted only to look
        self._unjudged = 0  # consecutive steps with prefill rows
        self._repetition = Repetition()

    @property
    def _prices(self) -> CostModel:
        if self.cost is None:
            raise PlanError("a step was to be priced before a cost table was there")
        return self.cost

    @property
    def rest(self) -> int:
        """Steps from now on that repeat a decision, so that nothing need be learned; 0: learn."""
        return self._repetition.rest

    @property
    def rest_ahead(self) -> int:
        """Coming steps that may repeat a native decision unseen; then tell `repeated`."""
        return self._repetition.rest_ahead if self.options.lazy else 0

    def repeated(self, steps: int) -> None:
        """The last decision, a native one, was carried out in so many steps more."""
        self._repetition.skip(steps)

    def plan(self, facts: StepFacts, batch: RequestBatch) -> VerifyPlan:
        """Decide one step."""
        draining = self._drain.update(batch.owner.size, facts.num_arrived, facts.num_waiting)
        forced = self.options.test_windows is not None
        if forced and batch.owner.size and not _any(batch.excluded):
            return self._finish(self._forced(facts, batch))
        reason = self._standing_aside(facts, batch)
        if reason is not None:
            self._keep_or_end_pause(reason)
            return self._finish(self._native(facts, batch, reason, None))
        self._unjudged = 0
        seen = self._evaluate(facts, batch)
        if seen.native is None or (seen.trim is None and seen.skip is None):
            self.selector.reset()
            return self._finish(self._native(facts, batch, Reason.UNPRICED, None))
        kind, reason = self.selector.select(
            seen.native.goodput,
            seen.trim.goodput if seen.trim else 0.0,
            seen.skip.goodput if seen.skip else 0.0,
        )
        if kind is PlanKind.SKIP_DRAFT:
            plan = self._pause(facts, batch, seen)
        elif not np.count_nonzero(batch.num_drafts):
            plan = self._single(facts, batch, seen, Reason.NO_DRAFTS, draft_next=True)
        elif kind is PlanKind.TRIM:
            plan = self._trim_or_native(facts, batch, seen, reason, draining)
            self._finish(plan)
            self._repetition.allow(plan, batch, seen.incomplete)
            return plan
        else:
            plan = self._native(facts, batch, reason, seen.native)
        return self._finish(plan)

    def shortcut(
        self, facts: StepFacts, owner: OwnerArray, num_drafts: IntArray
    ) -> VerifyPlan | None:
        """The previous decision once more (repeat.py), before a batch is even gathered.

        None when the step must be planned: try this first, then `plan`.
        """
        if not self.options.lazy or facts.num_arrived or facts.reserved_rows:
            return None
        if facts.mode is StepMode.MIXED:
            return None
        plan = self._repetition.again(facts.step_id, owner, num_drafts)
        if plan is None:
            return None
        draining = self._drain.update(owner.size, 0, facts.num_waiting)
        if draining and plan.kind is PlanKind.TRIM:
            return None
        return self._finish(plan)

    # ---- before any arithmetic

    def _standing_aside(self, facts: StepFacts, batch: RequestBatch) -> Reason | None:
        """Why this step is native whatever the numbers say, if so."""
        if batch.owner.size == 0:
            return Reason.EMPTY
        if not self.options.enabled:
            return Reason.DISABLED
        if _any(batch.excluded):
            return Reason.EXCLUDED
        if (facts.reserved_rows or facts.mode is StepMode.MIXED) and not self.options.mixed:
            return Reason.MIXED
        if self.cost is None:
            return Reason.UNPRICED
        # In a pause nothing new becomes known but by probes, and priors are all there is.
        paused = self.selector.kind is PlanKind.SKIP_DRAFT
        if not paused and batch.known is not None and not np.count_nonzero(batch.known):
            return Reason.UNKNOWN
        return None

    def _keep_or_end_pause(self, reason: Reason) -> None:
        """A few prefill steps keep a pause of drafting; nobody would end it otherwise."""
        self._unjudged += 1
        if reason is not Reason.MIXED or self._unjudged >= self.options.probe_interval:
            self.selector.reset()

    # ---- what each kind promises

    def _evaluate(self, facts: StepFacts, batch: RequestBatch) -> _Evaluation:
        """Goodput of the three kinds, as if every request had its K drafts.

        A step right after a pause has none; whether to draft is a matter of what
        drafts would give, not of what happens to be there.
        """
        alive = survival(batch.acceptance)
        num_requests, width = batch.owner.size, batch.num_positions
        ranking = self._rank(batch, alive, batch.capacity)
        rows = self._rows(facts, batch)
        overhead = self._prices.table.overhead_ms
        drafted = overhead + self._prices.draft_ms(num_requests)
        ragged = drafted + self._allocation_ms()
        trim = best_ragged(self._prices, facts.mode, rows, ranking, ragged)
        native = uniform(
            self._prices,
            facts.native_mode,
            StepShape.NATIVE,
            rows,
            num_requests * width,
            ranking.total_gain(),
            drafted,
        )
        skip = None
        if self.options.skip_draft and not _any(batch.reserved):
            skip = uniform(self._prices, facts.mode, StepShape.SINGLE, rows, 0, 0.0, overhead)
        incomplete = int(np.add.reduce(batch.num_drafts)) < num_requests * width
        return _Evaluation(native, trim, skip, alive, ranking, incomplete)

    def _rows(self, facts: StepFacts, batch: RequestBatch) -> StepRows:
        num_requests = batch.owner.size
        return StepRows(
            base=facts.reserved_rows + num_requests,
            num_sampling=facts.reserved_sampling + num_requests,
            kv_tokens=facts.kv_tokens,
        )

    def _rank(self, batch: RequestBatch, alive: FloatArray, capacity: IntArray) -> Ranking:
        floor = None
        if batch.reserved is not None or self.options.request_floor:
            floor = np.minimum(capacity, np.int32(self.options.request_floor))
            if batch.reserved is not None:
                np.copyto(floor, capacity, where=batch.reserved)
        return rank(alive, capacity, floor)

    def _rank_here(self, batch: RequestBatch, seen: _Evaluation) -> Ranking:
        """Ranking of the drafts that really are there."""
        if not seen.incomplete:
            return seen.ranking
        return self._rank(batch, seen.survival, np.minimum(batch.capacity, batch.num_drafts))

    def _allocation_ms(self) -> float:
        return self._prices.table.allocation_ms if self.options.device_windows else 0.0

    # ---- from kind to plan

    def _trim_or_native(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        seen: _Evaluation,
        reason: Reason,
        draining: bool,
    ) -> VerifyPlan:
        ranking, option = self._rank_here(batch, seen), seen.trim
        if seen.incomplete:
            option = self._best_here(facts, batch, ranking, drafting=True)
        if option is None:
            return self._native(facts, batch, Reason.UNPRICED, seen.native)
        guarded = draining and self.options.drain_guard
        if guarded and self._delays(batch, seen, ranking, option):
            return self._native(facts, batch, Reason.DRAIN_GUARD, seen.native)
        return self._trim(facts, batch, seen, reason, option, ranking, draft_next=True)

    def _pause(self, facts: StepFacts, batch: RequestBatch, seen: _Evaluation) -> VerifyPlan:
        """A step while drafting is skipped."""
        ranking = self._rank_here(batch, seen)
        if np.count_nonzero(batch.num_drafts) and ranking.most:
            if self._probing:
                reason, option = Reason.PROBE_VERIFY, self._probe(facts, batch, ranking)
            else:
                reason = Reason.SKIP_LEFTOVER
                option = self._best_here(facts, batch, ranking, drafting=False)
            if option is not None and option.budget > 0:
                return self._trim(facts, batch, seen, reason, option, ranking, draft_next=False)
        if self._since_draft + 1 >= self.options.probe_interval:
            return self._single(facts, batch, seen, Reason.PROBE_DRAFT, draft_next=True)
        return self._single(facts, batch, seen, Reason.SKIP_GAIN, draft_next=False)

    def _best_here(
        self, facts: StepFacts, batch: RequestBatch, ranking: Ranking, drafting: bool
    ) -> Option | None:
        """Best budget for the drafts at hand."""
        fixed_ms = self._prices.table.overhead_ms + self._allocation_ms()
        if drafting:
            fixed_ms += self._prices.draft_ms(batch.owner.size)
        return best_ragged(self._prices, facts.mode, self._rows(facts, batch), ranking, fixed_ms)

    def _probe(self, facts: StepFacts, batch: RequestBatch, ranking: Ranking) -> Option | None:
        """As many drafts as fill the first padded size with room for K of them."""
        rows = self._rows(facts, batch)
        wanted = rows.base + max(ranking.least, min(batch.num_positions, ranking.most))
        priced = self._prices.step_ms(facts.mode, StepShape.RAGGED, facts.kv_tokens, wanted)
        if priced is None:
            return None
        padded, ms = priced
        budget = min(padded, rows.base + ranking.most) - rows.base
        gain = float(ranking.gains(np.array([budget]))[0])
        fixed_ms = self._prices.table.overhead_ms + self._allocation_ms()
        return Option(budget, padded, ms + fixed_ms, rows.num_sampling + gain)

    def _delays(
        self, batch: RequestBatch, seen: _Evaluation, ranking: Ranking, trim: Option
    ) -> bool:
        """Whether a trimmed step loses more in the tail of the batch than it saves now."""
        if seen.native is None:
            return False
        tail_ms = self._prices.table.overhead_ms + self._prices.draft_ms(1)
        for mode in _MODES:
            priced = self._prices.step_ms(mode, StepShape.NATIVE, 0, batch.num_positions + 1)
            if priced is not None:
                tail_ms += priced[1]
                break
        full, kept = ranking.admit(ranking.most), ranking.admit(trim.budget)
        later = delay_ms(seen.survival, full, kept, batch.remaining, tail_ms)
        return seen.native.ms - trim.ms <= later

    # ---- the plans themselves

    def _native(
        self, facts: StepFacts, batch: RequestBatch, reason: Reason, own: Option | None
    ) -> VerifyPlan:
        """All drafts there are; drafts again unless a pause is on."""
        drafting = self.selector.kind is not PlanKind.SKIP_DRAFT
        budget = int(np.add.reduce(batch.num_drafts))
        kind = PlanKind.OFF if reason is Reason.DISABLED else PlanKind.NATIVE
        return self._plan(
            facts, batch, kind, reason, budget, batch.num_drafts, drafting, (own, own)
        )

    def _trim(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        seen: _Evaluation,
        reason: Reason,
        option: Option,
        ranking: Ranking,
        draft_next: bool,
    ) -> VerifyPlan:
        admitted = None
        if not self.options.device_windows:
            admitted = ranking.admit(option.budget)
        return self._plan(
            facts,
            batch,
            PlanKind.TRIM,
            reason,
            option.budget,
            admitted,
            draft_next,
            (option, seen.native),
        )

    def _single(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        seen: _Evaluation,
        reason: Reason,
        draft_next: bool,
    ) -> VerifyPlan:
        nothing, kind, own = np.zeros_like(batch.num_drafts), PlanKind.SKIP_DRAFT, seen.skip
        if own is not None and draft_next:
            own = replace(own, ms=own.ms + self._prices.draft_ms(batch.owner.size))
        prices = (own, seen.native)
        return self._plan(facts, batch, kind, reason, 0, nothing, draft_next, prices)

    def _forced(self, facts: StepFacts, batch: RequestBatch) -> VerifyPlan:
        """Windows prescribed by a test; these reach the device too."""
        spec, seed = self.options.test_windows, self.options.test_windows_seed
        windows = forced_windows(spec, seed, facts.step_id, batch.num_drafts, batch.num_positions)
        budget = int(windows.sum()) - windows.size
        full = budget == int(batch.num_drafts.sum())
        kind = PlanKind.NATIVE if full else PlanKind.TRIM
        plan = self._plan(facts, batch, kind, Reason.FORCED, budget, None, True, (None, None))
        return replace(plan, windows=tuple(windows.tolist()))

    def _plan(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        kind: PlanKind,
        reason: Reason,
        budget: int,
        admitted: IntArray | None,
        draft_next: bool,
        prices: tuple[Option | None, Option | None],  # of this plan, of the native step
    ) -> VerifyPlan:
        own, native = prices
        windows: tuple[int, ...] = ()
        if admitted is not None and not self.options.device_windows:
            windows = tuple((admitted + 1).tolist())
        return VerifyPlan(
            step_id=facts.step_id,
            digest=request_digest(batch.owner) if batch.digest is None else batch.digest,
            num_requests=batch.owner.size,
            num_positions=batch.num_positions,
            kind=kind,
            reason=reason,
            budget=budget,
            padded_tokens=own.padded_tokens if own else 0,
            draft_next=draft_next,
            windows=windows,
            predicted_ms=own.ms if own else 0.0,
            predicted_tokens=own.tokens if own else 0.0,
            native_ms=native.ms if native else 0.0,
            native_tokens=native.tokens if native else 0.0,
        )

    def _finish(self, plan: VerifyPlan) -> VerifyPlan:
        """Advance what depends on the plan that was made."""
        self._probing = plan.reason is Reason.PROBE_DRAFT
        self._since_draft = 0 if plan.draft_next else self._since_draft + 1
        self._repetition.note(plan)
        return plan


def _any(flags: BoolArray | None) -> bool:
    return flags is not None and bool(np.count_nonzero(flags))
