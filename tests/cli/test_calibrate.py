"""`calibrate` on recordings and on a stand-in for an engine."""

import io
import json

import numpy as np
import pytest
from rich.console import Console

from tests.artifacts.records import fingerprint
from tests.cli.replicas import FakeCalibration, K
from vllm_dspark.artifacts.store import ArtifactStore, read_calibration, write_atomic
from vllm_dspark.cli import calibrate, calibrate_view
from vllm_dspark.cli.replicas import Request
from vllm_dspark.errors import CalibrationError, InputError, UntrustedError


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


@pytest.fixture(autouse=True)
def replica(monkeypatch):
    monkeypatch.setattr(calibrate, "CalibrationReplica", FakeCalibration)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(120)))
    return path


def record(path, prompts=120, temperatures=(0.0, 1.0), **changes):
    """A recording of the stand-in."""
    lines = [{"kind": "dspark_pairs", "version": 1, "num_positions": K}]
    for prompt in range(prompts):
        for temperature in temperatures:
            pairs = FakeCalibration.pairs_of(Request(prompt, "", temperature, 1))
            rows = [
                [
                    p.request_id, p.sampled, changes.get("untouched", True), p.stamp, p.verified,
                    p.accepted, list(changes.get("confidence", p.confidence)),
                ]
                for p in pairs
            ]  # fmt: skip
            lines.append({"step": 1, "t": 0.0, "rows": rows})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_engine_run_fits_and_keeps(console, prompts, tmp_path):
    """Catches prompts run at the wrong temperature, or an artifact that no engine finds."""
    file = tmp_path / "out.json"
    options = calibrate.CalibrateOptions((str(tmp_path),), prompts=prompts, output=file)
    report = calibrate.run_calibrate(options, console)
    kept = ArtifactStore(tmp_path).load_calibration(fingerprint())
    assert kept == report.record == read_calibration(file, K)
    assert kept.greedy == pytest.approx((2.0,) * K, rel=0.5)
    assert kept.greedy != kept.sampled
    obj = json.loads(report.to_json())
    assert obj["prompts"] == 120
    assert obj["classes"]["sampled"]["rows_fit"] == 60 * 100
    assert obj["classes"]["greedy"]["rows_held_out"] == 60 * 100
    for row in obj["classes"]["greedy"]["positions"][:3]:
        assert row["ece_after"] < 0.04 < row["ece_before"]
        assert row["brier_after"] < row["brier_of_base_rate"]
    kinds = [figure["figure"] for figure in obj["figures"]]
    assert kinds.count("errors") == 2
    assert kinds.count("reliability") == 2 * K
    calibrate_view.show(report, console)
    assert "greedy (sts)" in console.file.getvalue()


def test_recording_gives_the_same_fit(console, prompts, tmp_path):
    """Catches a class or prompt lost on the way through the file."""
    engine = calibrate.run_calibrate(
        calibrate.CalibrateOptions((str(tmp_path),), prompts=prompts), console
    )
    options = calibrate.CalibrateOptions(
        (), recording=record(tmp_path / "pairs.jsonl"), output=tmp_path / "out.json"
    )
    read = calibrate.run_calibrate(options, console)
    assert read.record.fingerprint is None
    # request ids of a recording split otherwise than prompts, so the halves differ
    assert np.allclose(read.record.greedy[:3], engine.record.greedy[:3], rtol=0.3)


def test_one_class_only(console, tmp_path):
    """Catches a class that was not measured getting temperatures from nowhere."""
    options = calibrate.CalibrateOptions(
        (), recording=record(tmp_path / "p", temperatures=(0.0,)), output=tmp_path / "out.json"
    )
    report = calibrate.run_calibrate(options, console)
    assert report.record.sampled == (1.0,) * K
    calibrate_view.show(report, console)
    assert "sampled requests were not measured" in console.file.getvalue()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"prompts": 4}, UntrustedError, r"too little data: greedy: position 1 has \d00 rows"),
        ({"untouched": False}, UntrustedError, "no pair of confidences"),
        ({"confidence": [float("nan")] * K}, UntrustedError, "no pair of confidences"),
    ],
)
def test_too_little_to_go_by(console, tmp_path, changes, error, message):
    """Catches an artifact made of noise, or of rows that must not teach."""
    file = tmp_path / "out.json"
    path = record(tmp_path / "p", **changes)
    with pytest.raises(error, match=message):
        calibrate.run_calibrate(
            calibrate.CalibrateOptions((), recording=path, output=file), console
        )
    assert not file.exists()


def test_judging_another_engines_temperatures(console, tmp_path):
    """Catches the other's file being ignored, or judged on rows that fitted ours."""
    other = tmp_path / "theirs.json"
    write_atomic(other, json.dumps({"sts_temperatures": [2.0] * K}))
    path = record(tmp_path / "p")
    options = calibrate.CalibrateOptions(
        (), recording=path, against=other, output=tmp_path / "out.json"
    )
    report = calibrate.run_calibrate(options, console)
    rows = json.loads(report.to_json())["classes"]["greedy"]["positions"]
    assert rows[0]["ece_against"] < 0.04 < rows[0]["ece_before"]
    write_atomic(other, json.dumps({"sts_temperatures": [2.0] * (K - 1)}))
    with pytest.raises(CalibrationError, match="calibrates 6 draft positions"):
        calibrate.run_calibrate(options, console)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"held_out": 1.0}, "--held-out"),
        ({"temperatures": (-1.0,)}, "--temperature"),
        ({"temperatures": ()}, "--temperature"),
        ({"method": "magic"}, "--fit magic"),
        ({"recording": "x"}, "or a file with --output"),
        ({"recording": "nowhere"}, "there is no such file"),
        ({"prompts": "nowhere"}, "neither a JSONL file nor a dataset"),
    ],
)
def test_wrong_usage(console, tmp_path, options, message):
    """Catches bad input found only after an engine has run for minutes."""
    (tmp_path / "x").touch()
    for name in ("recording", "prompts"):
        if name in options:
            options = {**options, name: tmp_path / options[name]}
    with pytest.raises(InputError, match=message):
        calibrate.run_calibrate(calibrate.CalibrateOptions((), **options), console)
