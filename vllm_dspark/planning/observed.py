"""A cost table from steps that were served, for engines whose start-up measurement was refused.

An engine that starts on a busy machine gets no table (profiling refuses noise) and would run full
windows for ever. While it serves, every step is a sample all the same: one cell per token count,
the median of its newest samples, no KV axis. The table is tried again and again until it is fit to
price steps (cost.py refuses too few samples, flat and falling ones); sizes that were never served
are priced between and beyond those that were, so at least two different loads must have been seen.
"""

from collections import deque

from vllm_dspark.errors import CostTableError
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape, StepTiming, build_cost_table

_NEWEST = 32  # samples per size that count
_ENOUGH = 8  # samples from which on a size is a cell
_PERIOD = 64  # steps between two attempts
_MAX_SIZES = 512


class ObservedCosts:
    """Collects timings of decode steps; `table` once they make one."""

    def __init__(self, mode: StepMode, width: int) -> None:
        self._mode = mode
        self._width = width  # K
        self._samples: dict[int, deque[StepTiming]] = {}
        self._num_added = 0
        self.refusal = "nothing served yet"  # why the last attempt gave no table

    def add(self, timing: StepTiming) -> CostTable | None:
        """Take in a step; a table if it is due and can be made.

        Steps of other modes (prefill rows among them) and without a draft pass are left out.
        """
        if timing.mode is not self._mode or timing.draft_ms is None:
            return None
        if timing.draft_width is not None:  # forced by a test: no pass of full width
            return None
        size = timing.num_tokens
        if size not in self._samples and len(self._samples) >= _MAX_SIZES:
            return None
        self._samples.setdefault(size, deque(maxlen=_NEWEST)).append(timing)
        self._num_added += 1
        return self._table() if self._num_added % _PERIOD == 0 else None

    def _table(self) -> CostTable | None:
        cells = [samples for samples in self._samples.values() if len(samples) >= _ENOUGH]
        samples = [
            StepTiming(
                self._mode,
                StepShape.RAGGED,
                timing.num_requests,
                timing.num_tokens,
                kv_tokens=0,
                forward_ms=timing.forward_ms,
                draft_ms=timing.draft_ms,
            )
            for cell in cells
            for timing in cell
        ]
        if max((timing.num_tokens for timing in samples), default=0) <= self._width:
            self.refusal = "no full window was served often enough"
            return None
        try:
            return build_cost_table(samples)
        except CostTableError as error:
            self.refusal = str(error)
            return None
