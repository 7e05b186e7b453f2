"""`profile` and `calibrate` on real engines, one process and two Ray replicas."""

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.support.engines import (
    DEFAULTS,
    ENGINE_ENVIRONMENT,
    dspark,
    engine,
    runner_of,
    scheduler_of,
)
from tests.support.pairs import Pair, PairSpec
from tests.support.patience import PATIENCE_S
from tests.support.ray_cluster import local_ray
from vllm_dspark.cli import profile
from vllm_dspark.cli.calibrate import CalibrateOptions, CalibrateReport, run_calibrate
from vllm_dspark.cli.profile import ProfileOptions, run_profile
from vllm_dspark.cli.replicas import ProfileReplica
from vllm_dspark.cli.spread import RayPlace
from vllm_dspark.errors import EngineError
from vllm_dspark.integration import profiling
from vllm_dspark.integration.offline import describe_arguments
from vllm_dspark.integration.startup import live_fingerprint
from vllm_dspark.planning.quality import PositionQuality

pytestmark = pytest.mark.engine

SPEC = PairSpec(kind="markov", noise=0.2)


@pytest.fixture(scope="module")
def pair(build: Callable) -> Pair:
    return build(SPEC)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VLLM_DSPARK_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def arguments(pair: Pair, **options: Any) -> tuple[str, ...]:
    """The command line of a server with the settings of the test engines."""
    speculative = dspark(pair.drafter, options, num_speculative_tokens=7)
    words = [str(pair.target), "--enforce-eager", "--speculative-config", json.dumps(speculative)]
    for name in ("dtype", "max_model_len", "max_num_seqs", "kv_cache_memory_bytes", "seed"):
        words += [f"--{name.replace('_', '-')}", str(DEFAULTS[name])]
    return tuple(words)


def console() -> Console:
    return Console(file=io.StringIO())


def test_a_start_after_profile_measures_nothing(
    pair: Pair, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a table under another fingerprint than a start looks for.

    Steps really run; their times are replaced, since a busy test machine would be refused.
    """
    honest = profiling.measure_once
    seen = []

    def measure(
        runner: Any, requests: int, tokens: int, kv_tokens: int, columns: Any = None
    ) -> Any:
        timing = honest(runner, requests, tokens, kv_tokens, columns)
        if columns is None:
            seen.append((tokens, requests, timing.forward_ms))
        width = 7 if columns is None else columns
        return replace(timing, forward_ms=5.0 + tokens, draft_ms=(1.0 + requests) * width / 7)

    monkeypatch.setattr(profiling, "measure_once", measure)
    report = run_profile(
        ProfileOptions(arguments(pair), repeats=3, time_limit_s=PATIENCE_S), console()
    )
    (path,) = report.paths
    assert Path(path).parent == cache
    assert report.unused_because == ""
    assert {tokens for tokens, *_ in seen} == {*range(1, 9), 16, 32, 64}
    assert min(ms for *_, ms in seen) > 0.1

    def refuse(*_: Any) -> None:
        raise AssertionError("a start measured although its table is in the cache")

    monkeypatch.setattr(profiling, "measure_once", refuse)
    options = {"scheduling": True}
    with engine(pair.target, dspark(pair.drafter, options, num_speculative_tokens=7)) as llm:
        planner = scheduler_of(llm).conductor.planner
        assert planner is not None
        ((_, grid),) = planner.cost.table.grids.items()
        assert grid.sizes == (*range(1, 9), 16, 32, 64)
        assert grid.median_ms[0, 0] == 6.0


class SteadyProfile(ProfileReplica):
    """A real replica whose steps run, and whose times are those of a machine without noise."""

    def __init__(self, arguments: Sequence[str]) -> None:
        honest = profiling.measure_once

        def measure(
            runner: Any, requests: int, tokens: int, kv_tokens: int, columns: Any = None
        ) -> Any:
            timing = honest(runner, requests, tokens, kv_tokens, columns)
            assert timing.forward_ms > 0.1
            width = 7 if columns is None else columns
            ms = 5.0 + tokens + kv_tokens / 1000
            return replace(timing, forward_ms=ms, draft_ms=(1.0 + requests) * width / 7)

        # in the process of the replica: an actor's own, or the test's
        profiling.measure_once = measure
        super().__init__(arguments)


def test_two_ray_replicas_measure_what_one_process_measures(
    pair: Pair, cache: Path, cluster: RayPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches cells that a real engine in an actor cannot run, runs twice, or reports as others.

    Times are replaced for the same reason as above: two engines on two cores slow each other down.
    """
    monkeypatch.setattr(profile, "ProfileReplica", SteadyProfile)
    monkeypatch.setattr(profiling, "measure_once", profiling.measure_once)  # put back at the end
    options = ProfileOptions(arguments(pair, cache_dir=str(cache)), repeats=3, time_limit_s=600.0)
    one = run_profile(options, console())
    two = run_profile(replace(options, ray=cluster), console())
    assert two.record.fingerprint == one.record.fingerprint
    assert two.record.grids == one.record.grids
    assert (two.record.draft, two.record.narrow_draft) == (
        one.record.draft,
        one.record.narrow_draft,
    )
    assert len(two.replica_cost) == 2, "one of the replicas measured nothing"
    assert (two.num_cells, two.restarts) == (one.num_cells, 0)
    assert two.paths == one.paths


def test_building_the_drafter_does_not_change_the_fingerprint(pair: Pair, cache: Path) -> None:
    """Catches a table that a worker keeps under a name that the engine core, in another process,
    does not look for: classes of vLLM's write into the config that they are built from.
    """
    file = pair.drafter / "config.json"
    config = json.loads(file.read_text())
    plain = {key: value for key, value in config.items() if key != "draft_vocab_size"}
    file.write_text(json.dumps(plain))
    try:
        before = describe_arguments(arguments(pair))["fingerprint"]
        speculative = dspark(pair.drafter, {"scheduling": False}, num_speculative_tokens=7)
        with engine(pair.target, speculative) as llm:
            built = runner_of(llm).vllm_config
            drafter = built.speculative_config.draft_model_config.hf_config
            assert drafter.draft_vocab_size == config["vocab_size"], "vLLM no longer writes it"
            after = live_fingerprint(built)
    finally:
        file.write_text(json.dumps(config))
    assert after.drafter_hash == before["drafter_hash"]


def test_an_engine_that_does_not_start_is_one_error(pair: Pair, cache: Path) -> None:
    """Catches a traceback of vLLM's for a folder without a model."""
    words = ("/nowhere/model", *arguments(pair)[1:])
    with pytest.raises(EngineError, match="must work first"):
        run_profile(ProfileOptions(words), console())
    assert not cache.exists()


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayPlace]:
    pytest.importorskip("ray", reason="needs the `ray` extra")
    environment = {**ENGINE_ENVIRONMENT, "VLLM_DSPARK_CACHE_DIR": ""}
    environment["VLLM_DSPARK_CACHE_DIR"] = os.environ["VLLM_DSPARK_CACHE_DIR"]
    with local_ray(cpus=2):
        yield RayPlace("local", replicas=2, environment=environment)


