"""One line per interval that a person can read, from differences of the running sums."""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dspark.integration.metrics_catalog import Family

Values = npt.NDArray[np.float64]

logger = logging.getLogger("vllm.vllm_dspark")

_KIND_WORDS = {"skip_draft": "skip", "unplanned": "unplanned"}


class Summary:
    """Values of one period by family name; gauges as they are, all else as increase."""

    def __init__(self, families: Sequence[Family], before: Values, after: Values) -> None:
        self._families: dict[str, tuple[Family, Values]] = {}
        start = 0
        for family in families:
            part = slice(start, start + family.size)
            change = after[part] if family.kind == "gauge" else after[part] - before[part]
            self._families[family.name] = (family, change)
            start += family.size

    def total(self, name: str) -> float:
        """Sum over all cells."""
        return float(self._families[name][1].sum())

    def values(self, name: str) -> Values:
        """Value of each cell."""
        return self._families[name][1]

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums by one label, without zeros, largest first."""
        family, values = self._families[name]
        index = family.labels.index(label)
        sums: dict[str, float] = {}
        for cell, value in zip(family.cells, values.tolist(), strict=True):
            sums[cell[index]] = sums.get(cell[index], 0.0) + value
        return {k: v for k, v in sorted(sums.items(), key=lambda item: -item[1]) if v}


def describe(period_s: float, summary: Summary) -> str:
    """The line for one period."""
    steps = summary.total("steps")
    parts = [f"{period_s:.0f} s, {steps:.0f} steps ({_shares(summary, steps)})"]
    rows = summary.total("request_steps")
    if rows:
        width = summary.total("draft_width")
        per_row = {
            name: summary.total(f"{name}_tokens") / rows
            for name in ("admitted", "verified", "accepted")
        }
        parts += [
            f"AL {summary.total('emitted_tokens') / rows:.2f}",
            f"admitted {per_row['admitted']:.1f}/{width:.0f}",
            f"verified {per_row['verified']:.1f}",
            f"accepted {per_row['accepted']:.1f}",
        ]
    timed = summary.total("timed_steps")
    if timed:
        measured = summary.total("measured_step_seconds") / timed * 1e3
        predicted = summary.total("predicted_step_seconds") / timed * 1e3
        parts.append(f"step {measured:.1f} ms (predicted {predicted:.1f})")
    promised = summary.total("predicted_tokens")
    if promised:
        kept = summary.total("realised_tokens") / promised
        parts.append(f"tokens {kept:.0%} of predicted".replace("%", " %"))
    parts += _quality(summary) + _troubles(summary)
    return "dspark: " + ", ".join(parts)


def _shares(summary: Summary, steps: float) -> str:
    shares = summary.by_label("steps", "kind")
    words = [
        f"{value / steps:.0%}".replace("%", " %") + f" {_KIND_WORDS.get(kind, kind)}"
        for kind, value in shares.items()
    ]
    return ", ".join(words)


def _quality(summary: Summary) -> list[str]:
    known = summary.values("ece")[np.isfinite(summary.values("ece"))]
    if not known.size or not summary.total("paired_drafts"):
        return []
    return [f"ECE {known.mean():.2f}"]


def _troubles(summary: Summary) -> list[str]:
    """What a person should look into; nothing in a healthy engine."""
    found: list[str] = []
    if cells := summary.total("cost_drifted_cells"):
        found.append(f"{cells:.0f} cost cells drifted")
    if invalid := summary.total("invalid_confidences"):
        found.append(f"{invalid:.0f} invalid confidences")
    neutral, rows = summary.total("neutral_requests"), summary.total("confidence_rows")
    if rows and neutral > rows / 2:
        found.append(f"{neutral / rows:.0%} of rows neutral".replace("%", " %"))
    for reason, count in summary.by_label("fallbacks", "reason").items():
        found.append(f"declined {count:.0f} times for {reason}")
    return found


@dataclass
class _Period:
    started: float
    values: Values


class SummaryLog:
    """Writes a line when an interval has passed and something was done in it.

    Idle time is in no period: after a pause longer than the interval, what was done before it is
    written as a period of its own.
    """

    def __init__(
        self,
        families: Sequence[Family],
        interval_s: float,
        *,
        prefix: str = "",
        clock: Callable[[], float] = time.monotonic,
        write: Callable[[str], object] = logger.info,
    ) -> None:
        self._families = families
        self._interval_s = interval_s
        self._prefix = prefix
        self._clock = clock
        self._write = write
        self._period: _Period | None = None
        self._newest = 0.0

    def tick(self, values: Values) -> None:
        """At each step, with the record as the previous step has left it."""
        now = self._clock()
        if self._period is None:
            self._begin(now, values)
        elif (
            now - self._newest > self._interval_s or now - self._period.started >= self._interval_s
        ):
            self._finish(self._period, values)
            self._begin(now, values)
        self._newest = now

    def flush(self, values: Values) -> None:
        """Write what is left, at the end."""
        if self._period is not None:
            self._finish(self._period, values)
            self._period = None

    def _begin(self, now: float, values: Values) -> None:
        self._period = _Period(now, values.copy())

    def _finish(self, period: _Period, values: Values) -> None:
        summary = Summary(self._families, period.values, values)
        if summary.total("steps"):
            self._write(self._prefix + describe(self._newest - period.started, summary))
