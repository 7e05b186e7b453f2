"""Traces: from recorded pairs, on disk, narrowed; and machines that were not measured."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.planning.builders import table_from
from vllm_dspark.artifacts.pairs import Pair
from vllm_dspark.errors import InputError, SimulationError, TraceError
from vllm_dspark.planning.cost import StepMode, StepShape
from vllm_dspark.simulation.trace import (
    Trace,
    read_trace,
    synthetic_trace,
    trace_of_pairs,
    write_trace,
)
from vllm_dspark.simulation.whatif import Machine, example_table, for_width, scaled, with_overhead

FULL = StepMode.FULL


def pair(name: str, stamp: int, accepted: int, verified: int = 3, **changes: Any) -> Pair:
    """One block of K = 3."""
    values = {"sampled": False, "untouched": True, "confidence": (0.9, 0.8, 0.7), **changes}
    return Pair(name, values["sampled"], True, stamp, verified, accepted, values["confidence"])


def test_pairs_become_requests_with_positions() -> None:
    """Catches steps in file order instead of draft order, and positions off by the first token."""
    pairs = [pair("b", 5, 0), pair("a", 7, 1), pair("a", 6, 2), pair("b", 6, 2, sampled=True)]
    trace = trace_of_pairs(pairs, 3, prompt=9)
    assert trace.num_requests == 2
    assert trace.first.tolist() == [0, 2, 4]
    assert trace.position.tolist() == [1, 2, 1, 4]  # b, then a
    assert trace.accepted.tolist() == [0, 2, 2, 1]
    assert trace.output.tolist() == [5, 6]
    assert trace.prompt.tolist() == [9, 9]
    assert trace.notes == {"steps": 4, "completed": 0}


def test_cut_off_outcomes_are_completed_by_confidence() -> None:
    """Catches windows taken for rejections, which would make trimmed recordings look bad."""
    pairs = [pair(f"r{i}", 1, 1, verified=1, confidence=(1.0, 0.6, 0.5)) for i in range(4000)]
    trace = trace_of_pairs(pairs, 3)
    assert trace.notes["completed"] == 4000
    assert (trace.accepted >= 1).all()
    assert (trace.accepted >= 2).mean() == pytest.approx(0.6, abs=0.03)
    assert (trace.accepted >= 3).mean() == pytest.approx(0.3, abs=0.03)
    assert trace.output.tolist() == [3] * 4000  # what was emitted, not what might have been
    refused = trace_of_pairs([pair("r", 1, 0, verified=1)], 3)
    assert refused.notes["completed"] == 0


def test_compact_form_keeps_everything(tmp_path: Path) -> None:
    """Catches an array or a note lost on disk."""
    trace = synthetic_trace([0.7, 0.5], num_requests=5, output=20, spread=1.0, sampled=True)
    write_trace(tmp_path / "deep" / "trace.npz", trace)
    again = read_trace(tmp_path / "deep" / "trace.npz")
    for name, value in vars(trace).items():
        assert np.array_equal(value, getattr(again, name)), name


def test_recording_is_read(tmp_path: Path) -> None:
    """Catches a reader that does not know the recorder's file."""
    file = tmp_path / "pairs.jsonl"
    rows = [["a", False, True, 3, 2, 1, [0.5, None]]]
    lines = [
        {"kind": "dspark_pairs", "version": 1, "num_positions": 2},
        {"step": 4, "t": 0.5, "rows": rows},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    trace = read_trace(file, prompt=7)
    assert (trace.width, trace.accepted.tolist(), trace.prompt.tolist()) == (2, [1], [7])
    assert np.isnan(trace.confidence[0, 1])


@pytest.mark.parametrize("content", [None, "", "no json\n", '{"kind": "other"}\n'])
def test_other_files_are_refused(tmp_path: Path, content: str | None) -> None:
    """Catches a traceback where a file is missing or of another kind."""
    file = tmp_path / "x"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InputError):
        read_trace(file)


