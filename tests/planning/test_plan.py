"""Identity of plans, and the box that never gives out a stale one."""

import pickle
from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from tests.planning.builders import batch, facts
from tests.planning.test_planner import planner
from vllm_dspark.planning.plan import PlanBox, owner_id, request_digest


def make(step_id=1, n=4):
    return planner().plan(facts(step_id), batch(np.full((7, n), 0.9)))


def claim(plan, **changes):
    values = {
        "step_id": plan.step_id,
        "digest": plan.digest,
        "num_requests": plan.num_requests,
        "num_positions": plan.num_positions,
    }
    return values | changes


def test_owner_ids_are_stable_positive_and_distinct():
    assert owner_id("request-1") == owner_id("request-1") == 1595470616336395803
    ids = {owner_id(f"r{i}", generation) for i in range(500) for generation in range(3)}
    assert len(ids) == 1500
    assert all(0 < value < 2**63 for value in ids)


def test_digest_ignores_order_and_sees_membership():
    owners = np.array([owner_id(f"r{i}") for i in range(50)])
    digest = request_digest(owners)
    assert 0 <= digest < 2**64
    assert request_digest(owners[::-1]) == digest
    others = [request_digest(np.delete(owners, i)) for i in range(50)]
    others += [request_digest(np.append(owners, owner_id("new")))]
    others += [request_digest(np.where(owners == owners[3], owner_id("r3", 1), owners))]
    assert digest not in others
    assert len(set(others)) == len(others)


def test_plans_are_immutable_and_travel():
    plan = make()
    with pytest.raises(FrozenInstanceError):
        plan.budget = 3
    assert pickle.loads(pickle.dumps(plan)) == plan
    assert type(plan.budget) is type(plan.windows[0]) is int


def test_a_plan_is_given_out_once():
    box, plan = PlanBox(), make()
    assert box.take(**claim(plan)) is None
    box.put(plan)
    assert box.take(**claim(plan)) is plan
    assert box.take(**claim(plan)) is None
    assert (box.accepted, box.mismatched, box.unclaimed) == (1, 0, 0)


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("step_id", "step"),
        ("digest", "request set"),
        ("num_requests", "request count"),
        ("num_positions", "draft width"),
    ],
)
def test_a_mismatch_is_refused_counted_and_cleared(field, name):
    box, plan = PlanBox(), make()
    box.put(plan)
    assert box.take(**claim(plan, **{field: getattr(plan, field) + 1})) is None
    assert box.mismatched == 1
    assert box.last_mismatch.startswith(f"{name}: step has")
    assert box.take(**claim(plan)) is None  # not even for its own step any more
    assert box.accepted == 0


def test_an_unused_plan_is_replaced_and_counted():
    box, old, new = PlanBox(), make(1), make(2)
    box.put(old)
    box.put(new)
    assert box.unclaimed == 1
    assert box.take(**claim(old)) is None
    box.put(new)
    box.drop()
    assert box.take(**claim(new)) is None
    assert box.unclaimed == 2


def test_zero_budget_plans_are_cleared_too():
    """A plan whose budget is 0 once survived its step in another engine."""
    box = PlanBox()
    plan = planner().plan(facts(), batch(np.full((7, 128), 0.01)))
    assert plan.budget == 0
    box.put(plan)
    assert box.take(**claim(plan)) is plan
    assert box.take(**claim(plan)) is None
