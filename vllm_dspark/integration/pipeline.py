"""Scheduling for pipeline ranks: several steps are in flight at once.

With pipeline ranks and no async scheduling, vLLM's engine core keeps a step in flight while it
schedules the next one, and collects the drafts of a step as soon as that step was sent, before its
output. Given to the scheduler then, they count as tokens of a request whose last sampled token is
not there yet, and the next step has fewer rows than it verifies: the first rank stops at an
assertion (0.32.0, 0.33.0: `EngineCore.post_step`). Here such drafts wait for that output.
"""

from dataclasses import replace
from typing import Any


class EarlyDrafts:
    """Holds the drafts of requests that are in flight until their tokens have arrived."""

    def __init__(self) -> None:
        self._held: dict[str, list[int]] = {}
        self._kind: Any = None  # vLLM's class, taken from what it hands over

    def hold(self, drafts: Any, requests: dict[str, Any]) -> Any:
        """drafts: vLLM's DraftTokenIds. Returns those whose requests are not in flight."""
        self._kind = type(drafts)
        ready: dict[str, list[int]] = {}
        for name, tokens in zip(drafts.req_ids, drafts.draft_token_ids, strict=True):
            request = requests.get(name)
            if request is None:
                continue
            (self._held if in_flight(request) else ready)[name] = tokens
        return self._kind(list(ready), list(ready.values()))

    def release(self, running: list[Any]) -> Any | None:
        """DraftTokenIds of requests whose tokens have arrived; None if there are none.

        What is no longer running (finished, preempted) has lost its drafts.
        """
        if not self._held:
            return None
        found: dict[str, list[int]] = {}
        waiting: dict[str, list[int]] = {}
        for request in running:
            name = request.request_id
            if name in self._held:
                (waiting if in_flight(request) else found)[name] = self._held[name]
        self._held = waiting
        return self._kind(list(found), list(found.values())) if found else None


def in_flight(request: Any) -> bool:
    """Whether a step holds all of a request's known tokens, so that the next schedule cannot."""
    return bool(request.num_computed_tokens >= request.num_tokens)


class PipelineSchedulerMixin:
    """Goes before the other mixin: drafts in order, and steps judged by the requests in them."""

    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._early_drafts = EarlyDrafts()

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """vLLM's, for drafts of requests whose last token has arrived."""
        ready = self._early_drafts.hold(draft_token_ids, self.requests)
        super().update_draft_token_ids(ready)  # type: ignore[misc]

    def update_from_output(self, *args: Any, **kwargs: Any) -> Any:
        """The update of a step, then the drafts that waited for it."""
        outputs = super().update_from_output(*args, **kwargs)  # type: ignore[misc]
        drafts = self._early_drafts.release(self.running)
        if drafts is not None:
            super().update_draft_token_ids(drafts)  # type: ignore[misc]
        return outputs

    def _outlook(self, *args: Any) -> Any:
        """Requests of the other steps have no drafts, and yet bring no prefill rows to this one."""
        outlook = super()._outlook(*args)  # type: ignore[misc]
        prefills = any(not r.spec_token_ids and not in_flight(r) for r in self.running)
        has_room = len(self.running) < self.max_num_running_reqs
        return replace(outlook, mixed=prefills or (len(self.waiting) > 0 and has_room))
