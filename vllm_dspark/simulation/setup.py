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
    shapes = {shape: _grid(table, mode, shape) for shape in StepShape}
    fallback = {}
    for shape in (StepShape.NATIVE, StepShape.SINGLE):
        modes = _FALLBACK_MODES if mode is StepMode.FULL else ()
        found = (_grid(table, other, shape) for other in modes)
        fallback[shape] = next((grid for grid in found if grid.exists), _placeholder())
    draft = np.maximum.accumulate(table.draft.median_ms, axis=1)[0]
    return state.Costs(
        ragged=shapes[StepShape.RAGGED],
        native=shapes[StepShape.NATIVE],
        single=shapes[StepShape.SINGLE],
        native_fallback=fallback[StepShape.NATIVE],
        single_fallback=fallback[StepShape.SINGLE],
        mixed=_grid(table, StepMode.MIXED, StepShape.RAGGED),
        draft_sizes=np.array(table.draft.sizes, dtype=np.int64),
        draft_ms=draft.astype(np.float64),
        overhead_ms=float(table.overhead_ms),
        allocation_ms=float(table.allocation_ms) if allocation else 0.0,
        padded=int(mode.padded),
    )


def _grid(table: CostTable, mode: StepMode, shape: StepShape) -> state.Grid:
    key = table.resolve(mode, shape)
    return _placeholder() if key is None else _grid_arrays(table.grids[key])


def _grid_arrays(grid: CostGrid) -> state.Grid:
    return state.Grid(
        np.array(grid.sizes, dtype=np.int64),
        np.array(grid.kv_tokens, dtype=np.int64),
        np.ascontiguousarray(np.maximum.accumulate(grid.median_ms, axis=1)),
        max(1, grid.kv_tokens[-1] // _KV_STEPS),
        1,
    )


def _placeholder() -> state.Grid:
    one = np.ones(1, dtype=np.int64)
    return state.Grid(one, one, np.ones((1, 1)), 1, 0)


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
    sizes = max(costs.ragged.sizes.size, 1)
    return Arrays(
        world=_world(scenario.replicas, slots, trace.width, scenario.num_requests),
        learner=_learner(scenario.replicas, slots, calibration),
        planner=_planner(scenario.replicas, slots, trace.width, sizes),
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
    last = np.zeros(len(trace.position), dtype=np.bool_)
    last[trace.first[1:] - 1] = True
    prompt = trace.prompt if prefill else np.ones_like(trace.prompt)
    return state.Requests(
        trace.first,
        trace.position,
        np.ascontiguousarray(trace.confidence),
        trace.accepted,
        last,
        prompt,
        trace.output,
        trace.limit,
        trace.sampled,
    )


def _world(replicas: int, slots: int, width: int, number: int) -> state.World:
    def ints(*shape: int) -> npt.NDArray[np.int64]:
        return np.zeros(shape, dtype=np.int64)

    d, s = replicas, slots
    return state.World(
        clock=np.zeros(d),
        step=ints(d),
        running=ints(d, s),
        num_running=ints(d),
        free=np.tile(np.arange(s, dtype=np.int64)[::-1], (d, 1)),
        num_free=np.full(d, s, dtype=np.int64),
        instance=ints(d, s),
        emitted=ints(d, s),
        context=ints(d, s),
        prefill_left=ints(d, s),
        stamp=ints(d, s),
        record=ints(d, s),
        queue_next=ints(number),
        queue_head=ints(d),
        queue_tail=ints(d),
        queue_size=ints(d),
        outstanding=ints(d),
        issued=ints(1),
        done=ints(1),
        arrived=ints(d),
        arrive_ms=np.full(number, np.nan),
        first_ms=np.full(number, np.nan),
        done_ms=np.full(number, np.nan),
        order=ints(s),
        num_drafts=ints(s),
        admitted=ints(s),
        judged=ints(s),
        passed=ints(s),
        started=ints(s),
        finished=ints(s),
        prefilled=ints(s),
        counts=ints(4),
        row=np.zeros((d, state.HISTORY, s, width), dtype=np.float32),
        row_owner=ints(d, state.HISTORY, s),
        row_stamp=ints(d, state.HISTORY),
        totals=np.zeros(state.NUM_TOTALS),
        windows=ints(width + 2),
        kinds=ints(4, len(Reason)),
        timeline=np.zeros((state.TIMELINE, 4)),
        bucket_ms=np.ones(1),
    )


def _learner(replicas: int, slots: int, calibration: Calibration) -> state.Learner:
    d, s, k = replicas, slots, calibration.num_positions
    owner = np.zeros((d, s), dtype=np.int64)
    start = np.array([calibration.greedy_offset, calibration.sampled_offset], dtype=np.float64)
    slope = 1.0 / np.array([calibration.greedy, calibration.sampled], dtype=np.float64)
    trials = np.full((d, 2, k), posterior._START_TRIALS)
    accepted = trials * posterior._START_RATE
    prior = (accepted / trials).astype(np.float32)
    expected = np.zeros((d, 2, k + 1), dtype=np.float32)
    np.cumsum(prior, axis=2, out=expected[:, :, 1:])
    scalars = np.zeros((d, state.NUM_LEARNER_SCALARS))
    scalars[:, state.UNTIL_REFRESH] = posterior._REFRESH
    scalars[:, state.SHRINKAGE] = posterior._SHRINKAGE
    return state.Learner(
        owner=owner,
        row_owner=owner.copy(),
        row_stamp=owner.copy(),
        row=np.zeros((d, s, k), dtype=np.float32),
        outcome_stamp=owner.copy(),
        admitted=owner.copy(),
        accepted=owner.copy(),
        remaining=owner.copy(),
        sampled=np.zeros((d, s), dtype=np.bool_),
        residual=np.zeros((d, s), dtype=np.float32),
        trials=np.zeros((d, s), dtype=np.float32),
        prior_trials=trials,
        prior_accepted=accepted,
        prior=prior,
        expected=expected,
        seen=np.zeros((d, 2, k + 1)),
        hits=np.zeros((d, 2, k + 1)),
        scalars=scalars,
        cap_rows=np.zeros((d, 2, state.BUCKETS)),
        cap_weight=np.ones((d, 2, state.BUCKETS), dtype=np.float32),
        cap_until=np.ones((d, 2), dtype=np.int64),
        slope=-slope.astype(np.float32),
        bias=np.repeat(-start.astype(np.float32)[None], d, axis=0),
        offset=np.repeat(start[None], d, axis=0),
        start=start,
        sums=np.zeros((d, 3, 2, k)),
        identity=np.full(d, calibration == Calibration.identity(k)),
    )


def _planner(replicas: int, slots: int, width: int, sizes: int) -> state.Planner:
    status = np.zeros((replicas, state.NUM_PLANNER_STATES), dtype=np.int64)
    status[:, state.LAST_SIZE] = -1
    values = [np.zeros(width * slots, dtype=np.float32) for _ in range(3)]
    counts = [np.zeros(slots, dtype=np.int64) for _ in range(4)]
    known = np.zeros(slots, dtype=np.bool_)
    return state.Planner(status, *values, *counts, np.zeros(sizes), known)
