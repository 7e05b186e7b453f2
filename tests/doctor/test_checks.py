"""Checks one by one: what is found, at what level, and which flag mends it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tests.doctor.subjects import (
    H200,
    NAMES_A_REMEDY,
    findings,
    named,
    subject,
    write_target,
)
from tests.proposer.checkpoints import SPECULATORS, random_tensors, spec_of, write_checkpoint
from tests.support.wheels import write_wheel
from vllm_dspark.cli.doctor import command
from vllm_dspark.cli.doctor.arguments import parse_serve
from vllm_dspark.cli.doctor.examine import examine_wheel
from vllm_dspark.cli.doctor.findings import EXIT_CODES, Finding, Report
from vllm_dspark.cli.doctor.subject import Machine, Subject
from vllm_dspark.cli.doctor.trial import why_not_made
from vllm_dspark.cli.main import app
from vllm_dspark.errors import DSparkConfigError, InputError

CLEAN = ("--max-num-seqs", "32", "--max-model-len", "4000")


def test_healthy_engine_has_no_complaint(tmp_path: Path) -> None:
    """Catches a check that fires without cause: only a missing cost table is worth a word."""
    found = findings(subject(tmp_path, *CLEAN))
    assert {f.check for f in found if f.level in ("warning", "error")} == set()
    assert {f.check for f in found if f.level == "info"} <= {"cost_table", "windows"}


@pytest.mark.parametrize(
    ("parts", "check", "level", "words"),
    [
        ({"drafter": {"mask_token_id": 50}}, "drafter_config", "error", "mask_token_id"),
        ({"target": {"vocab_size": 51}}, "target_match", "error", "vocab_size"),
        ({"target": {"hidden_size": 32}}, "target_match", "error", "hidden"),
        ({"target": {"num_hidden_layers": 5}}, "target_match", "error", "[5]"),
        ({"speculative": {"num_speculative_tokens": 8}}, "draft_width", "error", "1..7"),
        ({"drafter": {"sample_from_anchor": False}}, "draft_width", "error", "1..6"),
        ({"speculative": {"num_speculative_tokens": None}}, "draft_width", "info", "7"),
        ({"speculative": {"method": "eagle"}}, "method", "error", "eagle"),
        ({"speculative": {"num_speculative_tokens": -3}}, "draft_width", "error", "1..7"),
        ({"speculative": {"dspark": {"windos": "host"}}}, "options", "error", "windos"),
        ({"speculative": {"dspark": {"test_draft_width": []}}}, "options", "error", " = []"),
        ({"speculative": {"num_speculative_token": 7}}, "speculative_keys", "error", "_tokens'?"),
        ({"speculative": {"zzz": 7}}, "speculative_keys", "error", "'zzz'"),
        ({"speculative": {"windows": "host"}}, "speculative_keys", "error", "one of the plugin's"),
        ({"speculative": {"model": None}}, "drafter_files", "error", "names no model"),
        ({"speculative": {"dspark": {"enabled": False}}}, "scheduling", "info", "enabled"),
        ({"speculative": {"dspark": {"scheduling": False}}}, "scheduling", "info", "off"),
        (
            {"speculative": {"dspark": {"calibration": "/nowhere.json"}}},
            "calibration",
            "error",
            "/nowhere.json",
        ),
        (
            {"speculative": {"dspark": {"validate_confidence_artifact_freshness": True}}},
            "evidence",
            "error",
            "evidence",
        ),
    ],
)
def test_finding(tmp_path: Path, parts: dict[str, Any], check: str, level: str, words: str) -> None:
    """Catches a mismatch that passes, or is found under another name or level."""
    (found,) = named(findings(subject(tmp_path, *CLEAN, **parts)), check)
    assert found.level == level
    assert words in found.message
    assert NAMES_A_REMEDY.search(found.flag), found.flag


@pytest.mark.parametrize(
    "speculative",
    [
        {"num_speculative_tokens": -3},
        {"num_speculative_tokens": 0},
        {"model": None},
        {"model": "./nope"},
        {"dspark": {"enabled": False}},
    ],
)
def test_one_mistake_is_one_finding(tmp_path: Path, speculative: dict[str, Any]) -> None:
    """Catches findings that only follow from another one, such as a budget for -3 drafts."""
    found = findings(subject(tmp_path, *CLEAN, speculative=speculative))
    told = [f for f in found if f.level != "ok" and f.check not in ("cost_table", "windows")]
    assert len(told) == 1, told
    if speculative.get("num_speculative_tokens", 1) < 1:
        assert "token_budget" not in {f.check for f in found}


@pytest.mark.parametrize(
    "name", ["/nope/dspark", "./nope", "../nope/dspark", "~/dspark", "a/b/dspark"]
)
def test_paths_that_lead_nowhere(tmp_path: Path, name: str) -> None:
    """Catches a mistyped folder taken for a hub id that only has to be downloaded."""
    (drafter,) = named(findings(subject(tmp_path, speculative={"model": name})), "drafter_files")
    assert (drafter.level, f"the folder {name} does not exist" in drafter.message) == (
        "error",
        True,
    )
    assert "hf download" not in drafter.flag
    made = Subject(parse_serve([name, "--speculative-config", '{"method": "dspark"}']), H200)
    found = [f for f in findings(made) if f.level != "ok"]
    assert [(f.check, f.level) for f in found] == [("target_files", "error")]
    given = json.dumps({"method": "dspark", "model": str(tmp_path / "dspark-drafter")})
    found = list(findings(Subject(parse_serve([name, "--speculative-config", given]), H200)))
    assert {f.check for f in found if f.level == "error"} == {"target_files"}
    assert not named(found, "target_match"), "advice to download a path"


def test_a_width_below_one_without_a_drafter_at_hand(tmp_path: Path) -> None:
    """Catches a K of -3 that nobody mentions because the drafter's block is not known."""
    wrong = {"model": str(tmp_path / "file"), "num_speculative_tokens": -3}
    (tmp_path / "file").write_text("")
    found = findings(subject(tmp_path, *CLEAN, speculative=wrong))
    told = {(f.check, f.level) for f in found if f.level != "ok"} - {("cost_table", "info")}
    assert told == {("drafter_files", "error"), ("draft_width", "error")}
    (drafter,) = named(found, "drafter_files")
    assert "is a file" in drafter.message


