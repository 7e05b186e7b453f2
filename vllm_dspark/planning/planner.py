"""The planner: one VerifyPlan per step, from what is known before the step.

    plan(facts, batch) -> VerifyPlan

is called once per step in the engine core. It holds four pieces of state: the kind
of step it is in (hysteresis.py), the width of narrow draft passes (width.py), whether
the batch is draining (drain.py), and where a pause of drafting stands. All else comes
in with the call, so equal calls in equal order give equal plans. What the alternatives
promise is worked out in promises.py.

Only trimmed steps end with narrow draft passes: a native step has full windows, and
so have the drafts for the next one. A step with prefill rows, which is native for want
of evidence, keeps the width of the trimmed steps around it.

A pause of drafting (skip-draft): the step that decides it still uses the drafts it
finds (SKIP_LEFTOVER) and makes no new ones; then steps are SINGLE. Every
`probe_interval` steps one of them drafts (PROBE_DRAFT) and the next verifies the few
drafts that fit the next padded size (PROBE_VERIFY), so acceptance stays measured.
When drafting pays again, the step that notices drafts (NO_DRAFTS) and the next one
verifies: speculation is back within two steps.

Steps with prefill rows have prices of their own once enough of them were served
(mixed_cost.py). With evidence (`options.mixed`) they are planned like all others then.
Without, they stay native: whatever drafts there are get verified. Whether they end with
a draft pass is still decided, by those prices, since under load hardly any step has no
prefill rows; before there are prices they keep a pause of drafting, unless there are
`probe_interval` of them in a row.
"""

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import PlanError
from vllm_dspark.planning.allocation import Ranking
from vllm_dspark.planning.budget import Option
from vllm_dspark.planning.compose import DraftPass, compose, compose_forced
from vllm_dspark.planning.cost import StepMode
from vllm_dspark.planning.draft_cost import ladder
from vllm_dspark.planning.drain import DrainWatch
from vllm_dspark.planning.explore import Explorer
from vllm_dspark.planning.facts import PlannerOptions, StepFacts
from vllm_dspark.planning.forced import forced_width
from vllm_dspark.planning.hysteresis import KindSelector
from vllm_dspark.planning.native_mixed import NativeMixed
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan
from vllm_dspark.planning.promises import Evaluation, Promises, any_of
from vllm_dspark.planning.repeat import Repetition
from vllm_dspark.planning.table import RequestBatch
from vllm_dspark.planning.usual import UsualSteps
from vllm_dspark.planning.width import WidthReason, WidthSelector, selector_of

IntArray = npt.NDArray[np.integer]
OwnerArray = npt.NDArray[np.int64]

_LEAST_REMAINING = 32  # tokens of the longest request

_TRIAL_PERIOD = 4  # steps with prefill rows from one trial of another size to the next


