"""Figures as data: what the JSON of a command carries under "figures" and `plot` draws.

Each figure is an object with "figure" (its kind), "title" and either "series" (lines or points) or
"bars"; optional: "x_label", "y_label", "note". Kinds:

    cost_curve   series: label, x tokens of a step, y ms, spread ms
    reliability  series: label, predicted, observed, count (bins of equal mass)
    errors       series: label, x positions, y ECE; "goal" draws a line
    frontier     series: label, x tokens/s per user, y tokens/s in all, names of the points
    windows      series: label, x seconds, y mean window, low, high
    breakdown    bars: label, parts (name -> ms)
    lines        series: label, x, y, optional low and high; anything else
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from vllm_dspark.artifacts.schema import VERSION
from vllm_dspark.cli.result_figures import (
    BENCH_SCHEMA,
    SIMULATION_VERSION,
    Figure,
    bench_figures,
    simulation_figures,
)
from vllm_dspark.errors import InputError
from vllm_dspark.planning.reliability import Bin, ClassFit

# What a series of each kind must hold, as lists of equal length.
_SERIES = {
    "cost_curve": ("x", "y"),
    "reliability": ("predicted", "observed", "count"),
    "errors": ("x", "y"),
    "frontier": ("x", "y"),
    "windows": ("x", "y"),
    "lines": ("x", "y"),
}
_OPTIONAL = ("spread", "low", "high", "names")
KINDS = (*_SERIES, "breakdown")


def cost_figures(table: Mapping[str, Any]) -> list[Figure]:
    """Curves of a cost table record (as JSON): one figure per mode and shape, one for drafts."""
    figures = [
        {
            "figure": "cost_curve",
            "title": f"Target step ({grid['mode']}, {grid['shape']})",
            "series": [
                {
                    "label": f"{kv} KV tokens",
                    "x": list(grid["sizes"]),
                    "y": list(grid["median_ms"][row]),
                    "spread": list(grid["spread_ms"][row]),
                }
                for row, kv in enumerate(grid["kv_tokens"])
            ],
        }
        for grid in table["grids"]
    ]
    draft = table["draft"]
    figures.append(
        {
            "figure": "cost_curve",
            "title": "Draft pass",
            "x_label": "requests",
            "series": [
                {
                    "label": "draft",
                    "x": list(draft["sizes"]),
                    "y": list(draft["median_ms"][0]),
                    "spread": list(draft["spread_ms"][0]),
                }
            ],
        }
    )
    breakdown = _step_breakdown(table)
    return [*figures, breakdown] if breakdown["bars"] else figures


def _step_breakdown(table: Mapping[str, Any]) -> Figure:
    """Parts of a full-window step by number of requests, where both were measured."""
    grid = next((g for g in table["grids"] if g["shape"] == "native"), table["grids"][0])
    draft = table["draft"]
    window = table["fingerprint"]["num_speculative_tokens"] + 1
    target_ms = dict(zip(grid["sizes"], grid["median_ms"][0], strict=True))
    bars = [
        {
            "label": f"{requests} requests",
            "parts": {
                "target": target_ms[requests * window],
                "draft": draft_ms,
                **({"allocation": table["allocation_ms"]} if table["allocation_ms"] else {}),
                **({"other": table["overhead_ms"]} if table["overhead_ms"] else {}),
            },
        }
        for requests, draft_ms in zip(draft["sizes"], draft["median_ms"][0], strict=True)
        if requests * window in target_ms
    ]
    title = f"Step with full windows, {grid['kv_tokens'][0]} KV tokens"
    return {"figure": "breakdown", "title": title, "bars": bars}


def calibration_figures(fits: Mapping[str, ClassFit]) -> list[Figure]:
    """ECE by position of every class, then a reliability diagram per class and position."""
    figures: list[Figure] = []
    for name, fit in fits.items():
        curves = {
            "before": [position.before.ece for position in fit.positions],
            "after": [position.after.ece for position in fit.positions],
            "a perfect forecast": [position.ece_floor for position in fit.positions],
        }
        figures.append(_errors(name, curves))
        for position in fit.positions:
            figures.append(
                {
                    "figure": "reliability",
                    "title": f"{name}, position {position.after.position}",
                    "series": [
                        _bins("before", position.bins_before),
                        _bins("after", position.bins_after),
                    ],
                }
            )
    return figures


def _errors(name: str, curves: Mapping[str, Sequence[float]]) -> Figure:
    """ECE of one class by position, 1 to K."""
    return {
        "figure": "errors",
        "title": f"ECE of {name} requests, held-out prompts",
        "x_label": "position of the draft",
        "y_label": "ECE (15 bins of equal mass)",
        "series": [
            {"label": label, "x": list(range(1, len(values) + 1)), "y": list(values)}
            for label, values in curves.items()
        ],
    }


def _bins(label: str, bins: Sequence[Bin]) -> dict[str, Any]:
    return {
        "label": label,
        "predicted": [round(item.predicted, 5) for item in bins],
        "observed": [round(item.observed, 5) for item in bins],
        "count": [item.count for item in bins],
    }


def recorded_figures(record: Mapping[str, Any]) -> list[Figure]:
    """Figures of a calibration artifact: its ECE before and after, where it holds any quality."""
    return [
        _errors(
            name,
            {
                label: [position[f"ece_{label}"] for position in record[f"{name}_quality"]]
                for label in ("before", "after")
            },
        )
        for name in ("greedy", "sampled")
        if record.get(f"{name}_quality")
    ]


def figures_of(obj: Mapping[str, Any], where: str) -> list[Figure]:
    """All figures in a command's JSON or an artifact; InputError if there are none."""
    if "figures" in obj:
        listed = obj["figures"]
        if not isinstance(listed, list):
            raise InputError(f'{where}: "figures" is no list')
        for number, figure in enumerate(listed, 1):
            _check(figure, f"{where}, figure {number}")
        figures: list[Figure] = listed
    elif obj.get("kind") in ("cost_table", "calibration"):
        figures = _artifact_figures(obj, where)
    elif obj.get("kind") == "simulation" or isinstance(obj.get("rows"), list):
        figures = _result_figures(obj, where)
    else:
        raise InputError(
            f'{where} holds no "figures" and is no cost table or calibration; give the --json '
            "output of profile, calibrate, simulate or bench"
        )
    if not figures:
        raise InputError(f"{where} holds nothing to draw")
    return figures


