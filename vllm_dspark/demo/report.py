"""What a run of the demo found: rows, the JSON file and the Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_dspark.demo.client import SpeculationCounters
from vllm_dspark.demo.compare import Identity

SCHEMA = 1


@dataclass
class Row:
    """One engine at one number of concurrent requests and one temperature.

    rounds: tokens per second of each round. counters: per domain, empty without speculation.
    identity: against the V1 engine at one request; None for that row itself and for T > 0.
    """

    engine: str
    title: str
    concurrency: int
    temperature: float
    rounds: list[float] = field(default_factory=list)
    counters: dict[str, SpeculationCounters] = field(default_factory=dict)
    identity: Identity | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Median over the rounds; None for a row that was not timed."""
        return statistics.median(self.rounds) if self.rounds else None

    @property
    def accepted_length(self) -> float | None:
        """Macro average over the domains that were measured; None without speculation."""
        lengths = [c.accepted_length for c in self.counters.values()]
        known = [length for length in lengths if length is not None]
        return statistics.fmean(known) if known else None

    @property
    def window(self) -> float | None:
        """Tokens verified per request and step, over all domains."""
        return sum(self.counters.values(), SpeculationCounters()).window

    def as_json(self) -> dict[str, Any]:
        """The row for the JSON file."""
        return {
            "engine": self.engine,
            "title": self.title,
            "concurrency": self.concurrency,
            "temperature": self.temperature,
            "tokens_per_s": self.tokens_per_s,
            "tokens_per_s_rounds": self.rounds,
            "accepted_length": self.accepted_length,
            "accepted_length_by_domain": {
                domain: c.accepted_length for domain, c in self.counters.items()
            },
            "window": self.window,
            "identical": self.identity.as_json() if self.identity else None,
        }


@dataclass
class Report:
    """All rows of one run, with what is needed to repeat and to judge it."""

    rows: list[Row]
    settings: dict[str, Any]
    environment: dict[str, Any]
    batch_shape_change: float | None = None

    def row(self, engine: str, concurrency: int = 1, temperature: float = 0.0) -> Row:
        """The row of one engine; KeyError when it was not measured."""
        for row in self.rows:
            if (row.engine, row.concurrency, row.temperature) == (engine, concurrency, temperature):
                return row
        raise KeyError((engine, concurrency, temperature))

    @property
    def identity(self) -> Identity:
        """All greedy requests of DSpark, at every number of concurrent requests."""
        found = [r.identity for r in self.rows if r.engine == "dspark" and r.identity is not None]
        return Identity(
            sum(i.equal for i in found),
            sum(i.near_tie for i in found),
            sum(i.different for i in found),
            tuple(d for i in found for d in i.differences),
        )

    def faster_baseline(self, concurrency: int = 1) -> Row:
        """The row without speculation that makes more tokens per second."""
        rows = [self.row(name, concurrency) for name in ("v1", "v2")]
        return max(rows, key=lambda row: row.tokens_per_s or 0.0)

    def speedup(self, concurrency: int = 1) -> float:
        """DSpark's median over the faster baseline's median."""
        baseline = self.faster_baseline(concurrency).tokens_per_s
        ours = self.row("dspark", concurrency).tokens_per_s
        if not baseline or not ours:
            raise ValueError("no timed rounds: there is no speedup to report")
        return ours / baseline

    def speedup_range(self, concurrency: int = 1) -> tuple[float, float]:
        """Smallest and largest ratio of one round to the same round of the faster baseline."""
        ours = self.row("dspark", concurrency).rounds
        pairs = zip(ours, self.faster_baseline(concurrency).rounds, strict=True)
        ratios = [mine / theirs for mine, theirs in pairs]
        return min(ratios), max(ratios)

    def as_json(self) -> dict[str, Any]:
        """The JSON file's content."""
        return {
            "schema": SCHEMA,
            "identical": self.identity.holds,
            "requests": self.identity.counts(),
            "speedup": self.speedup(),
            "speedup_range": list(self.speedup_range()),
            "accepted_length": self.row("dspark").accepted_length,
            "batch_shape_change": self.batch_shape_change,
            "rows": [row.as_json() for row in self.rows],
            "settings": self.settings,
            "environment": self.environment,
        }


HEADER = ("engine", "requests", "T", "tokens/s", "min to max", "AL", "window", "identical")


def cells(row: Mapping[str, Any]) -> list[str]:
    """The table cells of one row in its JSON form, in the order of `HEADER`."""
    return [
        row["title"],
        str(row["concurrency"]),
        f"{row['temperature']:g}",
        "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:.1f}",
        _spread(row["tokens_per_s_rounds"]),
        _number(row["accepted_length"]),
        _number(row["window"]),
        _identical(row),
    ]


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows of a JSON file as a Markdown table."""
    lines = [HEADER, ("---",) * len(HEADER), *(cells(row) for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def domain_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Accepted length per domain of the rows with speculation, as a Markdown table."""
    speculative = [row for row in rows if row["accepted_length_by_domain"]]
    domains = sorted({d for row in speculative for d in row["accepted_length_by_domain"]})
    lines: list[Sequence[str]] = [("requests", "T", *domains), ("---",) * (len(domains) + 2)]
    for row in speculative:
        lengths = [_number(row["accepted_length_by_domain"].get(domain)) for domain in domains]
        lines.append((str(row["concurrency"]), f"{row['temperature']:g}", *lengths))
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _spread(rounds: Sequence[float]) -> str:
    return f"{min(rounds):.1f} to {max(rounds):.1f}" if rounds else ""


def _identical(row: Mapping[str, Any]) -> str:
    if row["identical"] is None:
        return "reference" if row["temperature"] == 0 and row["engine"] == "v1" else ""
    found = row["identical"]
    parts = [f"{found['equal']} equal"]
    if found["near_tie"]:
        parts.append(f"{found['near_tie']} near-tie")
    if found["different"]:
        parts.append(f"{found['different']} DIFFERENT")
    return ", ".join(parts)
