"""`vllm-dspark top` against a fake server: figures, restarts, several engines, trouble."""

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.top.pages import K, page, served, values_of, vllm_lines
from vllm_dspark.cli.main import app
from vllm_dspark.cli.top import command
from vllm_dspark.cli.top.figures import figures_of
from vllm_dspark.cli.top.scrape import changes, fetch, parse
from vllm_dspark.cli.top.view import render
from vllm_dspark.errors import ScrapeError

# After 10 steps, and after 30.
EARLY = {
    "drafted_tokens": 40,
    "judged_tokens": [40, 20, 10],
    "accepted_tokens": [20, 10, 5],
    "window": [0, 10, 20, 10, 0, 120],  # buckets 1..4, +Inf, sum
    "request_steps": 40,
    "emitted_tokens": 75,
    "draft_width": K,
    "steps": {("native", "native_best"): 10},
    "draft_passes": 10,
    "timed_steps": 10,
    "measured_step_seconds": 0.10,
    "predicted_step_seconds": 0.11,
    "predicted_tokens": 80,
    "realised_tokens": 75,
    "ece": [0.02, 0.04, float("nan")],
    "scheduling": 1.0,
}
LATE = {
    **EARLY,
    "judged_tokens": [140, 60, 30],
    "accepted_tokens": [60, 30, 15],
    "window": [40, 10, 20, 70, 0, 400],
    "request_steps": 140,
    "emitted_tokens": 275,
    "steps": {
        ("native", "native_best"): 20,
        ("trim", "trim_gain"): 5,
        ("skip_draft", "skip_gain"): 5,
    },
    "draft_passes": 25,
    "skipped_draft_passes": 5,
    "timed_steps": 30,
    "measured_step_seconds": 0.50,
    "predicted_step_seconds": 0.46,
    "predicted_tokens": 300,
    "realised_tokens": 275,
    "fallbacks": {"mixed": 4},
    "cost_drifted_cells": 2,
}


def _pages(tmp_path: Path) -> list[str]:
    early, late = values_of(K, **EARLY), values_of(K, **LATE)
    return [
        page(tmp_path, {"0": early}, vllm_lines(running=4, tokens=100)),
        page(tmp_path, {"0": late}, vllm_lines(running=5, waiting=2, tokens=500)),
    ]


def _between(first: str, second: str, seconds: float = 2.0):
    return figures_of(changes(parse(first, 10.0), parse(second, 10.0 + seconds)))


def test_figures_are_those_of_the_period(tmp_path: Path) -> None:
    """Catches totals shown as if they were the period's, or a wrong numerator."""
    (e,) = _between(*_pages(tmp_path))
    assert (e.model, e.engine, e.running, e.waiting, e.kv_usage) == ("m", "0", 5, 2, 0.25)
    assert e.tokens_per_s == 200.0
    assert e.steps_per_s == 10.0
    assert e.accepted_length == 2.0
    assert e.mean_window == pytest.approx(2.8)
    assert e.windows == {1: 0.4, 2: 0.0, 3: 0.0, 4: 0.6}
    assert e.acceptance == (0.4, 0.5, 0.5)
    assert e.kinds == {"native": 0.5, "trim": 0.25, "skip_draft": 0.25}
    assert e.reasons == {"native_best": 0.5, "trim_gain": 0.25, "skip_gain": 0.25}
    assert e.draft_share == 0.75
    assert (e.measured_ms, e.predicted_ms) == (pytest.approx(20.0), pytest.approx(17.5))
    assert e.tokens_kept == pytest.approx(200 / 220)
    assert e.ece == pytest.approx(0.03)
    assert e.ece_by_position == (0.02, 0.04, None)
    assert (e.drifted_cells, e.fallbacks) == (2, {"mixed": 4.0})
    assert (e.scheduling, e.off_reason, e.restarted) == (True, "", False)


