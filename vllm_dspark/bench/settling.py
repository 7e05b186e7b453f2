"""How soon windows follow a change of load: steps until their mean is what it will stay at.

A phase's load is reached with the first step in which (nearly) as many requests verify as the phase
holds: before that, prefills enter or the requests of the last phase run out. From there on, with
w(s) the mean window of step s over its requests,

    final  = mean of w over the last 100 steps of the phase
    settled = the least s such that the mean of w over steps s .. s+9 lies within 5 % of final

where means are over requests of all steps concerned. A single request's window jumps from step to
step as its confidences do, so ten steps are looked at together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

WITHIN = 0.05
_FINAL_STEPS = 100
_TOGETHER = 10
_REACHED = 0.9  # of a rising load: a request may be between two steps

# Of an engine since it started, after a step: time, requests that verified, their windows' sum.
StepSums = tuple[float, int, int]


def settling(
    steps: Sequence[StepSums], starts: Sequence[float], end: float, loads: Sequence[int]
) -> list[dict[str, Any]]:
    """One entry per phase; `settled_after` is None where a phase is too short to tell."""
    found = []
    edges = [*starts, end]
    last_load = 0
    for load, (start, stop) in zip(loads, itertools.pairwise(edges), strict=True):
        rows = [
            (second[1] - first[1], second[2] - first[2])
            for first, second in itertools.pairwise(steps)
            if start < second[0] <= stop and second[1] > first[1]
        ]
        rising = load > last_load
        found.append({"load": load, **_of_phase(rows, load, rising=rising)})
        last_load = load
    return found


def _of_phase(rows: Sequence[tuple[int, int]], load: int, *, rising: bool) -> dict[str, Any]:
    reached = [
        i for i, (n, _) in enumerate(rows) if (n >= _REACHED * load if rising else n <= load)
    ]
    waited = reached[0] if reached else len(rows)
    held = rows[waited:]
    entry: dict[str, Any] = {"steps": len(held), "steps_before": waited}
    if len(held) < _FINAL_STEPS + _TOGETHER:
        return {**entry, "final_window": None, "settled_after": None}
    final = _mean(held[-_FINAL_STEPS:])
    settled = next(
        (
            s
            for s in range(len(held) - _TOGETHER + 1)
            if abs(_mean(held[s : s + _TOGETHER]) / final - 1.0) <= WITHIN
        ),
        None,
    )
    return {**entry, "final_window": final, "settled_after": settled}


def _mean(rows: Sequence[tuple[int, int]]) -> float:
    return sum(windows for _, windows in rows) / sum(requests for requests, _ in rows)
