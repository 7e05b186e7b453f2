"""From a decision to the VerifyPlan that says it."""

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.budget import Option
from vllm_dspark.planning.facts import PlannerOptions, StepFacts
from vllm_dspark.planning.forced import forced_windows
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan, request_digest
from vllm_dspark.planning.table import RequestBatch
from vllm_dspark.planning.width import WidthReason

IntArray = npt.NDArray[np.integer]
# Columns of the draft pass that ends a step, and why; None: no pass.
DraftPass = tuple[int, WidthReason] | None


def compose(
    facts: StepFacts,
    batch: RequestBatch,
    kind: PlanKind,
    reason: Reason,
    budget: int,
    admitted: IntArray | None,
    drafting: DraftPass,
    prices: tuple[Option | None, Option | None],
) -> VerifyPlan:
    """The plan of one step.

    admitted: drafts that each request keeps, None where the device ranks them; prices: of this
    plan, and of the native step.
    """
    own, native = prices
    columns, width_reason = drafting or (batch.num_positions, WidthReason.FULL)
    return VerifyPlan(
        step_id=facts.step_id,
        digest=request_digest(batch.owner) if batch.digest is None else batch.digest,
        num_requests=batch.owner.size,
        num_positions=batch.num_positions,
        kind=kind,
        reason=reason,
        budget=budget,
        padded_tokens=own.padded_tokens if own else 0,
        draft_next=drafting is not None,
        windows=() if admitted is None else tuple((admitted + 1).tolist()),
        predicted_ms=own.ms if own else 0.0,
        predicted_tokens=own.tokens if own else 0.0,
        native_ms=native.ms if native else 0.0,
        native_tokens=native.tokens if native else 0.0,
        draft_width=columns if columns < batch.num_positions else None,
        width_reason=width_reason,
    )


def compose_forced(
    options: PlannerOptions, facts: StepFacts, batch: RequestBatch, drafting: DraftPass
) -> VerifyPlan:
    """Windows prescribed by a test; these reach the device too."""
    spec, seed = options.test_windows, options.test_windows_seed
    windows = forced_windows(spec, seed, facts.step_id, batch.num_drafts, batch.num_positions)
    admitted = windows - 1
    budget = int(admitted.sum())
    kind = PlanKind.NATIVE if budget == int(batch.num_drafts.sum()) else PlanKind.TRIM
    return compose(facts, batch, kind, Reason.FORCED, budget, admitted, drafting, (None, None))
