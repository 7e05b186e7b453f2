"""Scheduler of the engine core: decides how many drafts each request verifies."""

import logging
from typing import Any

import numpy as np

from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.batches import (
    Drafting,
    DraftingLookup,
    WorkerOrder,
    cut_drafts,
    cuts_to,
)
from vllm_dspark.integration.carrier import options_of
from vllm_dspark.integration.conductor import Conductor
from vllm_dspark.integration.draft_width import narrow_refusal
from vllm_dspark.integration.exclusions import undeclared_processors
from vllm_dspark.integration.metrics import EngineMetrics
from vllm_dspark.integration.metrics_correction import Corrections, emitting, per_request
from vllm_dspark.integration.outcomes import (
    OutcomeLog,
    OutcomeTotals,
    PendingOutcomes,
)
from vllm_dspark.integration.pipeline import PipelineSchedulerMixin
from vllm_dspark.integration.report import (
    StepOrder,
    StepReport,
    attach_order,
    order_of,
    report_of,
)
from vllm_dspark.integration.rested_counts import RestedStep, more_than
from vllm_dspark.integration.scheduled_step import ScheduledStep, StepOutlook
from vllm_dspark.integration.startup import (
    require_schedulable,
    require_servable,
    resolve_scheduling,
    settle_windows,
    step_modes,
)
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
    max_num_scheduled_tokens: int
    finished_req_ids: set[str]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        options = options_of(self.vllm_config) or DSparkConfig()
        width: int = self.num_spec_tokens
        self.dspark_totals = OutcomeTotals(width)
        self._outcome_log = OutcomeLog(options.record_outcomes) if options.record_outcomes else None
        self.conductor = self._make_conductor(options, width)
        self._corrections = Corrections()
        self._drafting = DraftingLookup()
        self._worker_order = WorkerOrder()
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
            found = "; ".join(resolution.used) or "no cost table or calibration yet"
            logger.info("vllm-dspark: found %s", found)
        full_width = narrow_refusal(vllm_config, options)
        if full_width and not resolution.off_reason:
            logger.info("vllm-dspark: draft passes keep full width: %s", full_width)
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
            narrow_drafts=not full_width,
        )

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's schedule, after this step's windows were applied to the running requests."""
        conductor = self.conductor
        has_room = len(self.running) < self.max_num_running_reqs
        order = conductor.rest(self.running, len(self.waiting), has_room)
        if order is None:
            drafting = self._drafting.of(self.running)
            order = conductor.order(drafting, self._outlook(len(drafting.requests)))
            self._cut_drafts(drafting, order)
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        else:
            output = super().schedule(*args, **kwargs)  # type: ignore[misc]
            if conductor.rested(order, output):
                attach_order(output, order)
                return output
            order = conductor.disturbed(order, output.scheduled_spec_decode_tokens)
        order = conductor.scheduled(order, self._scheduled(output, order))
        if order.draft_width is not None:
            output.num_spec_tokens_to_schedule = order.draft_width
            if self.vllm_config.scheduler_config.async_scheduling:
                self._shorten_placeholders(output, order.draft_width)
        attach_order(output, order)
        conductor.settle_down(order, self.running, self.max_num_scheduled_tokens)
        return output

    def _cut_drafts(self, drafting: Drafting, order: StepOrder) -> None:
        """Leave each request the drafts that its window admits, or none where none were made."""
        kept = self.conductor.kept(order)
        all_drafted = np.count_nonzero(order.draft_stamps) == order.draft_stamps.size
        if kept is order.num_drafts and all_drafted:
            return  # all drafts there are
        order.cuts = cuts_to(drafting.requests, kept.tolist(), self.num_spec_tokens)
        cut_drafts(order.cuts)

    def _shorten_placeholders(self, output: Any, width: int) -> None:
        """Of the drafts that a narrow pass will make; vLLM handed out as many as it assumed."""
        placeholders = [-1] * width
        for name in output.num_scheduled_tokens:
            request = self.requests[name]
            if len(request.spec_token_ids) > width:
                request.spec_token_ids = placeholders

    def _outlook(self, num_drafting: int) -> StepOutlook:
        num_running, num_waiting = len(self.running), len(self.waiting)
        has_room = num_running < self.max_num_running_reqs
        mixed = num_drafting < num_running or (num_waiting > 0 and has_room)
        return StepOutlook(mixed, num_waiting)

    def _scheduled(self, output: Any, order: StepOrder) -> ScheduledStep:
        requests = self.requests
        ids = sampling = list(output.num_scheduled_tokens)
        if ids == order.request_ids:  # what has drafts is past its prefill
            ids = sampling = order.request_ids
        else:
            sampling = [name for name in ids if not requests[name].is_prefill_chunk]
        return ScheduledStep(
            started=[requests[new.req_id] for new in output.scheduled_new_reqs],
            preempted=output.preempted_req_ids or (),
            finished=output.finished_req_ids,
            sampling_ids=sampling,
            ids=ids,
            tokens=output.num_scheduled_tokens,
            num_tokens=output.total_num_scheduled_tokens,
            drafts=output.scheduled_spec_decode_tokens,
        )

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's update, then learning what became of this step's drafts."""
        order = order_of(scheduler_output)
        if order is None:
            return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        # vLLM shortens the lists of sampled tokens in place where a request stops. As bytes, since
        # those are made, searched and counted faster than anything else that holds small numbers.
        lengths = bytes(map(len, model_runner_output.sampled_token_ids))
        report = report_of(model_runner_output)
        resting = order.unseen and self._rests(
            scheduler_output, model_runner_output, order, lengths, report
        )
        self._corrections.begin(self, () if resting else order.request_ids)
        before = len(self.running), len(self.waiting)
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        # Whoever stops leaves the running requests, or the waiting ones if it was preempted.
        stopped = (len(self.running), len(self.waiting)) != before
        if resting and not stopped:
            self._count_rested(order, lengths, report)
            if report is not None:
                self.conductor.learn(report, None, order)
            return outputs
        where = self._worker_order
        places = where.places(
            order.request_ids, model_runner_output.req_ids, model_runner_output.req_id_to_index
        )
        pending = PendingOutcomes(
            scheduler_output,
            model_runner_output,
            order,
            self.num_spec_tokens,
            np.frombuffer(lengths, dtype=np.uint8).astype(np.int64),
            places,
            where.complete,
        )
        admitted = report.admitted if report is not None else None
        outcomes = pending.finish(emitting(outputs, order), admitted, stopped=stopped)
        self._corrections.apply(outcomes)
        self.conductor.learn(report, outcomes, order)
        self.dspark_totals.add(outcomes)
        self.dspark_metrics.step(order, outcomes, report, last=bool(self.finished_req_ids))
        if self._outcome_log is not None and outcomes is not None:
            self._outcome_log.write(order.step_id, outcomes)
        return outputs

    def _rests(
        self,
        scheduler_output: Any,
        model_runner_output: Any,
        order: StepOrder,
        lengths: bytes,
        report: StepReport | None,
    ) -> bool:
        """Whether outcomes need not be looked at one by one, unless a request stops."""
        batch, ids = self.conductor.resting_batch(), model_runner_output.req_ids
        if batch is None or batch.request_ids is not order.request_ids:
            return False
        if order.ranking is not None and (
            report is None or report.admitted is None or report.admitted.request_ids != ids
        ):
            return False  # who had which drafts verified is to be found out
        if batch.verified is None and order.sets_windows:
            index_of = model_runner_output.req_id_to_index
            batch.windows(self._worker_order.places(order.request_ids, ids, index_of))
        return (
            len(self.running) == len(lengths) == batch.size
            and batch.ran_in_order(ids)
            and 0 not in lengths
            and not scheduler_output.num_invalid_spec_tokens
            and self._outcome_log is None
            and not per_request(self)
        )

    def _count_rested(self, order: StepOrder, lengths: bytes, report: StepReport | None) -> None:
        """Totals of a step at rest, in which nobody stopped."""
        batch, width = self.conductor.resting_batch(), self.num_spec_tokens
        if batch is not None:
            batch.lengths.append(lengths)
        if batch is not None and batch.verified is not None:
            self.dspark_totals.add_windowed(lengths, batch.verified)
            verified, accepted = list(batch.verified.reached), more_than(lengths, width)[1:]
        else:
            if order.ranking is not None and report is not None and report.admitted is not None:
                step = RestedStep.trimmed(lengths, report.admitted.counts, width)
            else:
                step = RestedStep.native(lengths, width)
            self.dspark_totals.add_rested(len(lengths), step)
            verified, accepted = step.verified, step.accepted
        self._corrections.fill(verified[0], verified, accepted)
        self.dspark_metrics.step_at_rest(order, len(lengths) + sum(accepted))

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, *, request_id: str, **counts: Any
    ) -> Any:
        """vLLM's acceptance counts, begun by vLLM and filled in once its update is over."""
        if spec_decoding_stats is None:
            make = super().make_spec_decoding_stats  # type: ignore[misc]
            spec_decoding_stats = make(None, request_id=request_id, **counts)
            self._corrections.stats = spec_decoding_stats
        return spec_decoding_stats

    def finish_requests(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's; what was counted so far is published, as no step may follow."""
        finished = super().finish_requests(*args, **kwargs)  # type: ignore[misc]
        self.dspark_metrics.publish()
        return finished

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
