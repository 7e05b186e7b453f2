"""Device windows: the step's budget is spread over requests inside the step, by fresh confidences.

An executor stands where vLLM's adaptive-verification manager stands in the runner (attribute
`adaptive_verification`, checked on 0.32.0 and 0.33.0), but only in steps whose plan trims: in all
others the attribute is None and the step is vLLM's own, on uniform graphs and without work of ours.
This file has what all executors share and the one for the CPU build; cuda_windows.py has the other.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_dspark.integration.report import AdmittedDrafts, StepOrder
from vllm_dspark.planning.allocation import allocate
from vllm_dspark.planning.plan import PlanBox, PlanKind, VerifyPlan, request_digest
from vllm_dspark.planning.survival import acceptance, survival

logger = logging.getLogger("vllm.vllm_dspark")

IntArray = npt.NDArray[np.integer]
BoolArray = npt.NDArray[np.bool_]


class DeviceWindows:
    """Takes plans and turns them into limits per request; subclasses spread the budget.

    Confidence rows live per request slot. A row counts only if the pass that wrote it is the pass
    whose drafts are being verified; any other row is neutral, ranked by the order's prior.
    """

    #: whether host copies of lengths and offsets are the truth in a trimmed step
    exact_on_host = True

    def __init__(self, runner: Any, tp_group: Any) -> None:
        self.box = PlanBox()
        self._runner = runner
        self._width: int = runner.num_speculative_steps
        self._tp_group = tp_group
        self._row_stamp = np.zeros(runner.max_num_reqs, dtype=np.int32)
        self._order: StepOrder | None = None
        self._plan: VerifyPlan | None = None
        self._budget = 0

    # ---- called by our runner

    def accept(self, order: StepOrder, owners: npt.NDArray[np.int64]) -> bool:
        """Whether this step is ours to trim; a plan that is not about this step is dropped.

        owners: owner ids of the requests that have drafts in the step, in any order.
        """
        self.stand_aside()
        if order.plan is None or order.plan.kind is not PlanKind.TRIM:
            return False
        self.box.put(order.plan)
        plan = self.box.take(order.step_id, request_digest(owners), owners.size, self._width)
        if plan is None:
            level = logging.WARNING if self.box.mismatched == 1 else logging.DEBUG
            logger.log(
                level,
                "vllm-dspark: plan dropped, this step runs native: %s (counted from here on)",
                self.box.last_mismatch,
            )
            return False
        self._plan, self._order = plan, order
        return True

    def stand_aside(self) -> None:
        """The coming step is not ours: whatever plan is still here was about another one."""
        self._plan, self._order = None, None
        self.box.drop()

    def record(self, step_id: int, idx_mapping: IntArray, logits: torch.Tensor) -> None:
        """Note the rows that the draft pass of `step_id` wrote; logits: [n, K], batch order."""
        raise NotImplementedError

    def admitted(self) -> Callable[[], AdmittedDrafts]:
        """Drafts let through in the step just prepared.

        What is returned may be called once the step's output has arrived, and not before.
        """
        raise NotImplementedError

    def check(self) -> None:
        """Try what a trimmed step needs of the device, at start-up; raises DSparkError."""

    def launch_for_timing(self) -> None:
        """What a trimmed step launches besides a native one's work, once."""

    # ---- vLLM's manager interface

    def add_request(self, req_idx: int) -> None:
        """A slot has a new owner: its row is nobody's."""
        self._row_stamp[req_idx] = 0

    def get_num_tokens(
        self, num_tokens_per_req: dict[str, int], draft_tokens: dict[str, list[int]]
    ) -> int:
        """Tokens of the step after trimming."""
        num_drafts = sum(map(len, draft_tokens.values()))
        # The scheduler may have cut drafts (max_model_len, token budget) after the plan was made.
        self._budget = min(self._active_plan().budget, num_drafts)
        return sum(num_tokens_per_req.values()) - num_drafts + self._budget

    def record_confidences(self, confidence_probs: torch.Tensor, input_batch: Any) -> None:
        """vLLM's hook; ours are kept by `record`, in every step and not only in trimmed ones."""

    # ---- for subclasses

    def _active_plan(self) -> VerifyPlan:
        assert self._plan is not None, "device windows without an accepted plan"
        return self._plan

    def _active_order(self) -> StepOrder:
        assert self._order is not None, "an accepted plan comes with its order"
        return self._order

    def _batch(self) -> tuple[list[str], IntArray]:
        """Request ids of the batch in its order, and their slots."""
        ids: list[str] = self._runner.dspark_batch_ids
        slot_of = self._runner.req_states.req_id_to_index
        return ids, np.fromiter((slot_of[name] for name in ids), np.int64, len(ids))

    def _usable(self, order: StepOrder, req_ids: list[str], slots: IntArray) -> BoolArray:
        """[n] whether the slot's row was written by the pass whose drafts are verified."""
        stamps = np.fromiter((order.stamps.get(name, 0) for name in req_ids), np.int32)
        usable: BoolArray = (stamps > 0) & (self._row_stamp[slots] == stamps)
        return usable

    def _limits(self, req_ids: list[str], num_drafts: IntArray) -> tuple[IntArray, IntArray]:
        """(capacity, floor) per request, [n]; the budget lies between their sums."""
        order, plan = self._active_order(), self._active_plan()
        if plan.windows:  # given windows, in the order of the requests that were planned
            given = dict(zip(order.drafted, plan.windows, strict=True))
            wanted = np.fromiter((given.get(name, 1) - 1 for name in req_ids), np.int64)
            exact = np.minimum(wanted, num_drafts).astype(np.int32)
            if exact.sum() == self._budget:
                return exact, exact
        ceiling = np.fromiter((order.ceilings.get(n, self._width) for n in req_ids), np.int64)
        capacity = np.minimum(num_drafts, ceiling).astype(np.int32)
        if capacity.sum() < self._budget:
            capacity = num_drafts.astype(np.int32)
        floor = np.fromiter((order.floors.get(name, 0) for name in req_ids), np.int32)
        floor = np.minimum(floor, capacity)
        if floor.sum() > self._budget:
            floor = np.zeros_like(capacity)
        return capacity, floor


