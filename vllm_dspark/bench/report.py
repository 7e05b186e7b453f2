"""From raw cells to rows, the JSON file and the tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vllm_dspark.bench import statistics
from vllm_dspark.bench.modes import Mode
from vllm_dspark.bench.store import Cell
from vllm_dspark.bench.windows import Drafts

SCHEMA = 1
RowKey = tuple[str, float, int]  # workload, temperature, concurrency


def make_report(
    fingerprint: Mapping[str, Any],
    cells: Iterable[Cell],
    *,
    settings: Mapping[str, Any] | None = None,
    conditions: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Everything that the run found, ready to be written as JSON.

    Keys: rows (medians, spreads and ratios), overall (per workload and temperature), cells (raw,
    without timelines and counters, which rows hold in sums).
    """
    grouped = group(cells)
    rows = [_row(key, modes) for key, modes in sorted(grouped.items())]
    return {
        "schema": SCHEMA,
        "fingerprint": dict(fingerprint),
        "settings": dict(settings or {}),
        "conditions": dict(conditions or {}),
        "overall": _overall(grouped),
        "rows": rows,
        "cells": [
            _raw(cell) for modes in grouped.values() for row in modes.values() for cell in row
        ],
    }


def group(cells: Iterable[Cell]) -> dict[RowKey, dict[str, list[Cell]]]:
    """Cells by row and mode, repeats ascending."""
    grouped: dict[RowKey, dict[str, list[Cell]]] = {}
    for cell in sorted(cells, key=lambda c: c.key.repeat):
        key = (cell.key.workload, cell.key.temperature, cell.key.concurrency)
        grouped.setdefault(key, {}).setdefault(cell.key.mode, []).append(cell)
    return grouped


def rates(cells: Sequence[Cell]) -> dict[int, float]:
    """Tokens per second by repeat."""
    return {cell.key.repeat: cell.tokens_per_s for cell in cells}


def _row(key: RowKey, modes: Mapping[str, list[Cell]]) -> dict[str, Any]:
    workload, temperature, concurrency = key
    medians = {
        name: statistics.spread([c.tokens_per_s for c in cells])["median"]
        for name, cells in modes.items()
    }
    fixed = _fixed(modes)
    row: dict[str, Any] = {
        "workload": workload,
        "concurrency": concurrency,
        "temperature": temperature,
        "off": medians.get("off"),
        "fixed": {
            str(Mode.parse(name).width): medians[name]
            for name in fixed
            if name != "off" and "off" not in name
        },
        "stock_adaptive": medians.get("adaptive"),
        "ours": medians.get("ours"),
    }
    ours = modes.get("ours")
    if ours is not None:
        ratio = statistics.against_best(rates(ours), fixed) if fixed else None
        row["ours_over_best_fixed"] = ratio.as_json() if ratio else None
        if "adaptive" in modes:
            ratio = statistics.between(rates(ours), rates(modes["adaptive"]))
            row["ours_over_adaptive"] = ratio.as_json() if ratio else None
    row["modes"] = {name: _mode_figures(cells) for name, cells in modes.items()}
    return row


def _fixed(modes: Mapping[str, list[Cell]]) -> dict[str, dict[int, float]]:
    return {name: rates(cells) for name, cells in modes.items() if Mode.parse(name).is_fixed}


def _mode_figures(cells: Sequence[Cell]) -> dict[str, Any]:
    """Medians over repeats of what a cell says besides its rate."""
    figures = [cell.figures for cell in cells]

    def percentile(name: str, which: str) -> float | None:
        return statistics.median_of([(f.get(name) or {}).get(which) for f in figures])

    drafts = Drafts.sum_of(f["counters"] for f in figures)
    return {
        "tokens_per_s": statistics.spread([cell.tokens_per_s for cell in cells]),
        "ttft_ms_p50": percentile("ttft_ms", "p50"),
        "ttft_ms_p99": percentile("ttft_ms", "p99"),
        "tpot_ms_p50": percentile("tpot_ms", "p50"),
        "tpot_ms_p99": percentile("tpot_ms", "p99"),
        **drafts.as_json(),
    }


