"""Figures from JSON: what is drawn, what is refused, and that a page needs nothing else."""

import json
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.artifacts.records import calibration_record, cost_record
from vllm_dspark.artifacts.store import write_record
from vllm_dspark.bench.report import SCHEMA
from vllm_dspark.cli.exits import EXIT_FAILED, code_of
from vllm_dspark.cli.figures import figures_of
from vllm_dspark.cli.output import OutputError
from vllm_dspark.cli.plot import run_plot
from vllm_dspark.cli.result_figures import BENCH_SCHEMA, SIMULATION_VERSION
from vllm_dspark.errors import InputError
from vllm_dspark.simulation.result import SimulationRecord

pytest.importorskip("matplotlib", reason="drawing needs the `plot` extra")

FIGURES = [
    {
        "figure": "cost_curve",
        "title": "Cost",
        "series": [{"label": "128 KV", "x": [1, 8], "y": [5.0, 6.0], "spread": [0.1, 0.2]}],
    },
    {
        "figure": "reliability",
        "title": "greedy, position 1",
        "series": [{"label": "after", "predicted": [0.2, 0.8], "observed": [0.25, 0.7],
                    "count": [10, 10]}],
    },
    {
        "figure": "frontier",
        "title": "Frontier",
        "series": [{"label": "ours", "x": [90, 40], "y": [90, 640], "names": ["c=1", "c=16"]}],
    },
    {
        "figure": "windows",
        "title": "Windows",
        "series": [{"label": "w", "x": [0, 1], "y": [4, 6], "low": [1, 2], "high": [8, 8]}],
    },
    {
        "figure": "breakdown",
        "title": "Step <time>",
        "bars": [{"label": "c=1", "parts": {"target": 9.0, "draft": 2.0}},
                 {"label": "c=8", "parts": {"target": 12.0, "host": 1.0}}],
    },
    {"figure": "lines", "title": "Other", "series": [{"label": "l", "x": [1], "y": [2]}]},
    {"figure": "errors", "title": "ECE", "goal": 0.03,
     "series": [{"label": "after", "x": [1, 2], "y": [0.01, 0.02]}]},
]  # fmt: skip


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"command": "bench", "machine": "<b>", "figures": FIGURES}))
    return path


class _References(HTMLParser):
    """Every attribute that makes a browser fetch something, and every script."""

    FETCHING = ("src", "srcset", "data", "poster", "action", "background")

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.titles = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.titles += tag == "h2"
        if tag in ("script", "link", "iframe", "img", "object", "embed", "base"):
            self.found.append((tag, ""))
        for name, value in attrs:
            local = name in ("href", "xlink:href") and (value or "").startswith("#")
            if name in self.FETCHING or (name.endswith("href") and not local):
                self.found.append((tag, f"{name}={value}"))


def test_page_needs_nothing_else(source: Path, tmp_path: Path) -> None:
    """Catches a page that loads a script, style, font or image from somewhere."""
    page = tmp_path / "report.html"
    report = run_plot([source], None, page)
    assert report.figures == {figure["figure"]: 1 for figure in FIGURES}
    text = page.read_text()
    parser = _References()
    parser.feed(text)
    assert parser.found == []
    assert parser.titles == 1
    assert "@import" not in text
    assert "url(http" not in text
    assert text.count("<svg") == len(FIGURES)
    # names from the file are text, not markup
    assert "<td>&lt;b&gt;</td>" in text
    for word in ("128 KV", "Frontier", "c=16", "target"):
        assert word in text


def test_images(source: Path, tmp_path: Path) -> None:
    """Catches a file of another format than its name says, and drawings that differ by run."""
    png, svg, again = tmp_path / "a.png", tmp_path / "b.svg", tmp_path / "c.svg"
    run_plot([source], png, None)
    assert png.read_bytes().startswith(b"\x89PNG")
    run_plot([source], svg, None)
    run_plot([source], again, None)
    assert svg.read_bytes() == again.read_bytes()
    assert b"Step &lt;time&gt;" in svg.read_bytes()
    assert [path.name for path in tmp_path.glob(".*")] == []


