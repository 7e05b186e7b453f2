"""Command lines of profile, calibrate and plot: arguments, messages, exit codes, files."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.cli.replicas import FakeCalibration, FakeProfile
from tests.cli.test_calibrate import record
from tests.cli.test_profile import counted_time  # noqa: F401 - a fixture
from vllm_dspark.cli import calibrate, measuring_commands, profile, serve
from vllm_dspark.cli.main import app

SPEC = ["--speculative-config", '{"method": "dspark", "model": "org/drafter"}']


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(autouse=True)
def replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for engines; a preload would replace the test's own process."""
    monkeypatch.setattr(profile, "ProfileReplica", FakeProfile)
    monkeypatch.setattr(calibrate, "CalibrationReplica", FakeCalibration)
    monkeypatch.setattr(FakeProfile, "noise", 0.0)
    monkeypatch.setattr(FakeProfile, "saved", None)
    monkeypatch.setattr(measuring_commands, "_start_again", lambda _: None)
    monkeypatch.setattr(serve, "has_vllm", lambda: True)


@pytest.mark.parametrize("command", ["profile", "calibrate", "plot"])
def test_help_has_one_example(command: str) -> None:
    """Catches a command without the example that its help promises."""
    result = run(command, "-h")
    assert result.exit_code == 0
    assert result.output.count(f"Example: vllm-dspark {command}") == 1


def test_arguments_of_vllm_pass_through_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches vLLM's options eaten, reordered or mistaken for ours."""
    seen = []
    honest = FakeProfile.__init__

    def noted(self: FakeProfile, arguments: tuple[str, ...]) -> None:
        seen.append(arguments)
        honest(self, arguments)

    monkeypatch.setattr(FakeProfile, "__init__", noted)
    theirs = ["org/target", "--max-model-len", "512", "-tp", "2", "--dtype=float32", "--seed", "3"]
    theirs += [*SPEC, "-O3", "--limit-mm-per-prompt", "{}"]
    result = run("profile", *theirs[:3], "--repeats", "3", *theirs[3:], "--full")
    assert result.exit_code == 0, result.output
    assert seen == [tuple(theirs)]


