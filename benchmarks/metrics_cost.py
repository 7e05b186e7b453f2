"""CPU time that outcomes and metrics add to a step of the engine core, by batch size.

python benchmarks/metrics_cost.py    (no engine, no model; times are CPU time, best of five)
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from vllm_dspark.artifacts.freshness import Resolution
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.carrier import MetricsPlace
from vllm_dspark.integration.conductor import Conductor
from vllm_dspark.integration.metrics import EngineMetrics
from vllm_dspark.integration.metrics_collector import open_sinks
from vllm_dspark.integration.metrics_log import SummaryLog
from vllm_dspark.integration.outcomes import (
    OutcomeTotals,
    PendingOutcomes,
    token_counts,
)
from vllm_dspark.integration.report import StepOrder
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import StepMode
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan
from vllm_dspark.planning.table import RequestTable

K = 7
REPEATS, CALLS = 5, 300


def microseconds(function: Callable[[], object]) -> float:
    """CPU time of one call."""
    best = float("inf")
    for _ in range(REPEATS):
        started = time.process_time()
        for _ in range(CALLS):
            function()
        best = min(best, time.process_time() - started)
    return best / CALLS * 1e6


def measure(requests: int, folder: Path) -> dict[str, float]:
    """Each part by itself."""
    rng = np.random.default_rng(0)
    names = [f"request-{i}" for i in range(requests)]
    scheduled = {name: [0] * 4 for name in names}
    lists = [[0] * int(rng.integers(1, 6)) for _ in names]
    output = SimpleNamespace(scheduled_spec_decode_tokens=scheduled, num_invalid_spec_tokens=None)
    ran = SimpleNamespace(sampled_token_ids=lists)
    plan = VerifyPlan(
        1, 0, requests, K, PlanKind.TRIM, Reason.TRIM_GAIN, 4, 8, True, (), 5.0, 3.0, 6.0, 3.0
    )
    order = StepOrder.of(1, plan, dict.fromkeys(names, K), 1)
    order.num_scheduled = np.full(requests, 4, dtype=np.int32)

    def outcomes() -> Any:
        counts = token_counts(ran)
        pending = PendingOutcomes(output, ran, order, K, counts, None, complete=True)
        return pending.finish(None, None, stopped=False)

    totals = OutcomeTotals(K)
    table = RequestTable(K, requests, Calibration.identity(K), rank_by_posterior=True)
    off = Resolution("off", Calibration.identity(K))
    conductor = Conductor(table, off, DSparkConfig(), StepMode.EAGER, device_windows=False)
    metrics = EngineMetrics(conductor, totals, 0.25)
    multi = folder / f"multi{requests}"
    multi.mkdir()
    step = outcomes()
    result = {
        "outcomes": microseconds(outcomes),
        "totals": microseconds(lambda: totals.add(step)),
        "nothing open": microseconds(lambda: metrics.step(order, step, None)),
    }
    metrics.log = SummaryLog(metrics.families, 60.0)
    metrics.sinks = open_sinks(MetricsPlace(folder / f"own{requests}"), ("m", "0"), K, "off")
    result["file and log"] = microseconds(lambda: metrics.step(order, step, None))
    metrics.sinks += open_sinks(MetricsPlace(folder / f"b{requests}", multi), ("m", "0"), K, "off")
    result["both files"] = microseconds(lambda: metrics.step(order, step, None))
    metrics.log = None
    metrics.close()
    return result


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        for requests in (1, 64, 256):
            parts = measure(requests, Path(folder))
            print(requests, {name: round(value, 1) for name, value in parts.items()})


if __name__ == "__main__":
    main()
