"""Sorting the ranking keys of a step: most of what planning a step costs.

Keys are survivals in [0, 1], or the marks of barred (below 0) and forced drafts (above 1). They are
spread over as many buckets as there are keys, by their square root because survivals crowd towards
0; what is left is close to sorted. Square root and rounding are monotone, so bucket order is key
order.
"""

import math

import numpy as np

from vllm_dspark.simulation.core.jit import inner

_CROWDED = 24  # a fuller bucket is sorted by itself, before insertion becomes quadratic


@inner
def sort_keys(keys, ascending, counts, size: int):
    """ascending[:size] = keys[:size] sorted; `counts` is working space of size + 3."""
    counts[: size + 3] = 0
    for j in range(size):
        counts[_bucket(keys[j], size) + 1] += 1
    crowded = False
    start = 0
    for b in range(size + 3):
        crowded = crowded or counts[b] > _CROWDED
        start += counts[b]
        counts[b] = start
    for j in range(size):
        b = _bucket(keys[j], size)
        ascending[counts[b]] = keys[j]
        counts[b] += 1
    # counts[b] is now where bucket b ends.
    if crowded:
        start = 0
        for b in range(size + 2):
            if counts[b] - start > _CROWDED:
                ascending[start : counts[b]].sort()
            start = counts[b]
    for j in range(1, size):
        key = ascending[j]
        i = j
        while i > 0 and ascending[i - 1] > key:
            ascending[i] = ascending[i - 1]
            i -= 1
        ascending[i] = key


@inner
def _bucket(key, size: int) -> int:
    """0 for barred keys, 1 .. size for survivals, size + 1 for forced ones."""
    if key < 0.0:
        return 0
    if key > 1.0:
        return size + 1
    return 1 + int(np.float32(math.sqrt(key)) * np.float32(size - 1))
