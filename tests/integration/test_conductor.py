"""What the engine core makes of the worker's start-up, and of the modes that steps run in."""

import numpy as np
import pytest

from vllm_dspark.artifacts.freshness import Resolution
from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.conductor import Conductor, StepOutlook
from vllm_dspark.integration.report import StepReport
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import StepMode
from vllm_dspark.planning.table import RequestTable

K = 4


def conductor(options: DSparkConfig, **changes: object) -> Conductor:
    table = RequestTable(K, 8, Calibration.identity(K), rank_by_posterior=True)
    resolution = Resolution("", Calibration.identity(K))
    return Conductor(table, resolution, options, **changes)  # type: ignore[arg-type]


def test_a_worker_that_refuses_ends_planning() -> None:
    """Catches plans for a device whose start-up check failed, and silence about it."""
    made = conductor(DSparkConfig(test_windows="random"), mode=StepMode.FULL, device_windows=True)
    refusal = StepReport(
        0, (), np.zeros(0, np.int64), np.zeros((0, K), np.float32), refused="no kernel"
    )
    assert made.planner is not None
    assert made.off_reason == ""
    made.learn(refusal, None)
    assert made.planner is None
    assert made.off_reason == "no kernel"


@pytest.mark.parametrize(("mixed", "mode"), [(False, StepMode.PIECEWISE), (True, StepMode.MIXED)])
def test_ragged_and_native_steps_have_modes_of_their_own(mixed: bool, mode: StepMode) -> None:
    """Catches a ragged step priced as the full graph that only uniform steps have."""
    made = conductor(
        DSparkConfig(),
        mode=StepMode.PIECEWISE,
        device_windows=False,
        native_mode=StepMode.FULL,
    )
    facts = made._facts(StepOutlook(mixed=mixed, num_waiting=0))
    assert facts.mode is mode
    assert facts.native_mode is (StepMode.MIXED if mixed else StepMode.FULL)
