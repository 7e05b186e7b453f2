"""Arrays for the compiled core, from trace, cost table, calibration and scenario."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import SimulationError
from vllm_dspark.planning import posterior
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostGrid, CostTable, StepMode, StepShape
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.online_cost import _KV_STEPS
from vllm_dspark.planning.plan import Reason, owner_id
from vllm_dspark.simulation.core import state
from vllm_dspark.simulation.scenario import POLICY_CODES, Scenario
from vllm_dspark.simulation.trace import Trace

_FALLBACK_MODES = (StepMode.PIECEWISE, StepMode.EAGER)
_DECODE_MODES = (StepMode.FULL, StepMode.PIECEWISE, StepMode.EAGER)


@dataclass(frozen=True)
class Arrays:
    """Everything one run works on."""

    world: state.World
    learner: state.Learner
    planner: state.Planner
    options: state.Options
    load: state.Load
    requests: state.Requests
    costs: state.Costs


def decode_mode(table: CostTable) -> StepMode:
    """How decode steps of the table's engine run."""
    for mode in _DECODE_MODES:
        if table.resolve(mode, StepShape.RAGGED) is not None:
            return mode
    raise SimulationError("the cost table prices no decode steps; measure one again")


def cost_arrays(table: CostTable, allocation: bool) -> state.Costs:
    """The table for the core; allocation: ragged steps pay the ranking on the device."""
    mode = decode_mode(table)
    grids: dict[int, CostGrid | None] = {
        state.RAGGED: _grid(table, mode, StepShape.RAGGED),
        state.UNIFORM: _grid(table, mode, StepShape.NATIVE),
        state.SINGLE: _grid(table, mode, StepShape.SINGLE),
        state.MIXED: _grid(table, StepMode.MIXED, StepShape.RAGGED),
    }
    if mode is StepMode.FULL:
        for g, shape in (
            (state.UNIFORM_FALLBACK, StepShape.NATIVE),
            (state.SINGLE_FALLBACK, StepShape.SINGLE),
        ):
            found = (_grid(table, other, shape) for other in _FALLBACK_MODES)
            grids[g] = next((grid for grid in found if grid is not None), None)
    present = {g: grid for g, grid in grids.items() if grid is not None}
    nodes = max(len(grid.kv_tokens) for grid in present.values())
    sizes = max(len(grid.sizes) for grid in present.values())
    costs = state.Costs(
        shape=np.zeros((state.NUM_GRIDS, 3), dtype=np.int64),
        sizes=np.zeros((state.NUM_GRIDS, sizes), dtype=np.int64),
        kv=np.zeros((state.NUM_GRIDS, nodes), dtype=np.int64),
        cells=np.zeros((state.NUM_GRIDS, nodes, sizes)),
        draft=np.stack([table.draft.sizes, np.maximum.accumulate(table.draft.median_ms[0])]),
        overhead_ms=float(table.overhead_ms),
        allocation_ms=float(table.allocation_ms) if allocation else 0.0,
        padded=int(mode.padded),
    )
    for g, grid in present.items():
        rows, columns = grid.median_ms.shape
        quantum = max(1, grid.kv_tokens[-1] // _KV_STEPS)
        costs.shape[g] = columns, rows, quantum
        costs.sizes[g, :columns] = grid.sizes
        costs.kv[g, :rows] = grid.kv_tokens
        costs.cells[g, :rows, :columns] = np.maximum.accumulate(grid.median_ms, axis=1)
    return costs


def _grid(table: CostTable, mode: StepMode, shape: StepShape) -> CostGrid | None:
    key = table.resolve(mode, shape)
    return None if key is None else table.grids[key]


def option_numbers(options: PlannerOptions, device: bool) -> state.Options:
    """PlannerOptions for the core."""
    return state.Options(
        float(options.min_gain),
        int(options.hysteresis_steps),
        int(options.drain_guard),
        int(options.skip_draft),
        int(options.probe_interval),
        int(options.request_floor),
        int(device),
        int(options.lazy),
    )


def build(trace: Trace, table: CostTable, calibration: Calibration, scenario: Scenario) -> Arrays:
    """Fresh state for one run."""
    if calibration.num_positions != trace.width:
        raise SimulationError(
            f"the calibration has {calibration.num_positions} positions, the trace K = "
            f"{trace.width}; give one fitted for this K"
        )
    scenario.check_width(trace.width)
    options, device = scenario.options, scenario.windows == "device"
    ours = scenario.policy.name == "ours"
    costs = cost_arrays(table, allocation=device or not ours)
    slots = _slots(scenario)
    load = _load(trace, scenario)
    return Arrays(
        world=_world(scenario.replicas, slots, trace.width, scenario.num_requests),
        learner=_learner(scenario.replicas, slots, calibration),
        planner=_planner(scenario.replicas, slots, trace.width),
        options=option_numbers(options, device),
        load=load,
        requests=_requests(trace, scenario.prefill),
        costs=costs,
    )


def _slots(scenario: Scenario) -> int:
    """Slots that can be in use; fewer arrays than max_num_seqs where the load is small."""
    if scenario.arrivals.kind == "closed":
        return min(scenario.max_num_seqs, scenario.arrivals.concurrency)
    return min(scenario.max_num_seqs, scenario.num_requests)


def _load(trace: Trace, scenario: Scenario) -> state.Load:
    number, seed = scenario.num_requests, scenario.seed
    rng = np.random.default_rng(seed)
    rounds = -(-number // trace.num_requests)
    order = [np.arange(trace.num_requests)]
    order += [rng.permutation(trace.num_requests) for _ in range(rounds - 1)]
    owners = np.zeros(number, dtype=np.int64)
    if scenario.policy.name == "ours":
        owners[:] = [owner_id(f"request-{j}") for j in range(number)]
    closed = scenario.arrivals.kind == "closed"
    return state.Load(
        trace=np.concatenate(order)[:number].astype(np.int64),
        owner=owners,
        arrival_ms=scenario.arrivals.times_ms(number, seed + 1),
        concurrency=scenario.arrivals.concurrency if closed else 0,
        max_seqs=_slots(scenario),
        max_batched=scenario.max_num_batched_tokens,
        policy=POLICY_CODES[scenario.policy.name],
        knob=float(scenario.policy.value),
        lag=scenario.row_lag,
        by_posterior=int(scenario.windows == "host"),
        learn=int(scenario.online_calibration),
    )


def _requests(trace: Trace, prefill: bool) -> state.Requests:
    count = np.diff(trace.first)
    prompt = trace.prompt if prefill else np.ones_like(trace.prompt)
    requests = (trace.first[:-1], count, prompt, trace.output, trace.limit, trace.sampled)
    drafts = np.arange(trace.width + 1)[:, None]
    tokens = np.minimum(trace.accepted, drafts).mean(axis=1) + 1.0
    return state.Requests(
        trace.accepted.astype(np.int64),
        np.ascontiguousarray(trace.confidence),
        np.stack([column.astype(np.int64) for column in requests]),
        tokens / tokens[-1],
    )


def _ints(*shape: int) -> npt.NDArray[np.int64]:
    return np.zeros(shape, dtype=np.int64)


def _world(replicas: int, slots: int, width: int, number: int) -> state.World:
    d, s = replicas, slots
    world = state.World(
        clock=np.zeros(d),
        rep=_ints(d, 8),
        slot=_ints(d, 8, s),
        cursor=np.zeros((d, s)),
        batch=_ints(8, s),
        counts=_ints(6),
        queue_next=_ints(number),
        times=np.full((3, number), np.nan),
        row=np.zeros((d, state.HISTORY, s, width), dtype=np.float32),
        row_owner=_ints(d, state.HISTORY, s),
        row_stamp=_ints(d, state.HISTORY),
        totals=np.zeros(state.NUM_TOTALS),
        windows=_ints(width + 2),
        kinds=_ints(4, len(Reason)),
        timeline=np.zeros((state.TIMELINE, 4)),
    )
    world.slot[:, state.FREE] = np.arange(s)[::-1]
    world.rep[:, state.NUM_FREE] = s
    world.totals[state.BUCKET_MS] = 1.0
    return world


def _learner(replicas: int, slots: int, calibration: Calibration) -> state.Learner:
    d, s, k = replicas, slots, calibration.num_positions
    offset = np.array([calibration.greedy_offset, calibration.sampled_offset], dtype=np.float64)
    slope = 1.0 / np.array([calibration.greedy, calibration.sampled], dtype=np.float64)
    learner = state.Learner(
        slot=_ints(d, 8, s),
        own=np.zeros((d, 2, s), dtype=np.float32),
        row=np.zeros((d, s, k), dtype=np.float32),
        shared=np.zeros((d, state.NUM_SHARED, 2, k)),
        histogram=np.zeros((d, 2, 2, k + 1)),
        prior=np.zeros((d, 2, k), dtype=np.float32),
        expected=np.zeros((d, 2, k + 1), dtype=np.float32),
        temper=np.zeros((d, 2, 2, k), dtype=np.float32),
        scalars=np.zeros((d, state.NUM_LEARNER_SCALARS)),
        cap_rows=np.zeros((d, 2, state.BUCKETS)),
        cap_weight=np.ones((d, 2, state.BUCKETS), dtype=np.float32),
    )
    trials = posterior._START_TRIALS
    learner.shared[:, state.P_TRIALS] = trials
    learner.shared[:, state.P_ACCEPTED] = trials * posterior._START_RATE
    learner.shared[:, state.P_OFFSET] = learner.shared[:, state.P_START] = offset
    learner.prior[:] = np.float32(trials * posterior._START_RATE / trials)
    np.cumsum(learner.prior, axis=2, out=learner.expected[:, :, 1:])
    learner.temper[:, state.SLOPE] = -slope.astype(np.float32)
    learner.temper[:, state.BIAS] = -offset.astype(np.float32)
    scalars = learner.scalars
    scalars[:, state.UNTIL_REFRESH] = posterior._REFRESH
    scalars[:, state.SHRINKAGE] = posterior._SHRINKAGE
    scalars[:, state.IDENTITY] = calibration == Calibration.identity(k)
    scalars[:, state.CAP_UNTIL :] = 1
    return learner


def _planner(replicas: int, slots: int, width: int) -> state.Planner:
    status = _ints(replicas, state.NUM_PLANNER_STATES)
    status[:, state.LAST_SIZE] = -1
    keys = width * slots
    floats = np.zeros((3, keys), dtype=np.float32)
    last, counts = _ints(replicas, 2, slots), _ints(keys + 3)
    return state.Planner(status, floats, _ints(5, slots), last, counts)
