"""vLLM's own acceptance counters, made to say what happened.

vLLM counts, before it looks for a stop, all scheduled drafts as proposed and all sampled tokens but
one as accepted. With our plans a scheduled draft may never be verified (device windows), which is
no rejection; and tokens behind a stop are cut from the output, so they were not accepted. The stats
object is handed out by reference, so it is filled again once vLLM's update is over.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dspark.integration.outcomes import StepOutcomes
from vllm_dspark.integration.report import StepOrder


def emitting(outputs: Mapping[int, Any], order: StepOrder) -> set[str] | None:
    """Requests that this update of vLLM's scheduler has added tokens to; None: all of the order.

    outputs: what `update_from_output` returned. It drops what comes in for requests that have ended
    meanwhile, and hands out one entry, in scheduler order, for every request it has dealt with.
    """
    if order.num_scheduled is not None and len(outputs) == 1:
        (only,) = outputs.values()
        entries = only.outputs
        # Nobody else was scheduled, and errors, which come last, have no tokens.
        if len(entries) == len(order.request_ids) and entries and entries[-1].new_token_ids:
            return None
    return {
        entry.request_id
        for part in outputs.values()
        for entry in part.outputs
        if entry.new_token_ids
    }


@dataclass(frozen=True, slots=True)
class _Before:
    """What vLLM had counted of a request without drafts before an update."""

    metrics: Any
    num_draft_tokens: int
    num_none_accepted: int
    num_steps: int

    @classmethod
    def of(cls, metrics: Any) -> "_Before":
        steps = len(metrics.per_step_accepted)
        return cls(metrics, metrics.num_draft_tokens, metrics.histogram[0], steps)

    def restore(self) -> None:
        """Padding adds a step of so many drafts of which none was accepted."""
        self.metrics.num_draft_tokens = self.num_draft_tokens
        self.metrics.histogram[0] = self.num_none_accepted
        del self.metrics.per_step_accepted[self.num_steps :]
        del self.metrics.per_step_drafted[self.num_steps :]


class Corrections:
    """Of one scheduler; used around each `update_from_output`."""

    def __init__(self) -> None:
        self.stats: Any = None  # vLLM's, of the update under way; it counts for the first request
        # Metrics of single requests, where the user asked for them: with drafts, and without any.
        self._of_request: dict[str, Any] = {}
        self._without_drafts: list[_Before] = []

    def begin(self, scheduler: Any, request_ids: Sequence[str]) -> None:
        """Before vLLM's update; request_ids: requests of the step that have drafts."""
        self.stats = None
        self._of_request, self._without_drafts = {}, []
        if not per_request(scheduler):
            return
        drafting = set(request_ids)
        for name, request in scheduler.requests.items():
            metrics = request.spec_decode_metrics
            if metrics is None or not request.num_in_flight_tokens:
                continue
            if name in drafting:
                self._of_request[name] = metrics
            else:
                self._without_drafts.append(_Before.of(metrics))

    def apply(self, outcomes: StepOutcomes | None) -> None:
        """After vLLM's update: the numbers of the outcomes in place of vLLM's."""
        for before in self._without_drafts:
            before.restore()
        if outcomes is None:
            # vLLM has counted the slots that it pads one-token prompts with, if anything.
            if self.stats is not None:
                none = [0] * len(self.stats.num_accepted_tokens_per_pos)
                self.fill(0, none, list(none))
            return
        if self.stats is not None:
            _, admitted, verified, _, accepted = outcomes.reached.tolist()
            self.fill(admitted[0], verified, accepted)
        if self._of_request:
            self._correct_requests(outcomes)

    def fill(self, num_rows: int, verified: list[int], accepted: list[int]) -> None:
        """Requests with drafts, and how many of them had theirs verified and accepted, [K] each."""
        stats = self.stats
        if stats is not None:
            stats.num_drafts = num_rows
            stats.num_draft_tokens = sum(verified)
            stats.num_accepted_tokens = sum(accepted)
            stats.num_draft_tokens_per_pos = verified
            stats.num_accepted_tokens_per_pos = accepted

    def _correct_requests(self, outcomes: StepOutcomes) -> None:
        """Per-request metrics: vLLM has added (sampled - 1, scheduled) to each of them."""
        rows = zip(
            outcomes.request_ids,
            outcomes.sampled.tolist(),
            outcomes.accepted.tolist(),
            outcomes.scheduled.tolist(),
            (outcomes.scheduled - outcomes.admitted).tolist(),
            strict=True,
        )
        for name, sampled, accepted, scheduled, not_verified in rows:
            metrics = self._of_request.get(name)
            if metrics is None or not scheduled:
                continue
            metrics.histogram[sampled - 1] -= 1
            metrics.histogram[accepted] += 1
            metrics.num_draft_tokens -= not_verified
            if metrics.per_step_accepted:
                metrics.per_step_accepted[-1] = accepted
                metrics.per_step_drafted[-1] -= not_verified


def per_request(scheduler: Any) -> bool:
    """Whether vLLM keeps acceptance counts of single requests."""
    return getattr(scheduler, "spec_decode_metrics_level", "none") != "none"
