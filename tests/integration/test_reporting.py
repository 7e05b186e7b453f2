"""What worker and engine core tell each other: owners, rows and their age."""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm_dspark.integration.report import StepOrder
from vllm_dspark.integration.reporting import ConfidenceRows, Owners
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.plan import PlanKind, Reason, VerifyPlan, owner_id
from vllm_dspark.planning.table import RankingParameters


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


class TestOrderOnItsWay:
    """What of an order reaches workers in other processes."""

    def order(self, kind: PlanKind, windows: tuple[int, ...], **changes: object) -> StepOrder:
        plan = VerifyPlan(
            9, 5, 2, 4, kind, Reason.TRIM_GAIN, 3, 8, True, windows, 5.0, 3.0, 6.0, 3.0
        )
        drafts = np.array([4, 4], dtype=np.int32)
        return StepOrder(9, plan, ["a", "b"], drafts, drafts + 4, num_scheduled=drafts, **changes)

    @pytest.mark.parametrize("kind", [PlanKind.NATIVE, PlanKind.TRIM, PlanKind.SKIP_DRAFT])
    def test_what_the_host_has_carried_out_stays_there(self, kind: PlanKind) -> None:
        """Catches lists of 256 requests in every message, which nobody there looks at."""
        sent = pickle.loads(pickle.dumps(self.order(kind, (3, 2), at_rest=True)))
        assert (sent.step_id, sent.draft_next, sent.at_rest) == (9, True, True)
        assert (sent.plan.kind, sent.plan.budget, sent.plan.windows) == (kind, 3, ())
        assert sent.request_ids == [] and sent.num_scheduled is None
        assert sent.drafted == sent.stamps == {}

    def test_what_the_device_is_to_do_arrives(self) -> None:
        ranking = RankingParameters(Calibration.identity(4), np.full((2, 4), 0.5, np.float32))
        order = self.order(
            PlanKind.TRIM, (), ranking=ranking, sampled=frozenset("a"), ceilings={"b": 1}
        )
        sent = pickle.loads(pickle.dumps(order))
        assert sent.plan == order.plan
        assert (sent.drafted, sent.stamps) == ({"a": 4, "b": 4}, {"a": 8, "b": 8})
        assert (sent.sampled, sent.floors, sent.ceilings) == (order.sampled, {}, {"b": 1})
        assert np.array_equal(sent.ranking.prior, ranking.prior)
        assert sent.num_scheduled is None
