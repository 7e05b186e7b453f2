"""The planner in a closed loop with arrivals, on a made-up machine that is like an H200.

    python -m benchmarks.mixed_load [--requests 8,32,64,128,256] [--seeds 2] [--full-windows]

No engine: the real planner, request table and prices, and a machine whose step times are those
found for the Qwen3-8B shape (docs/benchmarks/h200-serving.md). Decode steps and draft passes cost
what the cost table says; a step with rows of prompts costs 3 ms and 0.0275 ms for each row. Every
request has 256 prompt tokens and 128 of output, and the next one begins when it ends. Drafts are
accepted with the means of the demo pair at T = 0, confidences say how likely. Printed: output
tokens per second of each fixed K and of none (0), of ours, and ours over the best of them.
--full-windows: steps with prompts are not trimmed, as by default.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from tests.planning.builders import facts
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape, StepTiming, build_cost_table
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind, VerifyPlan
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.table import RequestTable

K, PROMPT, OUTPUT = 7, 256, 128
ACCEPTANCE = np.array([0.767, 0.751, 0.766, 0.769, 0.755, 0.758, 0.727])
SPREAD = 2.0  # of confidences: beta(mean * SPREAD, (1 - mean) * SPREAD)
NOISE = 0.05  # of step times, as a standard deviation of their logarithm
KV_TOKENS = 20_000
SIZES = {1: 5.5, 64: 6.4, 128: 7.1, 256: 9.8, 512: 14.1, 768: 21.1, 1024: 23.8, 2048: 45.0}
DRAFTS = {
    None: {1: 1.24, 32: 1.82, 64: 2.9, 128: 5.5, 256: 9.8},
    1: {1: 1.11, 28: 1.22, 256: 2.35},
    2: {1: 1.14, 28: 1.27, 256: 3.54},
    3: {1: 1.16, 28: 1.35, 256: 4.76},
    5: {1: 1.20, 28: 1.50, 256: 7.32},
}

IntArray = npt.NDArray[np.int64]


def h200_table() -> CostTable:
    """Measured times between which all others are interpolated."""
    every = sorted({*SIZES, *range(8, 2049, 8)})
    times = np.interp(every, list(SIZES), list(SIZES.values()))
    samples = [
        StepTiming(StepMode.FULL, shape, n, n, kv, ms)
        for shape in StepShape
        for n, ms in zip(every, times.tolist(), strict=True)
        for kv in (0, 10 * KV_TOKENS)
    ]
    for columns, nodes in DRAFTS.items():
        shape = StepShape.NATIVE if columns is None else StepShape.RAGGED
        for requests, ms in nodes.items():
            size = max(8 * requests, 8)
            whole = float(np.interp(size, every, times))
            timing = StepTiming(StepMode.FULL, shape, requests, size, 0, whole, ms, columns)
            samples += [timing, replace(timing, kv_tokens=10 * KV_TOKENS)]
    return build_cost_table(samples * 3)


TABLE = h200_table()
TRUE = CostModel(TABLE, online=False, num_positions=K)


def target_ms(rows: int, prompts: int) -> float:
    """True time of target and verification."""
    if prompts:
        return max(6.5, 3.0 + 0.0275 * (rows + prompts))
    priced = TRUE.step_ms(StepMode.FULL, StepShape.RAGGED, KV_TOKENS, max(rows, 1))
    assert priced is not None, "the table ends below this size"
    return priced[1]


def draft_ms(requests: int, columns: int, prompts: int) -> float:
    """True time of a draft pass, the prompts' context included; 0 without one."""
    if not columns:
        return 0.0
    return TRUE.draft_ms(requests, columns if columns < K else None) + 0.0015 * prompts


@dataclass
class Ours:
    """The real planner and all it learns from."""

    requests: int
    trims_mixed: bool = True
    cost: CostModel = field(default_factory=lambda: CostModel(TABLE, num_positions=K))

    def __post_init__(self) -> None:
        options = PlannerOptions(device_windows=True, choose_width=True, mixed=self.trims_mixed)
        self._planner = Planner(self.cost, options)
        self.table = RequestTable(
            K, self.requests, Calibration.identity(K), rank_by_posterior=False
        )

    def plan(self, step: int, names: list[str], drafts: IntArray, prompts: int) -> VerifyPlan:
        """What the engine core would decide."""
        slots = self.table.slots(names)
        mode = StepMode.MIXED if prompts else StepMode.FULL
        reserved = self.cost.prefill_rows if prompts else 0
        here = facts(step, mode=mode, native_mode=mode, kv_tokens=KV_TOKENS, reserved_rows=reserved)
        stamps = np.full(len(names), step, dtype=np.int32)
        return self._planner.plan(here, self.table.batch(slots, drafts.astype(np.int32), stamps))

    def seen(self, step: int, confidence: dict[str, npt.NDArray[np.float64]]) -> None:
        """Confidence rows of the pass before the last one have come back."""
        names = [name for name in confidence if name in self.table]
        if names:
            slots = self.table.slots(names)
            rows = np.array([confidence[name] for name in names], dtype=np.float32)
            self.table.record_rows(slots, self.table.owners(slots), step, rows)


