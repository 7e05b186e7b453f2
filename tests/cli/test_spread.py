"""Replicas on a local Ray cluster of two CPUs, and what happens when one is killed."""

import io
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from tests.cli.replicas import Broken, FakeCalibration, FakeProfile, description
from tests.support.ray_cluster import local_ray
from vllm_dspark.cli import calibrate, profile
from vllm_dspark.cli.replicas import Request
from vllm_dspark.cli.spread import RayPlace, RayReplicas, one_identity
from vllm_dspark.errors import EngineError, InputError

pytest.importorskip("ray", reason="needs the `ray` extra")
PLACE = RayPlace("local", replicas=2, cpus_per_replica=0.5)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One cluster for the module: starting it takes longer than all that runs on it."""
    with local_ray(cpus=2):
        yield


def tasks(count: int = 12, size: int = 4) -> list[list[Request]]:
    numbers = range(count * size)
    requests = [Request(index, "", float(index % 2), 8) for index in numbers]
    return [requests[start : start + size] for start in range(0, len(requests), size)]


def run(folder: Path) -> tuple[dict[int, list], int, set]:
    """Results by task, replicas that died, and the processes that worked."""
    results: dict[int, list] = {}
    with RayReplicas(PLACE, FakeCalibration, ((str(folder),), True)) as replicas:
        names = {one["replica"] for one in replicas.describe()}
        for index, part in replicas.map(tasks()):
            assert index not in results
            results[index] = part.pairs
        return results, replicas.restarts, names


def test_a_killed_replicas_work_is_redone_once(tmp_path: Path) -> None:
    """Catches pairs lost with a replica, and pairs of a half-done task counted twice."""
    expected, restarts, names = run(tmp_path)
    assert restarts == 0
    assert len(names) == 2
    (tmp_path / "kill").touch()
    results, restarts, _ = run(tmp_path)
    assert not (tmp_path / "kill").exists()
    assert restarts == 1
    assert results == expected
    local = FakeCalibration((), True)
    assert results == {i: local.run(task).pairs for i, task in enumerate(tasks())}


def test_calibration_is_that_of_one_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches prompts mixed up between replicas; one of them is killed on the way."""
    monkeypatch.setattr(calibrate, "CalibrationReplica", FakeCalibration)
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"p{i}"}) + "\n" for i in range(60)))
    reports = []
    for place in (None, PLACE):
        (tmp_path / "kill").unlink(missing_ok=True)
        if place is not None:
            (tmp_path / "kill").touch()
        options = calibrate.CalibrateOptions((str(tmp_path),), prompts=file, ray=place)
        reports.append(calibrate.run_calibrate(options, Console(file=io.StringIO())))
    assert reports[1].facts["restarts"] == 1
    assert reports[0].record.greedy == reports[1].record.greedy
    assert reports[0].record.sampled_quality == reports[1].record.sampled_quality


def test_table_is_that_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches cells measured by nobody or counted for another, and a replica nobody asked."""
    monkeypatch.setattr(profile, "ProfileReplica", FakeProfile)
    reports = [
        profile.run_profile(
            profile.ProfileOptions(("T",), repeats=6, ray=place), Console(file=io.StringIO())
        )
        for place in (None, PLACE)
    ]
    assert reports[0].record.grids == reports[1].record.grids
    assert reports[0].record.draft == reports[1].record.draft
    assert reports[0].num_samples == reports[1].num_samples
    assert len(reports[1].replica_cost) == 2
    assert set(reports[1].replica_cost.values()) == {1.0}


def test_work_that_kills_every_replica_is_given_up() -> None:
    """Catches replicas started for ever."""
    place = RayPlace("local", replicas=1, cpus_per_replica=0.5)
    with (
        RayReplicas(place, Broken, ("die",)) as replicas,
        pytest.raises(EngineError, match="3 replicas died"),
    ):
        list(replicas.map([1]))


def test_a_replicas_error_is_the_commands() -> None:
    """Catches bad input reported as a crash of Ray."""
    place = RayPlace("local", replicas=1, cpus_per_replica=0.5)
    with (
        RayReplicas(place, Broken, ("refuse",)) as replicas,
        pytest.raises(InputError, match="cannot do 5"),
    ):
        list(replicas.map([5]))


def test_machines_that_differ_are_not_mixed() -> None:
    """Catches one table from two kinds of GPU."""
    other = description(replica="there")
    other["fingerprint"] = {**other["fingerprint"], "device": "NVIDIA H100"}
    with pytest.raises(InputError, match=r"there differ.*device: recorded 'NVIDIA H200'"):
        one_identity([description(), other])
    assert one_identity([description(), description()])["model"] == "TARGET"


def test_a_cluster_without_gpus_is_named() -> None:
    """Catches waiting for ever for GPUs that are not there."""
    with pytest.raises(InputError, match="has 0 GPUs, one replica needs 4"):
        RayReplicas(RayPlace("local", gpus_per_replica=4), Broken, ("",))
