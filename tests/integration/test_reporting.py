"""What worker and engine core tell each other: owners, rows and their age."""

from types import SimpleNamespace

import numpy as np
import torch

from vllm_dspark.integration.reporting import ConfidenceRows, Owners
from vllm_dspark.planning.plan import owner_id


def output(new: tuple[str, ...] = (), preempted: tuple[str, ...] = (), finished: tuple = ()):
    return SimpleNamespace(
        scheduled_new_reqs=[SimpleNamespace(req_id=name) for name in new],
        preempted_req_ids=set(preempted),
        finished_req_ids=set(finished),
    )


def test_a_preempted_request_comes_back_as_another_owner() -> None:
    """Catches rows from before a preemption being used after it."""
    owners = Owners()
    owners.update(output(new=("a", "b")))
    before = owners.of(("a", "b"))
    assert before.tolist() == [owner_id("a", 0), owner_id("b", 0)]
    owners.update(output(preempted=("a",)))
    owners.update(output(new=("a",)))
    after = owners.of(("a", "b"))
    assert after[0] == owner_id("a", 1) != before[0]
    assert after[1] == before[1]


def test_a_finished_request_is_forgotten() -> None:
    """Catches growth with every request, and a reused name inheriting a generation."""
    owners = Owners()
    owners.update(output(new=("a",)))
    owners.update(output(preempted=("a",)))
    owners.update(output(finished=("a",)))
    assert owners.of(("a",)).tolist() == [0]
    assert not owners._generation and not owners._owner
    owners.update(output(new=("a",)))
    assert owners.of(("a",)).tolist() == [owner_id("a", 0)]


def test_newest_rows_win_and_are_probabilities() -> None:
    """Catches old rows overtaking new ones, and logits handed over raw."""
    rows = ConfidenceRows(torch.device("cpu"))
    assert rows.take() is None
    for stamp, value in ((1, 0.0), (2, 100.0)):
        rows.record(stamp, ("a",), np.array([7]), torch.full((1, 3), value))
    newest = rows.take()
    assert newest is not None and newest.stamp == 2
    assert newest.host.tolist() == [[1.0, 1.0, 1.0]]
    assert rows.take() is None
