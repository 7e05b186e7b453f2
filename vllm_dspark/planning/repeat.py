"""When the previous decision is the next one too, so that nothing has to be worked out.

Two cases. A settled native decision: after _LAZY_AFTER of them in a row on an unchanged batch, only
every n-th step is planned, since native steps should cost nothing; n grows from 8 to 64 with the
number of native decisions in a row (`period`), since what has held for hundreds of steps holds for
some dozens more. A batch that changes is planned anew whatever n is. A trimmed step of a large
batch: it serves n // 64 more steps, three at most, because by then planning is a cost and what it
decides from (outcomes of some twenty steps) has hardly moved. A budget that stays about the same
when it is worked out again, for the same requests, serves twice as long, and again, up to eight
times as long; on the device it is spread by fresh confidences anyway. With host windows these
themselves are repeated: what each request accepts meanwhile is learned all the same, and rows about
the very drafts to be verified, which greedy requests may use, would be wasted, so steps that have
some are planned anew.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan, request_digest
from vllm_dspark.planning.table import RequestBatch

OwnerArray = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer]

_LAZY_AFTER = 16
# Steps between two planned ones, from so many native decisions in a row on: (decisions, steps).
_PERIODS = ((256, 64), (64, 32), (0, 8))
_AWAKE = 8  # steps before a planned one that are learned from, half the period if that is less
_LAZY_REQUESTS = 64  # a trimmed batch of so many requests serves one more step per so many
_MOST_REPEATS = 3
# A budget that moved by at most one in so many of all drafts is the same decision,
_STEADY = 32
_MOST_DOUBLINGS = 3  # and so often what it serves is doubled on the device.
# On the host, by repeats at first: windows of single requests age, and small batches gain little.
_HOST_DOUBLINGS = (0, 0, 1, 3)


def period(streak: int) -> int:
    """Steps from one planned native step to the next after `streak` native decisions."""
    return next(steps for least, steps in _PERIODS if streak >= least)


def most_doublings(repeats: int, *, device: bool) -> int:
    """How often that is doubled what a decision serves, which is at first so many steps more."""
    return _MOST_DOUBLINGS if device else _HOST_DOUBLINGS[repeats]


def same_array(one: OwnerArray, other: OwnerArray) -> bool:
    """Whether both hold the same; seldom looked into, since unchanged batches share arrays."""
    return one is other or np.array_equal(one, other)


class Repetition:
    """Remembers the last plan and whether it may serve again."""

    def __init__(self) -> None:
        self._last: VerifyPlan | None = None
        self._native_streak = 0
        self._owner: OwnerArray | None = None  # requests of a trimmed plan that may serve again
        self._left = 0  # steps that it may serve yet
        self._decided: tuple[OwnerArray, int] | None = None  # requests and budget of such a plan
        self._doublings = 0
        self._offer: VerifyPlan | None = None  # what `again` said last
        self._seen: tuple[OwnerArray, IntArray] | None = None  # batch of the last native repeat

    @property
    def rest(self) -> int:
        """How many steps from now on what comes in decides nothing; 0: it is needed now.

        The last steps before a planned one are learned from: rows of up to three passes before a
        planned step can reach it.
        """
        if self._owner is not None:
            return max(self._left - 1, 0)
        return self._native_rest(self._native_streak)

    @property
    def rest_ahead(self) -> int:
        """Coming steps that would be repeats and need no look at requests before they run.

        Where outcomes of repeats are not needed, not the last one before they are again: its rows
        pair with those. With host windows the outcomes of all of them are needed later.
        """
        if self._owner is not None:
            of_host = self._last is not None and bool(self._last.windows)
            return self._left if of_host else max(self._left - 3, 0)
        streak = self._native_streak
        if streak < _LAZY_AFTER or streak % period(streak) == 0:
            return 0
        return max(self._native_rest(streak + 1) - 1, 0)

    def skip(self, steps: int) -> None:
        """The last decision was repeated in so many steps without `again`."""
        if self._owner is not None:
            self._left -= steps
        else:
            self._native_streak += steps

    @staticmethod
    def _native_rest(streak: int) -> int:
        if streak < _LAZY_AFTER:
            return 0
        length = period(streak)
        place = streak % length
        return max(length - min(_AWAKE, length // 2) - place + 1, 0) if place else 0

    def note(self, plan: VerifyPlan) -> None:
        """A plan was made, or repeated."""
        settled = plan.reason in (Reason.NATIVE_BEST, Reason.MIN_GAIN)
        self._native_streak = self._native_streak + 1 if settled else 0
        self._last = plan
        if plan is self._offer:
            self._left = max(self._left - 1, 0)
        else:
            self._owner, self._left, self._seen = None, 0, None
            if plan.kind is not PlanKind.TRIM:
                self._decided = None

    def allow(self, plan: VerifyPlan, batch: RequestBatch, incomplete: bool) -> None:
        """The plan just noted was worked out for `batch`; incomplete: drafts were missing."""
        repeats = min(batch.owner.size // _LAZY_REQUESTS, _MOST_REPEATS)
        wasted = batch.fresh and bool(plan.windows)
        before, self._decided = self._decided, None
        if plan.kind is PlanKind.TRIM and repeats and not (incomplete or wasted):
            most = most_doublings(repeats, device=not plan.windows)
            steady = self._confirms(before, plan, batch.owner)
            self._doublings = min(self._doublings + 1, most) if steady else 0
            self._decided = (batch.owner, plan.budget)
            self._owner = batch.owner
            self._left = ((repeats + 1) << self._doublings) - 1

    @staticmethod
    def _confirms(
        before: tuple[OwnerArray, int] | None, plan: VerifyPlan, owner: OwnerArray
    ) -> bool:
        """Whether `plan` decides about `owner` what was decided `before`."""
        if before is None or not same_array(owner, before[0]):
            return False
        moved = abs(plan.budget - before[1])
        return moved * _STEADY <= plan.num_requests * plan.num_positions

    def again(self, step_id: int, owner: OwnerArray, num_drafts: IntArray) -> VerifyPlan | None:
        """The last plan for the step at hand, or None if that must be planned.

        Neither array is changed by anybody afterwards: the same ones are about the same batch.
        """
        self._offer = self._again(step_id, owner, num_drafts)
        return self._offer

    def _again(self, step_id: int, owner: OwnerArray, num_drafts: IntArray) -> VerifyPlan | None:
        last = self._last
        if last is None or last.num_requests != owner.size:
            return None
        if last.kind is PlanKind.NATIVE:
            streak = self._native_streak
            if streak < _LAZY_AFTER or streak % period(streak) == 0:
                return None
            return self._native(last, step_id, owner, num_drafts)
        if not self._left or self._owner is None or not same_array(owner, self._owner):
            return None
        full = int(np.add.reduce(num_drafts)) == owner.size * last.num_positions
        return last.at_step(step_id) if full else None

    def _native(
        self, last: VerifyPlan, step_id: int, owner: OwnerArray, num_drafts: IntArray
    ) -> VerifyPlan:
        if self._seen is not None and self._seen[0] is owner and self._seen[1] is num_drafts:
            return last.at_step(step_id)
        self._seen = (owner, num_drafts)
        budget, windows = int(np.add.reduce(num_drafts)), last.windows
        if windows and budget != last.budget:
            windows = tuple((num_drafts + 1).tolist())
        digest = request_digest(owner)
        return replace(last, step_id=step_id, digest=digest, budget=budget, windows=windows)