def calibrated(pair: Pair, folder: Path, place: RayPlace | None) -> CalibrateReport:
    prompts = folder / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{i} {chr(97 + i % 26) * 3}"}) for i in range(64)]
    prompts.write_text("\n".join(lines))
    options = CalibrateOptions(
        arguments(pair, cache_dir=str(folder / "cache")),
        prompts=prompts,
        max_tokens=48,
        min_outcomes=3,
        ray=place,
        output=folder / "calibration.json",
    )
    return run_calibrate(options, console())


def six_deviations(one: PositionQuality, two: PositionQuality) -> float:
    """Of the difference of two rates (rows of one text are not quite independent: not five)."""
    rate = (one.base_rate + two.base_rate) / 2
    return 6 * math.sqrt(rate * (1 - rate) * (1 / one.count + 1 / two.count))


def test_two_ray_replicas_fit_what_one_process_fits(
    pair: Pair, cluster: RayPlace, tmp_path: Path
) -> None:
    """Catches pairs lost or mixed up between the engines of a cluster.

    Greedy text does not depend on the replica, so its rows agree but for numerics of the batch
    size; sampled text does (and who gets which prompts depends on the machine), so its fit agrees
    within the noise of two samples. Rows of the other class would be 0.2 to 0.4 off.
    """
    one, two = (calibrated(pair, tmp_path, place) for place in (None, cluster))
    assert two.record.fingerprint == one.record.fingerprint
    for name in ("greedy", "sampled"):
        ours, theirs = one.fits[name], two.fits[name]
        assert theirs.num_fit == pytest.approx(ours.num_fit, rel=0.1)
        for a, b in zip(ours.positions, theirs.positions, strict=True):
            far = 0.06 if name == "greedy" else six_deviations(a.after, b.after)
            assert b.after.base_rate == pytest.approx(a.after.base_rate, abs=far)
            assert b.before.ece == pytest.approx(a.before.ece, abs=far)
    assert two.fits["greedy"].num_fit == pytest.approx(one.fits["greedy"].num_fit, rel=0.02)
    assert two.facts["tokens"] == pytest.approx(one.facts["tokens"], rel=0.02)
    kept = list((tmp_path / "cache").glob("calibration-*.json"))
    assert len(kept) == 1
