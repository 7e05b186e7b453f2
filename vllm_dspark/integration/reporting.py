"""Worker side of step reports: confidence rows and step times, without waiting for a device."""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_dspark.integration.report import AdmittedDrafts, StepOrder, StepReport
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.plan import owner_id

_NO_OWNERS = np.zeros(0, dtype=np.int64)
_NO_ROWS = np.zeros((0, 0), dtype=np.float32)
# Copies under way at most; a device that is further behind than this loses rows, never time.
_MAX_PENDING = 4


class Owners:
    """Owner id of each request on this worker; a preempted request comes back as another owner.

    Mirrors the engine core's count, from the same scheduler outputs.
    """

    def __init__(self) -> None:
        self._generation: dict[str, int] = {}
        self._owner: dict[str, int] = {}

    def update(self, scheduler_output: Any) -> None:
        """Follow one scheduler output, before the step runs."""
        for request_id in scheduler_output.finished_req_ids:
            self._generation.pop(request_id, None)
            self._owner.pop(request_id, None)
        for request_id in scheduler_output.preempted_req_ids or ():
            self._generation[request_id] = self._generation.get(request_id, 0) + 1
        for request in scheduler_output.scheduled_new_reqs:
            name = request.req_id
            self._owner[name] = owner_id(name, self._generation.get(name, 0))

    def of(self, request_ids: Iterable[str]) -> npt.NDArray[np.int64]:
        """Owner ids in order; 0, nobody, for requests never started here."""
        return np.fromiter((self._owner.get(name, 0) for name in request_ids), np.int64)


@dataclass(frozen=True, slots=True)
class _PendingRows:
    stamp: int
    request_ids: tuple[str, ...]
    owners: npt.NDArray[np.int64]
    host: torch.Tensor  # [>= m, K] float32 logits, being filled; [m, K] probabilities once taken
    event: Any  # recorded behind the copy; None when the rows are there already


