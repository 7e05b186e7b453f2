"""Restating a plan for the step that was scheduled."""

import numpy as np

from tests.planning.builders import batch, facts
from tests.planning.test_planner import K, planner, uniform
from vllm_dspark.planning.cost import StepMode
from vllm_dspark.planning.plan import PlanKind, request_digest
from vllm_dspark.planning.settle import settle


def test_a_step_as_expected_keeps_its_plan():
    one = planner()
    for n, rate in ((2, 0.9), (64, 0.8), (128, 0.05)):
        seen = uniform(n, rate)
        plan = one.plan(facts(), seen)
        drafts = np.array(plan.windows) - 1
        settled = settle(plan, one.cost, facts(), seen.owner, drafts)
        assert settled.predicted_ms > 0
        assert abs(settled.predicted_ms - plan.predicted_ms) < 1e-9
        assert settled == plan


def test_left_out_requests_and_drafts():
    one = planner()
    seen = uniform(64, 0.8)
    plan = one.plan(facts(), seen)
    drafts = np.minimum(np.array(plan.windows) - 1, 2)[:60]
    settled = settle(plan, one.cost, facts(5), seen.owner[:60], drafts)
    assert settled.digest == request_digest(seen.owner[:60])
    assert (settled.step_id, settled.num_requests) == (5, 60)
    assert settled.budget == drafts.sum()
    assert settled.windows == tuple(drafts + 1)
    assert settled.padded_tokens >= 60 + settled.budget


def test_native_with_missing_drafts_runs_ragged():
    one = planner()
    seen = batch(np.full((K, 2), 0.9))
    plan = one.plan(facts(), seen)
    settled = settle(plan, one.cost, facts(), seen.owner, np.array([7, 3]))
    assert settled.kind is PlanKind.TRIM
    none = settle(plan, one.cost, facts(), seen.owner, np.array([0, 0]))
    assert none.kind is PlanKind.NATIVE


def test_prefill_rows_make_it_unpriced():
    one = planner()
    seen = uniform(64, 0.8)
    plan = one.plan(facts(), seen)
    mixed = facts(mode=StepMode.MIXED, native_mode=StepMode.MIXED, reserved_rows=100)
    settled = settle(plan, one.cost, mixed, seen.owner, np.array(plan.windows) - 1)
    assert (settled.predicted_ms, settled.padded_tokens) == (0.0, 0)
