"""Run scenarios: compiled throughout, or with the real planner objects in the loop."""

import time

import numpy as np

from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable
from vllm_dspark.simulation.core import entry
from vllm_dspark.simulation.result import CellResult, summarise
from vllm_dspark.simulation.scenario import Scenario
from vllm_dspark.simulation.setup import Arrays, build
from vllm_dspark.simulation.trace import Trace


def simulate(
    trace: Trace,
    table: CostTable,
    scenario: Scenario,
    calibration: Calibration | None = None,
    *,
    exact: bool = False,
    machine: str = "",
) -> CellResult:
    """One scenario.

    exact: drive planning's own Planner and RequestTable instead of their compiled twins (some
    hundred microseconds a step; policy `ours` only). machine: label of a changed cost table.
    """
    calibration = calibration or Calibration.identity(trace.width)
    arrays = build(trace, table, calibration, scenario)
    started = time.process_time()
    if exact:
        from vllm_dspark.simulation.exact import RealPlanner

        RealPlanner(arrays, table, calibration, scenario).run(scenario.max_steps)
    else:
        run_compiled(arrays, scenario.max_steps)
    cpu_s = time.process_time() - started
    output = np.asarray(trace.output[arrays.load.trace])
    return summarise(scenario, arrays.world, output, cpu_s, machine)


def run_compiled(arrays: Arrays, max_steps: int) -> int:
    """Run to the end or for `max_steps`; returns the steps made."""
    a = arrays
    entry.start(a.world, a.load)
    return int(
        entry.run(a.world, a.learner, a.planner, a.options, a.load, a.requests, a.costs, max_steps)
    )


def warm_up() -> None:
    """Compile, or load compiled code, on a tiny load: the first run is then as fast as others."""
    from vllm_dspark.simulation.scenario import Arrivals, parse_policy
    from vllm_dspark.simulation.trace import synthetic_trace
    from vllm_dspark.simulation.whatif import example_table

    trace = synthetic_trace([0.5], num_requests=1, output=4, prompt=1)
    scenario = Scenario(parse_policy("ours", 1), Arrivals(concurrency=1), num_requests=1)
    simulate(trace, example_table(1), scenario)