def test_local_drafter_without_weights(tmp_path: Path) -> None:
    """Catches a warning where the engine would end: nobody will fetch weights into a folder."""
    made = subject(tmp_path)
    (tmp_path / "dspark-drafter" / "model.safetensors").unlink()
    (found,) = named(findings(made), "drafter_tensors")
    assert found.level == "error"
    assert "--local-dir" in found.flag


@pytest.mark.parametrize(
    ("options", "check", "level"),
    [
        ({"record_confidences": "{file}/pairs.jsonl"}, "recording", "error"),
        ({"record_outcomes": "{folder}"}, "recording", "error"),
        ({"record_outcomes": "{folder}/new/outcomes.jsonl"}, "", ""),
        ({"cache_dir": "{file}/cache"}, "cache_folder", "warning"),
        ({"cache_dir": "{file}/cache", "scheduling": False}, "", ""),
    ],
)
def test_files_that_cannot_be_written(
    tmp_path: Path, options: dict[str, Any], check: str, level: str
) -> None:
    """Catches a start that ends, or a table never kept, for a path that doctor could see."""
    (tmp_path / "file").write_text("")
    places = {"file": tmp_path / "file", "folder": tmp_path}
    given = {k: v.format(**places) if isinstance(v, str) else v for k, v in options.items()}
    found = findings(subject(tmp_path, speculative={"dspark": given}))
    checks = [(f.check, f.level) for f in found if f.check in ("recording", "cache_folder")]
    assert checks == ([(check, level)] if check else [])


