"""Sweeps of the simulator: what is varied, what is printed."""

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from rich.console import Console

from vllm_dspark.artifacts.store import read_calibration, read_cost_table
from vllm_dspark.cli.output import OutputError, progress
from vllm_dspark.errors import SimulationError
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.simulation.result import SimulationRecord, now
from vllm_dspark.simulation.run import simulate, warm_up
from vllm_dspark.simulation.scenario import Arrivals, Scenario, parse_policy
from vllm_dspark.simulation.trace import Trace, read_trace, synthetic_trace, write_trace
from vllm_dspark.simulation.whatif import (
    Machine,
    example_table,
    for_width,
    scaled,
    with_overhead,
)

DEFAULT_POLICIES = ("off", "fixed", "argmax", "early_stop", "ours")
_MAX_CELLS = 4096
_PATIENCE_S = 2.0  # loading compiled code takes less
_EXAMPLE = "example (no --cost-table): shaped like an 8B model on an H200"


@dataclass(frozen=True)
class Sweep:
    """All combinations of these are simulated; the rest of `base` is the same for all."""

    base: Scenario
    policies: tuple[str, ...] = DEFAULT_POLICIES
    loads: tuple[Arrivals, ...] = (Arrivals(),)
    widths: tuple[int, ...] = ()  # K; empty: the trace's
    gains: tuple[float, ...] = (0.04,)
    replicas: tuple[int, ...] = (1,)
    machines: tuple[Machine, ...] = (Machine(),)


@dataclass(frozen=True)
class Inputs:
    """Trace, prices and calibration, read."""

    trace: Trace
    table: CostTable
    table_width: int  # K that the table was measured for
    trace_name: str
    table_name: str
    calibration: Calibration | None = None
    notes: dict[str, object] = field(default_factory=dict)


def read_inputs(
    trace: Path | None,
    acceptance: Sequence[float],
    cost_table: Path | None,
    calibration: Path | None,
    overhead_ms: float | None,
    prompt_tokens: int,
    seed: int,
) -> Inputs:
    """Read what was named; raises InputError, ArtifactError or SimulationError."""
    if (trace is None) == (not acceptance):
        raise SimulationError("give either --trace or --acceptance")
    if trace is not None:
        requests, name = read_trace(trace, seed, prompt_tokens), str(trace)
    else:
        requests = synthetic_trace(acceptance, prompt=prompt_tokens, spread=0.5, seed=seed)
        name = f"synthetic, acceptance {', '.join(f'{a:g}' for a in acceptance)}"
    if cost_table is not None:
        record = read_cost_table(cost_table)
        table, width = record.to_table(), record.fingerprint.num_speculative_tokens
    else:
        table, width = example_table(requests.width), requests.width
    if overhead_ms is not None:
        table = with_overhead(table, overhead_ms)
    fitted = None
    if calibration is not None:
        fitted = read_calibration(calibration, requests.width).to_calibration()
    return Inputs(
        requests,
        table,
        width,
        name,
        _EXAMPLE if cost_table is None else str(cost_table),
        fitted,
        {
            **requests.notes,
            "requests": requests.num_requests,
            "steps": len(requests.position),
            "accepted_length_at_full_windows": requests.accepted_length,
        },
    )


def cells(sweep: Sweep, trace: Trace) -> Iterator[tuple[Scenario, int, Machine]]:
    """Scenario, K and machine of each combination; the margin is varied for `ours` alone."""
    widths = sweep.widths or (trace.width,)
    combinations = product(sweep.machines, sweep.replicas, widths, sweep.loads, sweep.policies)
    for machine, replicas, width, load, text in combinations:
        policy = parse_policy(text, width)
        gains = sweep.gains if policy.name == "ours" else sweep.gains[:1]
        for gain in gains:
            options = replace(sweep.base.options, min_gain=gain)
            yield (
                replace(
                    sweep.base, policy=policy, arrivals=load, replicas=replicas, options=options
                ),
                width,
                machine,
            )


def run_sweep(sweep: Sweep, inputs: Inputs, exact: bool) -> SimulationRecord:
    """Simulate all combinations."""
    plan = list(cells(sweep, inputs.trace))
    if len(plan) > _MAX_CELLS:
        raise SimulationError(f"{len(plan)} combinations; at most {_MAX_CELLS} are simulated")
    _check(plan, inputs)
    found = []
    # On standard error: none of it is a result.
    aside = Console(stderr=True)
    _ready(aside)
    with progress(aside) as bars:
        bar = bars.add_task("simulating", total=len(plan), note="")
        for number, (scenario, width, machine) in enumerate(plan):
            label = f"{scenario.arrivals.label}, {scenario.policy.label}"
            bars.update(bar, completed=number, note=label)
            trace = inputs.trace.narrowed(width)
            table = scaled(for_width(inputs.table, inputs.table_width, width), machine)
            found.append(
                simulate(
                    trace,
                    table,
                    scenario,
                    _narrowed(inputs.calibration, width),
                    exact=exact and scenario.policy.name == "ours",
                    machine=machine.label,
                )
            )
    return SimulationRecord(
        created=now(),
        trace=inputs.trace_name,
        cost_table=inputs.table_name,
        notes={**inputs.notes, "draft_width": _width_note(inputs.table)},
        cells=tuple(found),
    )


def _check(plan: Sequence[tuple[Scenario, int, Machine]], inputs: Inputs) -> None:
    """Raise SimulationError for what cannot be simulated, before anything is compiled."""
    for width in dict.fromkeys(width for _, width, _ in plan):
        inputs.trace.narrowed(width)
    for scenario, width, machine in plan:
        scenario.check_width(width)
        scaled(for_width(inputs.table, inputs.table_width, width), machine)


def _ready(aside: Console) -> None:
    """Compile or load the simulator; says so only where one has to wait for it."""

    def say() -> None:
        aside.print(
            "compiling the simulator (about a minute, once per installation) ...", soft_wrap=True
        )

    timer = threading.Timer(_PATIENCE_S, say)
    timer.daemon = True
    timer.start()
    try:
        warm_up()
    finally:
        timer.cancel()


def _width_note(table: CostTable) -> str:
    """What the simulator leaves out of `ours`: an engine on a CPU chooses columns step by step."""
    narrower = (
        "; an engine with this cost table drafts fewer columns where that pays "
        '("draft_width": "auto"), of which nothing is simulated'
    )
    return "every draft pass has full width K" + (narrower if table.narrow else ", as on CUDA")


def _narrowed(calibration: Calibration | None, width: int) -> Calibration | None:
    if calibration is None or calibration.num_positions == width:
        return calibration
    c = calibration
    return Calibration(
        c.greedy[:width], c.sampled[:width], c.greedy_offset[:width], c.sampled_offset[:width]
    )


def planner_options(
    hysteresis: int, skip_draft: bool, drain_guard: bool, probe_interval: int
) -> PlannerOptions:
    """Planner options from the command line."""
    return PlannerOptions(
        hysteresis_steps=hysteresis,
        skip_draft=skip_draft,
        drain_guard=drain_guard,
        probe_interval=probe_interval,
    )


def save_trace(path: Path | None, trace: Trace) -> None:
    """The compact form of what was read."""
    if path is None:
        return
    try:
        write_trace(path, trace)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; name another file") from error
