"""Figures of results whose files carry none: those of `bench` and `simulate`.

Read by their published keys, and leniently: a figure for which a file lacks a number is left out.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

Figure = dict[str, Any]

# Of the files that are read here; tests compare them with bench/report.py and simulation/result.py,
# whose imports (numba, numpy) a drawing does without.
BENCH_SCHEMA = 1
SIMULATION_VERSION = 1

# More lines than this hide each other.
_MAX_TIMELINES = 8


def bench_figures(report: Mapping[str, Any]) -> list[Figure]:
    """Frontier, window and step time over the load, per workload and temperature."""
    panels: dict[tuple[str, float], list[Mapping[str, Any]]] = defaultdict(list)
    for row in report["rows"]:
        panels[row["workload"], row["temperature"]].append(row)
    figures: list[Figure] = []
    for (workload, temperature), unordered in sorted(panels.items()):
        rows = sorted(unordered, key=lambda row: row["concurrency"])
        name = f"{workload}, T = {temperature:g}"
        frontier = {
            "figure": "frontier",
            "title": f"Throughput and interactivity: {name}",
            "series": _frontiers(rows),
        }
        ours = [row for row in rows if (row["modes"].get("ours") or {}).get("window")]
        figures += [frontier, _load_figure(name, ours), _breakdown(name, ours)]
    return [figure for figure in figures if figure.get("series") or figure.get("bars")]


def _frontiers(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    series = []
    for mode in sorted({mode for row in rows for mode in row["modes"]}):
        points = [
            (1e3 / figures["tpot_ms_p50"], figures["tokens_per_s"]["median"], row["concurrency"])
            for row in rows
            if (figures := row["modes"].get(mode)) and figures.get("tpot_ms_p50")
        ]
        if points:
            series.append(_points(mode, points))
    return series


def _points(label: str, points: Sequence[tuple[float, float, Any]]) -> dict[str, Any]:
    return {
        "label": label,
        "x": [x for x, _, _ in points],
        "y": [y for _, y, _ in points],
        "names": [str(name) for _, _, name in points],
    }


def _load_figure(name: str, ours: Sequence[Mapping[str, Any]]) -> Figure:
    load = [row["concurrency"] for row in ours]
    series = [
        {"label": label, "x": load, "y": [row["modes"]["ours"][key] for row in ours]}
        for label, key in (("window", "window"), ("accepted length", "accepted_length"))
        if ours and all(row["modes"]["ours"].get(key) for row in ours)
    ]
    return {
        "figure": "lines",
        "title": f"Window over load: {name}",
        "x_label": "requests in flight",
        "y_label": "tokens per request and step",
        "series": series,
    }


def _breakdown(name: str, ours: Sequence[Mapping[str, Any]]) -> Figure:
    bars = []
    for row in ours:
        figures = row["modes"]["ours"]
        step_ms, share = figures.get("step_ms"), figures.get("draft_share")
        if step_ms and share is not None:
            parts = {"target and host": step_ms * (1.0 - share), "draft": step_ms * share}
            bars.append({"label": f"{row['concurrency']} requests", "parts": parts})
    return {"figure": "breakdown", "title": f"Step time of ours: {name}", "bars": bars}


def simulation_figures(record: Mapping[str, Any]) -> list[Figure]:
    """Frontier by policy, and windows over simulated time of the first scenarios."""
    by_policy: dict[str, list[tuple[float, float, Any]]] = defaultdict(list)
    timelines: list[dict[str, Any]] = []
    for cell in record["cells"]:
        label = " ".join(filter(None, (cell["policy"], cell.get("machine"))))
        tpot_ms = float(cell["tpot_ms"]["p50"])
        if tpot_ms:
            by_policy[label].append((1e3 / tpot_ms, cell["tokens_per_s"], cell["arrivals"]))
        timeline = cell.get("timeline") or ()
        if timeline and len(timelines) < _MAX_TIMELINES:
            timelines.append(
                {
                    "label": f"{label}, {cell['arrivals']}",
                    "x": [point["t_s"] for point in timeline],
                    "y": [point["mean_window"] for point in timeline],
                }
            )
    figures: list[Figure] = [
        {
            "figure": "frontier",
            "title": "Simulated throughput and interactivity",
            "series": [_points(label, points) for label, points in by_policy.items()],
        },
        {"figure": "windows", "title": "Simulated windows", "series": timelines},
    ]
    return [figure for figure in figures if figure["series"]]
