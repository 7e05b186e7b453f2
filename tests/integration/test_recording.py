"""Rows and outcomes joined by request and draft pass (no engine)."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vllm_dspark.artifacts.pairs import Pair, read_pairs
from vllm_dspark.integration.outcomes import StepOutcomes
from vllm_dspark.integration.recording import PairRecorder
from vllm_dspark.integration.report import StepReport

K = 3


def report(stamp: int, *names: str, confidence: float = 0.5) -> StepReport:
    rows = np.full((len(names), K), confidence, dtype=np.float32)
    return StepReport(stamp, names, np.arange(1, len(names) + 1), rows)


def outcomes(stamp: int, **accepted: tuple[int, int]) -> StepOutcomes:
    """name=(verified, accepted)"""
    verified, taken = (np.array(column) for column in zip(*accepted.values(), strict=True))
    rest: Any = verified
    return StepOutcomes(
        list(accepted), rest, rest, rest, rest, verified, taken, rest, rest,
        np.full(len(accepted), stamp), np.zeros((5, K), dtype=np.int64),
    )  # fmt: skip


@pytest.fixture
def recorder(tmp_path: Path) -> PairRecorder:
    made = PairRecorder(tmp_path / "pairs.jsonl", K)
    made.add_request("a", sampled=False, untouched=True)
    made.add_request("b", sampled=True, untouched=False)
    return made


def written(recorder: PairRecorder, tmp_path: Path) -> list[Pair]:
    recorder.close()
    return read_pairs(tmp_path / "pairs.jsonl")[1]


def test_rows_wait_for_their_own_pass(recorder: PairRecorder, tmp_path: Path) -> None:
    """Catches the synchronous engine's trap: a report brings the rows of the NEXT pass."""
    recorder.record(1, report(1, "a", "b", confidence=0.1), None)
    recorder.record(2, report(2, "a", "b", confidence=0.2), outcomes(1, a=(3, 1), b=(2, 2)))
    recorder.record(3, report(3, "a", confidence=0.3), outcomes(2, a=(3, 0)))
    pairs = written(recorder, tmp_path)
    found = [(p.request_id, p.stamp, p.verified, p.accepted, p.confidence[0]) for p in pairs]
    assert found == [("a", 1, 3, 1, 0.1), ("b", 1, 2, 2, 0.1), ("a", 2, 3, 0, 0.2)]
    assert [(p.sampled, p.untouched) for p in pairs[:2]] == [(False, True), (True, False)]


def test_outcomes_wait_for_late_rows(recorder: PairRecorder, tmp_path: Path) -> None:
    """Catches pairs lost where rows arrive with a later output, as under async scheduling."""
    recorder.record(2, None, outcomes(1, a=(3, 2)))
    recorder.record(3, report(1, "a"), outcomes(2, a=(1, 0)))
    assert [(p.stamp, p.accepted) for p in written(recorder, tmp_path)] == [(1, 2)]


def test_what_was_not_verified_is_no_outcome(recorder: PairRecorder, tmp_path: Path) -> None:
    """Catches a window of one counted as a rejection, and rows of requests that have gone."""
    recorder.record(1, report(1, "a", "b", "stranger"), None)
    recorder.remove_request("b")
    recorder.record(2, None, outcomes(1, a=(0, 0), b=(3, 3), stranger=(3, 3)))
    assert written(recorder, tmp_path) == []


def test_a_row_is_used_once(recorder: PairRecorder, tmp_path: Path) -> None:
    """Catches an outcome that is reported twice counting twice."""
    recorder.record(1, report(1, "a"), None)
    recorder.record(2, None, outcomes(1, a=(3, 1)))
    recorder.record(3, None, outcomes(1, a=(3, 1)))
    assert len(written(recorder, tmp_path)) == 1


def test_nan_survives_json(recorder: PairRecorder, tmp_path: Path) -> None:
    """Catches a file that JSON readers refuse."""
    recorder.record(1, report(1, "a", confidence=math.nan), None)
    recorder.record(2, None, outcomes(1, a=(3, 1)))
    assert math.isnan(written(recorder, tmp_path)[0].confidence[0])
