"""CPU time of planning one step, by request count (K = 7, ladder of 51 sizes).

    python benchmarks/planner_micro.py [--repeats 2000] [--json out.json]

Rows: `plan` is Planner.plan on a gathered batch (rows -> plan, the pure plan);
`batch` gathers it from the request table; `shortcut` is a settled native step;
`rows` and `outcomes` are what update_from_output adds; `step` is their sum as the
engine core pays it. Times are process CPU time, median and 20th/80th percentile of
blocks of 20 calls, so a busy machine inflates them less than wall time would; the
fastest block is the best estimate of what the code costs on an idle one.
"""

import argparse
import json
import platform
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostGrid, CostTable, StepMode, StepShape, StepTiming
from vllm_dspark.planning.facts import PlannerOptions, StepFacts
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.table import RequestTable

K = 7
_BLOCK = 20


@dataclass(frozen=True)
class Row:
    requests: int
    part: str
    best_us: float
    median_us: float
    p20_us: float
    p80_us: float


def cost_table() -> CostTable:
    """Shape of a measured H200 table: 51 graph sizes, three kv nodes."""
    ladder = [1, 2, 4, *range(8, 257, 8), *range(272, 513, 16)]
    uniform = [n * (K + 1) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    single = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    kv = (0, 65_536, 1_048_576)

    def grid(sizes: list[int]) -> CostGrid:
        size = np.array(sizes, dtype=np.float64)
        ms = np.stack([5.0 + 0.02 * size + node * 4e-6 for node in kv])
        return CostGrid(
            tuple(sizes), kv, ms, np.full(ms.shape, 0.05), np.full(ms.shape, 5, dtype=np.int64)
        )

    draft = np.array([[0.6, 1.4]])
    full = StepMode.FULL
    return CostTable(
        {
            (full, StepShape.RAGGED): grid(ladder),
            (full, StepShape.NATIVE): grid(uniform),
            (full, StepShape.SINGLE): grid(single),
        },
        CostGrid((1, 256), (0,), draft, draft * 0.01, np.full((1, 2), 5, dtype=np.int64)),
        allocation_ms=0.05,
    )


def measure(call, repeats: int) -> tuple[float, float, float, float]:
    """Best, median, 20th and 80th percentile of the CPU time of one call, in us."""
    for _ in range(_BLOCK):
        call()
    samples = []
    for _ in range(max(repeats // _BLOCK, 5)):
        start = time.process_time_ns()
        for _ in range(_BLOCK):
            call()
        samples.append((time.process_time_ns() - start) / _BLOCK / 1000.0)
    p20, median, p80 = np.percentile(samples, (20, 50, 80))
    return min(samples), float(median), float(p20), float(p80)


def rows_for(num_requests: int, host: bool, repeats: int) -> list[Row]:
    rng = np.random.default_rng(num_requests)
    table = RequestTable(
        K, num_requests, Calibration((1.2,) * K, (1.4,) * K), rank_by_posterior=host
    )
    ids = [f"request-{i}" for i in range(num_requests)]
    for request_id in ids:
        table.add(request_id, sampled=True, remaining=100_000_000)
    slots = table.slots(ids)
    owners = table.owners(slots)
    rows = rng.uniform(0.5, 1.0, (num_requests, K)).astype(np.float32)
    admitted = np.full(num_requests, K, dtype=np.int32)
    accepted = rng.integers(0, K + 1, num_requests).astype(np.int32)
    stamp = np.full(num_requests, 9, dtype=np.int32)
    table.record_rows(slots, owners, 8, rows)
    table.record_outcomes(slots, 8, admitted, accepted)
    planner = Planner(
        CostModel(cost_table()),
        PlannerOptions(lazy=False, device_windows=not host, hysteresis_steps=0, min_gain=0.0),
    )
    facts = StepFacts(1, StepMode.FULL, StepMode.FULL, kv_tokens=num_requests * 1000)
    batch = table.batch(slots, admitted, stamp)
    model = CostModel(cost_table())
    timing = StepTiming(StepMode.FULL, StepShape.RAGGED, num_requests, 256, 100_000, 9.0, 1.0)
    settled = Planner(model, PlannerOptions(device_windows=not host, min_gain=0.9))
    for _ in range(20):
        settled.plan(facts, batch)

    def shortcut() -> None:
        settled._repetition._native_streak = 17  # never the one in eight that is planned
        settled.shortcut(facts, owners, admitted)

    def record() -> None:
        table.record_rows(slots, owners, 8, rows)

    def outcomes() -> None:
        table.record_outcomes(slots, 8, admitted, accepted)

    parts = {
        "plan": lambda: planner.plan(facts, batch),
        "batch": lambda: table.batch(slots, admitted, stamp),
        "slots": lambda: table.slots(ids),
        "shortcut": shortcut,
        "rows": record,
        "outcomes": outcomes,
        "timing": lambda: model.observe(timing),
    }
    found = [Row(num_requests, name, *measure(call, repeats)) for name, call in parts.items()]
    step = [row for row in found if row.part != "shortcut"]
    found.append(
        Row(
            num_requests,
            "step",
            *(
                sum(getattr(row, field) for row in step)
                for field in ("best_us", "median_us", "p20_us", "p80_us")
            ),
        )
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=2000)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    report = {"cpu": platform.processor() or platform.machine(), "numpy": np.__version__}
    for windows in ("host", "device"):
        print(f"{windows} windows; us of CPU time: best, median (20th .. 80th percentile)")
        for num_requests in (1, 16, 64, 256):
            rows = rows_for(num_requests, windows == "host", arguments.repeats)
            report[f"{windows}/{num_requests}"] = [asdict(row) for row in rows]
            text = "  ".join(
                f"{row.part} {row.best_us:.0f}, {row.median_us:.0f}"
                f" ({row.p20_us:.0f}..{row.p80_us:.0f})"
                for row in rows
            )
            print(f"  {num_requests:4d} requests  {text}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