class Load:
    """Requests that end and are replaced; `policy`: ours, or a number of columns."""

    def __init__(self, requests: int, policy: "Ours | int", seed: int) -> None:
        self._rng = np.random.default_rng(seed)
        self._policy = policy
        self._left: dict[str, int] = {}
        self._drafts: dict[str, int] = {}
        self._confidence: dict[str, npt.NDArray[np.float64]] = {}
        self._running: list[str] = []
        self._waiting = [self._new(OUTPUT * self._rng.uniform(0.5, 1.5)) for _ in range(requests)]
        self._step = 0

    def _new(self, tokens: float) -> str:
        name = f"r{len(self._left)}"
        self._left[name] = int(tokens)
        return name

    def step(self) -> tuple[int, float]:
        """Tokens and true time of the next step."""
        self._step += 1
        joining, self._waiting = self._waiting, []
        names, prompts = list(self._running), PROMPT * len(joining)
        drafts = np.array([self._drafts[name] for name in names], dtype=np.int64)
        admitted, columns = self._decide(names, drafts, prompts)
        accepted = self._accepted(names, admitted)
        rows = len(names) + int(admitted.sum())
        both = len(names) + len(joining)
        times = target_ms(rows, prompts), draft_ms(both, columns, prompts)
        if isinstance(self._policy, Ours):
            self._learn(names, (admitted, accepted, drafts), rows, both, prompts, columns, times)
        self._advance(names, joining, accepted, columns)
        return len(names) + int(accepted.sum()) + len(joining), sum(times)

    def _decide(self, names: list[str], drafts: IntArray, prompts: int) -> tuple[IntArray, int]:
        """Admitted drafts of each request, and columns of the pass at the end."""
        if isinstance(self._policy, int):
            return drafts, self._policy
        if not names:
            return drafts, K
        plan = self._policy.plan(self._step, names, drafts, prompts)
        if plan.kind is PlanKind.SKIP_DRAFT:
            drafts = np.zeros_like(drafts)
        elif plan.kind is PlanKind.TRIM:
            alive = np.full((len(names), K), -1.0)
            for row, name in enumerate(names):
                count = int(drafts[row])
                alive[row, :count] = np.cumprod(self._confidence[name][:count])
            best = np.argsort(-alive.ravel(), kind="stable")[: min(plan.budget, drafts.sum())]
            drafts = np.bincount(best // K, minlength=len(names))
        return drafts, plan.columns

    def _accepted(self, names: list[str], admitted: IntArray) -> IntArray:
        found = np.zeros(len(names), dtype=np.int64)
        for row, name in enumerate(names):
            count = int(admitted[row])
            rejected = self._rng.random(count) >= self._confidence[name][:count] if count else None
            if rejected is not None:
                found[row] = rejected.argmax() if rejected.any() else count
        return found

    def _learn(
        self,
        names: list[str],
        counts: tuple[IntArray, IntArray, IntArray],
        rows: int,
        requests: int,
        prompts: int,
        columns: int,
        times: tuple[float, float],
    ) -> None:
        assert isinstance(self._policy, Ours), "a fixed policy learns nothing"
        admitted, accepted, drafts = counts
        if drafts.any():
            slots = self._policy.table.slots(names)
            self._policy.table.record_outcomes(slots, self._step, admitted, accepted)
        noisy = np.array(times) * np.exp(self._rng.normal(0.0, NOISE, 2))
        timing = StepTiming(
            StepMode.MIXED if prompts else StepMode.FULL,
            StepShape.RAGGED,
            requests,
            rows + prompts,
            KV_TOKENS,
            float(noisy[0]),
            float(noisy[1]) if columns else None,
            columns if 0 < columns < K else None,
            prefill_rows=prompts,
        )
        self._policy.cost.observe(timing)
        if self._confidence:
            self._policy.seen(self._step, self._confidence)

    def _advance(
        self, names: list[str], joining: list[str], accepted: IntArray, columns: int
    ) -> None:
        """Whoever ends is replaced; all others have new drafts, or none."""
        ours = self._policy.table if isinstance(self._policy, Ours) else None
        self._running = []
        for name, tokens in zip(names, (accepted + 1).tolist(), strict=True):
            self._left[name] -= tokens
            if self._left[name] > 0:
                self._running.append(name)
                continue
            self._waiting.append(self._new(OUTPUT))
            if ours is not None:
                ours.remove(name)
        for name in joining:
            self._left[name] -= 1
            self._running.append(name)
            if ours is not None:
                left = self._left[name]
                ours.add(name, sampled=False, untouched=True, remaining=left)
        self._drafts = dict.fromkeys(self._running, columns)
        shape = ACCEPTANCE * SPREAD, (1.0 - ACCEPTANCE) * SPREAD
        drawn = self._running if columns else []
        self._confidence = {name: self._rng.beta(*shape) for name in drawn}


def throughput(requests: int, policy: Ours | int, seed: int) -> float:
    """Output tokens per second over some 440 tokens a request, after 200 each."""
    load, total, tokens, ms = Load(requests, policy, seed), 0, 0, 0.0
    while total <= 640 * requests:
        emitted, took = load.step()
        total += emitted
        if total > 200 * requests:
            tokens, ms = tokens + emitted, ms + took
    return tokens / ms * 1e3


def rows_of(loads: list[int], seeds: int, trims_mixed: bool) -> Iterator[str]:
    """One line for each load."""
    for requests in loads:
        fixed = {
            k: float(np.mean([throughput(requests, k, seed) for seed in range(seeds)]))
            for k in (0, 1, 2, 3, 5, 7)
        }
        runs = [throughput(requests, Ours(requests, trims_mixed), seed) for seed in range(seeds)]
        ours = float(np.mean(runs))
        shown = "  ".join(f"{k}: {value:6.0f}" for k, value in fixed.items())
        yield f"{requests:4} requests  {shown}  ours: {ours:6.0f}  {ours / max(fixed.values()):.3f}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="8,32,64,128,256")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--full-windows", action="store_true")
    args = parser.parse_args()
    loads = [int(part) for part in args.requests.split(",")]
    for line in rows_of(loads, args.seeds, not args.full_windows):
        print(line, flush=True)


if __name__ == "__main__":
    main()
