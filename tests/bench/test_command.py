"""The command line of `vllm-dspark bench`, and what it refuses; no engine is started."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from tests.bench.fakes import FakeHost
from vllm_dspark.bench.identity import fingerprint
from vllm_dspark.bench.modes import BenchError, EngineLaunch, PairSpec
from vllm_dspark.bench.workload import WORKLOADS, Question, Sizes
from vllm_dspark.cli import bench
from vllm_dspark.cli.main import app
from vllm_dspark.demo.target import drafter_path
from vllm_dspark.simulation.trace import Trace, write_trace


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["bench", *arguments])


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    for name in ("target", "drafter"):
        (tmp_path / name).mkdir()
        config = (drafter_path() / "config.json").read_text() if name == "drafter" else "{}"
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "tokenizer_config.json").write_text("{}")
    return ["--target", str(tmp_path / "target"), "--drafter", str(tmp_path / "drafter")]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "fastest"], "choose from off"),
        (["--concurrency", "0"], "0 is outside of what is allowed: a whole number from 1"),
        (["--concurrency", "1.5"], "'1.5' is no whole number"),
        (["--concurrency", "1000000"], "1000000 is outside"),
        (["--temperature", "nan"], "nan is outside"),
        (["--temperature", "0,-1"], "-1.0 is outside"),
        (["--time-limit", "nan"], "--time-limit: nan is outside"),
        (["--slices", "inf"], "--slices: inf is outside"),
        (["--repeats", "0"], "--repeats: 0 is outside"),
        (["--tokens", "1000000000000"], "--tokens: 1000000000000 is outside"),
        (["--concurrency", "4,4"], "twice"),
        (["--temperature", "hot"], "--temperature 'hot'"),
        (["--workload", "tea"], "choose from decode"),
        (["--workload", "burst@many"], "--workload 'burst@many'"),
        (["--replay", "x.npz", "--server"], "leave out --server"),
        (["--replay", "/nowhere.npz"], "cannot read"),
        (["--share-engines", "--engine-process"], "leave out one of the two"),
        (["--pair", "{"], "is not JSON"),
        (["--pair", '{"target": "x"}'], "keys of"),
        (["--pair", '{"width": "x"}'], "--pair: width = 'x': Input should be a valid integer"),
        (["--pair", '{"widht": 3}'], "keys of"),
        (["--pair", '{"width": 0}'], "--pair: width = 0: it must be at least 1"),
        (["--pair", '{"plugin_options": {"shedule": 1}}'], "--pair: plugin_options: "),
        (["--pair", '{"width": 8}', "--modes", "ours"], "--modes ours: "),
        (["--modes", "off,fixed99"], "--modes fixed99: "),
        (["--gate", "nonexistcmd x"], "--gate 'nonexistcmd x': there is no command"),
        (["--start-gate", "'"], '--start-gate "\'" is no command'),
        (["--target", "nope", "--drafter", "nope"], "--target nope: there is no such folder"),
        (["--drafter", "nope"], "--target and --drafter belong together"),
        (["--prompts", "nope"], "--prompts: cannot read prompts from nope: No such file"),
        (["--out", __file__], "it is a file; name a folder"),
        (["--compare", "/nowhere/cells.jsonl"], "does not exist"),
        (["--compare", "/dev/null"], "/dev/null is empty"),
        (["--json", "/"], "is a folder"),
        (["--json", "/nowhere/x.json"], "there is no folder /nowhere"),
    ],
)
def test_wrong_usage_exits_with_2(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches bad input that starts engines or makes files, or a traceback for a message."""
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    said = " ".join((result.output + result.stderr).split())
    assert message in said
    assert "Error(" not in said
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_made(models: list[str]) -> None:
    """Catches exit code 1, or a bare errno, for a mistyped --out."""
    result = run("--out", "/proc/x", *models)
    assert result.exit_code == 2, result.output
    assert "--out /proc/x: there is no folder /proc/x and it cannot be made" in result.stderr