def test_archive_of_another_version_is_refused(tmp_path: Path) -> None:
    """Catches a later format read as this one."""
    file = tmp_path / "t.npz"
    trace = synthetic_trace([0.5], num_requests=1, output=4)
    arrays = {k: v for k, v in vars(trace).items() if k != "notes"}
    np.savez(file, meta=np.array(json.dumps({"kind": "trace", "version": 2})), **arrays)
    with pytest.raises(TraceError, match="version 2"):
        read_trace(file)
    np.savez(file, other=np.zeros(1))
    with pytest.raises(TraceError, match="lacks"):
        read_trace(file)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"accepted": np.array([4], dtype=np.int32)}, "outside 0..2"),
        ({"first": np.array([0, 2])}, "index of steps"),
        ({"first": np.array([0, 0])}, "index of steps"),
        ({"prompt": np.array([0], dtype=np.int32)}, "length is below 1"),
        ({"confidence": np.zeros((2, 2), dtype=np.float32)}, "confidences of shape"),
    ],
)
def test_contradicting_arrays_are_refused(change: dict[str, Any], words: str) -> None:
    """Catches a broken trace that would index outside its arrays in compiled code."""
    values = {
        "first": np.array([0, 1]),
        "position": np.array([1], dtype=np.int32),
        "confidence": np.zeros((1, 2), dtype=np.float32),
        "accepted": np.array([1], dtype=np.int32),
        "prompt": np.array([3], dtype=np.int32),
        "output": np.array([3], dtype=np.int32),
        "limit": np.array([3], dtype=np.int32),
        "sampled": np.array([False]),
    }
    Trace(**values)
    with pytest.raises(TraceError, match=words):
        Trace(**{**values, **change})


def test_narrowing() -> None:
    """Catches acceptance beyond the narrower block."""
    trace = synthetic_trace([0.9, 0.9, 0.9], num_requests=4, output=40)
    narrow = trace.narrowed(1)
    assert narrow.width == 1
    assert set(narrow.accepted.tolist()) == {0, 1}
    with pytest.raises(TraceError, match=r"choose 1..3"):
        trace.narrowed(4)


def test_other_machines_scale_what_they_change() -> None:
    """Catches bandwidth that speeds up arithmetic, or the reverse; and TP without its losses."""
    table = table_from(lambda size: 4.0 + 0.01 * size, [8, 108], 3)

    def at(changed, size_index: int) -> float:
        return float(changed.grids[FULL, StepShape.RAGGED].median_ms[0, size_index])

    first, last = at(table, 0), at(table, 1)
    twice = scaled(table, Machine(bandwidth=2.0))
    assert at(twice, 0) == pytest.approx(first / 2)
    assert at(twice, 1) == pytest.approx(first / 2 + (last - first))
    stronger = scaled(table, Machine(compute=2.0))
    assert at(stronger, 0) == pytest.approx(first)
    assert at(stronger, 1) == pytest.approx(first + (last - first) / 2)
    four = scaled(table, Machine(tensor_parallel=4, tp_efficiency=0.9))
    assert at(four, 1) == pytest.approx(last / (4 * 0.81))
    assert scaled(table, Machine()) is table
    with pytest.raises(SimulationError, match="bandwidth 0"):
        Machine(bandwidth=0.0)


def test_another_width_has_its_own_draft_price() -> None:
    """Catches a CPU's drafter that costs a block of 7 for an engine of K = 3 or 5."""
    full = example_table(7)
    half = replace(full.draft, median_ms=full.draft.median_ms / 2)
    table = replace(full, narrow={3: half})
    assert for_width(table, 7, 3).draft.median_ms == pytest.approx(half.median_ms)
    between = full.draft.median_ms * 0.75  # half way from 3 columns to 7
    assert for_width(table, 7, 5).draft.median_ms == pytest.approx(between)
    assert for_width(full, 7, 3).draft.median_ms == pytest.approx(full.draft.median_ms)
    assert set(for_width(table, 7, 5).narrow) == {3}
    assert set(for_width(table, 7, 3).narrow) == set()
    slower = scaled(table, Machine(bandwidth=0.5)).narrow[3]
    assert slower.median_ms[0, 0] == pytest.approx(2.0 * half.median_ms[0, 0])


def test_another_width_has_its_own_graphs() -> None:
    """Catches uniform sizes of one K used for another."""
    table = example_table(7)
    narrow = for_width(table, 7, 3)
    sizes = narrow.grids[FULL, StepShape.NATIVE].sizes
    assert set(sizes) >= {4, 8, 16}
    assert all(size % 4 == 0 for size in sizes)
    narrow.validate()
    assert for_width(table, 7, 7) is table
    assert with_overhead(table, 0.5).overhead_ms == 0.5
    with pytest.raises(SimulationError, match="overhead"):
        with_overhead(table, -1.0)
