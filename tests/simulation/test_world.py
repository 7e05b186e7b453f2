"""The simulated engine: counts, times and limits that can be worked out by hand."""

from dataclasses import replace

import numpy as np
import pytest

from tests.planning.builders import grid
from tests.simulation.cases import EAGER, RAGGED
from vllm_dspark.errors import SimulationError
from vllm_dspark.planning.cost import CostTable
from vllm_dspark.simulation.result import CellResult
from vllm_dspark.simulation.run import simulate
from vllm_dspark.simulation.scenario import Arrivals, Scenario, parse_policy
from vllm_dspark.simulation.trace import Trace, synthetic_trace
from vllm_dspark.simulation.whatif import example_table

K = 3
# 1 ms and 0.1 ms a token, 0.01 ms per KV token, drafting 0.5 ms, no overhead
TABLE = CostTable(
    {(EAGER, RAGGED): grid((0, 1000), [[1.0, 101.0], [11.0, 111.0]], (0, 1000))},
    grid((1, 100), (0.5, 0.5)),
)


def constant_trace(accepted: int, output: int, prompt: int = 4, requests: int = 4) -> Trace:
    """Every block has the same number of accepted drafts."""
    steps = -(-(output - 1) // (accepted + 1))
    positions = 1 + (accepted + 1) * np.arange(steps)
    return Trace(
        first=np.arange(requests + 1) * steps,
        position=np.tile(positions, requests).astype(np.int32),
        confidence=np.full((steps * requests, K), 0.9, dtype=np.float32),
        accepted=np.full(steps * requests, accepted, dtype=np.int32),
        prompt=np.full(requests, prompt, dtype=np.int32),
        output=np.full(requests, output, dtype=np.int32),
        limit=np.full(requests, output, dtype=np.int32),
        sampled=np.zeros(requests, dtype=np.bool_),
    )


def run(trace: Trace, policy: str, table: CostTable = TABLE, **changes) -> CellResult:
    """One scenario with few requests at a time."""
    values = {"arrivals": Arrivals("closed", 1), "num_requests": 1, "row_lag": 0, **changes}
    return simulate(trace, table, Scenario(parse_policy(policy, trace.width), **values))


def test_one_request_by_hand() -> None:
    """Catches a price at the wrong size or context, a token too many, a draft pass too few."""
    result = run(constant_trace(accepted=2, output=7), "fixed:3")
    # Prompt of 4: 1.4 ms and a draft pass; emits 1, context 5 (the emitted token counted).
    # Then two windows of 4 rows emit 3 each, at contexts 5 and 8.
    expected = (1.0 + 0.4 + 0.5) + (1.0 + 0.4 + 0.05 + 0.5) + (1.0 + 0.4 + 0.08 + 0.5)
    assert result.seconds * 1e3 == pytest.approx(expected)
    assert (result.steps, result.completed) == (3, 1)
    assert result.accepted_length == 3.0
    assert result.mean_window == 4.0
    assert result.windows == (0, 0, 0, 2)
    assert result.acceptance == pytest.approx(2 / 3)
    assert result.tokens_per_s == pytest.approx(7 / (expected / 1e3))
    assert result.ttft_ms.p50 == pytest.approx(1.9)
    assert result.tpot_ms.p50 == pytest.approx((expected - 1.9) / 6)
    assert result.latency_ms.p99 == pytest.approx(expected)


def test_end_of_a_request_cuts_the_last_block() -> None:
    """Catches accepted drafts behind the end that are counted as output."""
    result = run(constant_trace(accepted=3, output=6), "fixed:3")
    assert result.steps == 3
    assert result.accepted_length == pytest.approx((4 + 1) / 2)
    assert result.tokens_per_s * result.seconds == pytest.approx(6)


def test_without_speculation() -> None:
    """Catches a drafter that runs, or a window above 1, where none is asked for."""
    result = run(constant_trace(accepted=3, output=6), "off")
    assert (result.steps, result.draft_share, result.mean_window) == (6, 0.0, 1.0)
    assert result.accepted_length == 1.0


def test_narrower_windows_do_not_change_what_is_said() -> None:
    """Catches tokens lost or invented when windows cut accepted blocks."""
    for policy in ("off", "fixed:1", "fixed:2", "fixed:3", "threshold:0.85", "ours"):
        result = run(constant_trace(accepted=2, output=20), policy, num_requests=6)
        assert result.tokens_per_s * result.seconds == pytest.approx(6 * 20), policy
        assert result.completed == 6


def test_acceptance_of_independent_drafts_is_kept_at_every_width() -> None:
    """Catches a bias in which recorded step a draft pass stands for.

    Drafts are accepted independently with 0.6. Looked up by output position, K' = 1 would show 0.54
    (the next block) or 0.82 (the block that covers the position).
    """
    trace = synthetic_trace([0.6] * K, num_requests=64, output=200, seed=3)
    for width in (1, 2, 3):
        result = run(trace, f"fixed:{width}", num_requests=200, arrivals=Arrivals("closed", 8))
        expected = sum(0.6**k for k in range(width + 1))
        assert result.accepted_length == pytest.approx(expected, rel=0.02)


def test_batch_and_room() -> None:
    """Catches requests beyond max_num_seqs, or prompts that ignore the token budget."""
    trace = constant_trace(accepted=2, output=30, prompt=50, requests=8)
    burst = Arrivals("burst", rate_per_s=1e9, burst_size=8)
    wide = run(trace, "fixed:3", arrivals=burst, num_requests=8, max_num_seqs=8)
    narrow = run(trace, "fixed:3", arrivals=burst, num_requests=8, max_num_seqs=2)
    assert max(point.requests for point in narrow.timeline) <= 2
    assert narrow.seconds > wide.seconds
    assert narrow.ttft_ms.p99 > wide.ttft_ms.p99
    chunked = run(
        trace,
        "fixed:3",
        arrivals=burst,
        num_requests=8,
        max_num_seqs=8,
        max_num_batched_tokens=64,
    )
    assert chunked.ttft_ms.p99 > wide.ttft_ms.p99
    with pytest.raises(SimulationError, match="max_num_batched_tokens = 8"):
        run(trace, "off", max_num_batched_tokens=8, arrivals=Arrivals("closed", 4))


def test_open_load_waits_for_arrivals() -> None:
    """Catches a clock that runs ahead of requests, or queues them when nothing is running."""
    trace = constant_trace(accepted=2, output=7)
    slow = Arrivals("poisson", rate_per_s=1.0)
    result = run(trace, "fixed:3", arrivals=slow, num_requests=200)
    assert result.seconds == pytest.approx(200, rel=0.25)
    assert result.latency_ms.p50 == pytest.approx(5.83, abs=0.1)
    assert result.ttft_ms.p50 == pytest.approx(1.9, abs=0.05)


def test_bursts_come_together() -> None:
    """Catches bursts that are spread out: the second half of each waits for the first."""
    arrivals = Arrivals("burst", rate_per_s=8.0, burst_size=4)
    assert arrivals.times_ms(8, 0).tolist() == [0.0] * 4 + [500.0] * 4
    result = run(
        constant_trace(accepted=2, output=7), "off", arrivals=arrivals, num_requests=8,
        max_num_seqs=2,
    )  # fmt: skip
    assert result.ttft_ms.p99 > 3 * result.ttft_ms.p50 / 2


def test_replicas_share_the_load() -> None:
    """Catches a router that sends everything to one engine."""
    trace = constant_trace(accepted=2, output=40, requests=16)
    one = run(trace, "fixed:3", arrivals=Arrivals("closed", 16), num_requests=160)
    four = run(trace, "fixed:3", arrivals=Arrivals("closed", 16), num_requests=160, replicas=4)
    assert four.completed == 160
    assert max(point.requests for point in four.timeline) <= 4.5
    assert four.tokens_per_s > 1.5 * one.tokens_per_s
    assert four.latency_ms.p50 < one.latency_ms.p50


def test_timeline_covers_the_run() -> None:
    """Catches buckets that lose tokens when they double."""
    trace = constant_trace(accepted=2, output=200, requests=4)
    result = run(trace, "fixed:3", num_requests=40, arrivals=Arrivals("closed", 4))
    width = min(b.t_s - a.t_s for a, b in zip(result.timeline, result.timeline[1:], strict=False))
    tokens = sum(point.tokens_per_s for point in result.timeline) * width
    assert tokens == pytest.approx(40 * 200, rel=1e-6)
    assert 10 < len(result.timeline) <= 256


def test_ours_is_at_least_as_good_as_the_best_fixed_setting() -> None:
    """Catches a planner that loses somewhere along the load, in the simulated world.

    A margin of 4 % against native and a few steps of hysteresis are the price of steadiness.
    """
    trace = synthetic_trace([0.85, 0.75, 0.6], num_requests=64, output=120, spread=0.8, prompt=8)
    table = example_table(K)
    for concurrency in (1, 8, 64, 256):
        load = {
            "arrivals": Arrivals("closed", concurrency),
            "num_requests": 8 * max(concurrency, 8),
            "row_lag": 1,
        }
        best = max(
            run(trace, policy, table, **load).tokens_per_s
            for policy in ("off", "fixed:1", "fixed:2", "fixed:3")
        )
        ours = run(trace, "ours", table, **load).tokens_per_s
        assert ours > 0.96 * best, concurrency


def test_equal_runs_are_equal() -> None:
    """Catches state left behind by an earlier run."""
    trace = synthetic_trace([0.7] * K, num_requests=16, output=50, spread=1.0)
    load = {"arrivals": Arrivals("poisson", rate_per_s=100.0), "num_requests": 50}
    first, second = (run(trace, "ours", **load) for _ in range(2))
    same = {"simulated_steps_per_minute": 0.0}
    assert first.model_copy(update=same) == second.model_copy(update=same)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fastest", "not known"),
        ("fixed:4", "from 0 to 3"),
        ("fixed:1.5", "integer"),
        ("threshold", "threshold:P"),
        ("threshold:2", "from 0 to 1"),
        ("ours:3", "not known"),
        ("fixed:x", "no number"),
    ],
)
def test_bad_policies_are_refused(text: str, words: str) -> None:
    """Catches a misspelt policy that simulates something else."""
    with pytest.raises(SimulationError, match=words):
        parse_policy(text, K)


def test_bad_scenarios_are_refused() -> None:
    """Catches settings that would simulate nothing, or something that was not asked for."""
    with pytest.raises(SimulationError, match="rate above 0"):
        Arrivals("poisson")
    with pytest.raises(SimulationError, match="concurrency = 0"):
        Arrivals("closed", 0)
    base = Scenario(parse_policy("ours", K))
    with pytest.raises(SimulationError, match="row_lag = 9"):
        replace(base, row_lag=9)
    with pytest.raises(SimulationError, match="not simulated"):
        replace(base, options=replace(base.options, mixed=True))
