"""vLLM's own acceptance counters, made to say what happened.

vLLM counts, before it looks for a stop, all scheduled drafts as proposed and all sampled tokens but
one as accepted. With our plans a scheduled draft may never be verified (device windows), which is
no rejection; and tokens behind a stop are cut from the output, so they were not accepted. The stats
object is handed out by reference, so it is filled again once vLLM's update is over.
"""

from collections.abc import Callable, Sequence
from typing import Any

from vllm_dspark.integration.outcomes import StepOutcomes


class Corrections:
    """Of one scheduler; used around each `update_from_output`."""

    def __init__(self) -> None:
        self.counted: set[str] = set()  # requests whose verification vLLM took note of
        self._stats: Any = None
        self._of_request: dict[str, Any] = {}  # per-request metrics, where the user asked for them

    def begin(self, scheduler: Any, request_ids: Sequence[str]) -> None:
        """Before vLLM's update."""
        self.counted = set()
        self._stats = None
        self._of_request = {}
        if getattr(scheduler, "spec_decode_metrics_level", "none") != "none":
            for name in request_ids:
                request = scheduler.requests.get(name)
                if request is not None and request.spec_decode_metrics is not None:
                    self._of_request[name] = request.spec_decode_metrics

    def note(self, make: Callable[..., Any], stats: Any, *args: Any, **kwargs: Any) -> Any:
        """Stand in for vLLM's `make_spec_decoding_stats`, once per verified request."""
        name = kwargs["request_id"] if "request_id" in kwargs else args[-1]
        self.counted.add(name)
        if stats is None:
            self._stats = stats = make(stats, *args, **kwargs)
        return stats

    def apply(self, outcomes: StepOutcomes | None) -> None:
        """After vLLM's update: the numbers of the outcomes in place of vLLM's."""
        if outcomes is None:
            return
        if self._stats is not None:
            self._fill(outcomes)
        if self._of_request:
            self._correct_requests(outcomes)

    def _fill(self, outcomes: StepOutcomes) -> None:
        stats, (_, admitted, verified, _, accepted) = self._stats, outcomes.reached.tolist()
        stats.num_drafts = admitted[0]
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
            (outcomes.scheduled - outcomes.admitted).tolist(),
            strict=True,
        )
        for name, sampled, accepted, not_verified in rows:
            metrics = self._of_request.get(name)
            if metrics is None or name not in self.counted:
                continue
            metrics.histogram[sampled - 1] -= 1
            metrics.histogram[accepted] += 1
            metrics.num_draft_tokens -= not_verified
            if metrics.per_step_accepted:
                metrics.per_step_accepted[-1] = accepted
                metrics.per_step_drafted[-1] -= not_verified
