"""CPU time that planning and bookkeeping add to vLLM's own scheduler, in the engine core.

    python -m benchmarks.scheduler_cost [--requests 1,16,64,256] [--steps 400] [--json out.json]

vLLM's scheduler as it is and ours run side by side in one process, on equal requests with made-up
worker output (K = 7, confidence rows a step late as under async scheduling); no model runs. A step
is `schedule()` and `update_from_output()`; variants take turns of 64 steps. All figures are process
CPU microseconds a step:

    added   time outside vLLM's own two methods, less what the harness itself counts there (stock)
    net     time of the whole step less that of stock vLLM in the same round: what users pay. It
            holds what vLLM saves by our counting of acceptance and by fewer drafts

each the median over rounds, with the 20th and 80th percentile; `added best` is the best turn.
`steps` is `added` by what is done in a step besides scheduling and counting: nothing at all
(`rest`, resting.py), a plan that is made or repeated, outcomes that are learned from, and rows
that the calibration is taught by; each with the share of steps, best, median, 20th and 80th
percentile. `planned` makes every step a trimmed one (no margin), `native` one in which full windows
have been best for many steps, `off` has scheduling switched off.
"""

import argparse
import gc
import json
import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.costs import write_cost_table
from tests.support.engines import ENGINE_ENVIRONMENT
from tests.support.pairs import Pair, PairSpec, build_pair
from tests.support.schedulers import MadeUpWorker, add_request, bare_scheduler
from vllm_dspark.integration.report import order_of

K = 7
TURN = 64
WARM_UP = 5 * TURN  # native steps rest for longest from the 256th on
# ms of an empty step, and by how much full windows raise it: trimming pays, or it never does.
TABLES = {"planned": (10.0, 2.0), "native": (100.0, 0.03)}
VARIANTS = ("stock", "off", "native", "planned-host", "planned-device")


_inner_ns = [0]  # spent inside vLLM's own methods


def watch_vllm() -> None:
    """Count the time of vLLM's own `schedule` and `update_from_output`."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.process_time_ns()
            result = method(*args, **kwargs)
            _inner_ns[0] += time.process_time_ns() - started
            return result

        return call

    for name in ("schedule", "update_from_output"):
        setattr(Scheduler, name, timed(getattr(Scheduler, name)))


@dataclass
class Side:
    """One scheduler and the made-up worker behind it."""

    scheduler: Any
    worker: MadeUpWorker

    def turn(self, steps: int) -> list[tuple[float, float, str]]:
        """CPU microseconds of each step, ours and vLLM's, and its kind.

        What stands for the worker is not counted.
        """
        found = []
        for _ in range(steps):
            before = self._done()
            _inner_ns[0] = 0
            started = time.process_time_ns()
            output = self.scheduler.schedule()
            spent = time.process_time_ns() - started
            ran = self.worker.run(output)
            started = time.process_time_ns()
            self.scheduler.update_from_output(output, ran)
            spent += time.process_time_ns() - started
            self.worker.draft(output)
            kind = self._kind(order_of(output), before)
            found.append(((spent - _inner_ns[0]) / 1e3, _inner_ns[0] / 1e3, kind))
        return found

    def _done(self) -> tuple[float, int, float]:
        """Requests planned for, steps learned from and drafts that taught the calibration."""
        conductor = getattr(self.scheduler, "conductor", None)
        if conductor is None:
            return 0.0, 0, 0.0
        table = conductor.table
        return conductor.rows.states.sum(), table._num_outcomes, table.live.paired.sum()

    def _kind(self, order: Any, before: tuple[float, int, float]) -> str:
        if order is None:
            return "stock"
        if order.unseen:
            return "rest"
        pairs = zip(self._done(), before, strict=True)
        planned, learned, taught = (bool(after > then) for after, then in pairs)
        words = ["planned" if planned else "repeated"] if order.plan is not None else ["unplanned"]
        return ", ".join(words + ["learned"] * learned + ["calibrated"] * taught)


def options_of(variant: str, requests: int, folder: Path) -> dict[str, Any]:
    """The plugin's options of a variant, with a cost table written for it."""
    if variant in ("stock", "off"):
        return {"enabled": False} if variant == "stock" else {"scheduling": False}
    kind, _, windows = variant.partition("-")
    base, growth = TABLES[kind]
    per_token = base * growth / (requests * (K + 1))
    path = folder / f"{kind}-{requests}.json"
    write_cost_table(path, base_ms=base, per_token_ms=per_token, max_requests=requests)
    options = {"scheduling": "auto", "cost_table": str(path), "windows": windows or "host"}
    if kind == "planned":
        options |= {"confidence_min_predicted_gain": 0.0, "hysteresis_steps": 0}
    # Whatever acceptance is learned, the decision is to stay what the variant is about.
    options |= {"online_cost": False}
    return options


