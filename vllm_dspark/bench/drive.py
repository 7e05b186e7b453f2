"""The load generator: holds a number of requests in flight and notes when tokens arrive.

It drives anything with the few methods of `Engine`: an engine in this process, one behind a
process boundary, or a server. What it returns is a `Trace` of raw arrivals; `summarise` makes the
figures of a cell of it. The clock starts when every request of the first wave has its first token
(so that their prefills, which the steady state does not have at once, are not in it) and stops
when the last phase has its tokens; what is still running is cancelled.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from vllm_dspark.bench.settling import StepSums, settling
from vllm_dspark.bench.windows import Drafts
from vllm_dspark.bench.workload import Ask, CellOrder, Phase

Counters = dict[str, float]
_BUCKETS = 40  # points of a cell's timeline
_LEAST_TOKENS = 4  # a request says something about time per token from here on


@dataclass(frozen=True)
class Arrival:
    """Tokens of one request that became known at once."""

    request: int
    tokens: int
    done: bool


class Engine(Protocol):
    """What is driven. Requests are numbered by the caller."""

    def add(self, request: int, ask: Ask, temperature: float) -> None:
        """Take one request."""

    def step(self) -> list[Arrival]:
        """Wait for something to happen; what happened."""

    def cancel(self, requests: Sequence[int]) -> None:
        """Drop requests; returns when the engine is idle."""

    def pause(self) -> None:
        """Stand still between two slices of a cell."""

    def resume(self) -> None:
        """Go on after `pause`."""

    def counters(self) -> Counters:
        """Running sums of the engine, by Prometheus name."""

    def verified(self) -> tuple[int, int] | None:
        """Requests that verified so far and the sum of their windows; None if nobody counts."""


@dataclass
class Trace:
    """Raw material of one cell; times in seconds of one clock."""

    started: float = 0.0
    ended: float = 0.0
    submitted: dict[int, float] = field(default_factory=dict)
    # per request: (time, tokens) of each arrival
    arrivals: dict[int, list[tuple[float, int]]] = field(default_factory=dict)
    in_flight: list[tuple[float, int]] = field(default_factory=list)  # at each change
    phase_starts: list[float] = field(default_factory=list)
    samples: list[tuple[float, Counters]] = field(default_factory=list)  # within the cell
    steps: list[StepSums] = field(default_factory=list)  # where windows are followed step by step
    loads: list[int] = field(default_factory=list)  # of the phases
    before: Counters = field(default_factory=dict)
    after: Counters = field(default_factory=dict)


def drive(
    engine: Engine, order: CellOrder, clock: Callable[[], float] = time.perf_counter
) -> Trace:
    """Run one cell."""
    cell = RunningCell(engine, order, clock)
    cell.advance()
    return cell.trace


class RunningCell:
    """A cell that can be run in slices: between them its clock stands still.

    Slices let several engines take turns within one cell, so that a slow stretch of the machine,
    often seconds long, meets all of them.
    """

    def __init__(
        self, engine: Engine, order: CellOrder, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.trace = Trace(loads=[phase.concurrency for phase in order.phases])
        self._engine = engine
        self._order = order
        self._clock = clock
        self._stopped = clock()
        self._paused = 0.0  # seconds so far that are in no slice
        self._running: set[int] = set()
        self._next_ask = 0
        self._phase = 0
        self._emitted = 0  # tokens of the phase
        self._first_wave: set[int] | None = set(range(order.phases[0].concurrency))

    def advance(self, seconds: float | None = None) -> bool:
        """Run for so long (None: to the end); whether the cell is done."""
        self._paused += self._clock() - self._stopped
        begun = self._now()
        if not self.trace.phase_starts:
            self.trace.phase_starts.append(begun)
        else:
            self._engine.resume()
        while self._phase < len(self._order.phases):
            self._step(self._order.phases[self._phase])
            if seconds is not None and self._now() - begun >= seconds:
                break
        done = self._phase == len(self._order.phases)
        if not done:
            self._engine.pause()  # on its own clock: the step that ends meanwhile is the cell's
        self._stopped = self._clock()
        return done

    def _now(self) -> float:
        return self._clock() - self._paused

    def _step(self, phase: Phase) -> None:
        trace, running = self.trace, self._running
        while len(running) < phase.concurrency:
            self._add()
        if not trace.in_flight or trace.in_flight[-1][1] != len(running):
            trace.in_flight.append((self._now(), len(running)))
        arrived = self._engine.step()
        now = self._now()
        for arrival in arrived:
            if arrival.tokens:
                trace.arrivals.setdefault(arrival.request, []).append((now, arrival.tokens))
            if arrival.done:
                running.discard(arrival.request)
        if self._first_wave is None:
            self._emitted += sum(arrival.tokens for arrival in arrived)
            if self._order.sample_s:
                self._sample(now)
            if self._emitted >= phase.tokens:
                self._end_phase()
        elif self._first_wave <= trace.arrivals.keys():
            self._first_wave = None
            trace.before = self._engine.counters()
            trace.started = trace.phase_starts[0] = self._now()
            trace.samples.append((trace.started, trace.before))

    def _sample(self, now: float) -> None:
        """Windows after every step, and all counters once in a while."""
        trace, sums = self.trace, self._engine.verified()
        if sums is not None:
            trace.steps.append((now, *sums))
        if now - trace.samples[-1][0] >= self._order.sample_s:
            trace.samples.append((now, self._engine.counters()))

    def _add(self) -> None:
        asks, number = self._order.asks, self._next_ask
        if number == len(asks):
            raise RuntimeError(f"a cell ran out of its {number} requests")
        self.trace.submitted[number] = self._now()
        self._engine.add(number, asks[number], self._order.temperature)
        self._running.add(number)
        self._next_ask += 1

    def _end_phase(self) -> None:
        self._phase, self._emitted = self._phase + 1, 0
        if self._phase < len(self._order.phases):
            self.trace.phase_starts.append(self._now())
            return
        self.trace.ended = self._now()
        self.trace.after = self._engine.counters()
        self._engine.cancel(sorted(self._running))


def summarise(trace: Trace) -> dict[str, Any]:
    """Figures of a cell: rates and times of requests as a client sees them, and counters."""
    seconds = trace.ended - trace.started
    in_time = {
        request: [(t, n) for t, n in arrivals if t > trace.started]
        for request, arrivals in trace.arrivals.items()
    }
    tokens = sum(n for arrivals in in_time.values() for _, n in arrivals)
    first = {r: a[0][0] - trace.submitted[r] for r, a in trace.arrivals.items()}
    steady = [first[r] for r in first if trace.submitted[r] > trace.started]
    per_token = [
        1e3 * (arrivals[-1][0] - arrivals[0][0]) / sum(n for _, n in arrivals[1:])
        for arrivals in trace.arrivals.values()
        if sum(n for _, n in arrivals[1:]) >= _LEAST_TOKENS
    ]
    return {
        "seconds": seconds,
        "tokens": tokens,
        "tokens_per_s": tokens / seconds,
        "requests_started": len(trace.submitted),
        "ttft_first_wave_ms": percentiles(
            [1e3 * t for r, t in first.items() if trace.submitted[r] <= trace.started]
        ),
        "ttft_ms": percentiles([1e3 * t for t in steady]),
        "tpot_ms": percentiles(per_token),
        "counters": difference(trace.before, trace.after),
        "phases": _phase_rates(trace, in_time),
        "timeline": _timeline(trace, in_time),
        "windows": _windows(trace),
        "settling": settling(trace.steps, trace.phase_starts, trace.ended, trace.loads),
    }


def difference(before: Counters, after: Counters) -> Counters:
    """Increase of each counter, those that stood still left out."""
    changes = {name: value - before.get(name, 0.0) for name, value in after.items()}
    return {name: change for name, change in changes.items() if change}


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Median and 99th percentile (nearest rank), None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def rank(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))]

    return {"p50": rank(0.5), "p99": rank(0.99), "count": float(len(ordered))}


def _phase_rates(
    trace: Trace, in_time: dict[int, list[tuple[float, int]]]
) -> list[dict[str, float]]:
    """Seconds and tokens of each phase."""
    edges = [*trace.phase_starts, trace.ended]
    rates = []
    for start, end in itertools.pairwise(edges):
        tokens = sum(n for a in in_time.values() for t, n in a if start < t <= end)
        rates.append({"seconds": end - start, "tokens": float(tokens)})
    return rates


def _windows(trace: Trace) -> list[dict[str, float | None]]:
    """Mean window between readings of the counters: how it follows the load."""
    found = []
    for (_, first), (t, second) in itertools.pairwise(trace.samples):
        figures = Drafts.sum_of([difference(first, second)]).as_json()
        found.append({"seconds": t - trace.started, "window": figures["window"]})
    return found


def _timeline(trace: Trace, in_time: dict[int, list[tuple[float, int]]]) -> dict[str, list[float]]:
    """Requests in flight and tokens per second over the cell, in equal buckets."""
    width = (trace.ended - trace.started) / _BUCKETS
    tokens = [0.0] * _BUCKETS
    for arrivals in in_time.values():
        for t, n in arrivals:
            tokens[min(_BUCKETS - 1, int((t - trace.started) / width))] += n
    edges = [trace.started + (i + 1) * width for i in range(_BUCKETS)]
    flight, position, current = [], 0, 0
    for edge in edges:
        while position < len(trace.in_flight) and trace.in_flight[position][0] <= edge:
            current = trace.in_flight[position][1]
            position += 1
        flight.append(float(current))
    return {
        "seconds": [round(edge - trace.started, 4) for edge in edges],
        "in_flight": flight,
        "tokens_per_s": [round(n / width, 3) for n in tokens],
    }
