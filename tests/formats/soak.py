"""Many requests of random lengths and parameters, aborts and bursts on a tiny KV cache.

    python -m tests.formats.soak --requests 2000 --blocks 6
    python -m tests.formats.soak --requests 2000 --blocks 6 --control
    python -m tests.formats.soak --requests 2000 --blocks 6 --kernels-kept 64

Starts two engines one after the other: one without speculation and with room, which says what each
greedy request of a pool has to answer, then the one under test. Prints a JSON report and exits
with 1 when anything leaked, stuck or came out wrong.

`--control` runs the same requests without speculation (vLLM's own V2 runner): what grows there is
vLLM's. `--kernels-kept` lowers the 1024 matrix products that oneDNN keeps compiled, one for every
number of rows of every shape of weights, which is what a process grows by.
"""

import argparse
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.formats.memory import Sample, grown, objects_by_type, sample, trim
from tests.support.engines import dspark, engine, runner_of, scheduler_of
from tests.support.pairs import Pair, PairSpec, build_pair
from vllm_dspark.integration.metrics_catalog import catalog

SYMBOLS = 94
SPEC = PairSpec(kind="markov", symbols=SYMBOLS, seed=7)
BLOCK = 32
WIDTH = 7
# Steps without any new token of any request after which the engine counts as stuck.
PATIENCE = 400
# Requests after which no new one comes until all have ended, so that leaks show: what is held with
# nothing running, and how much memory the process has, again and again.
DRAIN_EVERY = 50
# Growth of the process over the second half of a run that still counts as noise; before that,
# caches fill (compiled grammars, allocator arenas). The second one holds where few compiled
# products are kept, which go on filling through the first 2,000 requests.
MEMORY_NOISE_MB = 24.0
MEMORY_NOISE_FEW_KERNELS_MB = 8.0

Kind = dict[str, Any]
# Name and labels of a time series.
Series = tuple[str, tuple[tuple[str, str], ...]]
# Parameter sets; those at temperature 0 are compared token for token.
GREEDY: tuple[Kind, ...] = (
    {},
    {"stop_token_ids": [5, 17, 40]},
    {"min_tokens": 6, "stop_token_ids": [3, 9, 27, 60]},
    {"presence_penalty": 0.8, "frequency_penalty": 0.4},
    {"repetition_penalty": 1.2},
    {"allowed_token_ids": list(range(0, SYMBOLS, 3))},
    {"logprobs": 2},
    {"bad_words": ["ab", "c"]},
    {"choice": ["abcdefgh", "abcdxyz", "q"]},
)
SAMPLED: tuple[Kind, ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 7, "seed": 11},
    {"temperature": 0.9, "n": 2},
)


@dataclass
class Request:
    prompt: list[int]
    kind: Kind
    max_tokens: int
    expected: tuple[int, ...] | None = None


@dataclass
class Report:
    """What a soak found; `problems` is empty when all is well."""

    requests: int = 0
    finished: int = 0
    aborted: int = 0
    compared: int = 0
    preemptions: float = 0.0
    steps: int = 0
    seconds: float = 0.0
    accepted_per_position: list[int] = field(default_factory=list)
    memory: list[Sample] = field(default_factory=list)
    # types of which the last quarter made more objects than there were
    grown: dict[str, int] = field(default_factory=dict)
    # resident MiB before and after malloc gave back what it kept free, at the end
    trimmed: tuple[float, float] = (0.0, 0.0)
    series: list[int] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def sampling_of(request: Request) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    kind = dict(request.kind)
    choice = kind.pop("choice", None)
    if choice is not None:
        kind["structured_outputs"] = StructuredOutputsParams(choice=choice)
    if "min_tokens" in kind:
        kind["min_tokens"] = min(kind["min_tokens"], request.max_tokens)
    settings = {"temperature": 0.0, "ignore_eos": choice is None, **kind}
    return SamplingParams(max_tokens=request.max_tokens, **settings)