@pytest.mark.parametrize("place", ["/proc/x", "/proc/new/x"])
def test_folders_that_take_no_files(tmp_path: Path, place: str) -> None:
    """Catches a folder that root may write to by its permissions, and nobody can."""
    given = {"record_confidences": place, "cache_dir": place}
    found = findings(subject(tmp_path, speculative={"dspark": given}))
    for check in ("recording", "cache_folder"):
        (told,) = named(found, check)
        assert "nothing can be made in /proc" in told.message or "permission" in told.message


def test_trying_leaves_nothing_behind(tmp_path: Path) -> None:
    """Catches files and folders left by the trial, and a recording that it changed."""
    (tmp_path / "old").write_text("row")
    before = (tmp_path / "old").stat().st_mtime_ns
    for name in ("old", "file", "new/folder/file"):
        assert why_not_made(tmp_path / name) == ""
    assert [path.name for path in tmp_path.iterdir()] == ["old"]
    assert (tmp_path / "old").read_text() == "row"
    assert (tmp_path / "old").stat().st_mtime_ns == before


def test_names_without_an_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches advice to download a name that no hub has."""
    monkeypatch.setattr("vllm_dspark.integration.checkpoints._fetch", lambda *_: None)
    made = subject(tmp_path)
    given = json.dumps({"method": "dspark", "model": made.drafter_name})
    for name, words in (("nope", "OWNER/NAME"), ("SmolLM2-135M-Instruct-bfloat16", "demo.target")):
        found = findings(Subject(parse_serve([name, *CLEAN, "--speculative-config", given]), H200))
        (target,) = [f for f in found if f.level in ("warning", "error")]
        assert (target.check, target.level) == ("target_files", "error")
        assert words in target.flag
    (drafter,) = named(findings(subject(tmp_path, speculative={"model": "nope"})), "drafter_files")
    assert drafter.level == "error"
    assert "hf download" not in drafter.flag


def test_result_of_a_command_as_an_artifact(tmp_path: Path) -> None:
    """Catches "kind None" said about the JSON that calibrate or plot has printed."""
    file = tmp_path / "result.json"
    for content, words in (
        ({"command": "calibrate", "version": 1}, "a result of `vllm-dspark calibrate`"),
        ({"b": 1, "a": 2}, "an object with the keys a, b"),
    ):
        file.write_text(json.dumps(content))
        made = subject(tmp_path, *CLEAN, speculative={"dspark": {"calibration": str(file)}})
        (found,) = named(findings(made), "calibration")
        assert words in found.message
        assert "wanted 'calibration'" in found.message


def test_speculators_drafter_is_found(tmp_path: Path) -> None:
    """Catches the second format read as the first one: other ids, other layout, d2t."""
    made = subject(tmp_path, *CLEAN, speculative={"num_speculative_tokens": 3})
    folder = tmp_path / "dspark-drafter"
    shutil.rmtree(folder)
    write_checkpoint(folder, SPECULATORS, random_tensors(spec_of(SPECULATORS)))
    found = findings(made)
    (config,) = [f for f in found if f.check == "drafter_config"]
    assert config.message.startswith("speculators drafter")
    assert "[0, 2, 5]" in config.message
    assert [f.level for f in found if f.check == "drafter_tensors"] == ["ok"]


def test_missing_d2t_is_named(tmp_path: Path) -> None:
    """Catches a reduced vocabulary without its map."""
    made = subject(tmp_path, *CLEAN, speculative={"num_speculative_tokens": 3})
    tensors = random_tensors(spec_of(SPECULATORS))
    del tensors["d2t"]
    shutil.rmtree(tmp_path / "dspark-drafter")
    write_checkpoint(tmp_path / "dspark-drafter", SPECULATORS, tensors)
    (found,) = named(findings(made), "drafter_tensors")
    assert "d2t" in found.message


def test_files_that_are_not_at_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a hub name that is taken for a broken checkpoint."""
    monkeypatch.setattr("vllm_dspark.integration.checkpoints._fetch", lambda *_: None)
    target = write_target(tmp_path / "target")
    given = json.dumps({"method": "dspark", "model": "some/dspark-drafter"})
    made = Subject(parse_serve([str(target), "--speculative-config", given]), H200)
    (found,) = named(findings(made), "drafter_files")
    assert found.level == "warning"


