"""The command: sweeps, tables, files, exit codes."""

import io
import json
import re
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.artifacts.records import cost_record
from vllm_dspark.cli.main import app
from vllm_dspark.cli.simulate import command, view
from vllm_dspark.simulation.result import CellResult, Percentiles, SimulationRecord
from vllm_dspark.simulation.trace import read_trace, synthetic_trace, write_trace

SMALL = ("--requests", "12", "--prompt-tokens", "4")


def run(*arguments: str):
    return CliRunner().invoke(app, ["simulate", *arguments])


def test_sweep_to_json(tmp_path: Path) -> None:
    """Catches an option that is parsed and not simulated: one cell per combination."""
    file = tmp_path / "result.json"
    result = run(
        "--acceptance", "0.8,0.7", *SMALL, "--concurrency", "1,4", "-k", "1,2",
        "--min-gain", "0,0.1", "--dp", "1,2", "--bandwidth", "1,2", "--json", str(file),
        "--policy", "off", "--policy", "ours",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    record = SimulationRecord.model_validate_json(file.read_text())
    keys = [
        (c.arrivals, c.policy, c.width, c.min_gain, c.replicas, c.machine) for c in record.cells
    ]
    assert len(set(keys)) == len(keys) == 2 * 2 * 2 * 2 * 3  # off once, ours with two margins
    assert {c.machine for c in record.cells} == {"", "bandwidth x2"}
    assert all(c.completed == 12 for c in record.cells)
    faster = {c.machine: c.tokens_per_s for c in record.cells if c.policy == "off"}
    assert faster["bandwidth x2"] > 1.5 * faster[""]


def test_trace_and_table_from_files(tmp_path: Path) -> None:
    """Catches files that are named and not used."""
    record = cost_record()
    (tmp_path / "table.json").write_text(record.model_dump_json())
    width = record.fingerprint.num_speculative_tokens
    trace = synthetic_trace([0.7] * width, num_requests=3, output=10, prompt=5)
    write_trace(tmp_path / "in.npz", trace)
    result = run(
        "--trace", str(tmp_path / "in.npz"), "--cost-table", str(tmp_path / "table.json"),
        "--policy", "fixed", "--concurrency", "2", "--requests", "6",
        "--overhead-ms", "3", "--json", "-", "--save-trace", str(tmp_path / "out.npz"),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    written = json.loads(result.stdout)
    assert written["kind"] == "simulation"
    assert written["cost_table"].endswith("table.json")
    assert written["cells"][0]["step_ms"] > 3.0
    assert read_trace(tmp_path / "out.npz").num_requests == 3


def test_table_on_the_terminal() -> None:
    """Catches a result that is computed and not shown, and an example taken for a measurement."""
    result = run("--acceptance", "0.8,0.7", *SMALL, "--concurrency", "2")
    assert result.exit_code == 0, result.output
    for word in ("early_stop", "ours", "tokens/s", "example (no --cost-table)"):
        assert word in result.output


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ((), 2, "either --trace or --acceptance"),
        (("--acceptance", "0.5", "--trace", "x"), 2, "either --trace or --acceptance"),
        (("--trace", "/nowhere"), 2, "cannot read"),
        (("--acceptance", "0.5", "--cost-table", "/nowhere"), 2, "cannot read"),
        (("--acceptance", "half"), 2, "'half' is no number from 0 to 1"),
        (("--acceptance", "0.5", "--policy", "best"), 2, "not known"),
        (("--acceptance", "0.5", "-k", "2"), 2, "K = 2 cannot be simulated"),
        (("--acceptance", "0.5", "--arrivals", "poisson"), 2, "needs --rate"),
        (("--acceptance", "0.5", "--arrivals", "often"), 2, "closed, poisson or burst"),
        (("--acceptance", "0.5", "--tp-efficiency", "2"), 2, "--tp-efficiency: 2.0"),
        (("--acceptance", "0.5", "--json", "/"), 2, "is a folder"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], code: int, words: str) -> None:
    """Catches a traceback, or a simulation of something that was not asked for."""
    result = run(*arguments)
    assert result.exit_code == code, result.output
    assert words in " ".join((result.output + result.stderr).split())


@pytest.mark.parametrize(
    ("option", "values"),
    [
        ("--min-gain", "nan -0.1 1 inf 0,nan"),
        ("--acceptance", "1.8 -1 nan inf 0.5,1.1"),
        ("--requests", "0 -3 100000000000"),
        ("--dp", "0 -1 1.5 1000000 inf"),
        ("--tp", "0 -2 nan"),
        ("--bandwidth", "0 -1 nan inf 1e9"),
        ("--compute", "0 nan"),
        ("--concurrency", "0 -4 1e3 99999999999 ,"),
        ("--k", "0 -3 1.5"),
        ("--tp-efficiency", "0 nan 1.1"),
        ("--overhead-ms", "nan -1 inf"),
        ("--prompt-tokens", "0 99999999999"),
        ("--max-num-seqs", "0 99999999999"),
        ("--max-num-batched-tokens", "0 99999999999"),
        ("--burst-size", "0 99999999999"),
        ("--seed", "-1 99999999999"),
        ("--hysteresis", "-1 99999"),
        ("--probe-interval", "1 9999999"),
    ],
)
def test_numbers_are_judged_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, option: str, values: str
) -> None:
    """Catches half a minute of compiling, or a simulation of nonsense, for a mistyped number."""
    monkeypatch.setattr(command, "simulate", lambda *_, **__: pytest.fail("it was simulated"))
    for value in values.split():
        given = () if option == "--acceptance" else ("--acceptance", "0.5")
        result = run(*given, f"{option}={value}")
        assert result.exit_code == 2, (value, result.output)
        (line,) = result.stderr.splitlines()
        assert line.startswith(f"vllm-dspark: error: {option}"), line
        assert re.search(r"from \d|above \d|at least one", line), line  # what is allowed
    rate = run("--acceptance", "0.5", "--arrivals", "poisson", "--rate", "nan")
    assert (rate.exit_code, "--rate 'nan'" in rate.stderr) == (2, True)


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
def test_compiling_is_said_where_one_waits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], patience_s: float
) -> None:
    """Catches half a minute of silence, and a minute announced that is no second."""
    monkeypatch.setattr(command, "_PATIENCE_S", patience_s)
    monkeypatch.setattr(command, "warm_up", lambda: time.sleep(0.3))
    command._ready(Console(stderr=True))
    shown = capsys.readouterr()
    assert ("compiling the simulator" in shown.err) is (patience_s == 0.0)
    assert shown.out == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--acceptance", "0.8", "-k", "3"), "3"),
        (("--acceptance", "0.8,,0.7"), "there is no number between two commas"),
        (("--acceptance", "0.8,0.7,"), "there is no number between two commas"),
        (("--acceptance", "0.8", "--json", "/nowhere/x.json"), "--json: cannot write"),
        (("--acceptance", "0.8", "--save-trace", "/nowhere/x"), "there is no folder /nowhere"),
        (("--acceptance", "0.8", "--max-num-batched-tokens", "1"), "raise it"),
    ],
)
def test_wrong_usage_is_said_before_anything_is_compiled(
    monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], message: str
) -> None:
    """Catches a minute of compiling before a usage error."""
    monkeypatch.setattr(command, "warm_up", lambda: pytest.fail("it was compiled"))
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert line.startswith("vllm-dspark: error: ") and message in line


