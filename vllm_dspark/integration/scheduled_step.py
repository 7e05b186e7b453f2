"""What the scheduler tells the conductor about a step, before and after vLLM schedules it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class StepOutlook:
    """What the scheduler knows of a step before it schedules it."""

    mixed: bool  # prefill rows are expected in the step
    num_waiting: int


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """What vLLM scheduled.

    started: requests that enter (or re-enter) the batch; sampling_ids: requests whose step ends
    with a draft pass, if there is one; ids: all requests; tokens: rows by request id, drafts: their
    drafts.
    """

    started: Sequence[Any]
    preempted: Iterable[str]
    finished: Iterable[str]
    sampling_ids: list[str]
    ids: list[str]
    tokens: Mapping[str, int]
    num_tokens: int
    drafts: Mapping[str, list[int]]

    def tokens_as_ordered(self, request_ids: list[str], num_drafts: int) -> bool:
        """Whether just these requests run, and with all of `num_drafts` drafts together.

        Nobody has more than were left, so that the sum is right means that each count is.
        """
        return self.num_tokens == len(request_ids) + num_drafts and self.ids == request_ids
