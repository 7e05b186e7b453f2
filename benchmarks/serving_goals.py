"""The goals of serving on a GPU, judged from a report of `vllm-dspark bench` (bench/report.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

NEVER_WORSE = 0.99  # of the best fixed setting, at every load
OVER_ADAPTIVE = 1.10  # at these loads
_ADAPTIVE_LOADS = (128, 256)
OVER_SINGLE = 1.05  # geometric mean over loads, against the best single fixed setting
SETTLES_IN = 10  # steps after a change of load
_BURST = "burst"  # how its rows begin; the name of a recording may follow

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Verdict:
    """One goal: what was found, where, and whether that reaches it."""

    run: str
    goal: str
    found: str
    met: bool

    def as_json(self) -> dict[str, Any]:
        """For the JSON file."""
        return asdict(self)

    def line(self) -> list[str]:
        """For a table."""
        return [f"{self.run}: {self.goal}", self.found, "yes" if self.met else "**no**"]


def verdicts(run: str, report: Mapping[str, Any]) -> Iterator[Verdict]:
    """Every goal that the report has figures for."""
    rows: Rows = report["rows"]
    steady = [row for row in rows if not row["workload"].startswith(_BURST)]
    yield from _never_worse(run, steady)
    yield from _over_adaptive(run, steady)
    for entry in report["overall"]:
        ratio = entry["ours_over_best_single_fixed"]
        if not entry["workload"].startswith(_BURST) and ratio is not None:
            where = f"{entry['workload']}, T = {entry['temperature']:g}"
            goal = f"geometric mean over loads >= {OVER_SINGLE} x the best single setting ({where})"
            yield Verdict(run, goal, _ratio(ratio), ratio["value"] >= OVER_SINGLE)
    yield from _tail_latency(run, rows)
    yield from _burst(run, rows, report["cells"])


def _never_worse(run: str, rows: Rows) -> Iterator[Verdict]:
    judged = [row for row in rows if row.get("ours_over_best_fixed")]
    if judged:
        worst = min(judged, key=lambda row: row["ours_over_best_fixed"]["value"])
        ratio = worst["ours_over_best_fixed"]
        goal = f"every load >= {NEVER_WORSE} x the best fixed setting"
        yield Verdict(run, goal, f"{_ratio(ratio)} {_where(worst)}", ratio["value"] >= NEVER_WORSE)


def _over_adaptive(run: str, rows: Rows) -> Iterator[Verdict]:
    judged = [
        row
        for row in rows
        if row.get("ours_over_adaptive") and row["concurrency"] in _ADAPTIVE_LOADS
    ]
    if judged:
        worst = min(judged, key=lambda row: row["ours_over_adaptive"]["value"])
        ratio = worst["ours_over_adaptive"]
        goal = f"128 and 256 requests: >= {OVER_ADAPTIVE} x stock adaptive"
        met = ratio["value"] >= OVER_ADAPTIVE
        yield Verdict(run, goal, f"{_ratio(ratio)} {_where(worst)}", met)


def _tail_latency(run: str, rows: Rows) -> Iterator[Verdict]:
    worst, place = 0.0, ""
    for row in rows:
        ours, off = (row["modes"].get(name, {}).get("tpot_ms_p99") for name in ("ours", "off"))
        if ours is not None and off is not None and ours / off > worst:
            worst, place = ours / off, _where(row)
    if place:
        goal = "p99 of the time per token no worse than off"
        yield Verdict(run, goal, f"{worst:.3f} x off {place}", worst <= 1.0)


def _burst(run: str, rows: Rows, cells: Rows) -> Iterator[Verdict]:
    """Windows after a change of load, and each phase's rate beside off's in the same repeat."""
    burst = [cell for cell in cells if cell["workload"].startswith(_BURST)]
    settled = [
        (phase["settled_after"], phase["load"])
        for cell in burst
        if cell["mode"] == "ours"
        for phase in cell["settling"]
        if phase["final_window"] is not None
    ]
    if settled:
        never = [load for steps, load in settled if steps is None]
        slowest = max((steps for steps, _ in settled if steps is not None), default=0)
        found = f"{slowest} steps at most in {len(settled)} phases"
        found += f"; never at {sorted(set(never))} requests" if never else ""
        goal = f"burst: windows within 5 % of their final mean in {SETTLES_IN} steps"
        yield Verdict(run, goal, found, not never and slowest <= SETTLES_IN)
    lowest = min(_phase_ratios(burst), default=None)
    if lowest is not None:
        goal = "burst: no phase below off"
        yield Verdict(run, goal, f"{lowest:.3f} x off at the lowest", lowest >= 1.0)


def _phase_ratios(cells: Rows) -> Iterator[float]:
    by_place: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for cell in cells:
        place = (cell["workload"], cell["concurrency"], cell["temperature"], cell["repeat"])
        rates = [phase["tokens"] / phase["seconds"] for phase in cell["phases"]]
        by_place.setdefault(place, {})[cell["mode"]] = rates
    for modes in by_place.values():
        if {"ours", "off"} <= modes.keys():
            for ours, off in zip(modes["ours"], modes["off"], strict=True):
                yield ours / off


def _ratio(ratio: Mapping[str, float]) -> str:
    return f"{ratio['value']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})"


def _where(row: Mapping[str, Any]) -> str:
    return f"at {row['concurrency']} ({row['workload']}, T = {row['temperature']:g})"
