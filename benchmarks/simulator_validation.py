"""How far the simulator's predictions are from a real engine: the demo pair on this machine.

    python benchmarks/simulator_validation.py measure FOLDER    # engines: minutes
    python benchmarks/simulator_validation.py compare FOLDER    # simulations: seconds

`measure` runs the demo prompts as one batch on in-process CPU engines (one thread, eager, T = 0)
and keeps in FOLDER: measured.json, the recorded pairs of the full-width run and the cost table that
the engine's own profile made. `compare` predicts every run from pairs and table alone; what a step
costs beside the forward pass (scheduler, detokenisation) is fitted on the recorded run only.
"""

import argparse
import json
import os
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

TOKENS = 32
WIDTH = 7
# name, speculative tokens, options of the plugin, batch sizes
RUNS = (
    ("fixed:7", WIDTH, {"scheduling": False}, (4, 1)),
    ("ours", WIDTH, {"scheduling": "auto"}, (4, 8)),
    ("fixed:3", 3, {"scheduling": False}, (4,)),
    ("off", 0, None, (4,)),
)
RECORDED = ("fixed:7", 4)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@contextmanager
def engine(folder: Path, width: int, options: dict | None, seqs: int):
    """An in-process engine; width 0: vLLM without speculation, on the same runner."""
    import gc

    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    from vllm_dspark.demo.target import ensure_target

    speculative = None
    os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if options is None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    else:
        drafter = Path(__file__).parent.parent / "vllm_dspark" / "demo" / "drafter"
        speculative = {
            "method": "dspark",
            "model": str(drafter),
            "num_speculative_tokens": width,
            "dspark": {"cache_dir": str(folder / "cache"), "online_cost": False, **options},
        }
    llm = LLM(
        str(ensure_target(dtype="bfloat16")),
        speculative_config=speculative,
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=seqs,
        kv_cache_memory_bytes=256 << 20,
        enable_prefix_caching=False,
        disable_log_stats=False,
        seed=0,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


def prompts_of(llm) -> list[dict]:
    """The demo prompts as token ids, chat template applied."""
    from vllm_dspark.demo.prompts import choose_prompts

    tokenizer = llm.get_tokenizer()
    given = []
    for prompt in choose_prompts(4):
        message = [{"role": "user", "content": prompt.text}]
        ids = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=True)
        ids = ids["input_ids"] if hasattr(ids, "keys") else ids
        given.append({"prompt_token_ids": list(ids)})
    return given


def run_batch(llm, seqs: int) -> dict:
    """Generate for all prompts with at most `seqs` at a time."""
    from vllm import SamplingParams

    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.max_num_running_reqs = seqs
    given = prompts_of(llm)
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    totals = getattr(scheduler, "dspark_totals", None)
    before = (totals.steps, totals.request_steps, int(totals.emitted[0])) if totals else (0, 0, 0)
    started = time.perf_counter()
    answers = llm.generate(given, params, use_tqdm=False)
    seconds = time.perf_counter() - started
    tokens = sum(len(answer.outputs[0].token_ids) for answer in answers)
    row = {"requests": seqs, "seconds": seconds, "tokens": tokens}
    if totals:
        steps, rows, emitted = (
            now - then
            for now, then in zip(
                (totals.steps, totals.request_steps, int(totals.emitted[0])), before, strict=True
            )
        )
        row |= {"steps": steps, "accepted_length": emitted / rows}
    row["prompt_tokens"] = [len(prompt["prompt_token_ids"]) for prompt in given]
    return row


def measure(folder: Path) -> None:
    """All runs; results so far survive an interruption."""
    os.environ.update(ENVIRONMENT)
    file = folder / "measured.json"
    measured = json.loads(file.read_text()) if file.exists() else {}
    for name, width, options, sizes in RUNS:
        if name in measured:
            continue
        given = None if options is None else dict(options)
        pairs = folder / f"pairs-{name.replace(':', '')}.jsonl"
        if given is not None:
            given["record_confidences"] = str(pairs)
            pairs.unlink(missing_ok=True)
        with engine(folder, width, given, max(sizes)) as llm:
            llm.generate(prompts_of(llm)[:2], use_tqdm=False)  # first-call compilation
            found = []
            for size in sizes:
                mark = pairs.stat().st_size if pairs.exists() else 0
                found.append({**run_batch(llm, size), "pairs_from": mark})
                print(name, {k: v for k, v in found[-1].items() if k != "prompt_tokens"})
        measured[name] = found
        file.write_text(json.dumps(measured, indent=1))


