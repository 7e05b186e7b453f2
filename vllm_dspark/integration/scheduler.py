"""Scheduler of the engine core: decides how many drafts each request verifies."""

import logging
from typing import Any

from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.carrier import options_of
from vllm_dspark.integration.outcomes import OutcomeLog, OutcomeTotals, RequestOutcome
from vllm_dspark.integration.windows import GivenWindows

logger = logging.getLogger("vllm.vllm_dspark")


class DSparkSchedulerMixin:
    """Caps drafts before vLLM's `schedule`, records outcomes before its `update_from_output`.

    Capping before scheduling gives the freed token budget to waiting prefills of the same step.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = options_of(self.vllm_config) or DSparkConfig()  # type: ignore[attr-defined]
        width: int = self.num_spec_tokens  # type: ignore[attr-defined]
        self._given_windows: GivenWindows | None = None
        if options.test_windows is not None:
            self._given_windows = GivenWindows(
                options.test_windows, width, options.test_windows_seed
            )
        self.dspark_totals = OutcomeTotals(width)
        self._outcome_log = OutcomeLog(options.record_outcomes) if options.record_outcomes else None
        # admitted drafts of each request in the step being scheduled, where the plan cut any
        self._drafted: dict[str, int] = {}

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's schedule, after this step's windows were applied to the running requests."""
        self._drafted = self._cap_drafts()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        output.dspark_drafted = self._drafted
        return output

    def _cap_drafts(self) -> dict[str, int]:
        """Cut each request's drafts to its window; returns how many had been drafted."""
        drafting = [r for r in self.running if r.spec_token_ids]  # type: ignore[attr-defined]
        drafted = {r.request_id: len(r.spec_token_ids) for r in drafting}
        if self._given_windows is not None and drafting:
            for request, window in zip(
                drafting, self._given_windows.next(len(drafting)), strict=True
            ):
                if window - 1 < len(request.spec_token_ids):
                    request.spec_token_ids = request.spec_token_ids[: window - 1]
        return drafted

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's update, after recording what became of this step's drafts."""
        outcomes = self._outcomes(scheduler_output, model_runner_output)
        if outcomes:
            self.dspark_totals.add(outcomes)
            if self._outcome_log is not None:
                self._outcome_log.write(self.dspark_totals.steps, outcomes)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _outcomes(self, scheduler_output: Any, model_runner_output: Any) -> list[RequestOutcome]:
        sampled = model_runner_output.sampled_token_ids
        if not sampled:
            return []
        drafted: dict[str, int] = getattr(scheduler_output, "dspark_drafted", {})
        verified = scheduler_output.scheduled_spec_decode_tokens
        invalid = scheduler_output.num_invalid_spec_tokens or {}
        outcomes = []
        for request_id, num_drafted in drafted.items():
            index = model_runner_output.req_id_to_index.get(request_id)
            if index is None or request_id not in scheduler_output.num_scheduled_tokens:
                continue
            if not sampled[index]:  # a chunk of a resumed prefill: nothing was verified
                continue
            admitted = len(verified.get(request_id, ()))
            scored = admitted - invalid.get(request_id, 0)
            accepted = min(len(sampled[index]) - 1, scored)
            outcomes.append(RequestOutcome(request_id, num_drafted, admitted, scored, accepted))
        return outcomes

    def shutdown(self) -> None:
        """vLLM's shutdown, then the outcome log is closed."""
        super().shutdown()  # type: ignore[misc]
        if self._outcome_log is not None:
            self._outcome_log.close()


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """Late factory: async scheduling is settled only when the engine core starts."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as Base  # type: ignore[assignment]

    scheduler_class = type(f"DSpark{Base.__name__}", (DSparkSchedulerMixin, Base), {})
    return scheduler_class(vllm_config=vllm_config, **kwargs)