def test_only_some_kinds(source: Path, tmp_path: Path) -> None:
    """Catches a choice that is ignored, or a picture of nothing."""
    report = run_plot([source], tmp_path / "a.svg", None, ["windows"])
    assert report.figures == {"windows": 1}
    with pytest.raises(InputError, match="no figure of kind errors"):
        write_record(tmp_path / "cost.json", cost_record())
        run_plot([tmp_path / "cost.json"], tmp_path / "a.svg", None, ["errors"])


def test_artifacts_can_be_drawn(tmp_path: Path) -> None:
    """Catches a cost table that only its command's own JSON lets one see."""
    write_record(tmp_path / "cost.json", cost_record())
    report = run_plot([tmp_path / "cost.json"], tmp_path / "a.svg", None)
    assert set(report.figures) == {"cost_curve", "breakdown"}
    write_record(tmp_path / "cal.json", calibration_record())
    with pytest.raises(InputError, match="holds nothing to draw"):
        run_plot([tmp_path / "cal.json"], tmp_path / "a.svg", None)


BENCH_MODE = {
    "tokens_per_s": {"median": 100.0}, "tpot_ms_p50": 20.0, "window": 5.0, "accepted_length": 3.0,
    "step_ms": 40.0, "draft_share": 0.25,
}  # fmt: skip


def _bench_row(concurrency: int) -> dict[str, Any]:
    modes = {"off": {"tokens_per_s": {"median": 50.0}, "tpot_ms_p50": None}, "ours": BENCH_MODE}
    return {"workload": "mix", "temperature": 0.0, "concurrency": concurrency, "modes": modes}


def test_results_of_bench_and_simulate() -> None:
    """Catches figures of results that carry none, drawn over the wrong axis."""
    bench = figures_of({"schema": 1, "rows": [_bench_row(4), _bench_row(1)]}, "b")
    frontier, load, steps = bench
    assert frontier["series"] == [
        {"label": "ours", "x": [50.0, 50.0], "y": [100.0, 100.0], "names": ["1", "4"]}
    ]
    assert [series["label"] for series in load["series"]] == ["window", "accepted length"]
    assert load["series"][0]["x"] == [1, 4]
    assert steps["bars"][0] == {
        "label": "1 requests",
        "parts": {"target and host": 30.0, "draft": 10.0},
    }
    cell = {
        "policy": "ours", "arrivals": "closed:8", "machine": "", "tpot_ms": {"p50": 10.0},
        "tokens_per_s": 640.0, "timeline": [{"t_s": 1.0, "mean_window": 4.0}],
    }  # fmt: skip
    frontier, windows = figures_of({"kind": "simulation", "version": 1, "cells": [cell]}, "s")
    assert frontier["series"][0]["x"] == [100.0]
    assert windows["series"][0] == {"label": "ours, closed:8", "x": [1.0], "y": [4.0]}
    with pytest.raises(InputError, match="no result of simulate or bench"):
        figures_of({"kind": "simulation", "version": 1, "cells": [{"policy": "x"}]}, "s")


@pytest.mark.parametrize("version", [None, 5, "x", [], True, 1.0])
def test_versions_of_results_are_checked(version: Any) -> None:
    """Catches a result of another release drawn as if it were of this one."""
    for kind in ({"kind": "simulation", "cells": []}, {"kind": "cost_table"}):
        with pytest.raises(InputError, match="has version"):
            figures_of({**kind, "version": version}, "s")
    with pytest.raises(InputError, match="has schema"):
        figures_of({"rows": [], "schema": version}, "s")


def test_versions_are_those_that_are_written() -> None:
    """Catches a new version of a result that `plot` would go on to refuse."""
    assert SimulationRecord.model_fields["version"].default == SIMULATION_VERSION
    assert SCHEMA == BENCH_SCHEMA


@pytest.mark.parametrize("items", [None, 3, "x", [3], [None], [[]], {"a": 1}, [{"policy": 1}]])
@pytest.mark.parametrize("simulated", [True, False])
def test_results_of_wrong_types(items: Any, simulated: bool) -> None:
    """Catches Python's own words, or a traceback, for a file that was edited."""
    obj = {"kind": "simulation", "version": 1, "cells": items}
    if not simulated:
        obj = {"schema": 1, "rows": [items]}
    with pytest.raises(InputError) as raised:
        figures_of(obj, "s.json")
    assert "Error(" not in str(raised.value) and "object" not in str(raised.value)