def recorded_trace(folder: Path, measured: dict):
    """The trace of the recorded run alone, with its prompts' lengths."""
    import numpy as np

    from vllm_dspark.artifacts.pairs import PairReader
    from vllm_dspark.simulation.trace import Trace, trace_of_pairs

    name, size = RECORDED
    runs = measured[name]
    place = next(i for i, run in enumerate(runs) if run["requests"] == size)
    lines = (folder / f"pairs-{name.replace(':', '')}.jsonl").read_bytes()
    stop = runs[place + 1]["pairs_from"] if place + 1 < len(runs) else len(lines)
    header = lines[: lines.index(b"\n") + 1]
    part = folder / "recorded.jsonl"
    part.write_bytes(header + lines[runs[place]["pairs_from"] : stop])
    reader = PairReader(part)
    trace = trace_of_pairs(reader.read(), reader.num_positions)
    lengths = np.array(runs[place]["prompt_tokens"][: trace.num_requests], dtype=np.int32)
    values = {key: value for key, value in vars(trace).items() if key != "prompt"}
    values["output"] = np.full(trace.num_requests, TOKENS, dtype=np.int32)
    values["limit"] = values["output"].copy()
    return Trace(prompt=lengths, **values)


def predict(folder: Path, trace, table, name: str, size: int):
    """The simulator's answer for one measured run."""
    from vllm_dspark.simulation.run import simulate
    from vllm_dspark.simulation.scenario import Arrivals, Scenario, parse_policy

    scenario = Scenario(
        parse_policy(name, WIDTH),
        Arrivals("burst", rate_per_s=1e9, burst_size=trace.num_requests),
        num_requests=trace.num_requests,
        max_num_seqs=size,
        row_lag=0,
    )
    return simulate(trace, table, scenario)


def compare(folder: Path) -> None:
    """Print the table of docs/benchmarks/simulator.md."""
    from vllm_dspark.artifacts.store import read_cost_table

    measured = json.loads((folder / "measured.json").read_text())
    (path,) = (folder / "cache").glob("cost-table-*.json")
    table = read_cost_table(path).to_table()
    trace = recorded_trace(folder, measured)
    print(f"trace: {trace.num_requests} requests, {len(trace.position)} steps, {trace.notes}")
    name, size = RECORDED
    run = next(run for run in measured[name] if run["requests"] == size)
    alone = predict(folder, trace, table, name, size)
    overhead = max((run["seconds"] - alone.seconds) * 1e3 / alone.steps, 0.0)
    print(f"overhead beside the priced step, from {name} at {size} requests: {overhead:.2f} ms")
    table = replace(table, overhead_ms=table.overhead_ms + overhead)
    print("| run | requests | tokens/s measured | predicted | error | AL measured | predicted |")
    print("|---|---|---|---|---|---|---|")
    errors = []
    for name, runs in measured.items():
        for run in runs:
            found = predict(folder, trace, table, name, run["requests"])
            speed = run["tokens"] / run["seconds"]
            error = found.tokens_per_s / speed - 1.0
            if (name, run["requests"]) != RECORDED:
                errors.append(abs(error))
            length = run.get("accepted_length", 1.0)
            print(
                f"| {name} | {run['requests']} | {speed:.1f} | {found.tokens_per_s:.1f} | "
                f"{error:+.1%} | {length:.2f} | {found.accepted_length:.2f} |"
            )
    errors.sort()
    print(f"absolute error: median {errors[len(errors) // 2]:.1%}, largest {errors[-1]:.1%}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("measure", "compare"))
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    {"measure": measure, "compare": compare}[arguments.part](arguments.folder)


if __name__ == "__main__":
    main()
