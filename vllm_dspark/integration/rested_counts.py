"""How many requests have a draft verified, judged and accepted at each position, in steps at rest.

Counted from the numbers of tokens that came back and nothing else (resting.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]


def more_than(numbers: bytes, most: int) -> list[int]:
    """[most + 1] how many of the numbers are above 0, 1, ..., `most`; none is above most + 1.

    In bytes they are counted faster than in anything else that holds small numbers.
    """
    found = [0] * (most + 1)
    total = 0
    for number in range(most, -1, -1):
        total += numbers.count(number + 1)
        found[number] = total
    return found


@dataclass(frozen=True, slots=True)
class VerifiedDrafts:
    """Of requests in each of some steps: [n], and how many of those reach each position, [K]."""

    counts: npt.NDArray[np.uint8]
    reached: list[int]

    @staticmethod
    def of(counts: npt.NDArray[np.uint8], width: int) -> "VerifiedDrafts":
        """Count them."""
        return VerifiedDrafts(counts, more_than(counts.tobytes(), width - 1))


@dataclass(frozen=True, slots=True)
class RestedStep:
    """Requests whose verified, judged and accepted drafts reach a position, [K] each.

    Of a step of requests that had all their drafts and did not stop; no drafts were invalid.
    """

    verified: list[int]
    judged: list[int]
    accepted: list[int]

    @staticmethod
    def native(sampled: bytes, width: int) -> "RestedStep":
        """All drafts were verified; sampled: tokens of each request."""
        num_rows = len(sampled)
        accepted = more_than(sampled, width)[1:]
        # A draft is judged if the one before it was accepted.
        return RestedStep([num_rows] * width, [num_rows, *accepted[:-1]], accepted)

    @staticmethod
    def windowed(steps: Sequence[bytes], drafts: VerifiedDrafts, width: int) -> "RestedStep":
        """Of several steps, [n] each, whose windows were set by the scheduler."""
        together = b"".join(steps)
        sampled = np.frombuffer(together, dtype=np.uint8).reshape(len(steps), -1)
        judged = np.minimum(sampled, drafts.counts).tobytes()
        return RestedStep(
            [count * len(steps) for count in drafts.reached],
            more_than(judged, width - 1),
            more_than(together, width)[1:],
        )

    @staticmethod
    def trimmed(sampled: bytes, admitted: IntArray, width: int) -> "RestedStep":
        """Drafts that the worker let through were verified, [n] in the order of `sampled`."""
        tokens = np.frombuffer(sampled, dtype=np.uint8)
        verified = admitted.astype(np.uint8)
        accepted = np.minimum(tokens - 1, verified)
        judged = np.minimum(tokens, verified)
        counts = (more_than(each.tobytes(), width - 1) for each in (verified, judged, accepted))
        return RestedStep(*counts)
