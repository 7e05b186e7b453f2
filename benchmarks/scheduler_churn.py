"""CPU time of the engine core's scheduling under arrivals: ours beside vLLM's own.

    python -m benchmarks.scheduler_churn [--requests 32,128,256] [--turns 5]

Like benchmarks/scheduler_cost.py, but requests end after 64 to 192 tokens and others with prompts
of 64 tokens take their place, so that in most steps someone joins or leaves and nothing repeats or
rests; steps with prompts are priced by reported times and trimmed (`"confidence_mixed_evidence":
"auto"`), passes may be narrow, windows are set on the device. Printed: process CPU microseconds a
step in `schedule()` and `update_from_output()`, medians over turns of 60 steps that alternate;
`inner` is what vLLM's own two methods take of it, `own` the rest, `net` what both take beyond
stock; `plans` counts the measured steps by what was planned, since prices decide what is measured.
"""

import argparse
import gc
import os
import random
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import scheduler_cost
from tests.support.costs import write_cost_table
from tests.support.engines import ENGINE_ENVIRONMENT
from tests.support.pairs import Pair, PairSpec, build_pair
from tests.support.schedulers import MadeUpWorker, add_request, bare_scheduler
from vllm_dspark.planning.cost import StepMode

K, TURN, WARM_UP = 7, 60, 150
PROMPT = range(10, 74)


class TimedWorker(MadeUpWorker):
    """Reports step times like a GPU's: steps with prompts cost by all their rows."""

    def _report(self, output: Any, order: Any, ids: list[str], admitted: Any) -> Any:
        report = super()._report(output, order, ids, admitted)
        rows = output.total_num_scheduled_tokens
        prompts = sum(n for n in output.num_scheduled_tokens.values() if n > K + 1)
        timing = replace(
            report.timings[0],
            mode=StepMode.MIXED if prompts else StepMode.FULL,
            num_tokens=rows,
            forward_ms=3.0 + 0.0275 * rows if prompts else 5.5 + 0.02 * rows,
            draft_ms=1.0 + 0.005 * len(ids) * (order.draft_width or K),
            prefill_rows=prompts,
        )
        return replace(report, timings=(timing,))


@dataclass
class Side:
    """One scheduler under the load."""

    scheduler: Any
    worker: TimedWorker
    requests: int
    lengths: random.Random = field(default_factory=lambda: random.Random(3))
    added: int = 0

    def turn(self, steps: int) -> tuple[float, float, float]:
        """CPU microseconds a step: schedule, update_from_output, and vLLM's own part of both."""
        spent, inner = [0, 0], 0
        for _ in range(steps):
            while len(self.scheduler.running) + len(self.scheduler.waiting) < self.requests:
                self.added += 1
                tokens = self.lengths.randint(64, 192)
                add_request(self.scheduler, f"r{self.added}", prompt=PROMPT, max_tokens=tokens)
            scheduler_cost._inner_ns[0] = 0
            started = time.process_time_ns()
            output = self.scheduler.schedule()
            spent[0] += time.process_time_ns() - started
            ran = self.worker.run(output)
            started = time.process_time_ns()
            self.scheduler.update_from_output(output, ran)
            spent[1] += time.process_time_ns() - started
            inner += scheduler_cost._inner_ns[0]
            self.worker.draft(output)
        return spent[0] / steps / 1e3, spent[1] / steps / 1e3, inner / steps / 1e3


def start(pair: Pair, requests: int, folder: Path, *, ours: bool) -> Side:
    """A scheduler that has served the load for a while."""
    options: dict[str, Any] = {"enabled": False}
    if ours:
        table = write_cost_table(
            folder / f"{requests}.json",
            base_ms=5.5,
            per_token_ms=0.02,
            draft_ms=1.0 + 0.035 * requests,
            narrow_share=0.3,
            max_requests=requests,
        )
        options = {
            "scheduling": "auto",
            "cost_table": str(table),
            "windows": "device",
            "confidence_mixed_evidence": "auto",
        }
    scheduler = bare_scheduler(
        pair,
        options,
        width=K,
        blocks=1_000_000,
        max_num_seqs=requests,
        max_model_len=100_000,
        max_num_batched_tokens=16_384,
        hf_overrides={"max_position_embeddings": 100_000},
    )
    rng = np.random.default_rng(1)
    worker = TimedWorker(scheduler, lambda _, drafts: int(rng.binomial(drafts, 0.7)), lag=1)
    side = Side(scheduler, worker, requests)
    side.turn(WARM_UP)
    worker.plans.clear()
    return side


def measure(pair: Pair, requests: int, turns: int, folder: Path) -> None:
    """Print both sides of one load."""
    sides = {name: start(pair, requests, folder, ours=name == "ours") for name in ("stock", "ours")}
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in sides}
    gc.collect()
    gc.freeze()  # vLLM's engine core does the same
    for _ in range(turns):
        for name, side in sides.items():
            found[name].append(side.turn(TURN))
    for name, rows in found.items():
        schedule, update, inner = np.median(rows, axis=0)
        print(f"{requests} requests, {name}: schedule {schedule:.0f}, update {update:.0f}, "
              f"inner {inner:.0f} us", flush=True)  # fmt: skip
    whole = {name: np.array([row[0] + row[1] for row in rows]) for name, rows in found.items()}
    net = whole["ours"] - whole["stock"]
    own = np.array([row[0] + row[1] - row[2] for row in found["ours"]])
    for label, values in (("own", own), ("net", net)):
        low, middle, high = np.percentile(values, (20, 50, 80))
        print(f"    {label}: {middle:.0f} ({low:.0f} to {high:.0f}) us a step", flush=True)
    plans = sides["ours"].worker.plans
    print(
        f"    plans: {dict(Counter(plan.reason.value for plan in plans).most_common())}", flush=True
    )
    for side in sides.values():
        side.scheduler.shutdown()


def main() -> None:
    """Measure each load in turn."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="32,128,256")
    parser.add_argument("--turns", type=int, default=5)
    arguments = parser.parse_args()
    os.environ.update(ENGINE_ENVIRONMENT)
    scheduler_cost.watch_vllm()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["VLLM_DSPARK_CACHE_DIR"] = name
        pair = build_pair(folder, PairSpec(kind="markov", max_positions=100_000))
        for requests in map(int, arguments.requests.split(",")):
            measure(pair, requests, arguments.turns, folder)


if __name__ == "__main__":
    main()
