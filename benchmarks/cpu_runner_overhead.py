"""What a decode step of vLLM's V2 runner costs on a CPU beside V1's, side by side in one run.

    python benchmarks/cpu_runner_overhead.py --model TARGET --modes v1,v1-plugin,v2
    python benchmarks/cpu_runner_overhead.py --model TARGET --drafter DRAFTER --modes v1,v2,dspark

Every mode lives in a process of its own for the whole run; the processes take turns, a burst of
decode steps at a time, so that a slow minute of the machine hits all of them. Figures are wall
milliseconds a step (median over bursts of the burst's median, and the bursts' quartiles), CPU
milliseconds a step, and the median over turns of the ratio to the first mode. One thread a
process by default: with more, OpenMP's spinning barriers make the numbers useless as soon as
another job wants a core.

Modes: v1 (vLLM alone: plugins off, our Triton backend ignored), v1-plugin (V1 with the plugin
installed), v2 (plain V2 on native kernels), dspark and dspark-sampled (vLLM's own DSpark on
native kernels; greedy requests, and sampled requests with sampled drafts).
"""

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

MODES = ("v1", "v1-plugin", "v2", "dspark", "dspark-sampled")


@dataclass(frozen=True)
class Load:
    """What every mode runs."""

    model: str
    drafter: str | None
    num_drafts: int
    dtype: str
    requests: int
    context: int
    steps: int
    threads: int
    eager: bool


@dataclass(frozen=True)
class Burst:
    """One turn of one mode."""

    wall_ms: float  # median over the burst's steps
    cpu_ms: float  # mean over the burst's steps
    tokens: int
    steps: int


def environment_of(mode: str, load: Load) -> dict[str, str]:
    """Settings that must stand before vLLM is imported."""
    common = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": str(load.threads),
        "VLLM_USE_V2_MODEL_RUNNER": "0" if mode.startswith("v1") else "1",
    }
    if load.threads == 1:
        common["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    if mode == "v1":
        common |= {"TRITON_BACKENDS_IN_TREE": "1", "VLLM_PLUGINS": ""}
    return common


def start_engine(mode: str, load: Load) -> Any:
    """The mode's engine inside this process."""
    speculative = None
    if mode.startswith("dspark"):
        if load.drafter is None:
            raise SystemExit(f"mode {mode} needs --drafter")
        sampled = mode == "dspark-sampled"
        speculative = {
            "method": "dspark",
            "model": load.drafter,
            "num_speculative_tokens": load.num_drafts,
            "draft_sample_method": "probabilistic" if sampled else "greedy",
            "dspark": {"enabled": False},
        }
    if mode != "v1":
        from vllm_dspark.integration.cpu_kernels import hook_cpu_platform

        hook_cpu_platform()
    from vllm import LLM

    length = load.context + (load.steps + 4) * (load.num_drafts + 1) + 16
    return LLM(
        load.model,
        dtype=load.dtype,
        speculative_config=speculative,
        skip_tokenizer_init=True,
        enforce_eager=load.eager,
        enable_prefix_caching=False,
        max_model_len=length,
        max_num_seqs=max(load.requests, 2),
        kv_cache_memory_bytes=256 << 20,
    ).llm_engine


def run_burst(engine: Any, mode: str, load: Load, turn: int) -> Burst:
    """Decode ``load.steps`` steps of fresh requests; prefill and the first decode are not timed."""
    from vllm import SamplingParams

    sampled = mode == "dspark-sampled"
    params = SamplingParams(
        temperature=1.0 if sampled else 0.0,
        max_tokens=(load.steps + 4) * (load.num_drafts + 1),
        ignore_eos=True,
        detokenize=False,
    )
    for i in range(load.requests):
        first = 100 + 7 * i
        prompt = {"prompt_token_ids": [first + j % 400 for j in range(load.context)]}
        engine.add_request(f"{turn}-{i}", prompt, params)
    for _ in range(2):
        before = sum(len(o.outputs[0].token_ids) for o in engine.step())
    walls, cpu_start = [], time.process_time()
    for _ in range(load.steps):
        start = time.perf_counter()
        outputs = engine.step()
        walls.append((time.perf_counter() - start) * 1e3)
    cpu_ms = (time.process_time() - cpu_start) * 1e3 / load.steps
    tokens = sum(len(o.outputs[0].token_ids) for o in outputs) - before
    engine.abort_request([f"{turn}-{i}" for i in range(load.requests)])
    while engine.has_unfinished_requests():
        engine.step()
    return Burst(statistics.median(walls), cpu_ms, tokens, load.steps)


def serve_mode(mode: str, load: Load, pipe: Connection) -> None:
    """Child process: start the engine, then one burst per number received, until None."""
    os.environ.update(environment_of(mode, load))
    start = time.perf_counter()
    engine = start_engine(mode, load)
    pipe.send(time.perf_counter() - start)
    while (turn := pipe.recv()) is not None:
        pipe.send(run_burst(engine, mode, load, turn))


def measure(modes: list[str], load: Load, turns: int, warm_up: int) -> dict[str, Any]:
    """Bursts of every mode in turn, order rotated from turn to turn."""
    context = multiprocessing.get_context("spawn")
    pipes, starts = {}, {}
    for mode in modes:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve_mode, args=(mode, load, theirs), daemon=True)
        process.start()
        theirs.close()
        pipes[mode], starts[mode] = ours, ours.recv()
        print(f"{mode}: engine started in {starts[mode]:.1f} s", file=sys.stderr, flush=True)
    bursts: dict[str, list[Burst]] = {mode: [] for mode in modes}
    for turn in range(-warm_up, turns):
        shift = turn % len(modes)
        for mode in modes[shift:] + modes[:shift]:
            pipes[mode].send(turn)
            burst = pipes[mode].recv()
            if turn >= 0:
                bursts[mode].append(burst)
    for pipe in pipes.values():
        pipe.send(None)
    return {"starts_s": starts, "bursts": bursts}