def test_a_page_does_not_take_its_source_s_place(source: Path) -> None:
    """Catches results overwritten by their drawing, and a page that no browser takes for one."""
    before = source.read_text()
    with pytest.raises(InputError, match=r"--html .*ends in \.html or \.htm"):
        run_plot([source], None, source)
    page, picture = source.with_name("r.html"), source.with_name("r.svg")
    for path in (page, picture):
        path.write_text(before)
    with pytest.raises(InputError, match="is one of the files to draw"):
        run_plot([source, page], None, page)
    with pytest.raises(InputError, match="is one of the files to draw"):
        run_plot([picture], picture, None)
    assert {path.read_text() for path in (source, page, picture)} == {before}


def test_outputs_that_cannot_be_written(source: Path) -> None:
    """Catches folders made for a mistyped name, and a wrong exit code for a failed write."""
    with pytest.raises(InputError, match=r"--html: cannot write .*there is no folder"):
        run_plot([source], None, source.parent / "deep" / "r.html")
    with pytest.raises(OutputError, match=r"cannot write /proc/b\.png") as raised:
        run_plot([source], Path("/proc/b.png"), None)
    assert code_of(raised.value) == EXIT_FAILED
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def _series(**changes: Any) -> dict[str, Any]:
    item = {"label": "a", "x": [1], "y": [1], **changes}
    return {"figure": "lines", "series": [item]}


@pytest.mark.parametrize(
    ("obj", "message"),
    [
        ({"tokens": 1}, 'holds no "figures"'),
        ({"kind": "cost_table", "version": 99}, "has version 99; this release reads version 1"),
        ({"kind": "cost_table", "version": 1}, "no whole cost_table record: 'grids' is missing"),
        ({"figures": 1}, '"figures" is no list'),
        ({"figures": []}, "nothing to draw"),
        ({"figures": [{"figure": "pie"}]}, "figure 1: kind 'pie' is none of"),
        ({"figures": [3]}, "kind None"),
        ({"figures": [{"figure": "lines"}]}, "needs series"),
        ({"figures": [_series(x=[1, 2])]}, "'y' of series 'a' has 1 values, 'x' has 2"),
        ({"figures": [_series(y=["high"])]}, "'y' of series 'a' is not all numbers"),
        ({"figures": [_series(y=None)]}, "lacks the list 'y'"),
        ({"figures": [_series(low=[1, 2])]}, "'low' of series"),
        ({"figures": [{"figure": "breakdown", "bars": [{"label": "x"}]}]}, "breakdown needs bars"),
    ],
)
def test_bad_figures_are_named(obj: dict[str, Any], message: str) -> None:
    """Catches a traceback from the drawing library."""
    with pytest.raises(InputError, match=message):
        figures_of(obj, "file.json")


def test_nothing_is_written_for_bad_input(source: Path, tmp_path: Path) -> None:
    """Catches half a result: one good file and one bad one."""
    bad = tmp_path / "bad.json"
    page = tmp_path / "report.html"
    for text, message in (("[1]", "holds a list"), ("{", "is not JSON")):
        bad.write_text(text)
        with pytest.raises(InputError, match=message):
            run_plot([source, bad], None, page)
    for content in (b"", b"\x89PNG\r\n\x1a\n\x00\xff", b"[" * 200_000):
        bad.write_bytes(content)
        with pytest.raises(InputError, match=r"bad\.json is not JSON"):
            run_plot([source, bad], None, page)
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(InputError, match=f"cannot read {path}: "):
            run_plot([path], None, page)
    with pytest.raises(InputError, match=r"ends in \.png or \.svg"):
        run_plot([source], tmp_path / "a.gif", page)
    with pytest.raises(InputError, match="say where to"):
        run_plot([source], None, None)
    with pytest.raises(InputError, match="kinds are"):
        run_plot([source], None, page, ["pie"])
    assert not page.exists()
