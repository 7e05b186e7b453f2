"""Windows given from outside the planner (option `test_windows`), for tests and debugging."""

from collections.abc import Sequence

import numpy as np


class GivenWindows:
    """Windows per step by rule: full, one size, a repeated list, or seeded random ones.

    The sequence depends on the seed and on the order of steps alone, so a run can be repeated.
    """

    def __init__(
        self, rule: str | int | Sequence[int], num_speculative_tokens: int, seed: int
    ) -> None:
        self._rule = rule
        self._full = num_speculative_tokens + 1
        self._random = np.random.default_rng(seed)
        self._step = 0

    def next(self, num_requests: int) -> list[int]:
        """Windows (1..K+1) of the next step for its requests, in scheduler order."""
        step, self._step = self._step, self._step + 1
        rule = self._rule
        if rule == "random":
            return self._random.integers(1, self._full + 1, size=num_requests).tolist()
        if isinstance(rule, int):
            return [rule] * num_requests
        if isinstance(rule, str):
            return [self._full] * num_requests
        return [rule[(step + i) % len(rule)] for i in range(num_requests)]
