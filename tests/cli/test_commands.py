"""The commands' arguments, messages and exit codes; no engine is started."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from tests.cli.test_report import report
from vllm_dspark import __version__
from vllm_dspark.cli import demo, exits, serve
from vllm_dspark.cli.main import app
from vllm_dspark.demo.client import ServerError
from vllm_dspark.demo.target import TargetError, drafter_path


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda c: c.callback.__name__)
def test_help_has_one_example(command: Any) -> None:
    """Catches a command without example, with two, or with another command's."""
    name = command.callback.__name__
    assert command.epilog.startswith(f"Example: vllm-dspark {name} ")
    assert command.epilog.count("Example") == 1
    if name != "serve":  # whose --help is vLLM's
        result = run(name, "-h")
        assert result.exit_code == 0
        assert result.output.count(f"Example: vllm-dspark {name}") == 1


def test_exit_codes_are_documented() -> None:
    """Catches a code that only the source explains."""
    page = (Path(__file__).parents[2] / "docs" / "cli.md").read_text()
    rows = [line for line in (exits.__doc__ or "").splitlines() if line.startswith("| ")]
    assert len(rows) == 7
    assert all(row in page for row in rows)


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda c: c.callback.__name__)
def test_results_come_as_json(command: Any) -> None:
    """Catches a command whose result only people can read."""
    name = command.callback.__name__
    if name != "serve":
        assert "--json" in run(name, "-h").output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["demo", "--speed"], "No such option"),
        (["demo", "--dtype", "int8"], "choose bfloat16 or float32"),
        (["demo", "--prompts", "0"], "--prompts: 0 is outside of what is allowed"),
        (["demo", "--rounds", "99999"], "--rounds: 99999 is outside"),
        (["demo", "-k", "0"], "--num-speculative-tokens: 0 is outside"),
        (["demo", "--drafter", "/nowhere"], "no config.json"),
        (["demo", "--json", "/"], "is a folder"),
        (["demo", "-k", "9"], "-k 9: "),
        (["demo", "--logs", "/proc/zzz"], "--logs /proc/zzz: there is no folder"),
        (["demo", "--logs", "/nowhere/zzz"], "--logs /nowhere/zzz: there is no folder /nowhere"),
        (["dance"], "No such command"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: list[str], message: str) -> None:
    """Catches bad input that starts an engine, or a traceback instead of a message."""
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.output + result.stderr


