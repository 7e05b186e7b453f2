"""What the engine core does with a plan after it was made."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from vllm_dspark.artifacts.freshness import Resolution
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.conductor import Conductor, StepOutlook
from vllm_dspark.integration.report import StepReport
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import StepMode
from vllm_dspark.planning.plan import PlanKind, owner_id, request_digest
from vllm_dspark.planning.table import RequestTable

K = 4
NAMES = ("a", "b", "c")
OUTLOOK = StepOutlook(mixed=False, num_waiting=0, kv_tokens=30)


def request(name: str) -> Any:
    params = SimpleNamespace(
        temperature=0.0, seed=None, presence_penalty=0.0, frequency_penalty=0.0,
        repetition_penalty=1.0, bad_words=None, logit_bias=None, allowed_token_ids=None,
        min_tokens=0, extra_args=None,
    )  # fmt: skip
    return SimpleNamespace(
        request_id=name,
        spec_token_ids=[-1] * K,
        sampling_params=params,
        max_tokens=100,
        num_output_tokens=3,
        use_structured_output=False,
    )


def conductor(*, device: bool, windows: Any = (3, 2, 4)) -> tuple[Conductor, list[Any]]:
    """One whose requests have drafts of the step before."""
    table = RequestTable(K, 8, Calibration.identity(K), rank_by_posterior=not device)
    resolution = Resolution("scheduling is disabled", Calibration.identity(K))
    made = Conductor(
        table,
        resolution,
        DSparkConfig(test_windows=windows),
        StepMode.FULL,
        device_windows=device,
    )
    requests = [request(name) for name in NAMES]
    made.order([], OUTLOOK)
    made.scheduled(requests, (), (), list(NAMES), draft_next=True)
    return made, requests


def drafts(*names: str) -> dict[str, list[int]]:
    return {name: [-1] * K for name in names}


class TestSettled:
    """vLLM leaves out a request after the plan was made."""

    def test_an_unchanged_step_keeps_its_order(self) -> None:
        """Catches work, and a new plan, in every ordinary step."""
        made, requests = conductor(device=True)
        order = made.order(requests, OUTLOOK)
        assert made.settled(order, drafts(*NAMES)) is order

    def test_a_left_out_request_is_taken_out_of_the_plan(self) -> None:
        """Catches a plan that every worker drops: each request's end would cost a native step."""
        made, requests = conductor(device=True)
        order = made.order(requests, OUTLOOK)
        assert order.plan is not None and order.plan.kind is PlanKind.TRIM
        settled = made.settled(order, drafts("a", "c")).plan
        owners = np.array([owner_id("a"), owner_id("c")])
        assert settled is not None
        assert (settled.digest, settled.num_requests) == (request_digest(owners), 2)
        given = dict(zip(NAMES, order.plan.windows, strict=True))
        assert settled.budget == given["a"] + given["c"] - 2
        assert settled.step_id == order.plan.step_id

    def test_host_windows_are_left_alone(self) -> None:
        """Catches a change to plans that nobody checks: host windows were applied already."""
        made, requests = conductor(device=False)
        order = made.order(requests, OUTLOOK)
        assert made.settled(order, drafts("a")) is order


def test_a_worker_that_refuses_ends_planning() -> None:
    """Catches plans for a device whose start-up check failed, and silence about it."""
    made, requests = conductor(device=True)
    refusal = StepReport(
        0, (), np.zeros(0, np.int64), np.zeros((0, K), np.float32), refused="no kernel"
    )
    assert made.order(requests, OUTLOOK).plan is not None
    made.learn(refusal, None)
    assert made.order(requests, OUTLOOK).plan is None
    assert made.off_reason == "no kernel"


@pytest.mark.parametrize(("mixed", "mode"), [(False, StepMode.PIECEWISE), (True, StepMode.MIXED)])
def test_ragged_and_native_steps_have_modes_of_their_own(mixed: bool, mode: StepMode) -> None:
    """Catches a ragged step priced as the full graph that only uniform steps have."""
    table = RequestTable(K, 8, Calibration.identity(K), rank_by_posterior=True)
    made = Conductor(
        table,
        Resolution("", Calibration.identity(K)),
        DSparkConfig(),
        StepMode.PIECEWISE,
        device_windows=False,
        native_mode=StepMode.FULL,
    )
    facts = made._facts(StepOutlook(mixed=mixed, num_waiting=0, kv_tokens=1))
    assert facts.mode is mode
    assert facts.native_mode is (StepMode.MIXED if mixed else StepMode.FULL)
