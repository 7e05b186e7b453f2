"""planning.allocation: ranking of all drafts of a step, gains and admission."""

import numpy as np

from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.selection import sort_keys
from vllm_dspark.simulation.core.state import (
    ALIVE,
    ASCENDING,
    KEYS,
    P_CAPACITY,
    P_FLOOR,
    Planner,
    Ranked,
)

_FORCED = np.float32(2.0)
_BARRED = np.float32(-1.0)


@inner
def survive(values, num_requests: int, width: int):
    """Running product along positions, in place; position-major."""
    for j in range(num_requests, num_requests * width):
        values[j] *= values[j - num_requests]


@inner
def rank(p: Planner, num_requests: int, width: int, floor: int) -> Ranked:
    """Rank the survivals under the capacities, every request keeping `floor` drafts."""
    n, least, most, forced = num_requests, 0, 0, 0.0
    alive, keys, ascending = p.floats[ALIVE], p.floats[KEYS], p.floats[ASCENDING]
    capacities, floors = p.ints[P_CAPACITY], p.ints[P_FLOOR]
    for i in range(n):
        floors[i] = min(capacities[i], floor)
        least += floors[i]
        most += capacities[i]
    for k in range(width):
        for i in range(n):
            key = alive[k * n + i]
            if k < floors[i]:
                forced += key
                key = _FORCED
            elif k >= capacities[i]:
                key = _BARRED
            keys[k * n + i] = key
    size = n * width
    sort_keys(keys, ascending, p.counts, size)
    return Ranked(least, most, forced, size)


@inner
def gain(p: Planner, r: Ranked, start: int, stop: int) -> float:
    """Summed survival of the ranks start <= rank < stop."""
    total = 0.0
    for j in range(r.size - stop, r.size - start):
        total += p.floats[ASCENDING, j]
    return total


@inner
def total_gain(p: Planner, r: Ranked) -> float:
    """Expected accepted drafts if all are admitted: Ranking.total_gain."""
    return r.forced + gain(p, r, r.least, r.most)


@inner
def admit(p: Planner, r: Ranked, num_requests: int, budget: int, out):
    """Admitted drafts per request, summing to `budget`: Ranking.admit."""
    n = num_requests
    out[:n] = 0
    if budget == 0:
        return
    keys, threshold = p.floats[KEYS], p.floats[ASCENDING, r.size - budget]
    admitted = 0
    for k in range(r.size // n):
        for i in range(n):
            if keys[k * n + i] >= threshold:
                out[i] += 1
                admitted += 1
    j = r.size - 1
    while admitted > budget:  # ties at the threshold: the last of them stay out
        if keys[j] == threshold:
            out[j % n] -= 1
            admitted -= 1
        j -= 1