def _result_figures(obj: Mapping[str, Any], where: str) -> list[Figure]:
    simulated = obj.get("kind") == "simulation"
    name, known = ("version", SIMULATION_VERSION) if simulated else ("schema", BENCH_SCHEMA)
    version = obj.get(name)
    if type(version) is not int or version != known:  # True is none either
        raise InputError(f"{where} has {name} {version!r}; this release reads {name} {known}")
    try:
        return simulation_figures(obj) if simulated else bench_figures(obj)
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        listed = "cells" if simulated else "rows"
        why = f"{error} is missing" if isinstance(error, KeyError) else f"bad {listed!r}"
        raise InputError(
            f"{where} is no result of simulate or bench ({why}); give what --json wrote, unchanged"
        ) from error


def _artifact_figures(obj: Mapping[str, Any], where: str) -> list[Figure]:
    if type(obj.get("version")) is not int or obj["version"] != VERSION:
        raise InputError(
            f"{where} has version {obj.get('version')!r}; this release reads version {VERSION}"
        )
    try:
        return cost_figures(obj) if obj["kind"] == "cost_table" else recorded_figures(obj)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        why = f"{error} is missing" if isinstance(error, KeyError) else "a value is of another type"
        raise InputError(f"{where} is no whole {obj['kind']} record: {why}") from error


def _check(figure: Any, where: str) -> None:
    kind = figure.get("figure") if isinstance(figure, dict) else None
    if kind not in KINDS:
        raise InputError(f"{where}: kind {kind!r} is none of {', '.join(KINDS)}")
    if kind == "breakdown":
        bars = figure.get("bars")
        if not isinstance(bars, list) or not bars or not all(_is_bar(bar) for bar in bars):
            raise InputError(f"{where}: breakdown needs bars with a label and parts of numbers")
        return
    series = figure.get("series")
    if not isinstance(series, list) or not series:
        raise InputError(f"{where}: {kind} needs series")
    for item in series:
        _check_series(item, _SERIES[kind], f"{where} ({kind})")


def _check_series(item: Any, needed: Sequence[str], where: str) -> None:
    if not isinstance(item, dict):
        raise InputError(f"{where}: a series is no object: {item!r:.60}")
    length = None
    for name in (*needed, *_OPTIONAL):
        if name not in item and name in _OPTIONAL:
            continue
        values = item.get(name)
        if not isinstance(values, list):
            raise InputError(f"{where}: series {item.get('label')!r} lacks the list {name!r}")
        if name != "names" and not all(_is_number(value) for value in values):
            raise InputError(
                f"{where}: {name!r} of series {item.get('label')!r} is not all numbers"
            )
        length = len(values) if length is None else length
        if len(values) != length:
            raise InputError(
                f"{where}: {name!r} of series {item.get('label')!r} has {len(values)} values, "
                f"{needed[0]!r} has {length}"
            )


def _is_bar(bar: Any) -> bool:
    return (
        isinstance(bar, dict)
        and isinstance(bar.get("label"), str)
        and isinstance(bar.get("parts"), dict)
        and all(_is_number(value) for value in bar["parts"].values())
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