def make_pool(rng: random.Random, size: int, longest: int) -> list[Request]:
    """Greedy requests whose answers are known beforehand."""
    pool = []
    for i in range(size):
        length = rng.choice([1, 2, 5, 17, 31, 32, 33, rng.randint(1, longest // 2)])
        room = longest - length
        prompt = [rng.randrange(SYMBOLS) for _ in range(length)]
        pool.append(Request(prompt, GREEDY[i % len(GREEDY)], rng.randint(1, min(60, room))))
    return pool


def solve(pair: Pair, pool: list[Request], length: int) -> None:
    """Fill in what the target says without speculation and with room for all."""
    with engine(pair.target, max_model_len=length) as llm:
        for request in pool:
            prompt = {"prompt_token_ids": request.prompt}
            output = llm.generate([prompt], sampling_of(request), use_tqdm=False)[0]
            request.expected = tuple(output.outputs[0].token_ids)


class Soak:
    """Drives one engine step by step."""

    def __init__(
        self, llm: Any, pool: list[Request], count: int, seed: int, speculative: bool = True
    ) -> None:
        self.llm, self.pool, self.count, self.speculative = llm, pool, count, speculative
        self.objects: list[tuple[int, Counter[str]]] = []
        self.series: list[frozenset[Series]] = []
        self.verbose = False
        self.memory_noise_mb = MEMORY_NOISE_MB
        self.rng = random.Random(seed)
        self.report = Report(requests=count)
        self.live: dict[str, Request] = {}
        self.started = 0
        self.total_blocks = self._free_blocks()

    def run(self) -> Report:
        clock, idle = time.monotonic(), 0
        wait, pause = 0, DRAIN_EVERY
        while self.started < self.count or self.live:
            if not self.live and self.started >= pause:
                pause = self.started + DRAIN_EVERY
            if self.started < min(self.count, pause) and wait <= 0:
                self._burst()
                wait = self.rng.choice([0, 1, 2, 5, 30])
            wait -= 1
            self._maybe_abort()
            progressed = self._step()
            idle = 0 if progressed else idle + 1
            if idle > PATIENCE:
                self.report.problems.append(
                    f"stuck: {PATIENCE} steps without a token, waiting: {sorted(self.live)}"
                )
                break
            if not self.live:
                self._check_empty()
        self.report.seconds = round(time.monotonic() - clock, 1)
        self._finish()
        return self.report

    def _burst(self) -> None:
        for _ in range(min(self.rng.choice([1, 1, 2, 3, 8, 24]), self.count - self.started)):
            request = self.rng.choice(self.pool)
            if self.rng.random() < 0.3:  # nobody knows the answer, it only has to end
                sampled = self.rng.choice(SAMPLED)
                request = Request(request.prompt, sampled, request.max_tokens)
            name = f"r{self.started}"
            prompt = {"prompt_token_ids": request.prompt}
            self.llm.llm_engine.add_request(name, prompt, sampling_of(request))
            self.live[name] = request
            self.started += 1

    def _maybe_abort(self) -> None:
        if self.live and self.rng.random() < 0.04:
            name = self.rng.choice(sorted(self.live))
            self.llm.llm_engine.abort_request([name])
            del self.live[name]
            self.report.aborted += 1

    def _step(self) -> bool:
        outputs = self.llm.llm_engine.step()
        self.report.steps += 1
        for output in outputs:
            request = self.live.get(output.request_id)
            if request is None or not output.finished:
                continue
            del self.live[output.request_id]
            self.report.finished += 1
            self._compare(output, request)
        return bool(outputs) or not self.live

    def _compare(self, output: Any, request: Request) -> None:
        tokens = tuple(output.outputs[0].token_ids)
        if len(tokens) > request.max_tokens:
            self.report.problems.append(f"{output.request_id}: {len(tokens)} tokens, too many")
        if request.expected is None:
            return
        self.report.compared += 1
        if tokens != request.expected:
            self.report.problems.append(
                f"{output.request_id} {request.kind} after {len(request.prompt)} tokens: "
                f"{tokens} instead of {request.expected}"
            )

    def _free_blocks(self) -> int:
        pool = scheduler_of(self.llm).kv_cache_manager.block_pool
        return int(pool.get_num_free_blocks())

    def _check_empty(self) -> None:
        """With no request left, nothing of any may be left either."""
        for _ in range(2):  # finished ids travel with the next steps
            self.llm.llm_engine.step()
        scheduler, runner = scheduler_of(self.llm), runner_of(self.llm)
        left = {
            "blocks": self.total_blocks - self._free_blocks(),
            "running": len(scheduler.running),
            "waiting": len(scheduler.waiting),
            "requests of the scheduler": len(scheduler.requests),
            "slots of the worker": len(runner.req_states.req_id_to_index),
        }
        if self.speculative:
            owners = runner.dspark_reporter.owners
            left |= {
                "slots of the request table": len(scheduler.conductor.table._slot_of),
                "generations of the core": len(scheduler.conductor._generation),
                "owners of the worker": len(owners._owner) + len(owners._generation),
            }
        leaks = {name: count for name, count in left.items() if count}
        # Finished requests reach the worker with the next scheduled step only.
        lagging = ("slots", "owners", "generations")
        most = scheduler.max_num_running_reqs
        leaks = {n: c for n, c in leaks.items() if not n.startswith(lagging) or c > most}
        if leaks:
            self.report.problems.append(f"left behind after {self.report.steps} steps: {leaks}")
        self.report.memory.append(sample())
        if self.verbose:
            print(self.started, self.report.memory[-1], file=sys.stderr, flush=True)
        late = self.started >= self.count * 3 // 4
        if late and (not self.objects or self.started >= self.count):
            self.objects.append((self.started, objects_by_type()))
        self.series = [*self.series[:1], series_of(self.llm)]  # all of them would be a leak of ours
        self.report.series.append(len(self.series[-1]))

    def _finish(self) -> None:
        report = self.report
        metrics = {m.name: m for m in self.llm.get_metrics()}
        report.preemptions = float(metrics["vllm:num_preemptions"].value)
        if self.speculative:
            totals = scheduler_of(self.llm).dspark_totals
            report.accepted_per_position = totals.accepted.tolist()
            if not report.accepted_per_position[0]:
                report.problems.append("no draft was accepted: nothing was speculated")
            self._one_more()
        report.grown = grown(self.objects[0][1], self.objects[-1][1])
        before = sample().resident
        report.trimmed = (before, trim())
        # Ours are shown once they have a value, vLLM's once they are asked for; none for a request.
        late = self.series[-1] - self.series[0]
        unknown = sorted(name for name in late if not declared(*name))
        if unknown:
            report.problems.append(f"metric series that nobody declared came late: {unknown}")
        settled = [s.resident for s in report.memory[len(report.memory) // 2 :]]
        if len(settled) > 8 and settled[-1] - settled[0] > self.memory_noise_mb:
            report.problems.append(f"memory grew from {settled[0]} to {settled[-1]} MB")

    def _one_more(self) -> None:
        """After one more request every trace of the earlier ones has to be gone."""
        last = Request([1, 2, 3], {}, 4)
        self.llm.llm_engine.add_request(
            "last", {"prompt_token_ids": last.prompt}, sampling_of(last)
        )
        while self.llm.llm_engine.has_unfinished_requests():
            self.llm.llm_engine.step()
        owners = runner_of(self.llm).dspark_reporter.owners
        scheduler = scheduler_of(self.llm)
        names = set(owners._owner) | set(owners._generation) | set(scheduler.conductor._generation)
        names |= set(runner_of(self.llm).req_states.req_id_to_index)
        names |= set(scheduler.conductor.table._slot_of)
        old = sorted(name for name in names if not name.startswith("last"))
        if old:
            self.report.problems.append(f"remembered for ever: {old[:10]} ({len(old)})")


def series_of(llm: Any) -> frozenset[Series]:
    """The metric series that an engine shows."""
    return frozenset((m.name, tuple(sorted(m.labels.items()))) for m in llm.get_metrics())


def declared(name: str, labels: tuple[tuple[str, str], ...]) -> bool:
    """Whether the plugin's catalogue has this series (its gauges and reasons come when known)."""
    values = dict(labels)
    return any(
        family.full_name == name
        and tuple(values.get(label, "") for label in family.labels) in family.cells
        for family in catalog(WIDTH)
    )


def soak(
    folder: Path,
    count: int,
    blocks: int,
    seed: int = 1,
    pool_size: int = 36,
    control: bool = False,
    verbose: bool = False,
    few_kernels: bool = False,
) -> Report:
    """Build a pair, find the answers, and run `count` requests with `blocks` cache blocks.

    control: without speculation; verbose: memory at every drain on stderr; few_kernels: oneDNN
    keeps few compiled products, so memory has to stay closer to where it was.
    """
    pair = build_pair(folder, SPEC)
    length = BLOCK * (blocks - 2)
    pool = make_pool(random.Random(seed), pool_size, length)
    solve(pair, pool, length)
    options = {"test_windows": "random", "test_windows_seed": seed}
    speculative = None if control else dspark(pair.drafter, options, num_speculative_tokens=WIDTH)
    with engine(
        pair.target, speculative, max_model_len=length, block_size=BLOCK,
        num_gpu_blocks_override=blocks, max_num_seqs=6, max_num_batched_tokens=256, v2=control,
    ) as llm:  # fmt: skip
        run = Soak(llm, pool, count, seed, speculative=not control)
        run.verbose = verbose
        if few_kernels:
            run.memory_noise_mb = MEMORY_NOISE_FEW_KERNELS_MB
        return run.run()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--control", action="store_true", help="without speculation")
    parser.add_argument("--kernels-kept", type=int, help="oneDNN's primitive cache")
    given = parser.parse_args()
    if given.kernels_kept is not None:  # read at the first product
        os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = str(given.kernels_kept)
    with tempfile.TemporaryDirectory() as folder:
        report = soak(
            Path(folder), given.requests, given.blocks, given.seed,
            control=given.control, verbose=True, few_kernels=given.kernels_kept is not None,
        )  # fmt: skip
    shown = {**vars(report)}
    memory = [s.shown() for s in shown.pop("memory")]
    eighths = [memory[i * (len(memory) - 1) // 8] for i in range(9)]
    shown["memory_mb"] = {"samples": len(memory), "eighths": eighths}
    shown["series"] = sorted(set(report.series))
    print(json.dumps(shown, indent=1))
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
