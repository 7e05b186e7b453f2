"""Reading a server's /metrics, and what happened between two readings.

Counters start at 0 with their engine. When any counter of an engine falls, the engine (or the
whole server) was restarted in between, and its new values are the whole increase.
"""

import http.client
import math
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

from vllm_dspark.errors import ScrapeError

EngineKey = tuple[str, str]  # model name, engine
Cell = tuple[str, tuple[tuple[str, str], ...]]  # sample name, its other labels

_PREFIX = "vllm:"
# Suffixes of what only ever grows.
_GROWING = ("_total", "_count", "_sum", "_bucket")


@dataclass(frozen=True)
class Snapshot:
    """One reading: samples of every engine."""

    at_s: float  # monotonic
    engines: Mapping[EngineKey, Mapping[Cell, float]]


@dataclass(frozen=True)
class Change:
    """What one engine did in a period. Gauges are as they are now, all else is an increase."""

    seconds: float
    values: Mapping[Cell, float]
    restarted: bool = False
    _by_name: dict[str, list[tuple[dict[str, str], float]]] = field(
        default_factory=dict, repr=False, compare=False
    )

    def samples(self, name: str) -> Iterator[tuple[dict[str, str], float]]:
        """Labels and value of each sample of a name, without the prefix `vllm:`."""
        if not self._by_name:
            for (full, labels), value in self.values.items():
                self._by_name.setdefault(full, []).append((dict(labels), value))
        yield from self._by_name.get(_PREFIX + name, ())

    def total(self, name: str) -> float:
        """Sum over all samples; 0 without any."""
        return math.fsum(value for _, value in self.samples(name))

    def ratio(self, above: str, below: str) -> float | None:
        """Quotient of two totals; None where nothing was counted."""
        divisor = self.total(below)
        return self.total(above) / divisor if divisor else None

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label, largest first, without zeros."""
        sums: dict[str, float] = {}
        for labels, value in self.samples(name):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return {k: v for k, v in sorted(sums.items(), key=lambda item: -item[1]) if v}


def fetch(url: str, timeout_s: float = 5.0) -> str:
    """The text of a metrics page; raises ScrapeError."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as answer:
            body: bytes = answer.read()
    except urllib.error.HTTPError as error:
        error.close()
        raise ScrapeError(
            f"{url} answers, but with HTTP {error.code} ({error.reason}): no metrics are there; is "
            "this the address of a vLLM server?"
        ) from error
    except (urllib.error.URLError, http.client.HTTPException, OSError, ValueError) as error:
        raise ScrapeError(
            f"{url} does not answer: {error}; is the server up, and is this its address?"
        ) from error
    return body.decode("utf-8", errors="replace")


def parse(text: str, at_s: float | None = None) -> Snapshot:
    """The vLLM samples of a metrics page; raises ScrapeError for text that is none."""
    engines: dict[EngineKey, dict[Cell, float]] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if not sample.name.startswith(_PREFIX) or sample.name.endswith("_created"):
                    continue
                labels = dict(sample.labels)
                if "model_name" not in labels:  # of the server, not of an engine
                    continue
                key = (labels.pop("model_name"), labels.pop("engine", "0"))
                cell = (sample.name, tuple(sorted(labels.items())))
                engines.setdefault(key, {})[cell] = float(sample.value)
    except (ValueError, IndexError, KeyError) as error:
        raise ScrapeError(f"the page is not in Prometheus' text format: {error}") from error
    if not engines:
        raise ScrapeError("the page has no vllm: metrics; is this vLLM's /metrics?")
    return Snapshot(time.monotonic() if at_s is None else at_s, engines)


def changes(before: Snapshot | None, now: Snapshot) -> dict[EngineKey, Change]:
    """Per engine, what happened since `before`; since its start where there is no earlier reading.

    An engine that `before` does not have is new: all it counts happened in between.
    """
    seconds = now.at_s - before.at_s if before is not None else 0.0
    found = {}
    for key, values in now.engines.items():
        earlier = before.engines.get(key, {}) if before is not None else {}
        restarted = any(
            cell in values and values[cell] < value
            for cell, value in earlier.items()
            if cell[0].endswith(_GROWING)
        )
        base: Mapping[Cell, float] = {} if restarted else earlier
        increase = {
            cell: value - base.get(cell, 0.0) if cell[0].endswith(_GROWING) else value
            for cell, value in values.items()
        }
        found[key] = Change(seconds, increase, restarted)
    return found
