"""After schedule(): the plan of the step that was really scheduled.

With host windows a plan is made before ``schedule()``, from the requests and the mode
that are expected; scheduling may then leave requests out, grant fewer drafts, or add
prefill rows. `settle` keeps the decision and restates it for what came out, so that
identity checks and predictions are about the step that runs.
"""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.cost import StepShape
from vllm_dspark.planning.facts import StepFacts
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, VerifyPlan, request_digest

_SHAPES = {
    PlanKind.NATIVE: StepShape.NATIVE,
    PlanKind.TRIM: StepShape.RAGGED,
    PlanKind.SKIP_DRAFT: StepShape.SINGLE,
    PlanKind.OFF: StepShape.NATIVE,
}


def settle(
    plan: VerifyPlan,
    cost: CostModel | None,
    facts: StepFacts,
    owner: npt.NDArray[np.int64],  # [n] of the scheduled decode requests
    num_drafts: npt.NDArray[np.integer],  # [n] drafts scheduled for them
) -> VerifyPlan:
    """The same decision about the scheduled step; unpriced (0 ms) if no cell covers it."""
    num_requests = int(owner.size)
    budget = int(np.add.reduce(num_drafts))
    full = budget == num_requests * plan.num_positions
    kind = plan.kind
    if kind is PlanKind.NATIVE and not full and budget:
        kind = PlanKind.TRIM  # too few drafts for uniform rows: it runs as a ragged step
    native = kind in (PlanKind.NATIVE, PlanKind.OFF)
    mode = facts.native_mode if native else facts.mode
    rows = facts.reserved_rows + num_requests + budget
    priced, ms = None, 0.0
    if cost is not None:
        priced = cost.step_ms(mode, _SHAPES[kind], facts.kv_tokens, rows)
    if cost is not None and priced is not None:
        ms = priced[1] + cost.table.overhead_ms
        if plan.draft_next:
            ms += cost.draft_ms(num_requests, plan.draft_width, facts.mode)
    return replace(
        plan,
        step_id=facts.step_id,
        kind=kind,
        digest=request_digest(owner),
        num_requests=num_requests,
        budget=budget,
        padded_tokens=priced[0] if priced else 0,
        windows=tuple((num_drafts + 1).tolist()) if plan.windows else (),
        predicted_ms=ms,
    )
