"""Decisions for steps as they mostly are."""

import numpy as np
import pytest

from tests.planning.builders import batch, facts, table_from
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.plan import PlanKind
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.usual import UsualSteps

K, REQUESTS = 7, 64


def step(number, mixed):
    mode = StepMode.MIXED if mixed else StepMode.FULL
    return facts(number, mode=mode, native_mode=mode, reserved_rows=200 if mixed else 0)


def told(usual, facts):
    usual.note(facts)
    return usual.facts_for(facts)


def test_the_usual_kind_stands_for_the_other():
    usual = UsualSteps()
    assert told(usual, step(1, False)) is None
    assert told(usual, step(2, True)).mode is StepMode.FULL
    for number in range(3, 30):
        usual.note(step(number, True))
    found = told(usual, step(30, False))
    assert (found.mode, found.reserved_rows, found.step_id) == (StepMode.MIXED, 200, 30)
    assert told(usual, step(31, True)) is None
    usual.repeated(12)  # decode steps that nobody looked at
    assert not usual.mixed


@pytest.mark.parametrize("mixed", [False, True], ids=["full windows", "trimmed"])
def test_drafting_is_back_within_two_steps_of_the_load_falling(mixed):
    """Catches a pause for steps with prompts that outlives their load while they are remembered."""
    cost = CostModel(
        table_from(lambda s: 20.0 + 0.1 * s, range(8, 1025, 8), K, draft=(0.5, 5.0)),
        num_positions=K,
    )
    planner = Planner(cost, PlannerOptions(mixed=mixed))
    rng, drafts = np.random.default_rng(7), np.full(REQUESTS, K, dtype=np.int32)
    for number in range(1, 120):
        prompt = int(rng.integers(50, 400))
        here = batch(np.full((K, REQUESTS), 0.4), num_drafts=drafts)
        plan = planner.plan(step(number, True), here)
        rows = REQUESTS + (plan.budget if plan.kind is not PlanKind.SKIP_DRAFT else 0)
        ms = 20.0 + 0.5 * (rows + prompt)
        timing = StepTiming(
            StepMode.MIXED, StepShape.RAGGED, REQUESTS, rows + prompt, 0, ms,
            5.0 if plan.draft_next else None, prefill_rows=prompt,
        )  # fmt: skip
        cost.observe(timing)
        drafts = np.full(REQUESTS, K if plan.draft_next else 0, dtype=np.int32)
    assert plan.kind is PlanKind.SKIP_DRAFT
    alone = []
    for number in range(120, 123):
        here = batch(np.full((K, 1), 0.9), num_drafts=drafts[:1])
        plan = planner.plan(step(number, False), here)
        alone.append(plan.draft_next)
        drafts = np.full(1, K if plan.draft_next else 0, dtype=np.int32)
    assert alone[1] and alone[2], alone


def kinds_under(share, *, mixed_slope, steps=300):
    """Kinds of the later plans, where decode steps cost next to nothing and mixed ones by rows."""
    cost = CostModel(
        table_from(lambda s: 1.0 + 0.001 * s, range(8, 1025, 8), K, draft=(0.01, 0.01)),
        num_positions=K,
    )
    planner = Planner(cost, PlannerOptions(mixed=True, hysteresis_steps=2))
    rng, drafts = np.random.default_rng(5), np.full(REQUESTS, K, dtype=np.int32)
    kinds = []
    for number in range(1, steps + 1):
        mixed = bool(rng.random() < share)
        prompt = int(rng.integers(50, 400)) if mixed else 0
        here = batch(np.full((K, REQUESTS), 0.5), num_drafts=drafts)
        plan = planner.plan(step(number, mixed), here)
        verified = {PlanKind.SKIP_DRAFT: 0, PlanKind.TRIM: plan.budget}
        rows = REQUESTS + verified.get(plan.kind, int(drafts.sum()))
        if mixed:
            ms = 0.1 + mixed_slope * (rows + prompt)
            timing = StepTiming(
                StepMode.MIXED, StepShape.RAGGED, REQUESTS, rows + prompt, 0, ms,
                5.0 if plan.draft_next else None, prefill_rows=prompt,
            )  # fmt: skip
            cost.observe(timing)
        drafts = np.full(REQUESTS, K if plan.draft_next else 0, dtype=np.int32)
        kinds.append((mixed, plan.kind))
    return kinds[100:]


def test_a_step_without_prompts_ends_no_pause_of_a_load_that_has_them():
    """Catches pauses that end in each decode step, whose drafts then cost a mixed one its rows."""
    found = kinds_under(0.8, mixed_slope=0.2)
    others = [kind for mixed, kind in found if not mixed]
    assert len(others) > 20
    skipped = sum(kind is PlanKind.SKIP_DRAFT for _, kind in found)
    assert skipped >= 0.85 * len(found)


def test_few_steps_with_prompts_begin_no_pause():
    """Catches a load of decode steps that stops drafting for the sake of a step in ten."""
    found = kinds_under(0.1, mixed_slope=0.2)
    assert not any(kind is PlanKind.SKIP_DRAFT for mixed, kind in found if not mixed)