def quartiles(values: list[float]) -> tuple[float, float, float]:
    """Lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def summarise(modes: list[str], bursts: dict[str, list[Burst]]) -> list[dict[str, Any]]:
    """One row per mode."""
    rows = []
    base = bursts[modes[0]]
    for mode in modes:
        walls = [b.wall_ms for b in bursts[mode]]
        cpus = [b.cpu_ms for b in bursts[mode]]
        ratios = [b.wall_ms / a.wall_ms for a, b in zip(base, bursts[mode], strict=True)]
        cpu_ratios = [b.cpu_ms / a.cpu_ms for a, b in zip(base, bursts[mode], strict=True)]
        rows.append(
            {
                "mode": mode,
                "wall_ms": quartiles(walls),
                "best_wall_ms": min(walls),
                "cpu_ms": quartiles(cpus),
                "ratio": quartiles(ratios),
                "cpu_ratio": quartiles(cpu_ratios),
                "tokens_per_step": sum(b.tokens for b in bursts[mode])
                / sum(b.steps for b in bursts[mode]),
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown: median [quartiles] of each figure."""

    def cell(values: tuple[float, float, float], digits: int) -> str:
        low, middle, high = (f"{v:.{digits}f}" for v in values)
        return f"{middle} [{low}, {high}]"

    first = rows[0]["mode"]
    lines = [
        f"| mode | wall ms/step | best | CPU ms/step | wall / {first} | CPU / {first} "
        "| tokens/step |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['mode']} | {cell(row['wall_ms'], 1)} | {row['best_wall_ms']:.1f} "
            f"| {cell(row['cpu_ms'], 1)} | {cell(row['ratio'], 3)} "
            f"| {cell(row['cpu_ratio'], 3)} | {row['tokens_per_step']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--drafter")
    parser.add_argument("--modes", default="v1,v2", help=f"comma-separated, of {', '.join(MODES)}")
    parser.add_argument("--num-drafts", type=int, default=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--requests", type=int, default=1)
    parser.add_argument("--context", type=int, default=64, help="prompt tokens of a request")
    parser.add_argument("--steps", type=int, default=16, help="timed decode steps of a burst")
    parser.add_argument("--turns", type=int, default=12)
    parser.add_argument("--warm-up", type=int, default=2, help="untimed turns")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="no torch.compile")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    modes = options.modes.split(",")
    if unknown := set(modes) - set(MODES):
        parser.error(f"unknown modes {sorted(unknown)}; choose from {', '.join(MODES)}")
    load = Load(
        os.path.expanduser(options.model),  # noqa: PTH111 - may be a hub name
        options.drafter,
        options.num_drafts if any(m.startswith("dspark") for m in modes) else 0,
        options.dtype,
        options.requests,
        options.context,
        options.steps,
        options.threads,
        options.eager,
    )
    measured = measure(modes, load, options.turns, options.warm_up)
    rows = summarise(modes, measured["bursts"])
    print(table(rows))
    if options.json:
        record = {
            "load": asdict(load),
            "turns": options.turns,
            "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
            "load_average": os.getloadavg(),
            "starts_s": measured["starts_s"],
            "rows": rows,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
