"""What engine core and worker tell each other about a step, riding on vLLM's own messages.

The engine core puts a `StepOrder` on the scheduler output, the worker of the output rank puts a
`StepReport` on the model runner output. Both are plain attributes of dataclasses that travel by
pickle, so no channel of ours exists and nothing is waited for.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.integration.batches import Cuts
from vllm_dspark.planning.cost import StepTiming
from vllm_dspark.planning.plan import PlanKind, VerifyPlan
from vllm_dspark.planning.table import RankingParameters

IntArray = npt.NDArray[np.integer]

_ORDER = "dspark_order"
_REPORT = "dspark_report"
_NOBODY: IntArray = np.zeros(0, dtype=np.int32)


@dataclass
class StepOrder:
    """Engine core to worker, with one scheduler output; complete once that has been made.

    step_id: stamp of this step and of the confidence rows that its draft pass writes (1..2^31-1).
    request_ids: requests that may have drafts, in scheduler order; the plan's windows follow it.
    num_drafts: drafts each had before windows were applied; draft_stamps: the step whose draft
    pass had made them (0: none).
    For device windows: ranking, calibration and neutral priors; sampled, requests with a
    temperature; floors and ceilings, drafts that are let through at least and at most, where that
    is not 0 and K.
    num_scheduled: drafts that vLLM scheduled of each, where they are those that the plan left
    (None: look at the scheduler output); kept in the engine core.
    at_rest: nothing that could be reported about the step is needed (resting.py).
    Kept in the engine core: repeats, the plan was made for an earlier step; unseen, and no request
    was looked at for this one; cuts: what host windows leave of drafts.
    """

    step_id: int
    plan: VerifyPlan | None
    request_ids: list[str]
    num_drafts: IntArray  # [n]
    draft_stamps: IntArray  # [n]
    ranking: RankingParameters | None = None
    sampled: frozenset[str] = frozenset()
    floors: dict[str, int] = field(default_factory=dict)
    ceilings: dict[str, int] = field(default_factory=dict)
    num_scheduled: IntArray | None = None  # [n]
    at_rest: bool = False
    repeats: bool = False
    unseen: bool = False
    cuts: Cuts | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        """To another process goes what workers need: few steps are about single requests there."""
        plan = self.plan
        if plan is not None and plan.kind is PlanKind.TRIM and self.ranking is not None:
            order = replace(self, num_scheduled=None)
            return StepOrder, tuple(getattr(order, item.name) for item in fields(order))
        if plan is not None and plan.windows:
            plan = replace(plan, windows=())
        empty: tuple[Any, ...] = (None, frozenset(), {}, {}, None)
        return StepOrder, (self.step_id, plan, [], _NOBODY, _NOBODY, *empty, self.at_rest)

    @staticmethod
    def of(
        step_id: int, plan: VerifyPlan | None, drafted: dict[str, int], stamp: int
    ) -> "StepOrder":
        """An order whose drafts are all of one pass."""
        counts = np.fromiter(drafted.values(), dtype=np.int32)
        return StepOrder(step_id, plan, list(drafted), counts, np.full_like(counts, stamp))

    def repeated(
        self, step_id: int, plan: VerifyPlan | None, draft_stamps: IntArray, *, at_rest: bool
    ) -> "StepOrder":
        """The same for a later step, without a look at its requests."""
        order = StepOrder.__new__(StepOrder)  # a copy; pickle's protocol leaves out what stays here
        vars(order).update(vars(self))
        order.step_id, order.plan, order.draft_stamps = step_id, plan, draft_stamps
        order.at_rest, order.repeats, order.unseen = at_rest, True, True
        vars(order).pop("stamps", None)  # worked out from the others
        return order

    @property
    def sets_windows(self) -> bool:
        """Whether the scheduler itself leaves requests fewer drafts (host windows)."""
        return self.plan is not None and self.plan.sets_windows and self.ranking is None

    @property
    def draft_next(self) -> bool:
        """Whether the drafter proposes a block at the end of this step."""
        return self.plan is None or self.plan.draft_next

    @property
    def draft_width(self) -> int | None:
        """Columns that the drafter drafts then; None: all K."""
        return self.plan.draft_width if self.plan is not None else None

    @cached_property
    def drafted(self) -> dict[str, int]:
        """Drafts before windows were applied, by request id."""
        return dict(zip(self.request_ids, self.num_drafts.tolist(), strict=True))

    @cached_property
    def stamps(self) -> dict[str, int]:
        """Stamps of the drafts, by request id."""
        return dict(zip(self.request_ids, self.draft_stamps.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class AdmittedDrafts:
    """Drafts that windows on the worker let through in a step, in the order of its batch."""

    request_ids: Sequence[str]
    counts: IntArray  # [n]

    def by_name(self) -> dict[str, int]:
        """By request id."""
        return dict(zip(self.request_ids, self.counts.tolist(), strict=True))


@dataclass(frozen=True, slots=True)
class StepReport:
    """Worker to engine core, with the output of the step that ends or of a later one.

    stamp: step whose draft pass wrote the rows; 0: no rows. request_ids and owners name whom the
    rows are about (owner ids tell a preempted request from its restart); confidences: [m, n]
    float32 raw acceptance probabilities c_k of the n <= K columns that the pass drafted.
    timings: steps whose measured times have become known since the last report.
    admitted: drafts let through in the step that ends; None where the engine core decided that
    itself (host windows, native steps).
    cost_table: JSON of a freshly measured table, once, in the first report that can carry it.
    refused: why this worker executes no trim plans although the config promised it; "" if it does.
    """

    stamp: int
    request_ids: tuple[str, ...]
    owners: npt.NDArray[np.int64]
    confidences: npt.NDArray[np.float32]
    timings: tuple[StepTiming, ...] = ()
    admitted: AdmittedDrafts | None = None
    cost_table: str | None = None
    refused: str = ""


def attach_order(scheduler_output: Any, order: StepOrder) -> None:
    """Put the order on a scheduler output."""
    setattr(scheduler_output, _ORDER, order)


def order_of(scheduler_output: Any) -> StepOrder | None:
    """The order on a scheduler output; None for dummy runs and foreign schedulers."""
    order = getattr(scheduler_output, _ORDER, None)
    return order if isinstance(order, StepOrder) else None


def attach_report(model_runner_output: Any, report: StepReport) -> None:
    """Put the report on a model runner output."""
    setattr(model_runner_output, _REPORT, report)


def report_of(model_runner_output: Any) -> StepReport | None:
    """The report on a model runner output, if its worker is ours."""
    report = getattr(model_runner_output, _REPORT, None)
    return report if isinstance(report, StepReport) else None
