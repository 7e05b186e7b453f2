"""The command lines and environments of the demo's servers; processes are stand-ins."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S, wait_until
from vllm_dspark.demo import server
from vllm_dspark.demo.client import ServerError
from vllm_dspark.demo.server import V1, V2, Server, ServeSettings, dspark, serve_command

SETTINGS = ServeSettings(Path("target"), dtype="float32", extra_arguments=("--enforce-eager",))


def test_engines_differ_in_nothing_but_speculation() -> None:
    """Catches a baseline that is started with other settings than DSpark."""
    socket = Path("folder/x.sock")
    plain = serve_command(V1, SETTINGS, socket)
    ours = serve_command(dspark(Path("drafter")), SETTINGS, socket)
    assert plain == serve_command(V2, SETTINGS, socket)
    assert ours[: len(plain)] == plain
    flag, config = ours[len(plain) :]
    assert flag == "--speculative-config"
    assert json.loads(config) == {
        "method": "dspark",
        "model": "drafter",
        "num_speculative_tokens": 7,
        "dspark": {"cache_dir": "folder/artifacts"},
    }


def test_first_baseline_runs_without_the_plugin() -> None:
    """Catches a V1 row that our plugin or Triton backend had a part in."""
    assert V1.environment == {
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        "VLLM_PLUGINS": "",
        "TRITON_BACKENDS_IN_TREE": "1",
    }
    assert V2.environment == {"VLLM_USE_V2_MODEL_RUNNER": "1"}


def run_instead(monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    monkeypatch.setattr(server, "serve_command", lambda *_: [sys.executable, "-c", script])


def test_death_before_ready_shows_the_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a wait until the time limit for a server that is already dead."""
    run_instead(monkeypatch, "import sys; print('no such drafter'); sys.exit(3)")
    with (
        Server(V2, SETTINGS, tmp_path) as dead,
        pytest.raises(ServerError, match=r"(?s)code 3.*no such drafter"),
    ):
        dead.wait_until_ready()


def test_runner_choice_of_the_caller_does_not_leak(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches VLLM_USE_V2_MODEL_RUNNER=0 of the shell turning DSpark's engine into V1."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    script = "import os; print(os.environ.get('VLLM_USE_V2_MODEL_RUNNER'))"
    run_instead(monkeypatch, script)
    for spec, seen in ((dspark(Path("d")), "None"), (V1, "0"), (V2, "1")):
        with Server(spec, SETTINGS, tmp_path) as started:
            started._process.wait(PATIENCE_S)
        assert started.log_path.read_text().strip() == seen


def test_stop_kills_what_ignores_the_signal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Catches a server, or a child of it, that survives the demo."""
    monkeypatch.setattr(server, "STOP_TIMEOUT_S", 0.5)
    script = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = os.fork()\n"
        "print(os.getpid(), flush=True)\n"
        f"time.sleep({PATIENCE_S})\n"
    )
    run_instead(monkeypatch, script)
    with Server(V2, SETTINGS, tmp_path) as stubborn:
        log = stubborn.log_path
        wait_until("both stand-ins", lambda: log.read_text().count("\n") == 2, pause=0.05)
    pids = log.read_text().split()
    wait_until("their end", lambda: not any(map(_is_running, pids)), pause=0.05)


def _is_running(pid: str) -> bool:
    """Whether the process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
