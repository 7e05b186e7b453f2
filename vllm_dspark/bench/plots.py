"""Plots of a report, where matplotlib is installed (extra `plot`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

INSTALL_HINT = "no plots: matplotlib is not installed (pip install 'vllm-dspark[plot]')"
Rows = list[Mapping[str, Any]]


def available() -> bool:
    """Whether matplotlib can be imported."""
    return find_spec("matplotlib") is not None


def draw(report: Mapping[str, Any], folder: Path, stem: str) -> list[Path]:
    """Write all plots of a report as SVG; returns the files."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "vllm-dspark"  # equal data, equal file
    folder.mkdir(parents=True, exist_ok=True)
    painters: dict[str, Callable[[Any, Rows], bool]] = {
        "frontier": frontier,
        "windows": windows,
        "step-time": step_time,
    }
    written = []
    for name, paint in painters.items():
        path = folder / f"{stem}-{name}.svg"
        if _figure(report["rows"], paint, path):
            written.append(path)
    return written


def _figure(rows: Rows, paint: Callable[[Any, Rows], bool], path: Path) -> bool:
    """One figure, a panel per workload and temperature; False if there is nothing to show."""
    from matplotlib import pyplot as plt

    panels = sorted({(row["workload"], row["temperature"]) for row in rows})
    if not panels:  # time was over before the first cell
        return False
    figure, axes = plt.subplots(
        1, len(panels), figsize=(5.2 * len(panels), 4.0), squeeze=False, layout="constrained"
    )
    try:
        shown = False
        for axis, (workload, temperature) in zip(axes[0], panels, strict=True):
            part = [r for r in rows if (r["workload"], r["temperature"]) == (workload, temperature)]
            shown |= paint(axis, sorted(part, key=lambda r: r["concurrency"]))
            axis.set_title(f"{workload}, T = {temperature:g}")
        if shown:
            figure.savefig(path, metadata={"Date": None})
        return shown
    finally:
        plt.close(figure)


def frontier(axis: Any, rows: Rows) -> bool:
    """Throughput over interactivity (tokens per second that one user sees), a line per mode."""
    modes = sorted({mode for row in rows for mode in row["modes"]})
    for mode in modes:
        points = [
            (1e3 / figures["tpot_ms_p50"], figures["tokens_per_s"]["median"])
            for row in rows
            if (figures := row["modes"].get(mode)) and figures["tpot_ms_p50"]
        ]
        bold = {"linewidth": 2.5, "color": "black"} if mode == "ours" else {"linewidth": 1.0}
        axis.plot(*zip(*points, strict=True), marker="o", markersize=3, label=mode, **bold)
    axis.set_xlabel("tokens/s of one request (1 / median TPOT)")
    axis.set_ylabel("tokens/s of all requests")
    axis.legend(fontsize=7)
    return bool(modes)


def windows(axis: Any, rows: Rows) -> bool:
    """Mean window and accepted length of ours over the load."""
    known = [r for r in rows if r["modes"].get("ours", {}).get("window")]
    if not known:
        return False
    load = [r["concurrency"] for r in known]
    axis.plot(load, [r["modes"]["ours"]["window"] for r in known], marker="o", label="window")
    lengths = [r["modes"]["ours"]["accepted_length"] for r in known]
    axis.plot(load, lengths, marker="o", label="accepted length")
    axis.set_xscale("log", base=2)
    axis.set_xlabel("requests in flight")
    axis.set_ylabel("tokens per request and step")
    axis.set_ylim(bottom=0)
    axis.legend(fontsize=7)
    return True


def step_time(axis: Any, rows: Rows) -> bool:
    """Measured over predicted mean step time of ours, one point per load."""
    known = [r for r in rows if r["modes"].get("ours", {}).get("predicted_step_ms")]
    if not known:
        return False
    predicted = [r["modes"]["ours"]["predicted_step_ms"] for r in known]
    measured = [r["modes"]["ours"]["step_ms"] for r in known]
    axis.plot(predicted, measured, "o")
    ends = [0.0, 1.05 * max(*predicted, *measured)]
    axis.plot(ends, ends, linewidth=0.8, color="grey")
    for row, x, y in zip(known, predicted, measured, strict=True):
        axis.annotate(str(row["concurrency"]), (x, y), fontsize=7)
    axis.set_xlabel("predicted ms per step")
    axis.set_ylabel("measured ms per step")
    return True