def _overall(grouped: Mapping[RowKey, Mapping[str, list[Cell]]]) -> list[dict[str, Any]]:
    """Per workload and temperature: geometric means over concurrency."""
    found = []
    for workload, temperature in sorted({key[:2] for key in grouped}):
        rows = [m for k, m in sorted(grouped.items()) if k[:2] == (workload, temperature)]
        ours = [rates(modes["ours"]) for modes in rows if "ours" in modes]
        if len(ours) != len(rows):
            continue
        fixed = [_fixed(modes) for modes in rows]
        drafting = [{n: r for n, r in row.items() if not n.startswith("off")} for row in fixed]
        entry: dict[str, Any] = {"workload": workload, "temperature": temperature}
        for name, settings in (("best_single_fixed", fixed), ("best_single_fixed_k", drafting)):
            ratio = statistics.against_best_single(ours, settings)
            entry[f"ours_over_{name}"] = ratio.as_json() if ratio else None
        found.append(entry)
    return found


_LEFT_OUT = ("timeline", "counters")  # long; cells.jsonl has them


def _raw(cell: Cell) -> dict[str, Any]:
    key = cell.key
    figures = {k: v for k, v in cell.figures.items() if k not in _LEFT_OUT}
    return {
        "workload": key.workload,
        "concurrency": key.concurrency,
        "temperature": key.temperature,
        "mode": key.mode,
        "repeat": key.repeat,
        **figures,
    }


def header_and_lines(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """The throughput table: one line per row, one column per mode."""
    rows: list[dict[str, Any]] = report["rows"]
    modes = sorted({name for row in rows for name in row["modes"]}, key=_column_order)
    header = ["workload", "T", "requests", *modes, "ours / best fixed", "95 %"]
    lines = []
    for row in rows:
        line = [row["workload"], f"{row['temperature']:g}", str(row["concurrency"])]
        best = max(row["modes"][m]["tokens_per_s"]["median"] for m in modes if m in row["modes"])
        for mode in modes:
            figures = row["modes"].get(mode)
            rate = figures["tokens_per_s"]["median"] if figures else None
            text = "" if rate is None else f"{rate:.1f}"
            line.append(f"**{text}**" if rate == best else text)
        ratio = row.get("ours_over_best_fixed")
        line += (
            [f"{ratio['value']:.3f}", f"{ratio['low']:.3f} to {ratio['high']:.3f}"]
            if ratio
            else ["", ""]
        )
        lines.append(line)
    return header, lines


def _column_order(name: str) -> tuple[int, int]:
    mode = Mode.parse(name)
    kinds = ("off", "off-v2", "fixed", "plugin", "adaptive", "ours")
    place = next(i for i, kind in reversed(list(enumerate(kinds))) if name.startswith(kind))
    return place, mode.width or 0


def markdown(header: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    table = [list(header), ["---"] * len(header), *(list(line) for line in lines)]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def drafts_table(
    report: Mapping[str, Any], mode: str = "ours"
) -> tuple[list[str], list[list[str]]]:
    """What the drafts of one mode became, and the step time against its prediction."""
    header = [
        "workload", "T", "requests", "AL", "window", "admitted", "accepted", "skip-draft steps",
        "step ms", "predicted ms", "draft share",
    ]  # fmt: skip
    lines = []
    for row in report["rows"]:
        figures = row["modes"].get(mode)
        if figures is None:
            continue
        lines.append(
            [row["workload"], f"{row['temperature']:g}", str(row["concurrency"])]
            + [
                _text(figures[name], 2)
                for name in ("accepted_length", "window", "admitted_per_step", "accepted_per_step")
            ]
            + [
                _text(figures["skip_share"], 2),
                _text(figures["step_ms"], 1),
                _text(figures["predicted_step_ms"], 1),
                _text(figures["draft_share"], 2),
            ]
        )
    return header, lines


def latency_table(report: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """TTFT and time per output token of all modes."""
    header = [
        "workload",
        "T",
        "requests",
        "mode",
        "TTFT p50 ms",
        "TTFT p99 ms",
        "TPOT p50 ms",
        "TPOT p99 ms",
    ]
    lines = []
    for row in report["rows"]:
        for mode in sorted(row["modes"], key=_column_order):
            figures = row["modes"][mode]
            names = ("ttft_ms_p50", "ttft_ms_p99", "tpot_ms_p50", "tpot_ms_p99")
            lines.append(
                [row["workload"], f"{row['temperature']:g}", str(row["concurrency"]), mode]
                + [_text(figures[name], 1) for name in names]
            )
    return header, lines


def _text(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:.{digits}f}"
