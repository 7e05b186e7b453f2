"""When the previous decision is the next one too, so that nothing has to be worked out.

Two cases. A settled native decision: after _LAZY_AFTER of them in a row on an unchanged batch, only
every _LAZY_PERIOD-th step is planned, since native steps should cost nothing. A trimmed step of a
large batch: it serves one more step, because by then planning is a cost and what it decides from
(outcomes of some twenty steps) has hardly moved. Rows about the very drafts to be verified, which
greedy requests may use, would be wasted by that, so steps that have some are planned anew.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan, request_digest
from vllm_dspark.planning.table import RequestBatch

OwnerArray = npt.NDArray[np.int64]
IntArray = npt.NDArray[np.integer]

_LAZY_AFTER = 16
_LAZY_PERIOD = 8
_LAZY_REQUESTS = 64  # a batch this large is trimmed alike twice


class Repetition:
    """Remembers the last plan and whether it may serve again."""

    def __init__(self) -> None:
        self._last: VerifyPlan | None = None
        self._native_streak = 0
        self._owner: OwnerArray | None = None  # requests of a trimmed plan that may serve again

    @property
    def resting(self) -> bool:
        """Whether the next few steps will be repeats: what comes in now decides nothing.

        Half of the steps between two planned ones are learned from, the last ones: rows of up to
        three passes before a planned step can reach it.
        """
        return self._native_streak >= _LAZY_AFTER and (
            1 <= self._native_streak % _LAZY_PERIOD <= _LAZY_PERIOD // 2
        )

    def note(self, plan: VerifyPlan) -> None:
        """A plan was made, or repeated."""
        settled = plan.reason in (Reason.NATIVE_BEST, Reason.MIN_GAIN)
        self._native_streak = self._native_streak + 1 if settled else 0
        self._last, self._owner = plan, None

    def allow(self, plan: VerifyPlan, batch: RequestBatch, incomplete: bool) -> None:
        """The plan just noted was worked out for `batch`; incomplete: drafts were missing."""
        large = batch.owner.size >= _LAZY_REQUESTS
        if plan.kind is PlanKind.TRIM and large and not (incomplete or batch.fresh):
            self._owner = batch.owner

    def again(self, step_id: int, owner: OwnerArray, num_drafts: IntArray) -> VerifyPlan | None:
        """The last plan for the step at hand, or None if that must be planned."""
        last = self._last
        if last is None or last.num_requests != owner.size:
            return None
        budget = int(np.add.reduce(num_drafts))
        if last.kind is not PlanKind.NATIVE:
            full = budget == owner.size * last.num_positions
            if self._owner is None or not full or not np.array_equal(owner, self._owner):
                return None
            return replace(last, step_id=step_id)
        if self._native_streak < _LAZY_AFTER or self._native_streak % _LAZY_PERIOD == 0:
            return None
        windows = last.windows
        if windows and budget != last.budget:
            windows = tuple((num_drafts + 1).tolist())
        digest = request_digest(owner)
        return replace(last, step_id=step_id, digest=digest, budget=budget, windows=windows)
