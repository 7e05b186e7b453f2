"""Random cost tables, traces and scenarios."""

import numpy as np

from tests.planning.builders import grid
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.simulation.scenario import Arrivals, Policy, Scenario
from vllm_dspark.simulation.trace import Trace, synthetic_trace

FULL, EAGER = StepMode.FULL, StepMode.EAGER
RAGGED, NATIVE, SINGLE = StepShape.RAGGED, StepShape.NATIVE, StepShape.SINGLE


SMALL, LARGE = 12, 96  # requests at once; large batches are planned more lazily


def random_table(
    rng: np.random.Generator, width: int, padded: bool, most: int = SMALL
) -> CostTable:
    """Prices of a random machine: launch-bound, balanced or compute-bound."""
    per_token = float(10.0 ** rng.uniform(-2.5, 0.0))
    fixed = float(rng.uniform(1.0, 8.0))
    kv = (0, 2048, 20_000)[: int(rng.integers(1, 4))]

    def cells(sizes: list[int]) -> np.ndarray:
        noise = rng.uniform(0.98, 1.03, (len(kv), len(sizes)))
        ms = fixed + per_token * np.array(sizes) + np.array(kv)[:, None] * 2e-4
        ms = np.maximum.accumulate(ms * noise, axis=1)
        ms[:, -1] = np.maximum(ms[:, -1], 1.03 * ms[:, 0])  # flat tables are refused
        return ms

    requests = [1, 2, 4, 8, *range(12, most + 1, 12)]
    ragged = sorted({*rng.integers(1, most * (width + 1), 14).tolist(), 1, most * (width + 1)})
    native = [n * (width + 1) for n in requests]
    draft = grid((1, most), (0.2, float(rng.uniform(0.3, 3.0))))
    if not padded:
        grids = {(EAGER, RAGGED): grid(ragged, cells(ragged), kv)}
    else:
        grids = {
            (FULL, RAGGED): grid(ragged, cells(ragged), kv),
            (FULL, NATIVE): grid(native, cells(native), kv),
            (FULL, SINGLE): grid(requests, cells(requests), kv),
        }
        if rng.random() < 0.5:  # full graphs end early, an eager grid takes over
            short = native[:3]
            grids[FULL, NATIVE] = grid(short, cells(short), kv)
            grids[EAGER, RAGGED] = grid(ragged, cells(ragged) * 1.1, kv)
    return CostTable(grids, draft, allocation_ms=0.05, overhead_ms=float(rng.uniform(0, 1)))


def random_trace(rng: np.random.Generator, width: int) -> Trace:
    """Greedy and sampled requests of all kinds; confidences are off, some are no numbers."""
    trace = synthetic_trace(
        rng.uniform(0.2, 0.97, width),
        num_requests=int(rng.integers(6, 30)),
        output=int(rng.integers(20, 60)),
        prompt=int(rng.integers(1, 40)),
        spread=float(rng.uniform(0.0, 1.5)),
        seed=int(rng.integers(1 << 30)),
    )
    values = {name: getattr(trace, name) for name in vars(trace) if name != "notes"}
    values["sampled"] = rng.random(trace.num_requests) < rng.choice([0.0, 0.5, 1.0])
    odd = trace.confidence + rng.normal(0.0, 0.1, trace.confidence.shape).astype(np.float32)
    odd = np.clip(odd, 0.0, 1.0).astype(np.float32)
    odd[rng.random(odd.shape) < 0.01] = np.nan
    values["confidence"] = odd
    values["limit"] = trace.limit + rng.integers(0, 30, trace.num_requests).astype(np.int32)
    return Trace(**values)


def random_calibration(rng: np.random.Generator, width: int) -> Calibration:
    """Identity, or temperatures and offsets."""
    if rng.random() < 0.3:
        return Calibration.identity(width)
    greedy, sampled = (tuple(rng.uniform(0.5, 2.0, width).tolist()) for _ in range(2))
    return Calibration(greedy, sampled).with_offsets(rng.normal(0.0, 0.2, (2, width)))


def random_scenario(rng: np.random.Generator, most: int = SMALL) -> Scenario:
    """Policy ours in all its variants."""
    closed = rng.random() < 0.7 or most > SMALL
    at_once = int(rng.integers(1, most + 1)) if most == SMALL else int(rng.integers(60, most))
    return Scenario(
        Policy("ours"),
        Arrivals("closed", at_once)
        if closed
        else Arrivals("burst", rate_per_s=float(rng.uniform(5, 200)), burst_size=6),
        num_requests=int(rng.integers(10, 60)) if most == SMALL else at_once + 30,
        replicas=int(rng.integers(1, 3)) if most == SMALL else 1,
        max_num_seqs=int(rng.integers(2, 13)) if most == SMALL else most,
        max_num_batched_tokens=int(rng.integers(120, 400)) + most * 8,
        windows="host" if rng.random() < 0.5 else "device",
        row_lag=int(rng.integers(0, 4)),
        prefill=bool(rng.random() < 0.8),
        options=PlannerOptions(
            min_gain=float(rng.choice([0.0, 0.04, 0.2])),
            hysteresis_steps=int(rng.integers(0, 5)),
            drain_guard=bool(rng.random() < 0.7),
            skip_draft=bool(rng.random() < 0.7),
            probe_interval=int(rng.integers(2, 20)),
            request_floor=int(rng.choice([0, 0, 2])),
            lazy=bool(rng.random() < 0.7),
        ),
        seed=int(rng.integers(1 << 30)),
    )
