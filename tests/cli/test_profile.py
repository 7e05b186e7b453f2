"""`profile` on a stand-in for an engine; one real engine is in tests/integration."""

import io
import itertools
import json
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.cli.replicas import FakeProfile
from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.artifacts.store import read_cost_table
from vllm_dspark.cli import profile
from vllm_dspark.errors import InputError, UntrustedError


@pytest.fixture(autouse=True)
def replica(monkeypatch):
    """Every test gets a quiet machine and nothing saved."""
    monkeypatch.setattr(profile, "ProfileReplica", FakeProfile)
    monkeypatch.setattr(FakeProfile, "noise", 0.0)
    monkeypatch.setattr(FakeProfile, "saved", None)
    return FakeProfile


@pytest.fixture
def counted_time(monkeypatch):
    """A clock of 10 ms a look: how much is measured within a limit depends on no machine."""
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 100)
    monkeypatch.setattr(profile, "time", clock)


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=100)


def test_table_of_a_quiet_machine(console, tmp_path):
    """Catches cells that change places between measuring and the table."""
    file = tmp_path / "table.json"
    options = profile.ProfileOptions(("TARGET",), output=file)
    report = profile.run_profile(options, console)
    table = read_cost_table(file).to_table()
    ((_, grid),) = table.grids.items()
    assert grid.sizes == (1, 4, 16, 64)
    assert grid.kv_tokens == (128, 1024)
    assert grid.median_ms[1, 2] == pytest.approx(10 + 16 + 4)
    assert table.draft.sizes == (1, 2, 8)
    assert table.draft.median_ms[0, 1] == pytest.approx(4.0)
    assert table.allocation_ms == 0.25
    assert CostTableRecord.model_validate_json(FakeProfile.saved) == report.record
    assert report.paths == ("/cache/cost-table.json", str(file))
    assert report.num_samples == 5 * 8
    obj = json.loads(report.to_json())
    assert obj["command"] == "profile"
    assert [f["figure"] for f in obj["figures"]] == ["cost_curve", "cost_curve", "breakdown"]
    assert obj["figures"][2]["bars"] == [
        {
            "label": "2 requests",
            "parts": {"target": pytest.approx(26.5), "draft": 4.0, "allocation": 0.25},
        },
        {
            "label": "8 requests",
            "parts": {"target": pytest.approx(74.5), "draft": 10.0, "allocation": 0.25},
        },
    ]
    assert obj["figures"][0]["series"][1]["y"] == pytest.approx([15, 18, 30, 78])


def test_full_measures_more(console):
    """Catches an option without effect."""
    report = profile.run_profile(profile.ProfileOptions(("T",), full=True, repeats=3), console)
    assert report.num_cells == 14
    assert report.num_samples == 42


def test_noisy_machine_is_refused_with_advice(console, counted_time, monkeypatch, tmp_path):
    """Catches a table from a busy machine being kept, in the cache or in the file."""
    monkeypatch.setattr(FakeProfile, "noise", 2.0)
    file = tmp_path / "table.json"
    options = profile.ProfileOptions(("T",), time_limit_s=0.3, output=file)
    with pytest.raises(UntrustedError, match=r"scatter by more than 15%.*--time-limit"):
        profile.run_profile(options, console)
    assert FakeProfile.saved is None
    assert not file.exists()


def test_times_that_contradict_each_other_are_measured_again(console, monkeypatch):
    """Catches settled cells of two different speeds mixed into one table."""
    rounds = {"n": 0}
    honest = FakeProfile.run

    def throttled(self, task):
        result = honest(self, task)
        for sample in result["samples"]:
            if sample["num_tokens"] == 1:
                rounds["n"] += 1
            if rounds["n"] <= 10 and sample["num_tokens"] == 4:
                sample["forward_ms"] *= 4.0  # dearer than 16 tokens: impossible
        return result

    monkeypatch.setattr(FakeProfile, "run", throttled)
    report = profile.run_profile(profile.ProfileOptions(("T",)), console)
    assert report.record.grids[0].median_ms[0] == pytest.approx([11.5, 14.5, 26.5, 74.5])
    assert report.num_samples > 40


def test_bad_output_is_refused_before_an_engine_starts(console, monkeypatch, tmp_path):
    """Catches minutes of measuring whose result cannot be written."""
    monkeypatch.setattr(profile, "ProfileReplica", None)
    with pytest.raises(InputError, match="is a folder"):
        profile.run_profile(profile.ProfileOptions(("T",), output=tmp_path), console)


def test_a_cache_that_cannot_be_written_is_seen_before_measuring(console, monkeypatch):
    """Catches three minutes of measuring whose table nobody can keep."""
    honest = FakeProfile.describe
    monkeypatch.setattr(
        FakeProfile, "describe", lambda self: {**honest(self), "cache_dir": "/dev/null/x"}
    )
    monkeypatch.setattr(FakeProfile, "run", lambda *_: pytest.fail("it measured"))
    with pytest.raises(InputError, match="/dev/null is no folder"):
        profile.run_profile(profile.ProfileOptions(("TARGET",)), console)


def test_engine_that_will_not_use_it_is_said(console, monkeypatch):
    """Catches a user who measures for nothing without knowing."""
    honest = FakeProfile.describe
    monkeypatch.setattr(
        FakeProfile, "describe", lambda self: {**honest(self), "unused_because": "LoRA"}
    )
    report = profile.run_profile(profile.ProfileOptions(("T",)), console)
    assert "will not use the table: LoRA" in console.file.getvalue()
    assert json.loads(report.to_json())["unused_because"] == "LoRA"


def test_the_curve_on_a_terminal(console):
    """Catches columns that hold other sizes than their heads say."""
    report = profile.run_profile(profile.ProfileOptions(("T",)), console)
    profile.show(report, console)
    shown = console.file.getvalue()
    line = next(line for line in shown.splitlines() if "26.50" in line)
    assert line.split("│")[1:4] == ["       16 ", "        26.50 ", "         30.00 "]
    assert "saved /cache/cost-table.json" in shown
