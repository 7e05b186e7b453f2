"""Steps that repeat a settled decision about an unchanged batch, without a look at its requests.

Where full windows have been best for many steps, or nothing is ever scheduled, most steps need
nothing of ours: vLLM schedules what it would by itself, and what comes back is only counted. At 256
requests a single pass over them in Python costs as much as planning, so a resting step makes none:
that the batch is the expected one is seen from its list, its size and its sum of tokens. What has
been left out (stamps of drafts, tokens that remain) is made up for when the rest ends.

Nobody looks whether a request still has its drafts, so rest is only begun while none can run out of
tokens; vLLM would then cut them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.integration.report import StepOrder
from vllm_dspark.planning.plan import VerifyPlan
from vllm_dspark.planning.planner import Planner

IntArray = npt.NDArray[np.integer]
SlotArray = npt.NDArray[np.int64]

# Where nothing is ever scheduled: of so many steps the last ones serve the quality metrics.
_OFF_PERIOD, _OFF_AWAKE = 32, 8
# Steps that may be under way when rest begins (async scheduling), whose tokens are not counted yet.
_UNDER_WAY = 3


def off_rest(step_id: int) -> int:
    """Steps from this one on that need no look at what comes back; where nothing is scheduled."""
    return max(_OFF_PERIOD - _OFF_AWAKE - step_id % _OFF_PERIOD, 0)


@dataclass(slots=True)
class RestingBatch:
    """Requests that rest: all that run, with `width` drafts each, for at most `steps` steps more.

    running: the scheduler's list as it was; version: of the request table; planner: whose decision,
    `plan`, is repeated, None where there is none; stamp: draft pass that made the drafts at hand;
    done: steps rested so far.
    """

    running: list[Any]
    request_ids: list[str]
    slots: SlotArray
    num_drafts: IntArray
    width: int
    version: int
    planner: Planner | None
    plan: VerifyPlan | None
    stamp: int
    steps: int
    done: int = 0

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
        return RestingBatch(
            list(running),
            order.request_ids,
            slots,
            drafts,
            width,
            version,
            planner,
            order.plan,
            order.step_id,
            steps,
        )

    @property
    def size(self) -> int:
        """Requests."""
        return len(self.running)

    @property
    def num_tokens(self) -> int:
        """Rows of each of its steps."""
        return self.size * (self.width + 1)

    def order(self, step_id: int) -> StepOrder:
        """The order of its next step."""
        return StepOrder(
            step_id,
            replace(self.plan, step_id=step_id) if self.plan is not None else None,
            self.request_ids,
            self.num_drafts,
            np.full(self.size, self.stamp, dtype=np.int32),
            num_scheduled=self.num_drafts,
            at_rest=True,
        )

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


def accepted_by_position(num_sampled: bytes, num_positions: int) -> list[int]:
    """[K] requests that accepted the draft at each position; num_sampled: tokens of each."""
    reached = [0] * num_positions
    total = 0
    for position in range(num_positions, 0, -1):
        total += num_sampled.count(position + 1)
        reached[position - 1] = total
    return reached