def test_since_the_start_there_are_no_rates(tmp_path: Path) -> None:
    """Catches a rate over an unknown time."""
    (e,) = figures_of(changes(None, parse(_pages(tmp_path)[1])))
    assert (e.seconds, e.tokens_per_s, e.steps_per_s) == (0.0, None, None)
    assert e.accepted_length == pytest.approx(275 / 140)


def test_restart_counts_from_zero(tmp_path: Path) -> None:
    """Catches negative rates after a restart, also where only some counters have fallen."""
    early, late = _pages(tmp_path)
    (e,) = _between(late, early)
    assert e.restarted
    assert e.tokens_per_s == 50.0
    assert e.accepted_length == pytest.approx(75 / 40)
    assert e.kinds == {"native": 1.0}


def test_engines_are_kept_apart(tmp_path: Path) -> None:
    """Catches engines added together, sorted as text, or one's restart blamed on another."""
    names = ["0", "2", "10"]
    first = page(
        tmp_path,
        {n: values_of(K, **EARLY) for n in names[:2]},
        *(vllm_lines(n, tokens=100) for n in names[:2]),
    )
    second = page(
        tmp_path,
        {n: values_of(K, **(EARLY if n == "2" else LATE)) for n in names},
        *(vllm_lines(n, tokens=60 if n == "2" else 300) for n in names),
    )
    found = _between(first, second)
    assert [e.engine for e in found] == names
    assert [e.restarted for e in found] == [False, True, False]
    assert [e.tokens_per_s for e in found] == [100.0, 30.0, 150.0]


def test_engine_that_left_is_forgotten(tmp_path: Path) -> None:
    """Catches the last figures of a dead engine shown for ever."""
    early = values_of(K, **EARLY)
    first = page(tmp_path, {"0": early, "1": early}, vllm_lines("0"), vllm_lines("1"))
    assert [e.engine for e in _between(first, _pages(tmp_path)[1])] == ["0"]


def test_server_without_the_plugin(tmp_path: Path) -> None:
    """Catches a crash, or invented figures, where only vLLM's own metrics are there."""
    first, second = (vllm_lines(tokens=n) for n in (0, 30))
    (e,) = _between(first, second)
    assert (e.tokens_per_s, e.scheduling, e.accepted_length) == (15.0, None, None)
    text = _shown([e])
    assert "plugin absent" in text
    with served([first]) as address:
        once = ["top", address, "--once", "--interval", "0", "--json"]
        result = CliRunner().invoke(app, once)
    assert result.exit_code == 4
    assert json.loads(result.stdout)["engines"][0]["scheduling"] is None
    (line,) = result.stderr.splitlines()
    assert "no vllm:dspark_* ones" in line


def test_scheduling_that_is_off_says_why(tmp_path: Path) -> None:
    """Catches an engine at full windows that looks as if it were scheduled."""
    values = values_of(K, "no confidence head", **{**EARLY, "scheduling": 0.0})
    text = page(tmp_path, {"0": values}, vllm_lines(), off_reason="no confidence head")
    (e,) = figures_of(changes(None, parse(text)))
    assert (e.scheduling, e.off_reason) == (False, "no confidence head")
    assert "full windows: no confidence head" in _shown([e])


def _shown(engines) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(render("http://x/metrics", engines))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_view_shows_the_figures(tmp_path: Path) -> None:
    """Catches a line that is left out."""
    text = _shown(_between(*_pages(tmp_path)))
    for part in (
        "5 running, 2 waiting, KV cache 25%",
        "200.0",
        "2.00 (10.0 steps/s)",
        "2.80 of 4",
        "20.00 ms, predicted 17.50 ms",
        "native 50%, trim 25%, skip_draft 25%",
        "0.030",
        "mixed 4, 2 cost cells drifted",
    ):
        assert part in text, part


