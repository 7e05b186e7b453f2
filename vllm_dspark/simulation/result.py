"""What came out of a simulation, for tables, files and plots."""

from datetime import UTC, datetime
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict

from vllm_dspark.planning.plan import PlanKind, Reason
from vllm_dspark.simulation.core import state
from vllm_dspark.simulation.scenario import Scenario

Float64Array = npt.NDArray[np.float64]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Percentiles(_Record):
    """Of a time in ms over requests."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Float64Array) -> "Percentiles":
        """NaN entries, requests that never got there, are left out; all 0 without any."""
        known = values[np.isfinite(values)]
        if not known.size:
            return cls(mean=0.0, p50=0.0, p90=0.0, p99=0.0)
        p50, p90, p99 = np.percentile(known, (50, 90, 99))
        return cls(mean=float(known.mean()), p50=float(p50), p90=float(p90), p99=float(p99))


class TimelinePoint(_Record):
    """Means over one bucket of simulated time."""

    t_s: float  # end of the bucket
    tokens_per_s: float
    mean_window: float
    requests: float  # verified at once


class CellResult(_Record):
    """One scenario. Throughput is over all requests; steady: until no further request came."""

    policy: str
    arrivals: str
    width: int
    replicas: int
    min_gain: float
    machine: str  # what was changed about the cost table; empty: nothing
    requests: int
    completed: int
    steps: int
    seconds: float
    tokens_per_s: float
    steady_tokens_per_s: float
    accepted_length: float  # tokens per request and verification step
    mean_window: float
    windows: tuple[int, ...]  # rows by window 1..K+1
    acceptance: float  # accepted over verified drafts
    draft_share: float  # steps with a draft pass
    step_ms: float
    decode_step_ms: float
    ttft_ms: Percentiles
    tpot_ms: Percentiles
    latency_ms: Percentiles
    kinds: dict[str, int]
    reasons: dict[str, int]
    timeline: tuple[TimelinePoint, ...]
    simulated_steps_per_minute: float  # speed of the simulator itself


class SimulationRecord(_Record):
    """The file that `--json` writes."""

    kind: Literal["simulation"] = "simulation"
    version: Literal[1] = 1
    created: str
    trace: str
    cost_table: str
    notes: dict[str, Any]
    cells: tuple[CellResult, ...]


def now() -> str:
    """Time stamp of a record, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def summarise(
    scenario: Scenario,
    world: state.World,
    output: npt.NDArray[np.int32],
    cpu_s: float,
    machine: str,
) -> CellResult:
    """The result of a finished run. output: [N] tokens of each instance; cpu_s: time it took."""
    t = world.totals
    arrived, first, done = world.times
    seconds = float(world.clock.max()) / 1e3
    steps, rows = max(t[state.STEPS], 1.0), max(t[state.ROWS], 1.0)
    decoding = done - first
    tpot = np.where(output > 1, decoding / np.maximum(output - 1, 1), np.nan)
    steady_s = t[state.STEADY_MS] / 1e3
    kinds = world.kinds.sum(axis=1).tolist()
    reasons = world.kinds.sum(axis=0).tolist() if scenario.policy.name == "ours" else []
    return CellResult(
        policy=scenario.policy.label,
        arrivals=scenario.arrivals.label,
        width=len(world.windows) - 2,
        replicas=scenario.replicas,
        min_gain=scenario.options.min_gain,
        machine=machine,
        requests=scenario.num_requests,
        completed=int(world.counts[state.DONE]),
        steps=int(t[state.STEPS]),
        seconds=seconds,
        tokens_per_s=float(t[state.TOKENS]) / max(seconds, 1e-12),
        steady_tokens_per_s=float(t[state.STEADY_TOKENS] / steady_s) if steady_s else 0.0,
        accepted_length=float(t[state.VERIFY_TOKENS] / rows),
        mean_window=1.0 + float(t[state.ADMITTED] / rows),
        windows=tuple(world.windows[1:].tolist()),
        acceptance=float(t[state.ACCEPTED] / max(t[state.ADMITTED], 1.0)),
        draft_share=float(t[state.DRAFT_PASSES] / steps),
        step_ms=float(t[state.STEP_MS] / steps),
        decode_step_ms=float(t[state.DECODE_MS] / max(t[state.DECODE_STEPS], 1.0)),
        ttft_ms=Percentiles.of(first - arrived),
        tpot_ms=Percentiles.of(tpot),
        latency_ms=Percentiles.of(done - arrived),
        kinds={kind.value: n for kind, n in zip(PlanKind, kinds, strict=True) if n},
        reasons={r.value: n for r, n in zip(Reason, reasons, strict=False) if n},
        timeline=_timeline(world),
        simulated_steps_per_minute=60.0 * float(t[state.STEPS]) / max(cpu_s, 1e-9),
    )


def _timeline(world: state.World) -> tuple[TimelinePoint, ...]:
    bucket_s = float(world.totals[state.BUCKET_MS]) / 1e3
    points = []
    for b, (steps, tokens, rows, windows) in enumerate(world.timeline.tolist()):
        if steps:
            points.append(
                TimelinePoint(
                    t_s=(b + 1) * bucket_s,
                    tokens_per_s=tokens / bucket_s,
                    mean_window=windows / max(rows, 1.0),
                    requests=rows / steps,
                )
            )
    return tuple(points)
