"""Windows and draft widths that tests prescribe instead of the planner.

Options `test_windows` and `test_draft_width`. Any windows and widths give the same output at T=0
and the same distribution at T>0, so tests force awkward ones. Values depend on seed, step and
position in the batch alone.
"""

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.integer]
TestWindows = str | int | tuple[int, ...] | None
TestWidth = str | int | tuple[int, ...] | None

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


def forced_width(spec: TestWidth, seed: int, step_id: int, num_positions: int) -> int:
    """Columns of the draft pass of a step, between 1 and K."""
    if spec == "random":
        # Another stream than that of the windows of the same step.
        generator = np.random.default_rng((seed & _MASK, step_id & _MASK, 1))
        return int(generator.integers(1, num_positions, endpoint=True))
    if isinstance(spec, int):
        return min(spec, num_positions)
    if isinstance(spec, tuple):
        return min(spec[step_id % len(spec)], num_positions)
    raise ValueError(f"test_draft_width = {spec!r} prescribes no width")