@pytest.mark.parametrize(
    ("flags", "level"),
    [
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "512"), "ok"),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "511"), "warning"),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "449"), "warning"),
        (("--max-num-seqs", "64", "--max-num-batched-tokens", "448"), "error"),
    ],
)
def test_room_for_windows(tmp_path: Path, flags: tuple[str, ...], level: str) -> None:
    """Catches the limits off by one: 64 requests, K = 7: 512 for windows, 448 for drafts."""
    found = findings(subject(tmp_path, *flags, "--max-model-len=4000"))
    assert [f.level for f in found if f.check == "token_budget"] == [level]


@pytest.mark.parametrize(
    ("text", "tokens"), [("32k", 32_000), ("32K", 32_768), ("1.5k", 1500), ("4096", 4096)]
)
def test_sizes_are_read_as_vllm_does(text: str, tokens: int) -> None:
    """Catches decimal and binary suffixes mixed up."""
    assert parse_serve(["t", "--max-model-len", text]).get("max-model-len") == tokens


def test_spellings_of_flags() -> None:
    """Catches a flag that is only read in one of its spellings."""
    read = parse_serve(["t", "-tp", "2", "--max_num_seqs=8", "--spec-model", "d", "--unknown", "x"])
    assert read.integer("tensor-parallel-size", 1) == 2
    assert read.integer("max-num-seqs", 1) == 8
    assert read.speculative == {"model": "d"}
    assert "--unknown" in read.unread


def test_config_file(tmp_path: Path) -> None:
    """Catches vLLM's own config file being ignored, or winning over a flag."""
    file = tmp_path / "serve.yaml"
    file.write_text(
        "model: big/target\nmax-num-seqs: 12\ntensor-parallel-size: 4\n"
        "speculative-config: {method: dspark, num-speculative-tokens: 5}\n"
    )
    read = parse_serve(["--config", str(file), "-tp", "2"])
    assert read.target == "big/target"
    assert (read.integer("max-num-seqs", 0), read.integer("tensor-parallel-size", 0)) == (12, 2)
    assert read.speculative["num_speculative_tokens"] == 5


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["t", "--max-num-seqs", "many"],
        ["t", "--max-model-len", "long"],
        ["t", "--speculative-config", "{"],
        ["t", "--speculative-config", "[1]"],
        ["t", "--config", "/nowhere.yaml"],
    ],
)
def test_bad_arguments_are_refused(arguments: list[str]) -> None:
    """Catches a traceback, or a value that is silently dropped."""
    with pytest.raises(DSparkConfigError):
        parse_serve(arguments)


@pytest.mark.parametrize(
    ("levels", "code"),
    [((), 0), (("ok", "info"), 0), (("ok", "warning", "info"), 4), (("warning", "error"), 1)],
)
def test_exit_code_is_that_of_the_worst(levels: tuple[str, ...], code: int) -> None:
    """Catches an error hidden behind what comes after it."""
    report = Report.of(Finding("x", level, "m") for level in levels)  # type: ignore[arg-type]
    assert report.exit_code == code
    assert report.as_json()["exit_code"] == code