def test_json_on_standard_output_is_alone_there() -> None:
    """Catches progress mixed into what a script reads."""
    result = run("profile", "org/target", *SPEC, "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["command"] == "profile"
    assert "time of a step" in result.stderr


@pytest.mark.usefixtures("counted_time")
def test_noise_exits_with_3_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a script that goes on with a table nobody should use."""
    monkeypatch.setattr(FakeProfile, "noise", 2.0)
    files = [tmp_path / name for name in ("a.json", "b.json", "c.svg")]
    options = ["--output", files[0], "--json", files[1], "--plot", files[2]]
    result = run("profile", "org/target", *SPEC, "--time-limit", "1", *options)
    assert result.exit_code == 3
    assert "the machine is busy" in result.stderr
    assert FakeProfile.saved is None
    assert list(tmp_path.iterdir()) == []


def test_profile_and_calibrate_feed_plot(tmp_path: Path) -> None:
    """Catches JSON that the next command cannot read."""
    pytest.importorskip("matplotlib", reason="drawing needs the `plot` extra")
    cost, fit, page = tmp_path / "p.json", tmp_path / "c.json", tmp_path / "r.html"
    assert run("profile", "org/target", *SPEC, "--json", cost).exit_code == 0
    recording = record(tmp_path / "pairs.jsonl", prompts=60, temperatures=(0.0,))
    arguments = ["--recording", recording, "--output", tmp_path / "cal.json", "--json", fit]
    result = run("calibrate", *arguments)
    assert result.exit_code == 0, result.output
    drawn = run("plot", cost, fit, "--html", page, "--json", "-")
    assert drawn.exit_code == 0, drawn.output
    counts = json.loads(drawn.stdout)["figures_drawn"]
    assert counts == {"cost_curve": 2, "breakdown": 1, "errors": 1, "reliability": 7}
    assert str(cost) in page.read_text()


def test_too_little_data_exits_with_3(tmp_path: Path) -> None:
    """Catches a calibration made of a few rows."""
    recording = record(tmp_path / "pairs.jsonl", prompts=3)
    result = run("calibrate", "--recording", recording, "--output", tmp_path / "cal.json")
    assert result.exit_code == 3
    assert "too little data" in result.stderr
    assert not (tmp_path / "cal.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile"], "name the target model"),
        (["profile", "T", "--repeats", "1"], "--repeats: 1 is outside"),
        (["profile", "T", "--max-spread", "nan"], "--max-spread: nan is outside"),
        (["profile", "T", "--time-limit", "inf"], "--time-limit: inf is outside"),
        (["profile", "T", "--replicas", "-1"], "--replicas: -1 is outside"),
        (["calibrate", "T", "--temperature", "nan"], "--temperature [nan]"),
        (["calibrate", "T", "--temperature", "-1"], "--temperature [-1.0]"),
        (["calibrate", "T", "--held-out", "nan"], "--held-out nan"),
        (["calibrate", "T", "--limit", "1"], "--limit: 1 is outside"),
        (["calibrate", "T", "--max-tokens", "0"], "--max-tokens: 0 is outside"),
        (["calibrate", "T", "--min-outcomes", "0"], "--min-outcomes: 0 is outside"),
        (["calibrate", "T", "--split-seed", "-1"], "--split-seed: -1 is outside"),
        (["profile", "T", "--plot", "cost.gif"], "ends in .png or .svg"),
        (["calibrate"], "name the target model"),
        (["calibrate", "T", "--plot", "x"], "ends in .png or .svg"),
        (["calibrate", "T", "--json", "/"], "is a folder"),
        (["calibrate", "T", "--prompts", "/nowhere"], "neither a JSONL file nor"),
        (["calibrate", "T", "--held-out", "2"], "--held-out 2.0"),
        (["calibrate", "--recording", "/nowhere", "--output", "x"], "cannot read"),
        (["calibrate", "T", "--against", "/nowhere", "--limit", "30"], "cannot read /nowhere"),
        (["plot"], "Missing argument"),
        (["plot", "/nowhere", "--html", "x.html"], "cannot read"),
        (["plot", "/nowhere"], "say where to"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], message: str) -> None:
    """Catches bad input that starts an engine, or a traceback instead of a message."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert message in result.output + result.stderr


@pytest.mark.parametrize("command", ["profile", "calibrate"])
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give --speculative-config"),
        (["--speculative-config", "{"], "--speculative-config '{' is not JSON"),
        (["--speculative-config", '{"method": "dspark", "model": "/nope"}'], "/nope does not"),
        (["--speculative-config", '{"method": "ngram", "model": "org/d"}'], 'not "dspark"'),
        ([*SPEC, "--output", "/nowhere/x.json"], "--output: cannot write /nowhere/x.json: there"),
        ([*SPEC, "--json", "/nowhere/x.json"], "there is no folder /nowhere"),
    ],
)
def test_engine_arguments_are_judged_at_once(
    monkeypatch: pytest.MonkeyPatch, command: str, arguments: list[str], message: str
) -> None:
    """Catches an engine that starts (and vLLM's own raw message) for what is wrong already."""

    def started(*_: object) -> None:
        pytest.fail("an engine was started")

    monkeypatch.setattr(FakeProfile, "__init__", started)
    monkeypatch.setattr(FakeCalibration, "__init__", started)
    result = run(command, "org/target", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_recording_is_missed_before_output() -> None:
    """Catches advice about --output for a file that is not there."""
    result = run("calibrate", "--recording", "/nowhere")
    assert (result.exit_code, "there is no such file" in result.stderr) == (2, True)


def test_empty_prompts_are_said_to_be_empty() -> None:
    """Catches an empty file that is called no file."""
    result = run("calibrate", "org/target", *SPEC, "--prompts", "/dev/null")
    assert (result.exit_code, "/dev/null holds 0 prompts" in result.stderr) == (2, True)


def test_without_vllm_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an import error instead of how to install it."""
    monkeypatch.setattr(serve, "has_vllm", lambda: False)
    result = run("profile", "org/target", *SPEC)
    assert result.exit_code == 1
    assert "pip install" in result.stderr
