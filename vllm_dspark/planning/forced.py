"""Windows that tests prescribe instead of the planner (`test_windows`).

Any windows give the same output at T=0 and the same distribution at T>0, so tests
force awkward ones. Values depend on seed, step and position in the batch alone.
"""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
TestWindows = str | int | tuple[int, ...] | None

_MASK = 2**64 - 1


def forced_windows(
    spec: TestWindows, seed: int, step_id: int, num_drafts: IntArray, num_positions: int
) -> IntArray:
    """Windows [n], each between 1 and 1 + the drafts there are."""
    num_requests = num_drafts.size
    if spec == "full":
        wanted = np.full(num_requests, num_positions + 1)
    elif spec == "random":
        generator = np.random.default_rng((seed & _MASK, step_id & _MASK))
        wanted = generator.integers(1, num_positions + 1, num_requests, endpoint=True)
    elif isinstance(spec, int):
        wanted = np.full(num_requests, spec)
    elif isinstance(spec, tuple):
        wanted = np.array(spec)[(step_id + np.arange(num_requests)) % len(spec)]
    else:
        raise ValueError(f"test_windows = {spec!r} prescribes no windows")
    return np.clip(wanted, 1, num_drafts + 1).astype(np.int32)
