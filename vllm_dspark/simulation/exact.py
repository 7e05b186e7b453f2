"""The simulated world around planning's own objects, as integration/conductor.py uses them."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.allocation import allocate
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable, StepMode
from vllm_dspark.planning.facts import StepFacts
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.survival import acceptance, survival
from vllm_dspark.planning.table import RequestTable
from vllm_dspark.simulation.core import entry, state
from vllm_dspark.simulation.scenario import Scenario
from vllm_dspark.simulation.setup import Arrays, decode_mode

IntArray = npt.NDArray[np.integer]

_KINDS = {kind: index for index, kind in enumerate(PlanKind)}
_REASONS = {reason: index for index, reason in enumerate(Reason)}


class RealPlanner:
    """Steps the world of `arrays` with one Planner and RequestTable per replica."""

    def __init__(
        self, arrays: Arrays, table: CostTable, calibration: Calibration, scenario: Scenario
    ) -> None:
        self.arrays = arrays
        self.device = scenario.windows == "device"
        self.mode = decode_mode(table)
        self.lag = scenario.row_lag
        width = calibration.num_positions
        replicas, slots = len(arrays.world.clock), arrays.world.batch.shape[1]
        options = replace(scenario.options, device_windows=self.device)
        self.planners = [Planner(CostModel(table, online=False), options) for _ in range(replicas)]
        self.tables = [
            RequestTable(
                width,
                slots,
                calibration,
                rank_by_posterior=not self.device,
                online_calibration=scenario.online_calibration,
            )
            for _ in range(replicas)
        ]
        self._names: list[list[str]] = [[""] * slots for _ in range(replicas)]
        self._repeated = False  # the last plan repeats the one before it

    def run(self, max_steps: int) -> int:
        """Run to the end or for `max_steps`; returns the steps made."""
        a = self.arrays
        entry.start(a.world, a.load)
        for steps in range(max_steps):
            if self.step() is None:
                return steps
        return max_steps

    def step(self) -> tuple[VerifyPlan | None, int] | None:
        """One step: (its plan, requests decoded); None when all is done."""
        a, w = self.arrays, self.arrays.world
        d, n, drafts, kv_tokens, mixed = entry.begin(w, a.load)
        if d < 0:
            return None
        order = w.batch[state.ORDER, :n].copy()
        made_by = int(w.slot[d, state.STAMP, order[0]]) if n else 0
        plan = None
        kind, draft_next = state.NATIVE, True
        if n:
            plan = self._plan(d, order, drafts, kv_tokens, mixed, made_by)
            kind, draft_next = _KINDS[plan.kind], plan.draft_next
            w.kinds[kind, _REASONS[plan.reason]] += 1
        entry.schedule(w, a.load, a.requests, d, n)
        self._add(d)
        finished_from = int(w.counts[state.DONE])
        entry.complete(w, a.load, a.requests, a.costs, d, n, kind, draft_next)
        self._learn(d, order, made_by, plan)
        if w.counts[state.DONE] != finished_from:
            for slot in w.batch[state.FINISHED, : w.counts[state.N_FINISHED]].tolist():
                self.tables[d].remove(self._names[d][slot])
        return plan, n

    def _plan(
        self,
        d: int,
        order: IntArray,
        drafts: int,
        kv_tokens: int,
        mixed: bool,
        stamp: int,
    ) -> VerifyPlan:
        w, table = self.arrays.world, self.tables[d]
        facts = StepFacts(
            step_id=int(w.rep[d, state.STEP]) + 1,
            mode=StepMode.MIXED if mixed else self.mode,
            native_mode=StepMode.MIXED if mixed else self.mode,
            kv_tokens=int(kv_tokens),
            num_waiting=int(w.rep[d, state.QUEUE_SIZE]),
            num_arrived=int(w.rep[d, state.ARRIVED]),
        )
        w.rep[d, state.ARRIVED] = 0
        slots = table.slots(self._names[d][slot] for slot in order.tolist())
        counts = np.full(order.size, drafts, dtype=np.int32)
        plan = self.planners[d].shortcut(facts, table.owners(slots), counts)
        self._repeated = plan is not None
        if plan is None:
            stamps = np.full(order.size, stamp, dtype=np.int32)
            plan = self.planners[d].plan(facts, table.batch(slots, counts, stamps))
        admitted: IntArray = counts
        if plan.kind is PlanKind.TRIM and self.device:
            admitted = self._spread(d, order, slots, plan.budget)
        elif plan.windows:
            admitted = np.array(plan.windows, dtype=np.int32) - 1
        elif plan.kind is PlanKind.SKIP_DRAFT:
            admitted = np.zeros_like(counts)
        w.batch[state.TAKEN, : order.size] = admitted
        return plan

    def _spread(
        self,
        d: int,
        order: IntArray,
        slots: IntArray,
        budget: int,
    ) -> IntArray:
        """device_windows.py: the budget by the confidences of the drafts at hand."""
        w, table = self.arrays.world, self.tables[d]
        width = table.num_positions
        place = int(w.slot[d, state.STAMP, order[0]]) % state.HISTORY
        rows = np.ascontiguousarray(w.row[d, place, order].T)
        ranking = table.ranking_parameters()
        sampled = table._flags[0, slots]
        prior = ranking.prior[sampled.astype(np.intp)].T.astype(np.float32)
        usable = np.ones(order.size, dtype=np.bool_)
        estimate, _ = acceptance(rows, usable, prior, ranking.calibration, sampled)
        remaining = table._state[7, slots]
        capacity = np.clip(remaining - 1, 0, width).astype(np.int32)
        if capacity.sum() < budget:
            capacity = np.full(order.size, width, dtype=np.int32)
        return np.asarray(allocate(survival(estimate), capacity, np.zeros_like(capacity), budget))

    def _add(self, d: int) -> None:
        a, w = self.arrays, self.arrays.world
        for slot in w.batch[state.STARTED, : w.counts[state.N_STARTED]].tolist():
            j = int(w.slot[d, state.INSTANCE, slot])
            request = int(a.load.trace[j])
            name = f"request-{j}"
            self._names[d][slot] = name
            self.tables[d].add(
                name,
                sampled=bool(a.requests.request[state.R_SAMPLED, request]),
                remaining=int(a.requests.request[state.R_LIMIT, request]) - 1,
            )

    def _learn(self, d: int, order: IntArray, made_by: int, plan: VerifyPlan | None) -> None:
        w, table = self.arrays.world, self.tables[d]
        n = order.size
        names = [self._names[d][slot] for slot in order.tolist()]
        rest = self.planners[d].rest
        slots = table.slots(names)
        judged, passed = (w.batch[row, :n].astype(np.int64) for row in (state.JUDGED, state.PASSED))
        sets_windows = plan is not None and plan.sets_windows
        if sets_windows and self._repeated:
            table.record_repeated(slots, judged, passed[None])
        elif rest and n and not sets_windows:
            table.count_emitted(slots, passed)
        elif n:
            table.record_outcomes(slots, made_by, judged, passed)
        step = int(w.rep[d, state.STEP])
        place = (step - self.lag) % state.HISTORY
        shown = int(w.row_stamp[d, place])
        wanted = rest < 2 or (sets_windows and table.awaits_rows)
        if not wanted or shown == 0 or shown != step - self.lag:
            return
        where = [*order.tolist(), *w.batch[state.PREFILLED, : w.counts[state.N_PREFILLED]].tolist()]
        where = [s for s in where if w.row_owner[d, place, s] == w.slot[d, state.INSTANCE, s] + 1]
        if where:
            slots = table.slots(self._names[d][slot] for slot in where)
            table.record_rows(slots, table.owners(slots), shown, w.row[d, place, where])