def _cell(policy: str, tokens_per_s: float) -> CellResult:
    ms = Percentiles(mean=12.5, p50=12.34, p90=20.0, p99=98765.4)
    return CellResult(
        policy=policy, arrivals="closed 64", width=7, replicas=1, min_gain=0.04, machine="",
        requests=9, completed=9, steps=9, seconds=1.0, tokens_per_s=tokens_per_s,
        steady_tokens_per_s=1.0, accepted_length=3.21, mean_window=4.56, windows=(1,),
        acceptance=0.5, draft_share=0.87, step_ms=23.45, decode_step_ms=1.0, ttft_ms=ms,
        tpot_ms=ms, latency_ms=ms, kinds={}, reasons={}, timeline=(),
        simulated_steps_per_minute=1.0,
    )  # fmt: skip


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_numbers_are_never_cut(width: int) -> None:
    """Catches a table whose headers or numbers end in an ellipsis on a narrow terminal."""
    cells = (_cell("early_stop", 123456.7), _cell("threshold:0.5", 98765.4), _cell("ours", 1.5))
    record = SimulationRecord(
        created="", trace="t", cost_table="c", notes={"draft_width": "full"}, cells=cells
    )
    file = io.StringIO()
    view.print_record(record, Console(file=file, width=width))
    shown = file.getvalue()
    assert "\u2026" not in shown
    for word in ("tokens/s", "TPOT ms", "TTFT ms", "123456.7", "98765.4", "98.77", "87%", "23.45"):
        assert word in shown, word
    assert all(len(line.rstrip()) <= width for line in shown.splitlines())
    assert (shown.count("policy") == 1) is (width >= 80)


def test_full_draft_width_is_said() -> None:
    """Catches a prediction for a CPU engine that hides what its engine does otherwise."""
    shown = run("--acceptance", "0.5,0.5", *SMALL, "--concurrency", "2", "--policy", "ours")
    assert "every draft pass has full width" in " ".join(shown.output.split())
    off = run("--acceptance", "0.5,0.5", *SMALL, "--concurrency", "2", "--policy", "off")
    assert "full width" not in " ".join(off.output.split())


def test_help_has_an_example() -> None:
    """Catches a command without the example that its help promises."""
    assert "Example: vllm-dspark simulate" in " ".join(run("-h").output.split())