class HostTensorWindows(DeviceWindows):
    """Executes trim plans on an engine whose device tensors are host tensors (the CPU build)."""

    def __init__(self, runner: Any, tp_group: Any) -> None:
        super().__init__(runner, tp_group)
        self._rows = np.zeros((self._width, runner.max_num_reqs), dtype=np.float32)
        self._admitted = AdmittedDrafts([], np.zeros(0, dtype=np.int32))

    def record(self, step_id: int, idx_mapping: IntArray, logits: torch.Tensor) -> None:
        """Keep the rows, as probabilities; no request has drafts beyond the columns drafted."""
        self._rows[: logits.shape[1], idx_mapping] = torch.sigmoid(logits).numpy().T
        self._row_stamp[idx_mapping] = step_id

    def admitted(self) -> Callable[[], AdmittedDrafts]:
        """Known at once: there is no second truth on a device."""
        admitted = self._admitted
        return lambda: admitted

    def compact_batch(
        self,
        num_draft_tokens_per_req: IntArray,
        num_scheduled_tokens: IntArray,
        cu_num_logits_np: IntArray,
    ) -> tuple[IntArray, IntArray]:
        """Per-request token counts and logits offsets after allocation; exact."""
        admitted = self._allocate(num_draft_tokens_per_req)
        offsets = np.zeros_like(cu_num_logits_np)
        np.cumsum(admitted + 1, out=offsets[1:])
        self._cu_num_logits = offsets
        self._num_tokens = num_scheduled_tokens - num_draft_tokens_per_req + admitted
        return self._num_tokens, offsets

    def reallocate_drafts(
        self, req_ids: list[str], idx_mapping: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Device copies of the offsets, and the drafts verified in all."""
        num_reqs = len(req_ids)
        query_start_loc = self._runner.input_buffers.query_start_loc
        starts = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(self._num_tokens, out=starts[1:])
        query_start_loc[: num_reqs + 1].copy_(torch.from_numpy(starts))
        query_start_loc[num_reqs + 1 :].fill_(int(starts[-1]))
        cu_num_logits = torch.from_numpy(self._cu_num_logits.astype(np.int32))
        return cu_num_logits, query_start_loc, self._budget

    def _allocate(self, num_drafts: IntArray) -> IntArray:
        """Admitted drafts of the batch's requests, in batch order; equal on all ranks."""
        req_ids, slots = self._batch()
        admitted = self._rank(req_ids, slots, num_drafts)
        if self._tp_group.world_size > 1:
            # Confidences may differ in their last bits between ranks: rank 0 decides.
            shared = torch.from_numpy(admitted)
            admitted = self._tp_group.broadcast(shared, src=0).numpy()
        self._admitted = AdmittedDrafts(req_ids, admitted)
        return admitted

    def _rank(self, req_ids: list[str], slots: IntArray, num_drafts: IntArray) -> IntArray:
        """The budget spread over the batch by the confidences of the drafts at hand."""
        order = self._active_order()
        capacity, floor = self._limits(req_ids, num_drafts)
        if self._active_plan().windows and (capacity == floor).all():
            return capacity
        assert order.ranking is not None, "device windows need ranking parameters"
        sampled = np.array([name in order.sampled for name in req_ids])
        prior = order.ranking.prior[sampled.astype(np.intp)].T.astype(np.float32)
        usable = self._usable(order, req_ids, slots)
        rows = self._rows[:, slots]
        estimate, _ = acceptance(rows, usable, prior, order.ranking.calibration, sampled)
        admitted: IntArray = allocate(survival(estimate), capacity, floor, self._budget)
        return admitted
