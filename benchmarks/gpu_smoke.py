"""One CUDA machine, a few minutes: does the plugin run inside full graphs, and equal at T=0?

    PYTHONPATH=SITE:. python benchmarks/gpu_smoke.py --out FILE.json

Runs on a tiny nearly-Markov pair (tests/support/pairs.py), whose drafts are really accepted. Each
engine runs in its own process. Written after every stage, so a cut run keeps what it had.
Results: docs/benchmarks/h200-smoke.md.
"""

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

STAGES = {
    "off": None,
    "stock": {"dspark": {"enabled": False}},
    "ours": {"dspark": {"scheduling": False}},
    "ours_host_random": {"dspark": {"scheduling": False, "test_windows": "random"}},
    "ours_probabilistic": {
        "draft_sample_method": "probabilistic",
        "dspark": {"scheduling": False},
    },
    "custom_off": None,
    "custom_ours": {"dspark": {"scheduling": False}},
}
# Stages that run on our attention backend; the others on vLLM's choice.
ATTENTION = {"custom_off": "CUSTOM", "custom_ours": "CUSTOM"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pair", type=Path, default=Path("/tmp/dspark-smoke-pair"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--stages", default=",".join(STAGES))
    parser.add_argument("--budget-s", type=float, default=420.0)
    parser.add_argument("--stage")
    args = parser.parse_args()
    if args.stage:
        run_stage(args)
        return
    from tests.support.pairs import PairSpec, build_pair

    build_pair(
        args.pair, PairSpec(kind="markov", hidden=128, markov_rank=128, head_dim=64, noise=0.1)
    )
    started, results = time.monotonic(), {}
    for name in args.stages.split(","):
        left = args.budget_s - (time.monotonic() - started)
        if left < 40:
            results[name] = {"error": "no time left"}
            continue
        command = [sys.executable, __file__, "--stage", name]
        for option in ("pair", "out"):
            command += [f"--{option}", str(getattr(args, option))]
        try:
            done = subprocess.run(
                command, timeout=left, capture_output=True, text=True, check=False
            )
            rows = [line for line in done.stdout.splitlines() if line.startswith('{"init_s"')]
            results[name] = json.loads(rows[-1]) if rows else {"error": done.stderr[-3000:]}
        except subprocess.TimeoutExpired as expired:
            results[name] = {"error": f"timeout: {str(expired.stderr)[-2000:]}"}
        results["wall_s"] = time.monotonic() - started
        args.out.write_text(json.dumps(results, indent=1))
        print(name, {k: v for k, v in results[name].items() if k != "tokens"}, flush=True)
    compare(results)
    args.out.write_text(json.dumps(results, indent=1))


def compare(results: dict) -> None:
    base = results.get("off", {}).get("tokens")
    for name, row in results.items():
        if isinstance(row, dict) and base and row.get("tokens") and name != "off":
            row["equal_requests"] = sum(a == b for a, b in zip(base, row["tokens"], strict=True))
            print(name, "equal requests:", row["equal_requests"], "of", len(base), flush=True)


def run_stage(args: argparse.Namespace) -> None:
    from vllm import LLM, SamplingParams

    changes = STAGES[args.stage]
    speculative = None
    if changes is not None:
        speculative = {
            "method": "dspark",
            "model": str(args.pair / "drafter"),
            "num_speculative_tokens": 7,
            **changes,
        }
    started = time.perf_counter()
    llm = LLM(
        str(args.pair / "target"),
        speculative_config=speculative,
        max_model_len=1024,
        dtype="bfloat16",
        max_num_seqs=16,
        # A fixed cache: the run that measures memory trips over stages that run beside it.
        kv_cache_memory_bytes=4 << 30,
        attention_backend=ATTENTION.get(args.stage),
        disable_log_stats=False,
        # no torch.compile: a smoke run is about our code, and compiling takes a minute an engine
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        max_cudagraph_capture_size=128,
    )
    init_s = time.perf_counter() - started
    prompts = [{"prompt_token_ids": [10 + 7 * i, 20, 30 + i]} for i in range(8)]
    greedy = SamplingParams(temperature=0, max_tokens=128, ignore_eos=True)
    llm.generate(prompts[:1], greedy, use_tqdm=False)
    timings = {}
    for label, batch in (("1", prompts[:1]), ("8", prompts)):
        begun = time.perf_counter()
        outputs = llm.generate(batch, greedy, use_tqdm=False)
        timings[label] = len(batch) * 128 / (time.perf_counter() - begun)
    tokens = [list(o.outputs[0].token_ids) for o in outputs]
    sampled = SamplingParams(temperature=1.0, max_tokens=128, ignore_eos=True, seed=1)
    llm.generate(prompts, sampled, use_tqdm=False)
    metrics = {
        m.name: getattr(m, "value", None) for m in llm.get_metrics() if "spec_decode" in m.name
    }
    print(json.dumps({"init_s": init_s, "tok_s": timings, "tokens": tokens, "metrics": metrics}))


if __name__ == "__main__":
    main()
