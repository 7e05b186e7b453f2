"""Engine-core side of metrics: gathers the running sums once per step and publishes them.

Publishing is one concatenation of arrays that live elsewhere (metrics_totals.py, outcomes.py) and
one copy into the mapped file. It is done at most every 0.2 s while steps follow each other, and at
once where a request ends, so that nothing is lost when an engine goes idle. What costs more than
that (calibration error, drift) is worked out once a second.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.carrier import carried_by
from vllm_dspark.integration.conductor import Conductor
from vllm_dspark.integration.metrics_catalog import COST_GRIDS, catalog
from vllm_dspark.integration.metrics_collector import open_sinks
from vllm_dspark.integration.metrics_files import Sink
from vllm_dspark.integration.metrics_log import SummaryLog
from vllm_dspark.integration.metrics_totals import PlanTotals
from vllm_dspark.integration.outcomes import OutcomeTotals, StepOutcomes
from vllm_dspark.integration.report import StepOrder, StepReport
from vllm_dspark.planning.plan import PlanKind, VerifyPlan

_PERIOD_S = 0.2  # between publications while steps follow each other
_SLOW_PERIOD_S = 1.0
_GRID_INDEX = {name: i for i, name in enumerate(COST_GRIDS)}


class EngineMetrics:
    """All metrics of one engine; `step` after each of its steps."""

    def __init__(
        self,
        conductor: Conductor,
        totals: OutcomeTotals,
        drift_limit: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        width = totals.num_speculative_tokens
        self.families = catalog(width, conductor.off_reason)
        self.plans = PlanTotals(width)
        self.sinks: list[Sink] = []
        self.log: SummaryLog | None = None
        self._conductor = conductor
        self._totals = totals
        self._drift_limit = drift_limit
        self._clock = clock
        self._next_slow = self._next_publication = clock()
        self._rested: tuple[VerifyPlan, int, int] | None = None  # plan, steps, tokens
        self._rested_unplanned = 0
        self._ece = np.full(width, np.nan)
        self._cost_ratio = np.full(len(COST_GRIDS), np.nan)
        self._single = {
            name: np.zeros(1)
            for name in ("unpaired", "calibration_updates", "drifted", "scheduling")
        }
        self._arrays = self._sources()
        sizes = [family.size for family in self.families]
        if sizes != [array.size for array in self._arrays]:
            raise AssertionError("metrics: the sources do not match the catalog")
        self._values = np.zeros(sum(sizes))

    @classmethod
    def of_engine(
        cls, vllm_config: Any, options: DSparkConfig, conductor: Conductor, totals: OutcomeTotals
    ) -> "EngineMetrics":
        """With the file and the log line that the options ask for."""
        metrics = cls(conductor, totals, options.cost_drift_limit)
        carried = carried_by(vllm_config)
        engine = vllm_config.parallel_config.data_parallel_index
        if options.metrics and carried is not None and carried.metrics_place is not None:
            labels = (str(vllm_config.model_config.served_model_name), str(engine))
            width, off_reason = totals.num_speculative_tokens, conductor.off_reason
            metrics.sinks = open_sinks(carried.metrics_place, labels, width, off_reason)
        if options.log_interval_s > 0:
            prefix = f"engine {engine}: " if engine else ""
            metrics.log = SummaryLog(metrics.families, options.log_interval_s, prefix=prefix)
        for reason in carried.declined if carried is not None else ():
            metrics.plans.decline(reason)
        metrics.publish()
        return metrics

    def step(
        self,
        order: StepOrder,
        outcomes: StepOutcomes | None,
        report: StepReport | None,
        *,
        last: bool = True,
    ) -> None:
        """Count one step that has come back, and publish.

        last: no step may follow soon; while steps do, a publication now and then is enough.
        """
        plan = order.plan
        if plan is None and order.request_ids:
            off = self._conductor.off_reason
            self.plans.decline("scheduling_off" if off else "no_cost_table")
        elif plan is not None and self._conductor.device_windows and plan.kind is PlanKind.TRIM:
            refused = report is not None and report.admitted is None
            if refused:
                self.plans.decline("plan_refused")
        emitted = float(np.add.reduce(outcomes.emitted)) if outcomes is not None else 0.0
        self.plans.add(plan, emitted)
        self._publish_if_due(last)

    def step_at_rest(self, order: StepOrder, emitted: int) -> None:
        """Count a step of which nothing else is to be known; others follow."""
        plan = order.plan
        if plan is None:
            self._rested_unplanned += 1
        elif (
            self._rested is not None
            and self._rested[0].reason is plan.reason
            and self._rested[0].predicted_tokens == plan.predicted_tokens
        ):
            self._rested = (self._rested[0], self._rested[1] + 1, self._rested[2] + emitted)
        else:
            self._count_rested()
            self._rested = (plan, 1, emitted)
        self._publish_if_due(last=False)

    def _count_rested(self) -> None:
        """Add the steps at rest that were only noted; they repeat one plan."""
        if self._rested_unplanned:
            self.plans.add(None, 0.0, self._rested_unplanned)
            self.plans.decline("scheduling_off", self._rested_unplanned)
            self._rested_unplanned = 0
        if self._rested is not None:
            plan, steps, emitted = self._rested
            self.plans.add(plan, float(emitted), steps)
            self._rested = None

    def _publish_if_due(self, last: bool) -> None:
        now = self._clock()
        if self.log is not None:
            self.log.tick(self._values)
        if last or now >= self._next_publication:
            self.publish()

    def close(self) -> None:
        """Write what is left of the log and take the files away."""
        if self.log is not None:
            self._next_slow = -np.inf
            self.publish()
            self.log.flush(self._values)
            self.log = None
        while self.sinks:
            self.sinks.pop().close()

    def publish(self) -> None:
        """Bring all values up to date, here and in the files."""
        now = self._clock()
        self._next_publication = now + _PERIOD_S
        if now >= self._next_slow:
            self._refresh()
        self._totals.derive()
        self._count_rested()
        np.concatenate(self._arrays, out=self._values)
        for sink in self.sinks:
            sink.publish(self._values)

    def _refresh(self) -> None:
        """What is too dear for every step."""
        self._next_slow = self._clock() + _SLOW_PERIOD_S
        table, planner = self._conductor.table, self._conductor.planner
        single = self._single
        single["unpaired"][0] = table.unpaired
        single["calibration_updates"][0] = table.online.version
        single["scheduling"][0] = planner is not None and planner.cost is not None
        seen = table.live.paired > 0
        self._ece[:] = np.where(seen, table.live.ece(), np.nan)
        if planner is None or planner.cost is None:
            return
        # Worst first, so the last one written of each grid is the worst.
        for cell in reversed(planner.cost.drift(0.0)):
            self._cost_ratio[_GRID_INDEX[cell.grid]] = cell.ratio
        single["drifted"][0] = len(planner.cost.drift(self._drift_limit))

    def _sources(self) -> list[npt.NDArray[Any]]:
        """The arrays behind the families, in catalog order."""
        totals, plans, single = self._totals, self.plans, self._single  # rows are views
        rows, times, live = self._conductor.rows, self._conductor.times, self._conductor.table.live
        by_name: dict[str, npt.NDArray[Any]] = {
            "drafted_tokens": totals.drafted,
            "admitted_tokens": totals.admitted,
            "trimmed_tokens": totals.trimmed,
            "verified_tokens": totals.verified,
            "judged_tokens": totals.judged,
            "accepted_tokens": totals.accepted,
            "window": totals.windows,
            "request_steps": totals.rows,
            "emitted_tokens": totals.emitted,
            "discarded_tokens": totals.discarded,
            "draft_width": np.array([totals.num_speculative_tokens]),
            "steps": plans.steps,
            "draft_passes": plans.drafted,
            "draft_pass_width": plans.pass_width,
            "draft_pass_reasons": plans.width_reasons,
            "skipped_draft_passes": plans.skipped,
            "probes": plans.probes,
            "paired_drafts": live.paired,
            "predicted_accepted": live.predicted,
            "realised_accepted": live.realised,
            "ece": self._ece,
            "predicted_tokens": plans.predicted,
            "realised_tokens": plans.realised,
            "confidence_rows": rows.states,
            "neutral_requests": rows.neutral,
            "invalid_confidences": rows.invalid,
            "unpaired_outcomes": single["unpaired"],
            "calibration_updates": single["calibration_updates"],
            "timed_steps": times.timed,
            "measured_step_seconds": times.measured_s,
            "predicted_step_seconds": times.predicted_s,
            "measured_draft_seconds": times.draft_s,
            "step_time_ratio": times.ratio,
            "cost_ratio": self._cost_ratio,
            "cost_drifted_cells": single["drifted"],
            "scheduling": single["scheduling"],
            "fallbacks": plans.fallbacks,
        }
        return [by_name[family.name] for family in self.families]
