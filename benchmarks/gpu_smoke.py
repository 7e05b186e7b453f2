"""One CUDA machine, a few minutes: does every way of running a step work there, and what it costs.

    PYTHONPATH=SITE:. python benchmarks/gpu_smoke.py --out FILE.json

Runs on tiny nearly-Markov pairs (tests/support/pairs.py), whose drafts are really accepted. Groups
`correct`, `law` and `reference` run side by side, each in a process of its own; `time` runs alone
afterwards, so its kernels are compiled by then. A group keeps several engines in one process, one
after the other, and writes its file after each. Results: docs/benchmarks/h200-smoke.md.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu_probe import functions, generate, parts, prompts, runner_of, scheduler_of

WIDTH = 7
SIZES = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256]
LARGE_SIZES = [1, 8, 32, 64, 128, 256, 512, 1024]
RANDOM = {"scheduling": False, "test_windows": "random", "test_windows_seed": 3}
NARROW = {**RANDOM, "test_draft_width": "random"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/dspark-smoke"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--groups", default="correct,law,reference,time")
    parser.add_argument("--budget-s", type=float, default=240.0)
    parser.add_argument("--group")
    args = parser.parse_args()
    if args.group:
        Session(args.folder, args.out).run(GROUPS[args.group])
        return
    from tests.support.pairs import PairSpec, build_pair

    shape = {"kind": "markov", "hidden": 128, "markov_rank": 128, "head_dim": 64}
    build_pair(args.folder / "pair", PairSpec(noise=0.1, **shape))
    build_pair(
        args.folder / "small", PairSpec(symbols=12, sharpness=3.0, noise=0.6, seed=5, **shape)
    )
    wanted = args.groups.split(",")
    deadline = time.monotonic() + args.budget_s
    run_side_by_side([name for name in wanted if name != "time"], args, deadline)
    if "time" in wanted:
        run_side_by_side(["time"], args, deadline)


def run_side_by_side(names: list[str], args: argparse.Namespace, deadline: float) -> None:
    """Each group in a process, until all are done or the time is over."""
    running = {}
    for name in names:
        file = args.out.with_suffix(f".{name}.json")
        log = file.with_suffix(".log").open("w")
        command = [sys.executable, __file__, "--group", name, "--out", str(file)]
        command += ["--folder", str(args.folder)]
        running[name] = (subprocess.Popen(command, stdout=log, stderr=log), file)
    for name, (process, file) in running.items():
        try:
            process.wait(max(1.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            print(name, "cut off", flush=True)
        if file.exists():
            print(name, file.read_text(), flush=True)
        if process.returncode:
            print(name, file.with_suffix(".log").read_text()[-2500:], flush=True)


class Session:
    """Stages of one group, in one process."""

    def __init__(self, folder: Path, out: Path) -> None:
        self.folder, self.out = folder, out
        self.results: dict[str, Any] = {}
        self.expected: list[list[int]] = []

    def run(self, stages: dict[str, Callable[["Session"], Any]]) -> None:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        for name, stage in stages.items():
            started = time.perf_counter()
            try:
                row = stage(self)
            except Exception as error:  # noqa: BLE001 - a stage that fails must not cost the others
                import traceback

                row = {"error": repr(error), "trace": traceback.format_exc()[-1800:]}
            row["stage_s"] = round(time.perf_counter() - started, 1)
            self.results[name] = row
            self.out.write_text(json.dumps(self.results, indent=1))

    @contextmanager
    def engine(
        self, options: dict[str, Any] | None, pair: str = "pair", **changes: Any
    ) -> Iterator[Any]:
        """An in-process engine; options: of the plugin, None: no speculation."""
        import gc

        from vllm import LLM
        from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

        sizes = changes.pop("sizes", SIZES)
        drafts = changes.pop("drafts", "greedy")
        speculative = None
        if options is not None:
            speculative = {
                "method": "dspark",
                "model": str(self.folder / pair / "drafter"),
                "num_speculative_tokens": WIDTH,
                "draft_sample_method": drafts,
                "dspark": options,
            }
        settings = {
            "max_model_len": 1024,
            "dtype": "bfloat16",
            "max_num_seqs": 32,
            # A fixed cache: measuring memory trips over the groups that run beside this one.
            "kv_cache_memory_bytes": 4 << 30,
            # What vLLM wants to see free at its start: its default refuses a fourth group's engine.
            "gpu_memory_utilization": 0.1,
            "disable_log_stats": False,
            # no torch.compile: this is about our code, and compiling takes a minute an engine
            "compilation_config": {
                "mode": 0,
                "cudagraph_mode": "FULL_DECODE_ONLY",
                "cudagraph_capture_sizes": sizes,
            },
            **changes,
        }
        llm = None
        try:
            llm = LLM(
                str(self.folder / pair / "target"), speculative_config=speculative, **settings
            )
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()


def full_graph_table(path: Path, base_ms: float, per_token_ms: float, draft_ms: float) -> Path:
    """A linear cost table for full graphs of all shapes."""
    from tests.support.costs import any_fingerprint
    from vllm_dspark.artifacts.schema import CostTableRecord
    from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming, build_cost_table

    sizes = {
        StepShape.RAGGED: SIZES,
        StepShape.NATIVE: [s for s in SIZES if s % (WIDTH + 1) == 0],
        StepShape.SINGLE: [s for s in SIZES if s <= 32],
    }
    samples = [
        StepTiming(
            StepMode.FULL,
            shape,
            num_requests=max(1, size // (WIDTH + 1)),
            num_tokens=size,
            kv_tokens=128,
            forward_ms=base_ms + per_token_ms * size,
            draft_ms=draft_ms,
        )
        for shape, found in sizes.items()
        for size in found
        for _ in range(3)
    ]
    record = CostTableRecord.from_table(build_cost_table(samples), any_fingerprint(WIDTH))
    path.write_text(record.model_dump_json())
    return path


# ---- equality at T = 0


def watch(llm: Any) -> tuple[Counter, Counter]:
    """Plans that the engine core makes and graphs that steps run in, from now on."""
    plans: Counter[str] = Counter()
    graphs: Counter[str] = Counter()
    conductor, manager = scheduler_of(llm).conductor, runner_of(llm).cudagraph_manager
    order, dispatch = conductor.order, manager.dispatch

    def noted_order(*args: Any) -> Any:
        made = order(*args)
        if made.plan is not None:
            plans[f"{made.plan.kind.value}/{made.plan.reason.value}"] += 1
        return made

    def noted_dispatch(*args: Any, **kwargs: Any) -> Any:
        desc = dispatch(*args, **kwargs)
        rows = desc.uniform_token_count or ("variable" if desc.max_query_len else "any")
        graphs[f"{desc.cg_mode.name}/{rows}"] += 1
        return desc

    conductor.order, manager.dispatch = noted_order, noted_dispatch
    return plans, graphs


def unspeculated(**changes: Any) -> Callable[[Session], dict[str, Any]]:
    """A stage without speculation: what the others of its group are compared with."""

    def stage(session: Session) -> dict[str, Any]:
        with session.engine(None, **changes) as llm:
            session.expected = generate(llm, prompts(8), 96, temperature=0)
        return {"tokens": sum(map(len, session.expected))}

    return stage


def equality(options: dict[str, Any], **changes: Any) -> Callable[[Session], dict[str, Any]]:
    """A stage that compares greedy outputs with those without speculation."""

    def stage(session: Session) -> dict[str, Any]:
        chosen = dict(options)
        if isinstance(chosen.get("cost_table"), tuple):
            folder = session.folder / "table.json"
            chosen["cost_table"] = str(full_graph_table(folder, *chosen["cost_table"]))
        started = time.perf_counter()
        with session.engine(chosen, **changes) as llm:
            init_s = time.perf_counter() - started
            plans, graphs = watch(llm)
            found = generate(llm, prompts(8), 96, temperature=0)
            totals, runner = scheduler_of(llm).dspark_totals, runner_of(llm)
            windows = runner.dspark_windows
            return {
                "init_s": round(init_s, 1),
                "equal": sum(a == b for a, b in zip(session.expected, found, strict=True)),
                "of": len(found),
                "plans": dict(plans),
                "graphs": dict(graphs),
                "drafted": totals.drafted.tolist(),
                "admitted": totals.admitted.tolist(),
                "accepted": totals.accepted.tolist(),
                "executor": type(windows).__name__,
                "plans_executed": windows.box.accepted if windows else 0,
                "plans_dropped": windows.box.mismatched if windows else 0,
                "refused": runner.dspark_reporter.refused,
                "off_reason": scheduler_of(llm).conductor.off_reason,
                "context_graphs": len(runner.speculator._context_graphs),
                "narrow_graphs": {
                    width: len(manager.graphs)
                    for width, manager in runner.speculator._narrow_graphs.items()
                },
                "timed_steps": float(scheduler_of(llm).conductor.times.timed[0]),
            }

    return stage


def profiled(session: Session) -> dict[str, Any]:
    """Cost profile at start-up: time it takes, and whether a second start takes the cached one."""
    cache = session.folder / f"cache-{os.getpid()}"
    row: dict[str, Any] = {}
    for name in ("cold", "warm"):
        started = time.perf_counter()
        with session.engine({"cache_dir": str(cache)}) as llm:
            row[f"{name}_init_s"] = round(time.perf_counter() - started, 1)
            conductor = scheduler_of(llm).conductor
            generate(llm, prompts(8), 32, temperature=0)
            row[f"{name}_files"] = sorted(str(p.name) for p in cache.rglob("*.json"))
            row[f"{name}_priced"] = bool(conductor.planner and conductor.planner.cost)
            if name == "cold":
                from vllm_dspark.errors import CostTableError

                begun = time.perf_counter()
                try:
                    runner_of(llm).profile_costs()
                except CostTableError as error:
                    row["refused"] = str(error)
                row["profile_s"] = round(time.perf_counter() - begun, 2)
            if conductor.planner and conductor.planner.cost:
                table = conductor.planner.cost.table
                row["table"] = {
                    f"{mode.value}/{shape.value}": {
                        "kv": grid.kv_tokens,
                        "sizes": grid.sizes,
                        "ms": grid.median_ms.round(4).tolist(),
                    }
                    for (mode, shape), grid in table.grids.items()
                }
                row["allocation_ms"] = table.allocation_ms
    return row


# ---- law at T = 1


def laws(session: Session) -> dict[str, Any]:
    """Pairs of tokens after one prompt: ours in random device windows, against no speculation.

    Both run in bf16, so the exact law of the float64 model is not the yardstick: two samples are.
    """
    counts: dict[str, list[list[int]]] = {}
    row: dict[str, Any] = {}
    large = {"max_num_seqs": 128, "max_num_batched_tokens": 4096, "sizes": LARGE_SIZES}
    requests = [{"prompt_token_ids": [1, 7, 3, 3, 9]}] * 8000
    variants = {
        "off": (None, "greedy"),
        "probabilistic": (RANDOM, "probabilistic"),
        "greedy": (RANDOM, "greedy"),
        "narrow": (NARROW, "probabilistic"),
    }
    for name, (options, drafts) in variants.items():
        with session.engine(options, "small", drafts=drafts, **large) as llm:
            counts[name] = generate(llm, requests, 4, temperature=1.0)
            if options is not None:
                totals = scheduler_of(llm).dspark_totals
                row[f"{name}_accepted"] = totals.accepted.tolist()
                row[f"{name}_trimmed"] = totals.trimmed.tolist()
        if name != "off":
            row[name] = {
                f"tokens {i + 1},{i + 2}": two_sample_p(counts["off"], counts[name], i)
                for i in range(3)
            }
            session.out.write_text(json.dumps({"laws": row}, indent=1))
    return row


def two_sample_p(first: list[list[int]], second: list[list[int]], at: int) -> float:
    """p-value of "both samples have one law" for the tokens at positions at and at + 1."""
    from tests.support.statistics import chi_square_tail

    cells = [Counter((t[at], t[at + 1]) for t in sample) for sample in (first, second)]
    total = cells[0] + cells[1]
    share = len(first) / (len(first) + len(second))
    statistic, used, rest = 0.0, 0, [0, 0]
    for cell, count in total.items():
        if count * min(share, 1 - share) < 10:
            rest[0] += cells[0][cell]
            rest[1] += cells[1][cell]
            continue
        used += 1
        expected = count * share
        statistic += (cells[0][cell] - expected) ** 2 * (1 / expected + 1 / (count - expected))
    if sum(rest) * min(share, 1 - share) >= 10:
        used += 1
        expected = sum(rest) * share
        statistic += (rest[0] - expected) ** 2 * (1 / expected + 1 / (sum(rest) - expected))
    return chi_square_tail(statistic, used - 1)


# ---- time


def timing(options: dict[str, Any], **changes: Any) -> Callable[[Session], dict[str, Any]]:
    """A stage: tokens/s at several loads, then the parts of a step, host and device."""

    def stage(session: Session) -> dict[str, Any]:
        chosen = dict(options)
        if isinstance(chosen.get("cost_table"), tuple):
            folder = session.folder / "time-table.json"
            chosen["cost_table"] = str(full_graph_table(folder, *chosen["cost_table"]))
        started = time.perf_counter()
        row: dict[str, Any] = {}
        with session.engine(chosen, **changes) as llm:
            row["init_s"] = round(time.perf_counter() - started, 1)
            generate(llm, prompts(32), 16, temperature=0)
            for load in (1, 8, 32):
                runs = []
                for _ in range(3):
                    begun = time.perf_counter()
                    found = generate(llm, prompts(load), 256, temperature=0)
                    runs.append(sum(map(len, found)) / (time.perf_counter() - begun))
                row[f"tok_s_{load}"] = sorted(round(r) for r in runs)
            row["parts"] = {str(load): parts(llm, load) for load in (1, 8, 32)}
            row["functions"] = functions(llm)
        return row

    return stage


DEAR = (10.0, 1.0, 1.0)  # every row costs a tenth of an empty step: most drafts are not worth it
HOPELESS = (0.1, 10.0, 10.0)  # rows are all that costs: no draft is worth verifying
CHEAP = (20.0, 0.05, 0.1)  # rows are nearly free: full windows

GROUPS: dict[str, dict[str, Callable[[Session], Any]]] = {
    "correct": {
        "off": unspeculated(),
        "skipped": equality({"cost_table": HOPELESS, "online_cost": False, "probe_interval": 8}),
        "profiled": profiled,
        "host_random": equality({**RANDOM, "windows": "host"}),
        "device_random": equality(RANDOM),
        "random_widths": equality(NARROW),
        "planned": equality({"cost_table": DEAR, "online_cost": False}),
        "probabilistic": equality({"scheduling": False}, drafts="probabilistic"),
    },
    "law": {"laws": laws},
    "reference": {
        "off": unspeculated(),
        "reference": equality({"scheduling": False, "kernels": "reference"}),
        "reference_random": equality({**RANDOM, "kernels": "reference"}),
    },
    "custom": {  # our attention backend
        "off": unspeculated(attention_backend="CUSTOM"),
        "native": equality({"scheduling": False}, attention_backend="CUSTOM"),
        "device_random": equality(RANDOM, attention_backend="CUSTOM"),
    },
    "time": {
        "stock": timing({"enabled": False}),
        "native": timing({"scheduling": False}),
        "planned_native": timing({"cost_table": CHEAP, "online_cost": False}),
        "stock_again": timing({"enabled": False}),
    },
}


if __name__ == "__main__":
    main()