def test_once_as_json_over_http(tmp_path: Path) -> None:
    """Catches a script's view that differs from the live one."""
    with served(_pages(tmp_path)) as address:
        result = CliRunner().invoke(app, ["top", address, "--once", "--json", "--interval", "0.1"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    (engine,) = answer["engines"]
    assert answer["kind"] == "top"
    assert engine["windows"] == {"1": 0.4, "2": 0.0, "3": 0.0, "4": 0.6}
    assert engine["seconds"] >= 0.1
    assert engine["tokens_per_s"] * engine["seconds"] == pytest.approx(400)


def test_once_since_the_start(tmp_path: Path) -> None:
    """Catches a second reading where one was asked for."""
    with served([_pages(tmp_path)[1], 500]) as address:
        result = CliRunner().invoke(app, ["top", address, "--once", "--interval", "0"])
    assert result.exit_code == 0, result.output
    assert "since its start" in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["127.0.0.1:9", "--once"], 1, "does not answer"),
        (["localhost:8000", "--json"], 2, "--once"),
        (["localhost:8000", "--interval", "0"], 2, "--once"),
        (["localhost:8000", "--interval", "-1"], 2, "--interval"),
        (["localhost:8000", "--interval", "nan"], 2, "--interval"),
        (["no-such-host.invalid:8000", "--once"], 1, "does not answer"),
        (["http://[half", "--once"], 2, "is no address of a server"),
        (["http://h:99999", "--once"], 2, "is no address of a server"),
        (["http://h:port"], 2, "is no address of a server"),
        (["file:///etc/hosts", "--once"], 2, "is no address of a server"),
        (["http://", "--once"], 2, "is no address of a server"),
        (["local host:8000"], 2, "is no address of a server"),
    ],
)
def test_exit_codes(arguments: list[str], code: int, words: str) -> None:
    """Catches a traceback, or a failure that looks like success."""
    result = CliRunner().invoke(app, ["top", *arguments])
    assert result.exit_code == code
    (line,) = result.stderr.splitlines()
    assert words in line
    assert line.startswith("vllm-dspark: error: ")


@pytest.mark.parametrize("text", ["", "<html>hello</html>", "python_info 1.0\n", 'vllm:x{a="b'])
def test_page_that_is_something_else(text: str) -> None:
    """Catches a parser's own error, or an empty view, for a page of another program."""
    with pytest.raises(ScrapeError):
        parse(text)
    with served([text]) as address:
        result = CliRunner().invoke(app, ["top", address, "--once", "--interval", "0"])
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1


def test_http_errors_are_scrape_errors() -> None:
    """Catches urllib's exceptions reaching the user."""
    with served([404]) as address, pytest.raises(ScrapeError, match="404") as raised:
        fetch(f"http://{address}/metrics")
    assert "answers, but with HTTP 404" in str(raised.value)  # a server is there
    with pytest.raises(ScrapeError):
        fetch("no-such-scheme://x")


def test_live_view_survives_an_outage_and_a_restart(tmp_path: Path) -> None:
    """Catches a view that ends with the server, or shows the outage's length as zero speed."""
    early, late = _pages(tmp_path)
    console = Console(file=StringIO(), width=160, force_terminal=True)
    notes: list[str] = []

    def read(url: str) -> str:
        notes.append(url)
        if len(notes) == 3:
            raise ScrapeError("gone")
        return late if len(notes) == 2 else early

    command.watch("http://x/metrics", 0.01, console, read=read, rounds=4)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(notes) == 4
    assert "no answer, trying again: gone" in text
    assert "(restarted)" in text


def test_live_view_fails_at_once_without_a_server() -> None:
    """Catches a live view that waits for an address that never was one."""
    with pytest.raises(ScrapeError):
        command.watch("http://127.0.0.1:9/metrics", 0.01, Console(file=StringIO()), rounds=2)


@pytest.mark.parametrize(
    ("given", "url"),
    [
        ("localhost:8000", "http://localhost:8000/metrics"),
        ("http://h:1/", "http://h:1/metrics"),
        ("https://h/metrics", "https://h/metrics"),
    ],
)
def test_addresses(given: str, url: str) -> None:
    """Catches an address that must be spelt in one way."""
    assert command.metrics_url(given) == url


def test_help_has_an_example() -> None:
    """Catches a command without the example that its help promises."""
    assert "Example: vllm-dspark top" in CliRunner().invoke(app, ["top", "-h"]).output
