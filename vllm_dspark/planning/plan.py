"""The decision about one step, and the box that hands it over exactly once.

A ``VerifyPlan`` is made in one place (the engine core), is immutable, and travels
with the scheduler output. Whoever executes it first checks that it is about this
very step: same step id, same set of requests, same draft width. ``PlanBox.take``
does the check, empties the box in any case and counts what it refused, so that a
plan of an earlier step can never be executed later.
"""

import hashlib
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.width import WidthReason

_MASK = 2**64 - 1


class PlanKind(Enum):
    """Shape of the verification in a step."""

    NATIVE = "native"  # every scheduled draft, on uniform graphs, no work of ours
    TRIM = "trim"  # `budget` drafts in all, ragged windows
    SKIP_DRAFT = "skip_draft"  # no draft is verified
    OFF = "off"  # the plugin takes no part in this step


class Reason(Enum):
    """Why a plan is what it is; the value is the metric label."""

    EMPTY = "empty"  # no request to plan for
    DISABLED = "disabled"  # scheduling is off for this engine
    EXCLUDED = "excluded"  # a request of the step must not be scheduled
    MIXED = "mixed"  # prefill rows in the step and no evidence that trimming them pays
    UNPRICED = "unpriced"  # no cost cell for the step
    UNKNOWN = "unknown"  # nothing is known about any request of the step
    NATIVE_BEST = "native_best"  # full width has the highest goodput
    MIN_GAIN = "min_gain"  # something is better, by less than the margin
    HYSTERESIS = "hysteresis"  # something is better, not yet for long enough
    DRAIN_GUARD = "drain_guard"  # trimming would delay the last requests of a batch
    TRIM_GAIN = "trim_gain"
    NO_DRAFTS = "no_drafts"  # drafting pays, but this step has nothing to verify yet
    SKIP_GAIN = "skip_gain"
    SKIP_LEFTOVER = "skip_leftover"  # drafting stops; drafts already made are still used
    PROBE_DRAFT = "probe_draft"  # drafting is skipped, but this step drafts to look
    PROBE_VERIFY = "probe_verify"  # verifies the drafts of a probe
    EXPLORE = "explore"  # another draft width is tried, whose steps were not measured lately
    FORCED = "forced"  # `test_windows`


@dataclass(frozen=True, slots=True)
class VerifyPlan:
    """One step's decision. Filled by Planner.plan; never changed afterwards."""

    step_id: int
    digest: int  # request_digest of the step's requests, order-independent
    num_requests: int
    num_positions: int  # K
    kind: PlanKind
    reason: Reason
    budget: int  # B: drafts verified in the step
    padded_tokens: int  # G; 0 if the step could not be priced
    draft_next: bool  # run the drafter at the end of this step
    windows: tuple[int, ...]  # V per request in batch order; the host executes these
    predicted_ms: float
    predicted_tokens: float
    native_ms: float  # the alternative that was turned down, for comparison
    native_tokens: float
    draft_width: int | None = None  # columns that the drafter drafts, if it does; None: all K
    width_reason: WidthReason = WidthReason.FULL

    @property
    def columns(self) -> int:
        """Drafts per request of the draft pass at the end of this step, 0 if there is none."""
        if not self.draft_next:
            return 0
        return self.num_positions if self.draft_width is None else self.draft_width

    @property
    def predicted_gain(self) -> float:
        """Relative gain in tokens per ms over the native step; 0 if either is unpriced."""
        if min(self.predicted_ms, self.native_ms, self.native_tokens) <= 0.0:
            return 0.0
        own = self.predicted_tokens / self.predicted_ms
        return own * self.native_ms / self.native_tokens - 1.0


def owner_id(request_id: str, generation: int = 0) -> int:
    """Stable 63-bit identity of a request; raise `generation` at each preemption.

    Equal in every process, unlike ``hash``. Never 0, which means nobody.
    """
    data = f"{generation}:{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little") >> 1 or 1


def request_digest(owners: npt.NDArray[np.int64]) -> int:
    """Digest of a set of owners that does not depend on their order.

    Workers sort the batch differently from the scheduler, hence a commutative sum
    (mod 2**64). The terms are hashes already, so nothing has to be mixed.
    """
    return int(np.add.reduce(owners)) & _MASK


@dataclass
class PlanBox:
    """Holds at most one plan between the place that receives and the one that executes it."""

    accepted: int = 0
    mismatched: int = 0  # taken for a step it was not made for
    unclaimed: int = 0  # replaced or dropped without having been asked for
    last_mismatch: str = ""
    _plan: VerifyPlan | None = field(default=None, repr=False)

    def put(self, plan: VerifyPlan) -> None:
        """Store a plan; a plan still there was never used and is lost."""
        self.drop()
        self._plan = plan

    def drop(self) -> None:
        """Forget the plan, if any."""
        if self._plan is not None:
            self.unclaimed += 1
            self._plan = None

    def take(
        self, step_id: int, digest: int, num_requests: int, num_positions: int
    ) -> VerifyPlan | None:
        """The plan, if it is about exactly this step, else None; the box is empty afterwards."""
        plan, self._plan = self._plan, None
        if plan is None:
            return None
        wanted = (step_id, digest, num_requests, num_positions)
        found = (plan.step_id, plan.digest, plan.num_requests, plan.num_positions)
        if wanted != found:
            self.mismatched += 1
            names = ("step", "request set", "request count", "draft width")
            self.last_mismatch = "; ".join(
                f"{name}: step has {want}, plan has {have}"
                for name, want, have in zip(names, wanted, found, strict=True)
                if want != have
            )
            return None
        self.accepted += 1
        return plan
