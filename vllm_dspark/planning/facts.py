"""What goes into the planner besides the requests: options and facts of the step."""

from dataclasses import dataclass

from vllm_dspark.planning.cost import StepMode
from vllm_dspark.planning.forced import TestWidth, TestWindows


@dataclass(frozen=True, slots=True)
class PlannerOptions:
    """The planner's share of DSparkConfig (which explains the options)."""

    enabled: bool = True  # False: full windows (unless tests prescribe some), kind OFF
    min_gain: float = 0.04
    hysteresis_steps: int = 4
    drain_guard: bool = True
    skip_draft: bool = True
    probe_interval: int = 32
    request_floor: int = 0
    device_windows: bool = False  # windows are set on device: plans carry none
    mixed: bool = False  # evidence allows to trim steps with prefill rows
    lazy: bool = True  # repeat a settled native decision without working it out
    choose_width: bool = False  # draft passes may be narrower than K
    test_windows: TestWindows = None
    test_windows_seed: int = 0
    test_draft_width: TestWidth = None


@dataclass(frozen=True, slots=True)
class StepFacts:
    """What the engine knows about a step before it runs. Filled by integration/."""

    step_id: int
    mode: StepMode  # that a ragged step would run in
    native_mode: StepMode  # that a full-width step would run in
    kv_tokens: int  # KV tokens that attention will read
    reserved_rows: int = 0  # rows of prefill chunks and whatever else is not in the batch
    reserved_sampling: int = 0  # of the requests behind those rows, how many emit a token
    num_waiting: int = 0
    num_arrived: int = 0  # requests that joined since the previous plan
