"""Executor of trim plans on CUDA: one kernel ranks and lays out the step, nothing is waited for.

The host knows the budget and so the size of the step, hence the graph; who gets which drafts is
found on the device (kernels/windows.py) from the confidence logits that the last draft pass left in
its buffer, and only there. The host's copies of lengths are a stand-in with the right sum; what was
admitted comes back with the step's output. A native step costs a few array writes on the host.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_dspark.errors import DSparkError
from vllm_dspark.integration.device_windows import DeviceWindows
from vllm_dspark.integration.report import AdmittedDrafts
from vllm_dspark.kernels.windows import (
    WindowBuffers,
    WindowCalibration,
    WindowRequests,
    allocate_windows,
)
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.table import RankingParameters

IntArray = npt.NDArray[np.integer]
FloatArray = npt.NDArray[np.float32]

# Request counts that a launch is compiled for: its time grows with the padded count.
_SIZES = (16, 64, 256, 1024)
# Arrays start at multiples of this, so that every pointer is equally aligned: else Triton compiles
# the kernel again.
_ALIGN = 16
_NUM_ARRAYS = 6


@dataclass(frozen=True)
class _Staging:
    """One copy to the device per trimmed step: six int32 arrays [P], the budget, three [2, K]."""

    size: int  # P
    stride: int
    tables: int  # where the [2, K] float32 tables start
    device: torch.Tensor  # int32
    requests: WindowRequests  # views of `device`; idx_mapping is replaced per step
    budget: torch.Tensor
    calibration: WindowCalibration

    @staticmethod
    def make(size: int, width: int, device: torch.device) -> "_Staging":
        stride = -(-size // _ALIGN) * _ALIGN
        table = -(-2 * width // _ALIGN) * _ALIGN
        tables = _NUM_ARRAYS * stride + _ALIGN
        buffer = torch.zeros(tables + 3 * table, dtype=torch.int32, device=device)
        rows, usable, drafts, num_rows, capacity, floor = (
            buffer[i * stride : i * stride + size] for i in range(_NUM_ARRAYS)
        )
        slope, offset, prior = (
            buffer[tables + i * table :][: 2 * width].view(torch.float32).view(2, width)
            for i in range(3)
        )
        return _Staging(
            size,
            stride,
            tables,
            buffer,
            WindowRequests(rows, usable, drafts, num_rows, capacity, floor, rows),
            buffer[_NUM_ARRAYS * stride :][:1],
            WindowCalibration(slope[0], slope, offset, prior, logits=True),
        )

    def host_arrays(self) -> tuple[torch.Tensor, npt.NDArray[np.int32]]:
        """A page-locked twin of `device`, zeroed."""
        pinned = self.device.device.type == "cuda"
        tensor = torch.empty(self.device.shape, dtype=torch.int32, pin_memory=pinned)
        array: npt.NDArray[np.int32] = tensor.numpy()
        array.fill(0)
        return tensor, array


class CudaWindows(DeviceWindows):
    """`DeviceWindows` of a runner on CUDA (or, in tests, on CPU tensors under the interpreter)."""

    exact_on_host = False

    def __init__(self, runner: Any, tp_group: Any) -> None:
        super().__init__(runner, tp_group)
        device = runner.device
        self._confidence: torch.Tensor = runner.speculator.confidence_logits
        self._last_pass = 0
        self._row_of_slot = np.zeros(runner.max_num_reqs, dtype=np.int32)
        self._starts: torch.Tensor = runner.input_buffers.query_start_loc
        sizes = sorted({min(size, runner.max_num_reqs) for size in (*_SIZES, runner.max_num_reqs)})
        self._staging = [_Staging.make(size, self._width, device) for size in sizes]
        self._buffers = WindowBuffers.empty(runner.max_num_reqs, 0, 0, device)
        self._tables: FloatArray = np.zeros((3, 2, self._width), dtype=np.float32)
        self._tables_of: Calibration | None = None
        self._num_drafts: IntArray = np.zeros(0, dtype=np.int32)  # of the step being prepared
        self._num_rows: IntArray = np.zeros(0, dtype=np.int32)
        self._admitted: tuple[list[str], torch.Tensor] | None = None

    # ---- called by our runner

    def record(self, step_id: int, idx_mapping: IntArray, logits: torch.Tensor) -> None:
        """Note where the rows of the pass are; the rows stay where the drafter wrote them."""
        self._row_stamp[idx_mapping] = step_id
        self._row_of_slot[idx_mapping] = np.arange(len(idx_mapping), dtype=np.int32)
        self._last_pass = step_id

    def admitted(self) -> Callable[[], AdmittedDrafts]:
        """Read from the copy that was started behind the allocation."""
        assert self._admitted is not None, "no step was allocated"
        (req_ids, counts), self._admitted = self._admitted, None
        return lambda: AdmittedDrafts(req_ids, counts.numpy())

    # ---- vLLM's manager interface

    def compact_batch(
        self,
        num_draft_tokens_per_req: IntArray,
        num_scheduled_tokens: IntArray,
        cu_num_logits_np: IntArray,
    ) -> tuple[IntArray, IntArray]:
        """Stand-in token counts with the step's true sum, and offsets as an upper bound."""
        self._num_drafts = num_draft_tokens_per_req
        self._num_rows = num_scheduled_tokens
        return self._num_rows - self._num_drafts + _spread(self._num_drafts, self._budget), (
            cu_num_logits_np
        )

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Launch the allocation; (logits offsets, row offsets) on the device, drafts verified."""
        num_reqs = len(req_ids)
        staging = next(s for s in self._staging if s.size >= num_reqs)
        self._stage(staging)
        out = self._launch(staging, idx_mapping)
        counts = out.admitted[:num_reqs].to("cpu", non_blocking=True, copy=True)
        self._admitted = (req_ids, counts)
        return out.cu_num_logits[: num_reqs + 1], self._starts, self._budget

    # ---- allocation

    def _stage(self, staging: _Staging) -> None:
        """Start the copy of everything that the kernel needs of the host."""
        order = self._active_order()
        req_ids, slots = self._batch()
        capacity, floor = self._limits(req_ids, self._num_drafts)
        # The buffer holds one pass: an older row has been overwritten, whoever it was about.
        usable = self._usable(order, req_ids, slots) & (self._row_stamp[slots] == self._last_pass)
        tensor, array = staging.host_arrays()
        num_reqs, stride = len(req_ids), staging.stride
        columns = (
            self._row_of_slot[slots],
            usable,
            self._num_drafts,
            self._num_rows,
            capacity,
            floor,
        )
        for i, column in enumerate(columns):
            array[i * stride : i * stride + num_reqs] = column
        array[_NUM_ARRAYS * stride] = self._budget
        self._write_tables(array[staging.tables :].view(np.float32), order.ranking)
        staging.device.copy_(tensor, non_blocking=True)

    def _write_tables(self, into: FloatArray, ranking: RankingParameters | None) -> None:
        assert ranking is not None, "device windows need ranking parameters"
        if ranking.calibration is not self._tables_of:
            self._tables[:2] = calibration_tables(ranking.calibration)
            self._tables_of = ranking.calibration
        self._tables[2] = ranking.prior
        into.reshape(3, -1)[:, : 2 * self._width] = self._tables.reshape(3, -1)

    def _launch(self, staging: _Staging, idx_mapping: torch.Tensor) -> WindowBuffers:
        if self._tp_group.world_size > 1:
            # Logits may differ in their last bits between ranks: rank 0's decide.
            self._tp_group.broadcast(self._confidence, src=0)
        requests, calibration, out = staging.requests, staging.calibration, self._buffers
        size = staging.size
        out = WindowBuffers(
            out.admitted[:size],
            out.windows[:size],
            self._starts,
            out.cu_num_logits[: size + 1],
            out.source_rows,
            out.logits_rows,
            out.counters,
            out.before[: size + 1],
        )
        allocate_windows(
            out,
            self._confidence,
            None,
            WindowRequests(
                idx_mapping,
                requests.usable,
                requests.num_drafts,
                requests.num_rows,
                requests.capacity,
                requests.floor,
                requests.confidence_rows,
            ),
            staging.budget,
            WindowCalibration(
                self._runner.sampler.sampling_states.temperature.gpu,
                calibration.slope,
                calibration.offset,
                calibration.prior,
                logits=True,
            ),
        )
        return out

    # ---- start-up

    def launch_for_timing(self) -> None:
        """The launch of a step of as many requests as there can be."""
        staging = self._staging[-1]
        device = self._confidence.device
        self._launch(staging, torch.arange(staging.size, dtype=torch.int64, device=device))

    def check(self) -> None:
        """Compile every launch and compare it with a ranking on the host; raises DSparkError.

        Waits for the device: start-up only.
        """
        generator = np.random.default_rng(0)
        width = self._width
        kept = self._confidence.clone()
        self._confidence.copy_(torch.from_numpy(_normal(generator, self._confidence.shape)))
        logits = self._confidence.cpu().numpy()
        identity = RankingParameters(Calibration.identity(width), np.zeros((2, width), np.float32))
        for staging in self._staging:
            size = staging.size
            budget = max(1, size * width // 3)
            tensor, array = staging.host_arrays()
            array[:size] = np.arange(size)
            for i, value in enumerate((1, width, width + 1, width, 0), start=1):
                array[i * staging.stride : i * staging.stride + size] = value
            array[_NUM_ARRAYS * staging.stride] = budget
            self._write_tables(array[staging.tables :].view(np.float32), identity)
            staging.device.copy_(tensor)
            mapping = torch.arange(size, dtype=torch.int64, device=self._confidence.device)
            out = self._launch(staging, mapping)
            admitted = out.admitted[:size].cpu().numpy()
            starts = self._starts.cpu().numpy()
            _compare(admitted, starts, logits[:size], budget)
        self._confidence.copy_(kept)
        self._tables_of = None


def calibration_tables(calibration: Calibration) -> FloatArray:
    """[2, 2, K] slopes 1/T and offsets, of greedy and sampled requests."""
    temperatures = np.array([calibration.greedy, calibration.sampled], dtype=np.float64)
    offsets = np.array([calibration.greedy_offset, calibration.sampled_offset])
    tables: FloatArray = np.stack([1.0 / temperatures, offsets]).astype(np.float32)
    return tables


def _spread(num_drafts: IntArray, budget: int) -> IntArray:
    """Drafts per request that sum to the budget and exceed nobody's own, [n] int32."""
    ends = np.cumsum(num_drafts, dtype=np.int64) * budget // max(int(num_drafts.sum()), 1)
    spread: IntArray = np.diff(ends, prepend=0).astype(np.int32)
    return spread


def _normal(generator: np.random.Generator, shape: tuple[int, ...]) -> FloatArray:
    return generator.standard_normal(shape).astype(np.float32)


def _compare(admitted: IntArray, starts: IntArray, logits: FloatArray, budget: int) -> None:
    """Raise unless the best `budget` drafts were admitted and the rows laid out accordingly."""
    size, width = logits.shape
    alive = np.cumprod(1.0 / (1.0 + np.exp(-logits.astype(np.float64))), axis=1)
    inside = np.arange(width) < admitted[:, None]
    offsets = np.append(0, np.cumsum(admitted + 1))
    worst, best = alive[inside].min(initial=1.0), alive[~inside].max(initial=0.0)
    ends = starts[size + 1 :]
    if (
        int(admitted.sum()) != budget
        or worst < best - 1e-5  # device and host differ in the last bits of exp
        or not np.array_equal(starts[: size + 1], offsets)
        or not (ends == offsets[-1]).all()
    ):
        raise DSparkError(
            f"the window kernel admitted {int(admitted.sum())} drafts for a budget of {budget}, "
            f"down to a survival of {worst:.6f} while {best:.6f} was left out"
        )
