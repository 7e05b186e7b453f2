"""Looking into an engine in this process: its objects, its output, where a step spends its time."""

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Files whose functions are listed however little they cost.
OURS = (
    "runner.py", "reporting.py", "rejection.py", "speculator.py", "conductor.py", "outcomes.py",
    "metrics", "scheduler.py", "cuda_", "report.py", "rejection_sampler",
)  # fmt: skip


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: Any) -> Any:
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def prompts(count: int) -> list[dict[str, list[int]]]:
    return [{"prompt_token_ids": [10 + 7 * i % 200, 20, 30 + i]} for i in range(count)]


def generate(llm: Any, requests: list[Any], max_tokens: int, **params: Any) -> list[list[int]]:
    from vllm import SamplingParams

    chosen = SamplingParams(max_tokens=max_tokens, ignore_eos=True, detokenize=False, **params)
    outputs = llm.generate(requests, chosen, use_tqdm=False)
    return [list(o.outputs[0].token_ids) for o in outputs]


def parts(llm: Any, load: int) -> dict[str, Any]:
    """Median ms of the parts of a decode step: on the device's time line, and on the host's."""
    import torch

    runner = runner_of(llm)
    spots = {
        "execute": (runner, "execute_model"),
        "target": (runner.cudagraph_manager, "run_fullgraph"),
        "sample": (runner, "sample"),
        "draft": (runner.speculator, "propose"),
        "sample_tokens": (runner, "sample_tokens"),
        "schedule": (scheduler_of(llm), "schedule"),
        "update": (scheduler_of(llm), "update_from_output"),
    }
    marks: dict[str, list[Any]] = {name: [] for name in spots}
    host: dict[str, list[float]] = {name: [] for name in spots}

    def wrap(name: str, method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            begun = time.perf_counter()
            events[0].record()
            result = method(*args, **kwargs)
            events[1].record()
            host[name].append((time.perf_counter() - begun) * 1e3)
            marks[name].append(events)
            return result

        return call

    for name, (owner, method) in spots.items():
        setattr(owner, method, wrap(name, getattr(owner, method)))
    begun = time.perf_counter()
    generate(llm, prompts(load), 192, temperature=0)
    wall = (time.perf_counter() - begun) * 1e3
    for owner, method in spots.values():
        delattr(owner, method)
    torch.cuda.synchronize()
    steps = len(marks["draft"])
    device = {
        name: round(statistics.median(a.elapsed_time(b) for a, b in found[2:-1]), 4)
        for name, found in marks.items()
        if name in ("execute", "target", "sample", "draft") and len(found) > 3
    }
    return {
        "steps": steps,
        "wall_ms_per_step": round(wall / max(steps, 1), 4),
        "device_ms": device,
        "host_ms": {n: round(statistics.median(v), 4) for n, v in host.items() if v},
    }


def functions(llm: Any) -> list[list[Any]]:
    """Python functions by own and cumulative time per step at 8 requests (slower: traced)."""
    profile = cProfile.Profile()
    profile.enable()
    generate(llm, prompts(8), 96, temperature=0)
    profile.disable()
    stats = pstats.Stats(profile).stats
    steps = max(
        (calls for (_, _, name), (_, calls, *_) in stats.items() if name == "propose"), default=1
    )
    rows = [
        [f"{Path(file).name}:{line}:{name}", calls, round(own / steps * 1e3, 4), cumulative]
        for (file, line, name), (_, calls, own, cumulative, _) in stats.items()
    ]
    rows = [[n, c, o, round(cumulative / steps * 1e3, 4)] for n, c, o, cumulative in rows]
    by_own = sorted(rows, key=lambda r: -r[2])[:45]
    ours = [r for r in rows if r[3] > 0.01 and any(k in r[0] for k in OURS)]
    return by_own + sorted(ours, key=lambda r: -r[3])[:40]