@dataclass
class Planner:
    """State machine of one engine; call `plan` once per step."""

    cost: CostModel | None = None  # None until a table was measured: steps are native
    options: PlannerOptions = field(default_factory=PlannerOptions)

    def __post_init__(self) -> None:
        self.selector = KindSelector(self.options.min_gain, self.options.hysteresis_steps)
        self._widths: WidthSelector | None = None  # made with the first batch, which has K
        self._native_mixed = NativeMixed(self.options)
        self._drain = DrainWatch()
        self._since_draft = 0  # steps since the drafter last ran
        self._probing = False  # the last step drafted only to look
        self._unjudged = 0  # consecutive steps with prefill rows
        self._since_trial = 0  # mixed steps since another size was tried, while one is to be
        self._usual = UsualSteps()
        self._repetition = Repetition()
        self._explorer = Explorer()

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
        """Coming steps that may repeat the last decision unseen; then tell `repeated`."""
        if not self.options.lazy or (self.selector.kind is PlanKind.TRIM and self._drain.shrunk):
            return 0
        return self._repetition.rest_ahead

    def repeated(self, steps: int) -> None:
        """The last decision was carried out in so many steps more."""
        self._repetition.skip(steps)
        self._usual.repeated(steps)

    def plan(self, facts: StepFacts, batch: RequestBatch) -> VerifyPlan:
        """Decide one step."""
        draining = self._drain.update(batch.owner.size, facts.num_arrived, facts.num_waiting)
        forced = self.options.test_windows is not None
        if forced and batch.owner.size and not any_of(batch.excluded):
            return self._finish(compose_forced(self.options, facts, batch, self._full_pass(batch)))
        reason = self._standing_aside(facts, batch)
        if reason is Reason.MIXED and self._judges_mixed(batch):
            return self._finish(self._mixed(facts, batch))
        if reason is not None:
            self._keep_or_end_pause(reason)
            return self._finish(self._native(facts, batch, reason, None))
        self._unjudged = 0
        promises, seen = self._evaluate(facts, batch)
        trim = seen.trim.option
        if seen.native is None or (trim is None and seen.skip is None):
            self.selector.reset()
            return self._finish(self._native(facts, batch, Reason.UNPRICED, None))
        kind, reason = self.selector.select(
            seen.native.goodput,
            trim.goodput if trim else 0.0,
            seen.skip.goodput if seen.skip else 0.0,
        )
        may_try = self._prices.online and bool(seen.promised) and not draining
        may_try &= facts.mode is not StepMode.MIXED and seen.about is facts
        may_try &= not self._drafts_as_usual(facts)
        tried = self._trial_step(facts, batch, promises, seen) if may_try else None
        if tried is not None:
            return self._finish(tried)
        if kind is PlanKind.SKIP_DRAFT:
            plan = self._pause(facts, batch, promises, seen)
        elif (tried := self._trial_size(facts, batch, promises, seen)) is not None:
            plan = tried
        elif not np.count_nonzero(batch.num_drafts):
            plan = self._single(facts, batch, seen, Reason.NO_DRAFTS, self._next_pass(batch))
        elif kind is PlanKind.TRIM:
            plan = self._trim_or_native(facts, batch, promises, seen, reason, draining)
        else:
            plan = self._native(facts, batch, reason, seen.native)
        if may_try:
            plan = self._start_trial(batch, promises, seen, plan)
        plan = self._finish(self._as_usual(facts, batch, plan))
        if kind is PlanKind.TRIM and plan.reason not in (Reason.NO_DRAFTS, Reason.EXPLORE):
            self._repetition.allow(plan, batch, seen.incomplete)
        return plan

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
        self._usual.repeated(1)
        return self._finish(plan)

    def _evaluate(self, facts: StepFacts, batch: RequestBatch) -> tuple[Promises, Evaluation]:
        """What the step promises, and what kinds and widths promise in steps as they mostly are."""
        promises = Promises(self._prices, self.options, facts, batch)
        self._usual.note(facts)
        usual = self._usual.facts_for(facts) if self.trims_mixed else None
        if usual is None:
            seen = promises.evaluate()
            self._choose_width(batch, promises, seen)
            return promises, seen
        others = Promises(self._prices, self.options, usual, batch)
        seen = others.evaluate()
        seen.incomplete = True  # budgets are for what is here
        self._choose_width(batch, others, seen)
        return promises, seen

    # ---- before any arithmetic

    def _standing_aside(self, facts: StepFacts, batch: RequestBatch) -> Reason | None:
        """Why this step is native whatever the numbers say, if so."""
        if batch.owner.size == 0:
            return Reason.EMPTY
        if not self.options.enabled:
            return Reason.DISABLED
        if any_of(batch.excluded):
            return Reason.EXCLUDED
        mixed = facts.reserved_rows > 0 or facts.mode is StepMode.MIXED
        if mixed and not self.options.mixed:
            return Reason.MIXED
        if self.cost is None or (mixed and not self.cost.prices_mixed):
            return Reason.UNPRICED
        # In a pause nothing new becomes known but by probes, and priors are all there is.
        paused = self.selector.kind is PlanKind.SKIP_DRAFT
        if not paused and batch.known is not None and not np.count_nonzero(batch.known):
            return Reason.UNKNOWN
        return None

    @property
    def trims_mixed(self) -> bool:
        """Whether steps with prefill rows may be trimmed: evidence and prices are there."""
        return self.options.mixed and self.cost is not None and self.cost.prices_mixed

    def _judges_mixed(self, batch: RequestBatch) -> bool:
        """Whether a step with prefill rows that stays native can say if drafting pays."""
        priced = self.cost is not None and self.cost.prices_mixed
        known = batch.known is None or bool(np.count_nonzero(batch.known))
        return priced and (known or self._native_mixed.pauses)

    def _mixed(self, facts: StepFacts, batch: RequestBatch) -> VerifyPlan:
        """A step with prefill rows, all its drafts verified; drafts again if that pays."""
        self._unjudged = 0
        facts = replace(facts, mode=StepMode.MIXED, native_mode=StepMode.MIXED)
        self._usual.note(facts)
        promises = Promises(self._prices, self.options, facts, batch)
        seen = promises.evaluate()
        skip = self._native_mixed.decide(promises, seen, batch, narrow=self._offers_widths)
        drafting = self._native_mixed.next_pass(batch)
        there = np.count_nonzero(batch.num_drafts) > 0
        if skip is None or there:
            own = promises.native_here(seen, drafting[0] if drafting else 0)
            return self._native(facts, batch, Reason.MIXED, own, drafting)
        if self._since_draft + 1 >= self.options.probe_interval:
            return self._single(facts, batch, seen, Reason.PROBE_DRAFT, self._full_pass(batch))
        return self._single(facts, batch, seen, skip, None)

    def _drafts_as_usual(self, facts: StepFacts) -> bool:
        """Whether a step's pass is for steps with prefill rows that must not be trimmed."""
        among = self._usual.mixed and facts.mode is not StepMode.MIXED
        return among and not self.options.mixed and self._prices.prices_mixed

    def _as_usual(self, facts: StepFacts, batch: RequestBatch, plan: VerifyPlan) -> VerifyPlan:
        """A step without prefill rows among many with them: it drafts for the next of those."""
        usual = self._usual.facts_for(facts)
        own = any_of(batch.reserved) or plan.reason is Reason.PROBE_DRAFT
        if usual is None or own or not self._drafts_as_usual(facts):
            return plan
        # By the requests of now: a load that has fallen is seen in the step that finds it fallen.
        promises = Promises(self._prices, self.options, usual, batch)
        self._native_mixed.decide(promises, promises.evaluate(), batch, narrow=self._offers_widths)
        drafting = self._native_mixed.next_pass(batch)
        return self._with_pass(batch, plan, drafting)

    def _with_pass(self, batch: RequestBatch, plan: VerifyPlan, drafting: DraftPass) -> VerifyPlan:
        """The plan with another draft pass at its end, or none, and priced so if it had a price."""
        columns, reason = drafting or (0, plan.width_reason)
        ms, requests = plan.predicted_ms, batch.owner.size
        if ms:
            ms += self._prices.draft_ms(requests, columns) if columns else 0.0
            ms -= self._prices.draft_ms(requests, plan.columns) if plan.draft_next else 0.0
        return replace(
            plan,
            draft_next=columns > 0,
            draft_width=columns if 0 < columns < batch.num_positions else None,
            width_reason=reason,
            predicted_ms=ms,
        )

    def _keep_or_end_pause(self, reason: Reason) -> None:
        """A few prefill steps keep a pause of drafting; nobody would end it otherwise."""
        self._unjudged += 1
        if reason is not Reason.MIXED or self._unjudged >= self.options.probe_interval:
            self.selector.reset()

    # ---- the width of draft passes

    def _selector(self, num_positions: int) -> WidthSelector:
        """The selector for K = `num_positions`."""
        self._widths = selector_of(self._widths, ladder(num_positions), self.options)
        return self._widths

    @property
    def _offers_widths(self) -> bool:
        return self.options.choose_width and self._prices.prices_widths

    def _choose_width(self, batch: RequestBatch, promises: Promises, seen: Evaluation) -> None:
        """Decide the width of the passes of trimmed steps: that of `seen.trim` from now on."""
        selector = self._selector(batch.num_positions)
        if not self._offers_widths or seen.trim.option is None or any_of(batch.reserved):
            selector.reset()
            return
        promised = [*promises.narrower(seen.survival, selector.widths[:-1]), seen.trim]
        seen.promised = promised
        seen.trim = promised[selector.select([promise.goodput for promise in promised])]

    def _next_pass(self, batch: RequestBatch) -> DraftPass:
        """The pass that ends this step, unless drafting is skipped."""
        selector = self._selector(batch.num_positions)
        if self.selector.kind is PlanKind.TRIM:
            return selector.next_pass()
        return selector.full_pass()

    def _full_pass(self, batch: RequestBatch) -> DraftPass:
        return self._selector(batch.num_positions).full_pass()

    # ---- from kind to plan

    def _trim_or_native(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        promises: Promises,
        seen: Evaluation,
        reason: Reason,
        draining: bool,
    ) -> VerifyPlan:
        ranking, option = promises.rank_here(seen), seen.trim.option
        narrow = seen.trim.width < batch.num_positions
        guarded = draining and self.options.drain_guard
        # A narrow pass denies the last requests tokens just as a trimmed window does.
        if (
            guarded
            and narrow
            and option is not None
            and promises.delays(seen, seen.full, option, seen.trim.ranking)
        ):
            return self._native(facts, batch, Reason.DRAIN_GUARD, seen.native)
        drafting = self._next_pass(batch)
        if seen.incomplete or narrow:
            option = promises.best_here(ranking, drafting[0] if drafting else 0)
        if option is None:
            return self._native(facts, batch, Reason.UNPRICED, seen.native)
        if guarded and not narrow and promises.delays(seen, ranking, option, ranking):
            return self._native(facts, batch, Reason.DRAIN_GUARD, seen.native)
        return self._trim(facts, batch, seen, reason, option, ranking, drafting)

    def _pause(
        self, facts: StepFacts, batch: RequestBatch, promises: Promises, seen: Evaluation
    ) -> VerifyPlan:
        """A step while drafting is skipped."""
        ranking = promises.rank_here(seen)
        if np.count_nonzero(batch.num_drafts) and ranking.most:
            if self._probing:
                reason, option = Reason.PROBE_VERIFY, promises.probe(ranking)
            else:
                reason, option = Reason.SKIP_LEFTOVER, promises.best_here(ranking, 0)
            if option is not None and option.budget > 0:
                return self._trim(facts, batch, seen, reason, option, ranking, None)
        if self._since_draft + 1 >= self.options.probe_interval:
            return self._single(facts, batch, seen, Reason.PROBE_DRAFT, self._full_pass(batch))
        return self._single(facts, batch, seen, Reason.SKIP_GAIN, None)

    # ---- trying another width (explore.py)

    def _trial_step(
        self, facts: StepFacts, batch: RequestBatch, promises: Promises, seen: Evaluation
    ) -> VerifyPlan | None:
        """A step that verifies the drafts of a trial, if one is on."""
        trial, last = self._explorer.trial, self._explorer.left == 1
        if trial is None:
            return None
        ranking = promises.rank_here(seen)
        drafting: DraftPass = (trial.width, WidthReason.EXPLORE)
        if last:
            paused = self.selector.kind is PlanKind.SKIP_DRAFT
            drafting = None if paused else self._next_pass(batch)
        option = promises.at(ranking, trial.budget, drafting[0] if drafting else 0)
        same = batch.owner.size == trial.num_requests and ranking.most >= trial.budget
        if option is None or not same:
            self._explorer.stop()
            return None
        self._explorer.advance()
        return self._trim(facts, batch, seen, Reason.EXPLORE, option, ranking, drafting)

    def _start_trial(
        self, batch: RequestBatch, promises: Promises, seen: Evaluation, plan: VerifyPlan
    ) -> VerifyPlan:
        """The step at hand; if a trial is worth it, with a pass of that width at its end."""
        explorer, num_requests = self._explorer, batch.owner.size
        # Requests that are about to end have no use for what a trial finds.
        if not explorer.due() or int(batch.remaining.max()) < _LEAST_REMAINING:
            return plan
        own = {PlanKind.NATIVE: seen.native, PlanKind.SKIP_DRAFT: seen.skip}
        option = own.get(self.selector.kind, seen.trim.option)
        if option is None:
            return plan
        doubts = promises.doubts(seen.promised)
        trial = explorer.start(seen.promised, doubts, option.goodput, num_requests)
        if trial is None:
            return plan
        drafting: DraftPass = (trial.width, WidthReason.EXPLORE)
        return replace(self._with_pass(batch, plan, drafting), reason=Reason.EXPLORE)

    def _trial_size(
        self, facts: StepFacts, batch: RequestBatch, promises: Promises, seen: Evaluation
    ) -> VerifyPlan | None:
        """Of mixed steps that were all about as large, one in a few with half of the drafts.

        Their price at other sizes is a guess until such are served, and as long as the guess says
        that trimming does not pay, none would be.
        """
        ranking = promises.rank_here(seen)
        half = ranking.least + (ranking.most - ranking.least) // 2
        untried = (
            facts.mode is StepMode.MIXED
            and self.options.test_windows is None
            and half < ranking.most
            and not self._prices.served_mixed(batch.owner.size + half)
        )
        self._since_trial = self._since_trial + 1 if untried else 0
        if self._since_trial < _TRIAL_PERIOD:
            return None
        self._since_trial = 0
        drafting = self._next_pass(batch)
        option = promises.at(ranking, half, drafting[0] if drafting else 0)
        if option is None:
            return None
        return self._trim(facts, batch, seen, Reason.EXPLORE, option, ranking, drafting)

    # ---- the plans themselves

    def _native(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        reason: Reason,
        own: Option | None,
        drafting: DraftPass | Literal["usual"] = "usual",
    ) -> VerifyPlan:
        """All drafts there are; drafts again unless a pause is on."""
        if drafting == "usual":
            drafting = None
            if self.selector.kind is not PlanKind.SKIP_DRAFT:
                keeps = reason is Reason.MIXED and not any_of(batch.reserved)
                drafting = self._next_pass(batch) if keeps else self._full_pass(batch)
        budget = int(np.add.reduce(batch.num_drafts))
        kind = PlanKind.OFF if reason is Reason.DISABLED else PlanKind.NATIVE
        full = batch.owner.size * batch.num_positions
        if 0 < budget < full and own is not None and facts.mode.padded:
            # The drafts of a narrow pass, all of them: native graphs hold full windows only.
            kind = PlanKind.TRIM
        kept = None if self.options.device_windows else batch.num_drafts
        return compose(facts, batch, kind, reason, budget, kept, drafting, (own, own))

    def _trim(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        seen: Evaluation,
        reason: Reason,
        option: Option,
        ranking: Ranking,
        drafting: DraftPass,
    ) -> VerifyPlan:
        admitted = None
        if not self.options.device_windows:
            admitted = ranking.admit(option.budget)
        prices = (option, seen.native)
        return compose(
            facts, batch, PlanKind.TRIM, reason, option.budget, admitted, drafting, prices
        )

    def _single(
        self,
        facts: StepFacts,
        batch: RequestBatch,
        seen: Evaluation,
        reason: Reason,
        drafting: DraftPass,
    ) -> VerifyPlan:
        kind, own = PlanKind.SKIP_DRAFT, seen.skip
        nothing = None if self.options.device_windows else np.zeros_like(batch.num_drafts)
        if own is not None and drafting is not None:
            draft_ms = self._prices.draft_ms(batch.owner.size, drafting[0], facts.mode)
            own = replace(own, ms=own.ms + draft_ms)
        prices = (own, seen.native)
        return compose(facts, batch, kind, reason, 0, nothing, drafting, prices)

    def _finish(self, plan: VerifyPlan) -> VerifyPlan:
        """Advance what depends on the plan that was made."""
        spec = self.options.test_draft_width
        if spec is not None and plan.draft_next and plan.reason is not Reason.EXCLUDED:
            width = forced_width(
                spec, self.options.test_windows_seed, plan.step_id, plan.num_positions
            )
            plan = replace(plan, draft_width=width, width_reason=WidthReason.FORCED)
        self._probing = plan.reason is Reason.PROBE_DRAFT
        self._since_draft = 0 if plan.draft_next else self._since_draft + 1
        self._repetition.note(plan)
        return plan