def test_wheel_that_keeps_and_breaks_the_contract(tmp_path: Path) -> None:
    """Catches a wheel check that reads the installed vLLM instead of the wheel."""
    good = write_wheel(tmp_path / "good", "0.33.0")
    assert examine_wheel(good).exit_code == 0
    bad = write_wheel(tmp_path / "bad", "0.33.0", drop="v1/core/sched/output.py")
    report = examine_wheel(bad)
    assert report.exit_code == 1
    assert any("SchedulerOutput" in f.message for f in report.findings)
    for wheel, code in ((good, 0), (bad, 1)):
        assert CliRunner().invoke(app, ["doctor", "--wheel", str(wheel)]).exit_code == code
    old = examine_wheel(write_wheel(tmp_path / "old", "0.31.0"))
    assert any("0.31.0" in f.message for f in old.findings if f.level == "error")


@pytest.mark.parametrize("content", [None, b"no zip", "empty"])
def test_file_that_is_no_wheel(tmp_path: Path, content: Any) -> None:
    """Catches a traceback where a file is missing, broken or of another project."""
    path = tmp_path / "vllm.whl"
    if content == "empty":
        write_wheel(tmp_path, "1.0", name="other").rename(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="wheel"):
        examine_wheel(path)
    shown = CliRunner().invoke(app, ["doctor", "--wheel", str(path)])
    assert shown.exit_code == 2, "an input file that holds something else (docs/cli.md)"
    assert "--wheel" in shown.output
    assert not isinstance(shown.exception, InputError)


def test_command_prints_and_exits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a command that loses vLLM's flags, its exit code or its JSON."""
    monkeypatch.setattr(command, "probe_machine", lambda: Machine(cpu_build=True))
    made = subject(tmp_path)
    target, drafter = made.arguments.target, made.drafter_name
    given = json.dumps({"method": "dspark", "model": drafter, "num_speculative_tokens": 9})
    arguments = ["doctor", target, "-tp", "1", "--enforce-eager", "--speculative-config", given]
    shown = CliRunner().invoke(app, arguments)
    assert shown.exit_code == EXIT_CODES["error"]
    assert "draft_width" in shown.output
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["worst"] == "error"
    assert {"draft_width"} <= {f["check"] for f in report["findings"] if f["level"] == "error"}
    usage = CliRunner().invoke(app, ["doctor", "--speculative-config", "{"])
    assert usage.exit_code == 2
    quiet = json.loads(CliRunner().invoke(app, [*arguments, "--json", "--quiet"]).stdout)
    assert quiet["findings"] == [f for f in report["findings"] if f["level"] != "ok"]
    assert quiet["counts"] == report["counts"]
    help_text = CliRunner().invoke(app, ["doctor", "-h"]).output
    assert "Example: vllm-dspark doctor" in help_text
    assert "TARGET [OPTIONS OF VLLM SERVE]" in help_text


@pytest.mark.parametrize("given", ["x", [], 3, True])
def test_options_that_are_no_object(tmp_path: Path, given: object) -> None:
    """Catches a stack trace, or silence, where the plugin's options are of another kind."""
    with pytest.raises(DSparkConfigError, match="must be a JSON object") as caught:
        subject(tmp_path, speculative={"dspark": given})
    assert f'"dspark" = {given!r}' in str(caught.value)


@pytest.mark.parametrize("given", [{"num_speculative_tokens": k} for k in (7.5, "7", True)])
def test_numbers_that_are_none(tmp_path: Path, given: dict[str, object]) -> None:
    """Catches 7.5 taken as 7, and true as 1."""
    with pytest.raises(DSparkConfigError, match="must be a whole number"):
        subject(tmp_path, speculative=given)


def test_a_model_that_is_no_text(tmp_path: Path) -> None:
    """Catches advice to download the model 5."""
    with pytest.raises(DSparkConfigError, match=r'"model" = 5 .* must be a folder or a hub id'):
        subject(tmp_path, speculative={"model": 5})


def test_a_negative_number_of_requests(tmp_path: Path) -> None:
    """Catches a check that multiplies it into a budget with room to spare."""
    with pytest.raises(DSparkConfigError, match=r"--max-num-seqs -4 must be at least 1"):
        subject(tmp_path, "--max-num-seqs", "-4")
