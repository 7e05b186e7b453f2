"""How far the simulator's predictions are from measured runs of a real engine.

    python benchmarks/simulator_validation.py --cells CELLS --pairs PAIRS --cost-table TABLE \
        [--calibration FILE] [--reference off]

CELLS: cells.jsonl of `vllm-dspark bench` (workload decode); PAIRS: recorded pairs of the same
models at full width, on other prompts; TABLE: the cost table of the machine. Each cell is predicted
as a batch of constant size that decodes, without prompts. Two errors are kept apart, the one in
accepted length (the trace's) and the one in time per step (the table's). How much slower than its
table the machine was during the runs is one factor, fitted on the cells of the reference mode;
these are left out of the errors.
"""

import argparse
import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from vllm_dspark.artifacts.pairs import read_pairs
from vllm_dspark.artifacts.store import read_calibration, read_cost_table
from vllm_dspark.simulation.run import simulate
from vllm_dspark.simulation.scenario import Arrivals, Scenario, parse_policy
from vllm_dspark.simulation.trace import Trace, trace_of_pairs

OUTPUT = 200  # tokens of a simulated request: long, since the batch stays as it is
STEPS = "vllm:dspark_request_steps_total"
EMITTED = "vllm:dspark_emitted_tokens_total"


def trace_of(pairs, width: int, sampled: bool) -> Trace:
    """The requests of one class, played as long as needed."""
    trace = trace_of_pairs([pair for pair in pairs if pair.sampled == sampled], width)
    long = np.full(trace.num_requests, OUTPUT, dtype=np.int32)
    return replace(trace, output=long, limit=long)


def predict(trace: Trace, table, calibration, mode: str, concurrency: int):
    """(accepted length, ms per step) of a batch of constant size."""
    name = f"fixed:{mode.removeprefix('fixed')}" if mode.startswith("fixed") else mode
    scenario = Scenario(
        parse_policy(name, trace.width),
        Arrivals("closed", concurrency),
        num_requests=max(concurrency, 16),
        row_lag=0,
        prefill=False,
    )
    found = simulate(trace, table, scenario, calibration)
    return found.accepted_length, found.decode_step_ms


def measured_cells(path: Path) -> dict[tuple[float, int, str], list[tuple[float, float, float]]]:
    """By temperature, batch and mode: (tokens/s, accepted length, ms per step) of each repeat."""
    found = defaultdict(list)
    for line in path.read_text().splitlines():
        cell = json.loads(line)
        if "key" not in cell or cell["key"].get("workload") != "decode":
            continue
        key, figures = cell["key"], cell["figures"]
        counters = figures["counters"]
        length = counters[EMITTED] / counters[STEPS] if counters.get(STEPS) else 1.0
        speed = figures["tokens_per_s"]
        step_ms = 1e3 * length * key["concurrency"] / speed
        found[key["temperature"], key["concurrency"], key["mode"]].append((speed, length, step_ms))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("cells", "pairs", "cost-table"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--calibration", type=Path)
    parser.add_argument("--reference", default="off")
    arguments = parser.parse_args()
    width, pairs = read_pairs(arguments.pairs)
    table = read_cost_table(arguments.cost_table).to_table()
    calibration = None
    if arguments.calibration:
        calibration = read_calibration(arguments.calibration, width).to_calibration()
    traces = {sampled: trace_of(pairs, width, sampled) for sampled in (False, True)}
    rows = []
    for (temperature, batch, mode), repeats in sorted(measured_cells(arguments.cells).items()):
        measured = [float(np.median(column)) for column in zip(*repeats, strict=True)]
        trace = traces[temperature > 0.0]
        rows.append(
            (temperature, batch, mode, measured, predict(trace, table, calibration, mode, batch))
        )
    slower = [row[3][2] / row[4][1] for row in rows if row[2] == arguments.reference]
    factor = float(np.median(slower))
    print(f"steps took {factor:.2f} times what the table says ({arguments.reference})")
    print(
        "| T | requests | mode | AL: measured | simulated | ms/step | simulated | tokens/s | sim. |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    errors = defaultdict(list)
    for temperature, batch, mode, (speed, length, step_ms), (simulated, table_ms) in rows:
        simulated_ms = table_ms * factor
        simulated_speed = 1e3 * batch * simulated / simulated_ms
        if mode != arguments.reference:
            errors["accepted length"].append(math.log(simulated / length))
            errors["time per step"].append(math.log(simulated_ms / step_ms))
            errors["tokens/s"].append(math.log(simulated_speed / speed))
        print(
            f"| {temperature:g} | {batch} | {mode} | {length:.2f} | {simulated:.2f} | "
            f"{step_ms:.1f} | {simulated_ms:.1f} | {speed:.1f} | {simulated_speed:.1f} |"
        )
    for name, logs in errors.items():
        low, middle, high = np.expm1(np.percentile(logs, (10, 50, 90)))
        typical = math.expm1(float(np.median(np.abs(logs))))
        print(
            f"{name}: typical error {typical:.0%}; bias {middle:+.0%}, "
            f"80 % of cells between {low:+.0%} and {high:+.0%}"
        )


if __name__ == "__main__":
    main()