class ConfidenceRows:
    """Hands confidence rows of past draft passes over as soon as their copy has landed.

    On a device the copy of the logits follows the draft pass on its own stream of work: a few
    kilobytes, cheaper than leading them to another stream. Rows are recorded by the thread that
    launches steps and taken by the one that waits for outputs.
    """

    def __init__(self, device: torch.device) -> None:
        self._asynchronous = device.type != "cpu"
        self._pending: deque[_PendingRows] = deque()
        # Page-locked tensors and events of rows that were handed over, for use again.
        self._spare: list[tuple[torch.Tensor, Any]] = []
        self._lock = threading.Lock()

    def record(
        self,
        stamp: int,
        request_ids: tuple[str, ...],
        owners: npt.NDArray[np.int64],
        logits: torch.Tensor,  # [m, K] float32
    ) -> None:
        """Start copying the rows of the pass that was just launched."""
        host, event = self._buffer(logits)
        host[: len(logits)].copy_(logits, non_blocking=True)
        if event is not None:
            event.record()
        with self._lock:
            if len(self._pending) == _MAX_PENDING:
                self._pending.popleft()
            self._pending.append(_PendingRows(stamp, request_ids, owners, host, event))

    def _buffer(self, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """A host tensor of at least as many rows that no copy is writing, and its event."""
        with self._lock:
            while self._spare:
                host, event = self._spare.pop()
                if len(host) >= len(logits) and host.shape[1] == logits.shape[1]:
                    return host, event
        if not self._asynchronous:
            return torch.empty_like(logits), None
        rows = 1 << max(len(logits) - 1, 0).bit_length()
        host = torch.empty((rows, logits.shape[1]), dtype=logits.dtype, pin_memory=True)
        return host, torch.cuda.Event()

    def take(self) -> _PendingRows | None:
        """Newest rows that have arrived, as probabilities; older ones are superseded by it."""
        landed = []
        with self._lock:
            pending = self._pending
            while pending and (pending[0].event is None or pending[0].event.query()):
                landed.append(pending.popleft())
        if not landed:
            return None
        newest = landed[-1]
        probabilities = torch.sigmoid(newest.host[: len(newest.request_ids)])
        with self._lock:
            self._spare.extend((rows.host, rows.event) for rows in landed)
        return replace(newest, host=probabilities, event=None)


class StepClock:
    """Wall time of a step's parts on a CPU, where work is done when the call returns."""

    def __init__(self) -> None:
        self.total_ms = 0.0
        self.draft_ms: float | None = None
        self.draft_width: int | None = None  # of the pass that took draft_ms; None: K
        self._entered = 0.0

    def reset(self) -> None:
        """Start a step."""
        self.total_ms, self.draft_ms = 0.0, None

    def __enter__(self) -> "StepClock":
        self._entered = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.total_ms += (time.perf_counter() - self._entered) * 1e3

    def timing(self, input_batch: Any, width: int) -> StepTiming:
        """The step as a sample of the cost table; call after the step."""
        num_requests = input_batch.num_reqs
        # offsets rather than scheduled drafts: device windows change the former only
        windows = np.diff(input_batch.cu_num_logits_np)
        if (windows == 1).all():
            shape = StepShape.SINGLE
        elif (windows == width + 1).all():
            shape = StepShape.NATIVE
        else:
            shape = StepShape.RAGGED
        lengths = input_batch.seq_lens_cpu_upper_bound[:num_requests]
        return StepTiming(
            mode=StepMode.MIXED if input_batch.has_prefill else StepMode.EAGER,
            shape=shape,
            num_requests=num_requests,
            num_tokens=input_batch.num_tokens_after_padding,
            kv_tokens=int(lengths.sum()),
            forward_ms=self.total_ms - (self.draft_ms or 0.0),
            draft_ms=self.draft_ms,
            draft_width=self.draft_width if self.draft_ms is not None else None,
            prefill_rows=prefill_rows(input_batch),
        )


def prefill_rows(input_batch: Any) -> int:
    """Tokens of prompts in a step."""
    if not input_batch.has_prefill:
        return 0
    return int(input_batch.num_scheduled_tokens[input_batch.is_prefilling_np].sum())


class StepReporter:
    """Builds the report of each step on the output rank."""

    def __init__(self, device: torch.device, width: int) -> None:
        self.owners = Owners()
        self.clock = StepClock() if device.type == "cpu" else None
        self.late_timings: Callable[[], tuple[StepTiming, ...]] | None = None  # of a device
        self._rows = ConfidenceRows(device)
        self._width = width
        self.cost_table: str | None = None  # set once, by profiling
        self.refused = ""  # why this worker executes no trim plans, if so

    @property
    def has_news(self) -> bool:
        """Whether the engine core waits for more than rows and times of steps."""
        return self.cost_table is not None or bool(self.refused)

    def record_rows(self, order: StepOrder, input_batch: Any, logits: torch.Tensor) -> None:
        """Rows of the pass that was just launched; logits: [num_reqs, columns drafted]."""
        ids = tuple(input_batch.req_ids)
        self._rows.record(order.step_id, ids, self.owners.of(ids), logits[: len(ids)])

    def timings(self, input_batch: Any) -> tuple[StepTiming, ...]:
        """Of the step that was just run, where that is known at once."""
        return () if self.clock is None else (self.clock.timing(input_batch, self._width),)

    def report(
        self,
        timings: tuple[StepTiming, ...],
        admitted: Callable[[], AdmittedDrafts] | None,
    ) -> StepReport:
        """What is known when the step's output has arrived.

        admitted: drafts let through in the step, if windows were set on the worker.
        """
        table, self.cost_table = self.cost_table, None
        if self.late_timings is not None:
            timings = self.late_timings()
        counts = None if admitted is None else admitted()
        rows = self._rows.take()
        if rows is None:
            found = StepReport(0, (), _NO_OWNERS, _NO_ROWS, timings, counts, table)
        else:
            found = StepReport(
                rows.stamp,
                rows.request_ids,
                rows.owners,
                rows.host.numpy(),
                timings,
                counts,
                table,
            )
        return replace(found, refused=self.refused) if self.refused else found
