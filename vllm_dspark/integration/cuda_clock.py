"""Step times on CUDA: three events on the main stream, read once passed and never waited for.

The first event is recorded where vLLM's step-timing hook is called, right before the target's
forward pass; the second when drafting begins, so that logits and rejection are in the first part;
the third when drafting has been launched. One step in a few is timed: corrections of the cost table
need no more, and an untimed step pays nothing. Steps with prefill rows are all timed: nothing else
says what they cost, and beside their launches three events are nothing.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.async_utils import StepTimingCollector

from vllm_dspark.integration.reporting import prefill_rows
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming

PERIOD = 4  # of decode steps, one in this many is timed
_MAX_PENDING = 8
_Events = tuple[torch.cuda.Event, ...]  # forward start, draft start, draft end


class CudaClock(StepTimingCollector):
    """Stands where vLLM's collector stands in the runner (`step_timing`)."""

    def __init__(self, width: int, ungraphed: StepMode) -> None:
        super().__init__()
        self._width = width
        self._ungraphed = ungraphed  # mode of steps that no full graph fits
        self._steps = 0
        self._spare: list[_Events] = []
        self._running: _Events | None = None
        self._described: Callable[[], StepTiming] = _nothing
        self._pending: deque[tuple[_Events, Callable[[], StepTiming], bool, int | None]] = deque()
        self.period = PERIOD
        self.armed = False  # set by the runner for steps that an engine core ordered
        self.next_start: torch.cuda.Event | None = None  # recorded once, by profiling

    # ---- vLLM's hooks

    def record_batch(self, input_batch: Any, full_cudagraph: bool) -> None:
        """Called before the forward pass of every step."""
        super().record_batch(input_batch, full_cudagraph)
        self._running = None
        if not self.armed:
            return
        self.armed = False
        self._steps += 1
        due = input_batch.has_prefill or self._steps % self.period == 0
        if not due or len(self._pending) >= _MAX_PENDING:
            return
        self._running = self._spare.pop() if self._spare else _events()
        self._described = _description(input_batch, full_cudagraph, self._width, self._ungraphed)

    def forward_start(self) -> None:
        """Called right before the forward pass."""
        super().forward_start()
        if self.next_start is not None:
            self.next_start.record()
            self.next_start = None
        if self._running is not None:
            self._running[0].record()

    # ---- called by the speculator

    def draft_start(self) -> None:
        """Verification has been launched, drafting comes next."""
        if self._running is not None:
            self._running[1].record()

    def draft_end(self, drafted: bool, columns: int | None = None) -> None:
        """The step has been launched; drafted: it made a block, of so many columns (None: K)."""
        if self._running is not None:
            self._running[2].record()
            self._pending.append((self._running, self._described, drafted, columns))
            self._running = None

    # ---- for reports

    def take(self) -> tuple[StepTiming, ...]:
        """Steps whose times have become known."""
        found = []
        while self._pending and self._pending[0][0][2].query():
            events, described, drafted, columns = self._pending.popleft()
            start, middle, end = events
            found.append(
                replace(
                    described(),
                    forward_ms=start.elapsed_time(middle),
                    draft_ms=middle.elapsed_time(end) if drafted else None,
                    draft_width=columns if drafted else None,
                )
            )
            self._spare.append(events)
        return tuple(found)


def _events() -> _Events:
    return tuple(torch.cuda.Event(enable_timing=True) for _ in range(3))


def _nothing() -> StepTiming:
    raise AssertionError("no step was described")


def _description(
    input_batch: Any, full_graph: bool, width: int, ungraphed: StepMode
) -> Callable[[], StepTiming]:
    """The step as a sample without times, worked out only when the times are there."""
    num_requests, num_tokens = input_batch.num_reqs, input_batch.num_tokens_after_padding
    lengths = input_batch.seq_lens_cpu_upper_bound
    offsets = input_batch.cu_num_logits_np
    trimmed_on_device = input_batch.max_query_len is not None
    mode = StepMode.FULL if full_graph else ungraphed
    if input_batch.has_prefill:
        mode = StepMode.MIXED

    prompt_rows = prefill_rows(input_batch)

    def describe() -> StepTiming:
        windows = np.diff(offsets)
        if trimmed_on_device:
            shape = StepShape.RAGGED
        elif (windows == 1).all():
            shape = StepShape.SINGLE
        elif (windows == width + 1).all():
            shape = StepShape.NATIVE
        else:
            shape = StepShape.RAGGED
        kv_tokens = int(lengths[:num_requests].sum())
        return StepTiming(
            mode, shape, num_requests, num_tokens, kv_tokens, 0.0, prefill_rows=prompt_rows
        )

    return describe
