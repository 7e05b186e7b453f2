"""How soon windows settle after a change of load."""

import random

import pytest

from vllm_dspark.bench.settling import StepSums, settling


def phases(parts: list[list[tuple[int, float]]]) -> tuple[list[StepSums], list[float], float]:
    """Running sums of parts given as (requests, mean window) per step of a tenth of a second."""
    sums: list[StepSums] = [(0.0, 0, 0)]
    starts, now = [], 0.0
    for part in parts:
        starts.append(now)
        for requests, window in part:
            now += 0.1
            _, rows, windows = sums[-1]
            sums.append((now, rows + requests, windows + round(requests * window)))
    return sums, starts, now


def test_steps_count_from_the_load_on() -> None:
    """Catches prefill steps, in which requests are still missing, counted as slow settling."""
    alone = [(1, 8.0)] * 150
    rise = [(n, 8.0) for n in range(10, 230, 20)]
    full = [(256, 6.0)] * 7 + [(256, 3.0)] * 200
    fall = [(n, 3.0) for n in range(250, 1, -10)] + [(1, 8.0)] * 120
    steps, starts, end = phases([alone, rise + full, fall])
    found = settling(steps, starts, end, [1, 256, 1])
    assert [entry["settled_after"] for entry in found] == [0, 7, 0]
    assert [entry["steps_before"] for entry in found] == [0, len(rise), len(fall) - 120]
    assert [round(entry["final_window"], 3) for entry in found] == [8.0, 3.0, 8.0]


def test_noise_of_single_requests_is_not_unrest_but_a_wrong_level_is() -> None:
    source = random.Random(1)
    noisy = [(256, source.gauss(3.0, 0.13)) for _ in range(300)]
    steps, starts, end = phases([noisy])
    assert settling(steps, starts, end, [256])[0]["settled_after"] == 0
    creeping = [(256, 3.0 + 3.0 * 0.97**i) for i in range(300)]
    steps, starts, end = phases([creeping])
    # 3 * 0.97^s averaged over ten steps is 5 % of 3 at s = 95
    assert settling(steps, starts, end, [256])[0]["settled_after"] == pytest.approx(95, abs=4)


def test_too_short_a_phase_says_nothing() -> None:
    steps, starts, end = phases([[(4, 3.0)] * 40])
    assert settling(steps, starts, end, [4])[0] == {
        "load": 4,
        "steps": 40,
        "steps_before": 0,
        "final_window": None,
        "settled_after": None,
    }
    assert settling([], [0.0], 1.0, [4])[0]["settled_after"] is None
