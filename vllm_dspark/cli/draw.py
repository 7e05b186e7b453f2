"""Draw figures (figures.py) with matplotlib: one image, or one HTML file that needs nothing else.

SVG keeps text as text, so that the report can be searched, and carries no script, font or link.
"""

from __future__ import annotations

import contextlib
import html
import importlib.util
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_dspark.artifacts.schema import now
from vllm_dspark.cli.output import OutputError
from vllm_dspark.cli.result_figures import Figure
from vllm_dspark.errors import InputError

INSTALL_HINT = "drawing needs matplotlib: pip install 'vllm-dspark[plot]'"
FORMATS = (".png", ".svg")

_LABELS = {
    "cost_curve": ("tokens in the step", "ms"),
    "reliability": ("predicted", "observed"),
    "errors": ("position", "ECE"),
    "frontier": ("tokens/s per user", "tokens/s in all"),
    "windows": ("seconds", "window (tokens verified per request)"),
    "breakdown": ("", "ms per step"),
    "lines": ("", ""),
}
_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2rem auto; padding: 0 1rem;
       color: #1a1a1a; background: #fff; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(420px, 1fr)); gap: 1rem;
       margin-top: 1rem; }
figure { margin: 0; } figure svg { width: 100%; height: auto; }
figcaption { font-size: .9rem; color: #555; }
table { border-collapse: collapse; font-size: .9rem; } td, th { padding: .2rem .8rem .2rem 0;
       text-align: left; vertical-align: top; } pre { overflow-x: auto; background: #f5f5f5;
       padding: 1rem; font-size: .8rem; }
"""


def require_matplotlib() -> None:
    """Raise InputError, with the remedy, where it is not installed."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(INSTALL_HINT)


def require_drawable(path: Path | None) -> None:
    """Raise InputError before work whose picture could not be drawn; None asks for none."""
    if path is None:
        return
    require_matplotlib()
    if path.suffix not in FORMATS:
        raise InputError(f"{path}: choose a name that ends in {' or '.join(FORMATS)}")


def draw_image(figures: Sequence[Figure], path: Path) -> None:
    """All figures in one PNG or SVG file, written in one step."""
    require_drawable(path)
    data = _render(figures, path.suffix[1:])
    temporary = path.with_name(f".{path.name}.part")
    try:
        temporary.write_bytes(data)
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise OutputError(f"cannot write {path}: {error.strerror}; name another file") from error


def html_report(sources: Mapping[str, tuple[Mapping[str, Any], Sequence[Figure]]]) -> str:
    """A self-contained page. sources: name -> (the command's JSON, its figures)."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>vllm-dspark report</title><style>{_STYLE}</style></head><body>",
        f"<h1>vllm-dspark report</h1><p>Made {html.escape(now())}.</p>",
    ]
    for name, (obj, figures) in sources.items():
        parts.append(f"<h2>{html.escape(name)}</h2>")
        parts.append(_facts(obj))
        parts.append('<div class="figures">')
        for figure in figures:
            note = html.escape(str(figure.get("note", "")))
            parts.append(f"<figure>{_svg(figure)}<figcaption>{note}</figcaption></figure>")
        parts.append("</div><details><summary>Numbers</summary>")
        parts.append(f"<pre>{html.escape(json.dumps(obj, indent=1))}</pre></details>")
    parts.append("</body></html>")
    return "\n".join(parts)


def _facts(obj: Mapping[str, Any]) -> str:
    """The command's plain values as a table."""
    rows = [
        f"<tr><th>{html.escape(str(key))}</th><td>{html.escape(str(value))}</td></tr>"
        for key, value in obj.items()
        if isinstance(value, str | int | float) and value not in ("", None)
    ]
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _svg(figure: Figure) -> str:
    """One figure as an SVG element for a page."""
    text = _render([figure], "svg").decode()
    element = text[text.index("<svg") :]
    # Metadata names a schema by URL; nothing is fetched from there, but a page that is said to
    # need nothing else should not look as if it did.
    return re.sub(r"<metadata>.*?</metadata>", "", element, flags=re.DOTALL)


def _render(figures: Sequence[Figure], suffix: str) -> bytes:
    require_matplotlib()
    import matplotlib
    from matplotlib.figure import Figure as Canvas

    columns = min(3, len(figures))
    rows = -(-len(figures) // columns)
    # Ids from a fixed salt: the same figures give the same file.
    style: Any = {"svg.fonttype": "none", "svg.hashsalt": "vllm-dspark"}
    with matplotlib.rc_context(style):
        canvas = Canvas(figsize=(5.2 * columns, 3.6 * rows), layout="constrained")
        grid = canvas.subplots(rows, columns, squeeze=False)
        for axes, figure in zip(grid.flat, figures, strict=False):
            _draw(axes, figure)
        for axes in list(grid.flat)[len(figures) :]:
            axes.set_visible(False)
        buffer = io.BytesIO()
        metadata = {"Date": None} if suffix == "svg" else {}
        canvas.savefig(buffer, format=suffix, dpi=120, metadata=metadata)
    return buffer.getvalue()


def _draw(axes: Any, figure: Figure) -> None:
    kind = figure["figure"]
    x_label, y_label = _LABELS[kind]
    axes.set_title(figure.get("title", ""), fontsize=10)
    axes.set_xlabel(figure.get("x_label", x_label))
    axes.set_ylabel(figure.get("y_label", y_label))
    axes.grid(alpha=0.3)
    if kind == "breakdown":
        _bars(axes, figure["bars"])
    elif kind == "reliability":
        _reliability(axes, figure["series"])
    else:
        for series in figure["series"]:
            _line(axes, kind, series)
        if "goal" in figure:
            axes.axhline(figure["goal"], color="grey", linestyle=":", label="goal")
        axes.set_ylim(bottom=0)
        if kind == "cost_curve" and _spans_ladder(figure["series"]):
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize=8)


def _spans_ladder(series: Sequence[Mapping[str, Any]]) -> bool:
    """Whether sizes range so far that a linear axis would crowd the small ones."""
    sizes = [x for item in series for x in item["x"] if x > 0]
    return bool(sizes) and max(sizes) >= 32 * min(sizes)


def _line(axes: Any, kind: str, series: Mapping[str, Any]) -> None:
    x, y, label = series["x"], series["y"], series.get("label")
    marker = "" if kind == "windows" else "o"
    if "spread" in series:
        axes.errorbar(x, y, yerr=series["spread"], label=label, marker="o", markersize=3, capsize=2)
    else:
        axes.plot(x, y, label=label, marker=marker, markersize=4)
    if "low" in series and "high" in series:
        axes.fill_between(x, series["low"], series["high"], alpha=0.2)
    for name, left, up in zip(series.get("names", ()), x, y, strict=False):
        axes.annotate(str(name), (left, up), fontsize=7, xytext=(3, 3), textcoords="offset points")


def _reliability(axes: Any, series: Sequence[Mapping[str, Any]]) -> None:
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    for item in series:
        axes.plot(
            item["predicted"], item["observed"], marker="o", markersize=4, label=item.get("label")
        )
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_aspect("equal")


def _bars(axes: Any, bars: Sequence[Mapping[str, Any]]) -> None:
    names = list(dict.fromkeys(name for bar in bars for name in bar["parts"]))
    places = range(len(bars))
    bottom = [0.0] * len(bars)
    for name in names:
        heights = [float(bar["parts"].get(name, 0.0)) for bar in bars]
        axes.bar(places, heights, bottom=bottom, label=name, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    axes.set_xticks(list(places), [bar["label"] for bar in bars], rotation=20, ha="right")
