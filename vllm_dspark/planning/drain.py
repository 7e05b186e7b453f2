r"""The drain guard: near the end of a batch, tokens of the last requests are worth more.

Goodput counts every token alike. That is right while new requests take the place of
finished ones. When nothing arrives any more, the batch is over when its slowest
request is, and a token that trimming denies to that request must be made up for in
the tail, alone, at T(K + 1 rows) + D(1) for Y tokens. So a trimmed step is taken
only if the time it saves exceeds what it costs the critical requests later:

    ms_native - ms_trim  >  max over critical r of (Y_r - Y'_r) * tail_ms / Y_r

with Y_r, Y'_r the tokens r is expected to get from the native and the trimmed step,
and r critical if its remaining steps, tokens left over Y_r, are at least half of the
largest such number (lengths are upper bounds, so the exact maximum means little).
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]

# The batch counts as draining once it is this much smaller than when a request
# last arrived; smaller dips are ordinary gaps between arrivals.
_SHRUNK = 0.75
_CRITICAL = 0.5


@dataclass
class DrainWatch:
    """Tells draining batches from ones that are being refilled."""

    shrunk: bool = False  # the batch is draining as soon as nothing waits
    _largest: int = 0  # batch size since a request last arrived

    def update(self, num_requests: int, num_arrived: int, num_waiting: int) -> bool:
        """Note one step; True if the batch is draining."""
        if num_arrived > 0:
            self._largest = num_requests
        self._largest = max(self._largest, num_requests)
        self.shrunk = num_requests <= _SHRUNK * self._largest
        return num_waiting == 0 and self.shrunk


def delay_ms(
    survival: FloatArray,  # [K, n]
    native: IntArray,  # [n] drafts of the native step
    admitted: IntArray,  # [n] drafts of the trimmed one
    remaining: IntArray,  # [n]
    tail_ms: float,
) -> float:
    """What a trimmed step costs the critical requests in the tail."""
    positions = np.arange(survival.shape[0], dtype=np.int32)[:, None]
    full = 1.0 + np.where(positions < native, survival, 0).sum(axis=0)
    kept = 1.0 + np.where(positions < admitted, survival, 0).sum(axis=0)
    steps_left = remaining / full
    critical = steps_left >= _CRITICAL * steps_left.max()
    return float(((full - kept) / full)[critical].max() * tail_ms)