def test_failed_start_leaves_nothing_in_the_way(
    tmp_path: Path, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a start that failed and whose conditions the next run must then share."""

    class Dead(FakeHost):
        def start(self) -> None:
            raise BenchError("no memory")

    alive = [False]

    def make(launch: EngineLaunch) -> FakeHost:
        return (FakeHost if alive[0] else Dead)(launch, {"off": 1}, [])

    monkeypatch.setattr(bench, "_host_maker", lambda options: make)
    words = ["--modes", "off", "--concurrency", "1", "--repeats", "1", *models]
    words += ["--out", str(tmp_path / "deep" / "out")]
    first = run(*words, "--tokens", "30")
    assert first.exit_code == 1
    assert "starting off" in first.output
    alive[0] = True
    assert run(*words, "--tokens", "40").exit_code == 0
    other = run(*words, "--tokens", "50")
    assert other.exit_code == 1 and "under other conditions" in other.stderr


def test_help_lists_all_modes() -> None:
    """Catches a mode that only the source tells of."""
    assert "ours-full" in " ".join(run("-h").output.split())


def test_run_and_comparison(
    tmp_path: Path, models: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a command that does not write its report, measures twice, or cannot compare."""
    log: list[str] = []
    speeds = {"off": 1, "fixed3": 2, "ours": 3}

    def make(launch: EngineLaunch) -> FakeHost:
        return FakeHost(launch, speeds, log)

    monkeypatch.setattr(bench, "_host_maker", lambda options: make)
    arguments = ["--concurrency", "1,2", "--repeats", "2", *models]
    for modes, folder in (("off,fixed3", "a"), ("ours", "b")):
        result = run("--modes", modes, "--out", str(tmp_path / folder), *arguments)
        assert result.exit_code == 0, result.output
        assert "tokens/s" in result.output
    before = len(log)
    assert run("--modes", "ours", "--out", str(tmp_path / "b"), *arguments).exit_code == 0
    assert len(log) == before, "cells that were there were measured again"
    files = [str(tmp_path / folder / "cells.jsonl") for folder in "ab"]
    words = ["--compare", files[0], "--compare", files[1], "--out", str(tmp_path / "c")]
    result = run(*words, "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "c" / "bench.json").read_text())
    assert json.loads(result.stdout) == found
    assert found["rows"][0]["ours_over_best_fixed"]["chosen"] == {"fixed3": 2}
    assert (tmp_path / "c" / "bench-frontier.svg").stat().st_size > 1000


def test_a_workload_can_have_loads_of_its_own() -> None:
    """Catches a burst of one request, and engines too small for the largest load."""
    settings = {"concurrencies": "1,8", "temperatures": "0", "workloads": "short,burst@32+64"}
    options = bench.BenchOptions.parse(
        out=Path("x"), modes="off", repeats=1, sizes=(1, 1, 1), pair="{}", gates=("", "", 0.0),
        limits=(0.0, 1, False), target="t", drafter="d", **settings,
    )  # fmt: skip
    grid = bench._grid(options)
    assert [(c[0].name, c[1]) for c in grid.chunks()] == [
        ("short", 1), ("short", 8), ("burst", 32), ("burst", 64),
    ]  # fmt: skip
    assert bench._pair(options).max_num_seqs == 64
    assert bench._settings(options)["workloads"] == ["short", "burst@32+64"]


def identity(**changes: Any) -> dict[str, Any]:
    pair = PairSpec("t", "d", **changes)
    return fingerprint(pair, [WORKLOADS["short"]], [Question("a", "b")], Sizes(), "in process")


def test_fingerprint_knows_the_recording(tmp_path: Path) -> None:
    """Catches cells of different recordings in one table, and a path that makes a difference."""
    found = [WORKLOADS["short"].as_json()]
    for folder, text in (("a", "one"), ("b", "one"), ("c", "two")):
        path = tmp_path / folder / "t.npz"
        path.parent.mkdir()
        path.write_text(text)
        (workload,) = bench._replayed([WORKLOADS["short"]], [path])
        assert (workload.name, workload.replay) == ("short", str(path))
        found.append(workload.as_json())
    assert found[1] == found[2] != found[3] and found[0] not in found[1:]
    assert identity(replayed=True)["settings"] != identity()["settings"]


def test_recording_without_requests_of_a_temperature(tmp_path: Path, models: list[str]) -> None:
    """Catches engines that start, and die of the first request that nothing was recorded for."""
    ones, no = np.ones(1, np.int32), np.zeros(1, np.bool_)
    first, confidence = np.array([0, 1]), np.full((1, 7), 0.5, np.float32)
    path = tmp_path / "greedy.npz"
    write_trace(path, Trace(first, ones - 1, confidence, ones, ones, ones, ones, no))
    result = run(*models, "--replay", str(path), "--temperature", "0,0.7")
    assert result.exit_code == 2, result.output
    said = " ".join((result.output + result.stderr).split())
    assert "has no sampled request, which --temperature 0.7 needs" in said


def test_several_recordings_are_rows_of_their_own() -> None:
    paths = [Path("demo.npz"), Path("constant.npz")]
    found = bench._replayed([WORKLOADS["short"], WORKLOADS["burst"]], paths)
    assert [(w.name, w.replay, w.burst) for w in found] == [
        ("short, demo", "demo.npz", False),
        ("short, constant", "constant.npz", False),
        ("burst, demo", "demo.npz", True),
        ("burst, constant", "constant.npz", True),
    ]


def test_fingerprint_knows_settings_and_artifacts(tmp_path: Path) -> None:
    """Catches cells of different settings that would stand in one table."""
    base = identity()
    assert identity() == base
    assert identity(max_num_seqs=8)["settings"] != base["settings"]
    assert identity(plugin_options={"hysteresis_steps": 1})["settings"] != base["settings"]
    for text in ("one", "two"):
        (tmp_path / text).write_text(text)
    first, second = (
        identity(plugin_options={"cost_table": str(tmp_path / name)}) for name in ("one", "two")
    )
    assert first["settings"] == second["settings"] == base["settings"]
    assert first["artifacts"] != second["artifacts"]
