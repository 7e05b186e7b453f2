"""What the conductor learns from steps that have come back: outcomes, confidence rows and times."""

import logging

import numpy as np

from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.integration.metrics_totals import StepTimes
from vllm_dspark.integration.outcomes import StepOutcomes
from vllm_dspark.integration.report import StepOrder, StepReport
from vllm_dspark.integration.resting import RestingSteps, off_rest
from vllm_dspark.planning.cost import CostTable, StepMode, StepTiming
from vllm_dspark.planning.lookup import SlotLookup
from vllm_dspark.planning.observed import ObservedCosts
from vllm_dspark.planning.survival import stamp_age

logger = logging.getLogger("vllm.vllm_dspark")

# Of large steps at most one in so many corrects prices, as on CUDA one in so many of all is timed:
# the correction is slow anyway, and in the engine core's time it is not free.
_MANY_REQUESTS, _TIMED_PERIOD = 64, 4


class LearningSteps(RestingSteps):
    """The conductor's part of it; it has what is declared here."""

    times: StepTimes
    _judged: SlotLookup
    _drafted: SlotLookup
    _observed: ObservedCosts
    _timed_step: int = 0

    def withdraw(self, reason: str) -> None:
        """Plan nothing from now on."""
        raise NotImplementedError

    def _start_planning(self, table: CostTable | None) -> None:
        raise NotImplementedError

    def learn(
        self,
        report: StepReport | None,
        outcomes: StepOutcomes | None,
        order: StepOrder | None = None,
    ) -> None:
        """Take in outcomes, rows and times of a step that has come back; order: what it ran by."""
        if self._recorder is not None:
            self._recorder.record(self.step_id, report, outcomes)
        rest = self._rest()
        sets_windows = order is not None and order.sets_windows
        # Outcomes before rows: on a CPU a report brings the rows of the pass after the judged one,
        # which would overwrite the rows that these outcomes are about.
        if outcomes is not None:
            self.catch_up()
            if order is None or not sets_windows:
                self._take_outcomes(outcomes, counted=rest > 0)
            else:  # windows follow what each request accepts, so nothing of that is left out
                self._take_outcomes(outcomes, followed=order.repeats)
        if report is None:
            return
        if report.refused:
            self.withdraw(report.refused)
        # The last rows before outcomes are learned from again pair with those.
        if rest < 2 or (sets_windows and self.table.awaits_rows):
            self._take_rows(report)
        waiting = self.planner is None or self.planner.cost is None
        if report.cost_table is not None and waiting and not self.off_reason:
            record = CostTableRecord.model_validate_json(report.cost_table)
            self._start_planning(record.to_table())
        for timing in report.timings if not rest else ():
            self._take_timing(timing)

    def _take_timing(self, timing: StepTiming) -> None:
        planner = self.planner
        # Of steps with prefill rows each counts: their prices come from nothing else.
        if timing.num_requests >= _MANY_REQUESTS and timing.mode is not StepMode.MIXED:
            if stamp_age(self.step_id, self._timed_step) < _TIMED_PERIOD:
                return
            self._timed_step = self.step_id
        if planner is not None and planner.cost is not None:
            self.times.add(timing, planner.cost)
            planner.cost.observe(timing)
        elif not self.off_reason:
            table = self._observed.add(timing)
            if table is not None:
                logger.info("vllm-dspark: steps are priced from what was served from now on")
                self._start_planning(table)

    def _rest(self) -> int:
        """Steps from now on in which nothing that comes in is needed for a decision soon.

        Where nothing is ever scheduled, some steps still serve the quality metrics.
        """
        batch = self._resting
        if batch is not None:
            if batch.cuts is None or batch.planner is None:
                return 2
            return max(batch.planner.rest - batch.done, 0)  # the next plan uses the newest rows
        if self.off_reason:
            return off_rest(self.step_id)
        return self.planner.rest if self.planner is not None else 0

    def _take_outcomes(
        self, outcomes: StepOutcomes, *, counted: bool = False, followed: bool = False
    ) -> None:
        """Learn from outcomes; only about their requests if followed, not at all if counted."""
        # Nothing is known of drafts behind a stop: to the learner they were never verified.
        verified, accepted, stamps = outcomes.before_stop, outcomes.accepted, outcomes.stamps
        found = self._judged.of(outcomes.request_ids)
        slots = found.slots
        if found.known is not None:
            keep = found.known
            verified, accepted, stamps = verified[keep], accepted[keep], stamps[keep]
        if counted:
            self.table.count_emitted(slots, accepted)
        elif followed:
            self.table.record_repeated(slots, verified, accepted[None])
        if counted or followed or not slots.size:
            return
        first = int(stamps[0])
        if (stamps == first).all():
            self.table.record_outcomes(slots, first, verified, accepted)
            return
        for stamp in np.unique(stamps).tolist():
            of = stamps == stamp
            self.table.record_outcomes(slots[of], stamp, verified[of], accepted[of])

    def _take_rows(self, report: StepReport) -> None:
        if report.stamp == 0:
            return
        owners, rows = report.owners, report.confidences
        found = self._drafted.of(report.request_ids)
        if found.known is not None:
            owners, rows = owners[found.known], rows[found.known]
        if found.slots.size:
            self.table.record_rows(found.slots, owners, report.stamp, rows)