def test_drafter_without_its_tensors(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches servers that start for a drafter which the doctor knows to be incomplete."""
    shutil.copy(drafter_path() / "config.json", tmp_path)
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors")
    target = tmp_path / "target"
    target.mkdir()
    shape = {"hidden_size": 576, "vocab_size": 49152, "num_hidden_layers": 30}
    (target / "config.json").write_text(json.dumps({"model_type": "llama", **shape}))
    monkeypatch.setattr(demo, "ensure_target", lambda: target)
    monkeypatch.setattr(demo, "run", lambda *_: pytest.fail("servers were started"))
    result = run("demo", "--drafter", str(tmp_path))
    assert result.exit_code == 2, result.output
    assert f"drafter {tmp_path}: " in result.stderr


@pytest.mark.parametrize(
    "error", [TargetError("no PyPI"), ServerError("died"), PermissionError("no folder")]
)
def test_failure_exits_with_1(
    monkeypatch: pytest.MonkeyPatch, drafter: Path, error: Exception
) -> None:
    """Catches a failure of the run that looks like success, or like a crash of ours."""

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(demo, "run_demo", fail)
    result = run("demo", "--drafter", str(drafter))
    assert result.exit_code == 1
    assert f"vllm-dspark: error: {error}" in result.stderr


@pytest.mark.parametrize(("different", "code"), [(0, 0), (1, 1)])
def test_different_outputs_fail_the_demo(
    monkeypatch: pytest.MonkeyPatch, drafter: Path, different: int, code: int
) -> None:
    """Catches a lossy engine passing; the JSON file is written in both cases."""
    monkeypatch.setattr(demo, "run_demo", lambda *_: report(different))
    file = drafter / "result.json"
    result = run("demo", "--drafter", str(drafter), "--json", str(file))
    assert result.exit_code == code
    assert json.loads(file.read_text())["identical"] is (code == 0)
    shown = run("demo", "--drafter", str(drafter), "--json", "-")
    assert json.loads(shown.stdout)["identical"] is (code == 0)


def test_demo_options_reach_the_run(monkeypatch: pytest.MonkeyPatch, drafter: Path) -> None:
    """Catches an option that is parsed and then forgotten."""
    seen: list[demo.DemoOptions] = []
    monkeypatch.setattr(demo, "run_demo", lambda options, _: seen.append(options) or report())
    given = "--dtype float32 --prompts 2 --max-tokens 30 --rounds 5 --concurrency 3 -k 5 --compile"
    assert run("demo", "--drafter", str(drafter), *given.split()).exit_code == 0
    assert seen == [
        demo.DemoOptions("float32", 2, 30, 5, 3, 5, drafter, log_folder=None, compile=True)
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["some/model", "--port", "8001", "--speculative-config", '{"method":"dspark"}'],
        ["--help"],
        ["-h"],
        ["--help=ModelConfig"],
        ["m", "--json", "--no-such-flag", "--", "x"],
    ],
)
def test_serve_passes_everything_on(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> None:
    """Catches an argument of vLLM's that our own parser swallows, reorders or rejects."""
    executed: list[list[str]] = []
    monkeypatch.setattr(
        serve.os, "execve", lambda program, command, environment: executed.append(command)
    )
    assert run("serve", *arguments).exit_code == 0
    expected = [sys.executable, "-m", "vllm_dspark.integration.serving", *arguments]
    assert executed == [expected]


@pytest.mark.parametrize("command", ["serve", "demo"])
def test_without_vllm(monkeypatch: pytest.MonkeyPatch, drafter: Path, command: str) -> None:
    """Catches an import error where the remedy should be named."""
    monkeypatch.setattr(serve, "has_vllm", lambda: False)
    extra = ["--drafter", str(drafter)] if command == "demo" else ["model"]
    result = run(command, *extra)
    assert result.exit_code == 1
    assert "pip install 'vllm-dspark[cuda]'" in result.stderr


def test_version_as_json() -> None:
    """Catches a version report that needs vLLM to be importable, or is not JSON."""
    found = json.loads(run("version", "--json").stdout)
    assert found["vllm-dspark"]
    assert "vllm" in found


def test_interrupted_while_it_is_still_importing(tmp_path: Path) -> None:
    """Catches a stack trace for Ctrl-C right after the start."""
    (tmp_path / "typer.py").write_text("raise KeyboardInterrupt\n")
    done = subprocess.run(
        [sys.executable, "-m", "vllm_dspark.cli", "version"],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "vllm-dspark: interrupted\n"


@pytest.mark.parametrize(
    "arguments", [["version"], ["version", "--json"], ["simulate", "-h"], ["--version"]]
)
def test_full_disk_is_one_line(arguments: list[str]) -> None:
    """Catches a stack trace, or a success, where standard output takes nothing any more."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "vllm_dspark.cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("vllm-dspark: error: cannot write the output: No space left on device")


def test_interrupt_inside_a_command_is_one_line(tmp_path: Path) -> None:
    """Catches Ctrl-C that typer swallows without a word, or that shows a stack trace."""
    script = (
        "import vllm_dspark.cli.versions as v\n"
        "def stop():\n    raise KeyboardInterrupt\n"
        "v.installed_versions = stop\n"
        "from vllm_dspark.cli.__main__ import main\n"
        "import sys; sys.argv = ['vllm-dspark', 'version']\nmain()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "vllm-dspark: interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signals_unwind_the_demo(number: signal.Signals) -> None:
    """Catches a killed demo that leaves its servers running."""
    before, cleaned = signal.getsignal(number), []
    with pytest.raises(SystemExit) as left, demo.stop_on_signals():
        try:
            os.kill(os.getpid(), number)
            signal.pause()
        finally:
            cleaned.append(True)
    assert left.value.code == 128 + number
    assert cleaned
    assert signal.getsignal(number) is before


def test_the_version_by_the_usual_flag() -> None:
    """Catches a command that cannot be asked for its version the way all others can."""
    found = run("--version")
    assert (found.exit_code, found.output) == (0, f"vllm-dspark {__version__}\n")