def start(pair: Pair, variant: str, requests: int, folder: Path) -> Side:
    """A scheduler whose requests are all decoding."""
    scheduler = bare_scheduler(
        pair,
        options_of(variant, requests, folder),
        width=K,
        blocks=1_000_000,
        max_num_seqs=requests,
        max_model_len=1_000_000,
        max_num_batched_tokens=16_384,
        hf_overrides={"max_position_embeddings": 1_000_000},
    )
    for i in range(requests):
        add_request(scheduler, f"request-{i}", max_tokens=900_000)
    rng = np.random.default_rng(requests)
    worker = MadeUpWorker(scheduler, lambda _, drafts: int(rng.binomial(drafts, 0.7)), lag=1)
    side = Side(scheduler, worker)
    side.turn(WARM_UP)
    worker.plans.clear()
    return side


def measure(pair: Pair, requests: int, steps: int, folder: Path) -> dict[str, dict[str, Any]]:
    """Microseconds a step of each variant: what we add, and what vLLM's own part becomes."""
    sides = {variant: start(pair, variant, requests, folder) for variant in VARIANTS}
    turns: dict[str, list[list[tuple[float, float, str]]]] = {v: [] for v in VARIANTS}
    gc.collect()
    gc.freeze()  # vLLM's engine core does the same
    for _ in range(max(3, steps // TURN)):
        for variant, side in sides.items():
            turns[variant].append(side.turn(TURN))
    mean = {
        v: np.array(
            [[np.mean(column) for column in list(zip(*turn, strict=True))[:2]] for turn in turns[v]]
        )
        for v in VARIANTS
    }
    floor = float(np.median(mean["stock"][:, 0]))
    best_floor = float(mean["stock"][:, 0].min())
    found = {}
    for variant, values in mean.items():
        kinds = Counter(plan.kind.value for plan in sides[variant].worker.plans)
        net = values.sum(axis=1) - mean["stock"].sum(axis=1)
        by_kind: dict[str, list[float]] = {}
        for own, _, kind in (step for turn in turns[variant] for step in turn):
            by_kind.setdefault(kind, []).append(own - floor)
        found[variant] = {
            "kinds": dict(kinds),
            "added_us": _spread(values[:, 0] - floor),
            "added_best_us": round(float(values[:, 0].min()) - best_floor, 1),
            "net_us": _spread(net),
            "vllm_us": round(float(np.median(values[:, 1])), 1),
            "steps": {
                kind: [
                    round(len(own) / sum(map(len, by_kind.values())), 3),
                    round(min(own), 1),
                    *_spread(np.array(own)),
                ]
                for kind, own in sorted(by_kind.items(), key=lambda item: -len(item[1]))
            },
        }
    for side in sides.values():
        side.scheduler.shutdown()
    return found


def _spread(values: np.ndarray) -> list[float]:
    """Median, 20th and 80th percentile."""
    return [round(float(value), 1) for value in np.percentile(values, (50, 20, 80))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--json", default="")
    arguments = parser.parse_args()
    os.environ.update(ENGINE_ENVIRONMENT)
    watch_vllm()
    report = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        os.environ["VLLM_DSPARK_CACHE_DIR"] = name
        pair = build_pair(folder, PairSpec(kind="markov", max_positions=1_000_000))
        for requests in map(int, arguments.requests.split(",")):
            found = measure(pair, requests, arguments.steps, folder)
            report[str(requests)] = found
            for variant, row in found.items():
                kinds = row.pop("steps")
                print(f"{requests} requests, {variant}: {row}", flush=True)
                for kind, figures in kinds.items() if variant != "stock" else ():
                    print(f"    {kind}: {figures}", flush=True)
                row["steps"] = kinds
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(report, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
