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

from vllm_dspark.bench.windows import Drafts
from vllm_dspark.bench.workload import Ask, CellOrder

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

    def counters(self) -> Counters:
        """Running sums of the engine, by Prometheus name."""


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
    before: Counters = field(default_factory=dict)
    after: Counters = field(default_factory=dict)


def drive(
    engine: Engine, order: CellOrder, clock: Callable[[], float] = time.perf_counter
) -> Trace:
    """Run one cell."""
    trace, running, next_ask = Trace(), set[int](), 0
    for phase in order.phases:
        emitted, waiting_for = 0, None if trace.started else set(range(phase.concurrency))
        trace.phase_starts.append(clock())
        while emitted < phase.tokens:
            while len(running) < phase.concurrency:
                if next_ask == len(order.asks):
                    raise RuntimeError(f"a cell ran out of its {next_ask} requests")
                trace.submitted[next_ask] = clock()
                engine.add(next_ask, order.asks[next_ask], order.temperature)
                running.add(next_ask)
                next_ask += 1
            if not trace.in_flight or trace.in_flight[-1][1] != len(running):
                trace.in_flight.append((clock(), len(running)))
            arrived = engine.step()
            now = clock()
            for arrival in arrived:
                if arrival.tokens:
                    trace.arrivals.setdefault(arrival.request, []).append((now, arrival.tokens))
                if arrival.done:
                    running.discard(arrival.request)
            if waiting_for is None:
                emitted += sum(arrival.tokens for arrival in arrived)
                if order.sample_s and now - trace.samples[-1][0] >= order.sample_s:
                    trace.samples.append((now, engine.counters()))
            elif waiting_for <= trace.arrivals.keys():
                waiting_for = None
                trace.before = engine.counters()
                trace.started = trace.phase_starts[0] = clock()
                trace.samples.append((trace.started, trace.before))
    trace.ended = clock()
    trace.after = engine.counters()
    engine.cancel(sorted(running))
    return trace


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
