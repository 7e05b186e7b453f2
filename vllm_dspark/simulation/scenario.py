"""What is simulated: engine, load and policy, validated."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import numpy.typing as npt

from vllm_dspark.errors import SimulationError
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.simulation.core import state

PolicyName = Literal["off", "fixed", "argmax", "threshold", "early_stop", "ours"]
POLICY_CODES: dict[str, int] = {
    "off": state.OFF,
    "fixed": state.FIXED,
    "argmax": state.ARGMAX,
    "threshold": state.THRESHOLD,
    "early_stop": state.EARLY_STOP,
    "ours": state.OURS,
}
ArrivalName = Literal["closed", "poisson", "burst"]


@dataclass(frozen=True)
class Policy:
    """How many drafts are verified. `value`: K' of fixed, the least survival of threshold."""

    name: PolicyName
    value: float = 0.0

    @property
    def label(self) -> str:
        """Short name for tables, and what `parse_policy` reads."""
        if self.name == "fixed":
            return f"fixed:{self.value:.0f}"
        return f"threshold:{self.value:g}" if self.name == "threshold" else self.name


def parse_policy(text: str, width: int) -> Policy:
    """`off`, `fixed[:K]`, `argmax`, `threshold:P`, `early_stop` or `ours`."""
    name, _, value = text.partition(":")
    try:
        number = float(value) if value else None
    except ValueError:
        raise SimulationError(f"policy {text!r}: {value!r} is no number") from None
    if name == "fixed":
        number = float(width) if number is None else number
        if number != int(number) or not 0 <= number <= width:
            raise SimulationError(f"policy {text!r}: K must be an integer from 0 to {width}")
        return Policy("fixed", number)
    if name == "threshold":
        if number is None or not 0.0 <= number <= 1.0:
            raise SimulationError(f"policy {text!r}: write threshold:P with P from 0 to 1")
        return Policy("threshold", number)
    if name not in POLICY_CODES or number is not None:
        known = "off, fixed[:K], argmax, threshold:P, early_stop, ours"
        raise SimulationError(f"policy {text!r} is not known; choose from {known}")
    return Policy(name)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Arrivals:
    """When requests come.

    closed: `concurrency` requests at any time, each followed by the next at once.
    poisson: `rate_per_s` on average, independent. burst: `burst_size` at once, `rate_per_s` on
    average.
    """

    kind: ArrivalName = "closed"
    concurrency: int = 64
    rate_per_s: float = 0.0
    burst_size: int = 1

    def __post_init__(self) -> None:
        if self.kind == "closed" and self.concurrency < 1:
            raise SimulationError(f"concurrency = {self.concurrency}; it must be at least 1")
        if self.kind != "closed" and not self.rate_per_s > 0.0:
            raise SimulationError(
                f"{self.kind} arrivals at {self.rate_per_s} requests/s; give a rate above 0"
            )
        if self.burst_size < 1:
            raise SimulationError(f"burst size {self.burst_size}; it must be at least 1")

    def times_ms(self, num_requests: int, seed: int) -> npt.NDArray[np.float64]:
        """Arrival times, [N], of an open load."""
        if self.kind == "closed":
            return np.zeros(num_requests)
        rng = np.random.default_rng(seed)
        size = self.burst_size if self.kind == "burst" else 1
        bursts = -(-num_requests // size)
        gap_ms = 1e3 * size / self.rate_per_s
        gaps = rng.exponential(gap_ms, bursts) if self.kind == "poisson" else gap_ms
        starts = np.cumsum(np.broadcast_to(gaps, bursts)) - (gap_ms if self.kind == "burst" else 0)
        times: npt.NDArray[np.float64] = np.repeat(starts, size)[:num_requests].astype(np.float64)
        return times

    @property
    def label(self) -> str:
        """Short text for tables."""
        if self.kind == "closed":
            return f"closed {self.concurrency}"
        if self.kind == "poisson":
            return f"poisson {self.rate_per_s:g}/s"
        return f"burst {self.burst_size} x {self.rate_per_s / self.burst_size:g}/s"


@dataclass(frozen=True)
class Scenario:
    """One run of the simulator, but for trace, cost table and calibration."""

    policy: Policy
    arrivals: Arrivals = Arrivals()
    num_requests: int = 512
    replicas: int = 1  # data-parallel engines; a request goes to the least loaded
    max_num_seqs: int = 256  # of one engine
    max_num_batched_tokens: int = 8192
    windows: Literal["host", "device"] = "host"
    row_lag: int = 1  # draft passes until a confidence row is seen by a plan; 0 on a CPU
    prefill: bool = True  # False: prompts cost nothing
    online_calibration: bool = True
    options: PlannerOptions = field(default_factory=PlannerOptions)
    max_steps: int = 50_000_000
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("num_requests", "replicas", "max_num_seqs", "max_steps"):
            if getattr(self, name) < 1:
                raise SimulationError(f"{name} = {getattr(self, name)}; it must be at least 1")
        if not 0 <= self.row_lag < state.HISTORY:
            raise SimulationError(f"row_lag = {self.row_lag}; allowed: 0 to {state.HISTORY - 1}")
        unsupported = self.options.mixed or self.options.test_windows is not None
        if unsupported or not self.options.enabled:
            raise SimulationError(
                "options mixed, test_windows and enabled=False are not simulated; use the policies "
                "fixed and off instead"
            )

    def check_width(self, width: int) -> None:
        """Raise SimulationError where the draft width K does not fit."""
        least = min(self.max_num_seqs, self.arrivals.concurrency)
        if self.max_num_batched_tokens < least * (width + 1):
            raise SimulationError(
                f"max_num_batched_tokens = {self.max_num_batched_tokens} holds less than one full "
                f"window of {least} requests ({least * (width + 1)} tokens); raise it"
            )
