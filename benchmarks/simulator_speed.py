"""Simulated steps per minute of one core, by policy (K = 7).

    python benchmarks/simulator_speed.py [--requests-at-once 64] [--steps 20000]

CPU time of the process, so that a busy machine inflates it less than wall time would. `ours, real
planner` drives planning's own objects in the same simulated engine. The first lines say what
compiling costs, which happens once per installation.
"""

import argparse
import time
from dataclasses import replace

from vllm_dspark.simulation.run import simulate
from vllm_dspark.simulation.scenario import Arrivals, Scenario, parse_policy
from vllm_dspark.simulation.trace import synthetic_trace
from vllm_dspark.simulation.whatif import example_table, with_overhead

K = 7
POLICIES = ("off", "fixed:3", "fixed", "argmax", "threshold:0.5", "early_stop", "ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests-at-once", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--real-steps", type=int, default=1_500)
    arguments = parser.parse_args()
    at_once = arguments.requests_at_once
    trace = synthetic_trace([0.8] * K, num_requests=256, output=256, spread=0.7)
    # Prices that make the planner work: trimming pays now and then.
    table = with_overhead(example_table(K), 0.2)
    scenario = Scenario(
        parse_policy("ours", K), Arrivals("closed", at_once), num_requests=40 * at_once
    )
    for wall in ("compile or load", "second call"):
        started, cpu = time.perf_counter(), time.process_time()
        simulate(trace, table, replace(scenario, num_requests=1, max_steps=10))
        spent = time.process_time() - cpu
        print(f"{wall}: {time.perf_counter() - started:.2f} s, {spent:.2f} s of CPU time")
    for windows in ("host", "device"):
        for name in POLICIES:
            if windows == "device" and name != "ours":
                continue
            one = replace(scenario, policy=parse_policy(name, K), windows=windows)
            number = max(int(arguments.steps * at_once * 3 / 256), at_once)
            result = simulate(trace, table, replace(one, num_requests=number))
            report(f"{name} ({windows} windows)", result)
    one = replace(scenario, num_requests=10_000, max_steps=arguments.real_steps)
    # The parts that the real planner is put between are compiled at their first use.
    simulate(trace, table, replace(one, max_steps=10), exact=True)
    report("ours (host windows), real planner", simulate(trace, table, one, exact=True))


def report(name: str, result) -> None:
    """One line."""
    speed = result.simulated_steps_per_minute
    kinds = ", ".join(f"{kind} {n}" for kind, n in result.kinds.items())
    print(
        f"{name}: {result.steps} steps, {speed:,.0f} a minute, {6e7 / speed:.1f} us each; {kinds}"
    )


if __name__ == "__main__":
    main()
