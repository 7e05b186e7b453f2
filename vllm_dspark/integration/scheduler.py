"""Scheduler of the engine core: decides how many drafts each request verifies."""

import logging
from typing import Any

import numpy as np

from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.carrier import options_of
from vllm_dspark.integration.conductor import Conductor, ScheduledStep, StepOutlook
from vllm_dspark.integration.exclusions import undeclared_processors
from vllm_dspark.integration.metrics import EngineMetrics
from vllm_dspark.integration.metrics_correction import Corrections
from vllm_dspark.integration.outcomes import OutcomeLog, OutcomeTotals, PendingOutcomes
from vllm_dspark.integration.pipeline import PipelineSchedulerMixin
from vllm_dspark.integration.report import StepOrder, attach_order, order_of, report_of
from vllm_dspark.integration.startup import (
    require_schedulable,
    require_servable,
    resolve_scheduling,
    settle_windows,
    step_modes,
)
from vllm_dspark.planning.plan import PlanKind
from vllm_dspark.planning.table import RequestTable

logger = logging.getLogger("vllm.vllm_dspark")


class DSparkSchedulerMixin:
    """Applies windows before vLLM's `schedule`, learns before its `update_from_output`.

    Cutting drafts before scheduling gives the freed token budget to prefills that wait for it.
    """

    # of vLLM's Scheduler, which every user of this mixin derives from
    vllm_config: Any
    running: list[Any]
    waiting: Any
    requests: dict[str, Any]
    num_spec_tokens: int
    max_num_running_reqs: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = options_of(self.vllm_config) or DSparkConfig()
        width: int = self.num_spec_tokens
        self.dspark_totals = OutcomeTotals(width)
        self._outcome_log = OutcomeLog(options.record_outcomes) if options.record_outcomes else None
        self.conductor = self._make_conductor(options, width)
        self._corrections = Corrections()
        self.dspark_metrics = EngineMetrics.of_engine(
            self.vllm_config, options, self.conductor, self.dspark_totals
        )

    def _make_conductor(self, options: DSparkConfig, width: int) -> Conductor:
        vllm_config = self.vllm_config
        require_servable(vllm_config)
        resolution = resolve_scheduling(vllm_config, options)
        mode, why = settle_windows(vllm_config, options)
        require_schedulable(resolution.off_reason, options)
        for note in resolution.notes:
            logger.warning("vllm-dspark: %s", note)
        if resolution.off_reason:
            logger.info("vllm-dspark: full windows: %s", resolution.off_reason)
        else:
            logger.info("vllm-dspark: windows are set on the %s: %s", mode, why)
        table = RequestTable(
            width,
            self.max_num_running_reqs,
            resolution.calibration,
            rank_by_posterior=mode == "host",
            online_calibration=options.online_calibration,
        )
        ragged, native = step_modes(vllm_config)
        return Conductor(
            table,
            resolution,
            options,
            ragged,
            device_windows=mode == "device",
            processors=undeclared_processors(vllm_config),
            max_model_len=vllm_config.model_config.max_model_len,
            native_mode=native,
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's schedule, after this step's windows were applied to the running requests."""
        drafting = [r for r in self.running if r.spec_token_ids]
        order = self.conductor.order(drafting, self._outlook(drafting))
        self._cut_drafts(drafting, order)
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        attach_order(output, self.conductor.scheduled(order, self._scheduled(output, order)))
        return output

    def _cut_drafts(self, drafting: list[Any], order: StepOrder) -> None:
        """Leave each request the drafts that its window admits, or none where none were made."""
        kind = order.plan.kind if order.plan is not None else PlanKind.NATIVE
        if kind is PlanKind.SKIP_DRAFT:
            kept = [0] * len(drafting)
        elif kind is PlanKind.TRIM and not self.conductor.device_windows:
            kept = [window - 1 for window in order.plan.windows]  # type: ignore[union-attr]
        elif np.count_nonzero(order.draft_stamps) == len(drafting):
            return  # all drafts there are
        else:
            kept = order.num_drafts.tolist()
        for request, drafts in zip(drafting, kept, strict=True):
            if drafts < len(request.spec_token_ids):
                request.spec_token_ids = request.spec_token_ids[:drafts]

    def _outlook(self, drafting: list[Any]) -> StepOutlook:
        running = self.running
        num_waiting = len(self.waiting)
        has_room = len(running) < self.max_num_running_reqs
        return StepOutlook(
            mixed=len(drafting) < len(running) or (num_waiting > 0 and has_room),
            num_waiting=num_waiting,
            kv_tokens=sum([r.num_computed_tokens for r in drafting]),
        )

    def _scheduled(self, output: Any, order: StepOrder) -> ScheduledStep:
        requests = self.requests
        sampling = list(output.num_scheduled_tokens)
        if sampling != order.request_ids:  # what has drafts is past its prefill
            sampling = [name for name in sampling if not requests[name].is_prefill_chunk]
        return ScheduledStep(
            started=[requests[new.req_id] for new in output.scheduled_new_reqs],
            preempted=output.preempted_req_ids or (),
            finished=output.finished_req_ids,
            sampling_ids=sampling,
            tokens=output.num_scheduled_tokens,
            num_tokens=output.total_num_scheduled_tokens,
            drafts=output.scheduled_spec_decode_tokens,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's update, then learning what became of this step's drafts."""
        order = order_of(scheduler_output)
        if order is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        pending = PendingOutcomes(
            scheduler_output, model_runner_output, order, self.num_spec_tokens, self._is_alive
        )
        self._corrections.begin(self, pending.request_ids)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        report = report_of(model_runner_output)
        admitted = report.admitted if report is not None else None
        outcomes = pending.finish(self._corrections.counted, admitted)
        self._corrections.apply(outcomes)
        self.conductor.learn(report, outcomes)
        self.dspark_totals.add(outcomes)
        self.dspark_metrics.step(order, outcomes, report)
        if self._outcome_log is not None and outcomes is not None:
            self._outcome_log.write(order.step_id, outcomes)
        return outputs

    def make_spec_decoding_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's acceptance counts, which are corrected once its update is over."""
        make = super().make_spec_decoding_stats  # type: ignore[misc]
        return self._corrections.note(make, *args, **kwargs)

    def _is_alive(self, request_id: str) -> bool:
        request = self.requests.get(request_id)
        return request is not None and not request.is_finished()

    def shutdown(self) -> None:
        """vLLM's shutdown, then the outcome log and the metrics are closed."""
        super().shutdown()  # type: ignore[misc]
        self.dspark_metrics.close()
        self.conductor.close()
        if self._outcome_log is not None:
            self._outcome_log.close()


def make_scheduler(vllm_config: Any, **kwargs: Any) -> Any:
    """Late factory: async scheduling is settled only when the engine core starts."""
    if vllm_config.scheduler_config.async_scheduling:
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler as Base
    else:
        from vllm.v1.core.sched.scheduler import Scheduler as Base  # type: ignore[assignment]

    bases: tuple[type, ...] = (DSparkSchedulerMixin, Base)
    if vllm_config.parallel_config.pipeline_parallel_size > 1:
        bases = (PipelineSchedulerMixin, *bases)
    scheduler_class = type(f"DSpark{Base.__name__}", bases, {})
    return scheduler_class(vllm_config=vllm_config, **kwargs)
