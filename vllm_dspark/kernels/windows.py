"""Windows on the device: from confidences and a budget to per-request lengths and row maps.

Equal, bit for bit, to ``planning.allocation`` on the same float32 acceptances:
    a_k   = c_0 * ... * c_k, multiplied left to right; an entry that is no probability, and a row
            that may not be used, is the prior
    key   = 2 below the request's floor, -1 at or past its capacity, else a_k
    admit = the `budget` first of all drafts by (key descending, position, request)
Keys in {-1} and [0, 2] order like their bit patterns as int32, so the budget-th key is found by
deciding 31 bits from the top, two at a time, with counts over the step's drafts, until a count is
the budget; ties are admitted in C
order of [K, R]. A budget outside [sum of floors, sum of capacities] is moved to the nearer end, for
a launch cannot refuse. Padded requests have num_rows 0.

Launch 1, one program: admitted, windows, offsets. Launch 2, one program per request: row maps; it
is left out where no buffer for maps was made.
With `temperature` given, c is first calibrated (sigmoid(logit(c) * slope + offset), greedy or
sampled parameters); that uses the device's exp and log and is equal to the oracle only to rounding.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dspark.kernels.dependent import dependent_launches, launch_next, wait_previous

_MAX_ROWS = (1 << 20) - 1  # of a step, before or after trimming (fields of the offsets' scan)


@dataclass(frozen=True, slots=True)
class WindowBuffers:
    """What the launches write; P padded requests, made once per captured size."""

    # [P] int32 admitted drafts
    admitted: torch.Tensor
    # [P] int32, 1 + admitted; 0 for padded requests
    windows: torch.Tensor
    # [>= P + 1] int32, padded entries and whatever follows them repeat the total
    query_start_loc: torch.Tensor
    # [P + 1] int32
    cu_num_logits: torch.Tensor
    # [max_rows] int32: row of the untrimmed batch that each kept row was; 0 past the total
    source_rows: torch.Tensor
    # [max_logits] int32: kept row of each needed logit; 0 past the total
    logits_rows: torch.Tensor
    # [2] int32: entries of usable rows that were no probabilities, budget after clamping
    counters: torch.Tensor
    # [P + 1] int32 scratch: offsets of the untrimmed batch
    before: torch.Tensor

    @staticmethod
    def empty(
        num_reqs: int, max_rows: int, max_logits: int, device: torch.device
    ) -> "WindowBuffers":
        """Buffers for up to `num_reqs` requests; no rows and no logits: no row maps."""
        offsets = num_reqs + 1
        sizes = [num_reqs, num_reqs, offsets, offsets, max_rows, max_logits, 2, offsets]
        return WindowBuffers(
            *(torch.zeros(size, dtype=torch.int32, device=device) for size in sizes)
        )


@dataclass(frozen=True, slots=True)
class WindowRequests:
    """The step's requests on the device; P rows, padded ones with num_rows 0."""

    # [P] slot of each request in the per-slot tables
    idx_mapping: torch.Tensor
    # [P] int32 0 or 1: whether the slot's confidences may be used (owner and stamp match)
    usable: torch.Tensor
    # [P] int32 drafts and rows (drafts included) in the untrimmed batch
    num_drafts: torch.Tensor
    num_rows: torch.Tensor
    # [P] int32, 0 <= floor <= capacity <= num_drafts
    capacity: torch.Tensor
    floor: torch.Tensor
    # [P] row of each request in the confidence table; None: its slot
    confidence_rows: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class WindowCalibration:
    """Per-position calibration of greedy (row 0) and sampled (row 1) requests."""

    # [M] float32 sampling temperature per slot
    temperature: torch.Tensor
    # [2, K] float32: 1 / T_k
    slope: torch.Tensor
    # [2, K] float32
    offset: torch.Tensor
    # [2, K] float32 acceptance priors in place of per-slot ones, or None
    prior: torch.Tensor | None = None
    # the confidence table holds logits, not probabilities
    logits: bool = False


@triton.jit
def _allocate_kernel(
    admitted_ptr,
    windows_ptr,
    starts_ptr,
    logits_ptr,
    before_ptr,
    # [2]
    counters_ptr,
    # [M, K] float32 probabilities, or logits if LOGITS
    confidence_ptr,
    # [M, K] float32 probabilities, or [2, K] by kind of request
    prior_ptr,
    # [7, P]: idx_mapping, confidence rows, usable, num_drafts, num_rows, capacity, floor, as
    # separate tensors
    mapping_ptr,
    confidence_rows_ptr,
    usable_ptr,
    drafts_ptr,
    rows_ptr,
    capacity_ptr,
    floor_ptr,
    # [1] int32
    budget_ptr,
    temperature_ptr,
    slope_ptr,
    offset_ptr,
    num_reqs,
    num_starts,
    stride_conf,
    stride_prior,
    stride_prior_kind,
    K: tl.constexpr,
    CALIBRATE: tl.constexpr,
    LOGITS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    launch_next(DEPENDENT)
    reqs = tl.arange(0, BLOCK_R)
    in_batch = reqs < num_reqs
    num_rows = tl.load(rows_ptr + reqs, mask=in_batch, other=0)
    live = in_batch & (num_rows > 0)
    # Read beside `num_rows` instead of after it; what padded requests hold is then dropped. Only
    # the mapping may end with the live requests.
    slot = tl.load(mapping_ptr + reqs, mask=live, other=0).to(tl.int64)
    conf_row = tl.load(confidence_rows_ptr + reqs, mask=live, other=0).to(tl.int64)
    usable = tl.load(usable_ptr + reqs, mask=in_batch, other=0) != 0
    num_drafts = tl.load(drafts_ptr + reqs, mask=in_batch, other=0)
    capacity = tl.where(live, tl.load(capacity_ptr + reqs, mask=in_batch, other=0), 0)
    floor = tl.where(live, tl.load(floor_ptr + reqs, mask=in_batch, other=0), 0)
    sampled = reqs < 0
    if CALIBRATE:
        sampled = tl.load(temperature_ptr + slot, mask=live, other=0.0) > 0.0
    prior_row = slot * stride_prior + tl.where(sampled, stride_prior_kind, 0)

    ks = tl.arange(0, BLOCK_K)
    keys = tl.full([BLOCK_K, BLOCK_R], -1.0, tl.float32)
    running = tl.full([BLOCK_R], 1.0, tl.float32)
    invalid = tl.zeros([BLOCK_R], tl.int32)
    for k in tl.static_range(K):
        confidence = tl.load(confidence_ptr + conf_row * stride_conf + k, mask=live, other=0.0)
        if LOGITS:
            confidence = 1.0 / (1.0 + tl.exp(-confidence))
        prior = tl.load(prior_ptr + prior_row + k, mask=live, other=0.0)
        legal = (confidence >= 0.0) & (confidence <= 1.0)  # false for NaN
        invalid += tl.where(live & usable & (legal == 0), 1, 0)
        if CALIBRATE:
            p = tl.minimum(tl.maximum(confidence, 1e-6), 0.99999899)
            slope = tl.where(sampled, tl.load(slope_ptr + K + k), tl.load(slope_ptr + k))
            offset = tl.where(sampled, tl.load(offset_ptr + K + k), tl.load(offset_ptr + k))
            confidence = 1.0 / (1.0 + tl.exp(-(tl.log(p / (1.0 - p)) * slope + offset)))
        running = running * tl.where(legal & usable, confidence, prior)
        key = tl.where(running == 0.0, 0.0, running)  # -0.0 would sort below the barred
        key = tl.where(k < capacity, key, -1.0)
        key = tl.where(k < floor, 2.0, key)
        keys = tl.where((ks == k)[:, None], key[None, :], keys)
    bits = keys.to(tl.int32, bitcast=True)

    least, most = tl.sum(floor, 0), tl.sum(capacity, 0)
    budget = tl.minimum(tl.maximum(tl.load(budget_ptr), least), most)
    # Two bits a round: the counts of the three candidates, at most 2**16 drafts each, are the
    # fields of one 64-bit sum, since a round is a block-wide reduction's latency and little else. A
    # count that is the budget ends the search: what reaches the candidate is what is admitted. Bit
    # 30 is set in the key 2.0 alone, of which there are `least`.
    exact = least == budget
    threshold = tl.where(least >= budget, 1 << 30, 0)
    shift = budget * 0 + 28
    while (shift >= 0) & (exact == 0):
        reached = (bits >= (threshold | (1 << shift))).to(tl.int64)
        reached += (bits >= (threshold | (2 << shift))).to(tl.int64) << 20
        reached += (bits >= (threshold | (3 << shift))).to(tl.int64) << 40
        counts = tl.sum(tl.sum(reached, 0), 0)
        one, two, three = counts & 0xFFFFF, (counts >> 20) & 0xFFFFF, counts >> 40
        digit = (one >= budget).to(tl.int32) + (two >= budget).to(tl.int32)
        digit += (three >= budget).to(tl.int32)
        threshold = threshold | (digit << shift)
        # The largest candidate that enough drafts reach; is it just enough?
        exact = tl.where(digit == 3, three, tl.where(digit == 2, two, one)) == budget
        shift -= 2
    chosen = (bits >= threshold).to(tl.int32)
    if exact == 0:
        # Drafts tie at the threshold; the first of them in C order of [K, R] are admitted.
        tied = (bits == threshold).to(tl.int32)
        surplus = tl.sum(tl.sum(chosen, 0), 0) - budget
        per_position = tl.sum(tied, 1)
        rank = (tl.cumsum(per_position, 0) - per_position)[:, None] + tl.cumsum(tied, 1)
        admitted_ties = tl.sum(per_position, 0) - surplus
        chosen -= tl.where(rank > admitted_ties, tied, 0)
    admitted = tl.sum(chosen, 0)

    window = tl.where(live, admitted + 1, 0)
    kept = tl.where(live, num_rows - num_drafts + admitted, 0)
    rows_before = tl.where(live, num_rows, 0)
    tl.store(admitted_ptr + reqs, admitted, mask=in_batch)
    tl.store(windows_ptr + reqs, window, mask=in_batch)
    # One scan of three fields: 20 bits of windows, 22 each of kept and of former rows.
    packed = window.to(tl.int64) | (kept.to(tl.int64) << 20) | (rows_before.to(tl.int64) << 42)
    packed = tl.cumsum(packed, 0)
    tl.store(logits_ptr + reqs + 1, (packed & 0xFFFFF).to(tl.int32), mask=in_batch)
    tl.store(starts_ptr + reqs + 1, ((packed >> 20) & 0x3FFFFF).to(tl.int32), mask=in_batch)
    tl.store(before_ptr + reqs + 1, ((packed >> 42) & 0x3FFFFF).to(tl.int32), mask=in_batch)
    total = tl.sum(kept, 0)
    for base in range(num_reqs + 1, num_starts, BLOCK_R):
        tl.store(starts_ptr + base + reqs, total, mask=base + reqs < num_starts)
    tl.store(starts_ptr, 0)
    tl.store(logits_ptr, 0)
    tl.store(before_ptr, 0)
    tl.store(counters_ptr, tl.sum(invalid, 0))
    tl.store(counters_ptr + 1, budget)


@triton.jit
def _row_maps_kernel(
    # [max_rows], [max_logits]
    source_ptr,
    rows_ptr,
    # [P + 1] each
    starts_ptr,
    logits_ptr,
    before_ptr,
    num_reqs,
    max_rows,
    max_logits,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_previous(DEPENDENT)
    req = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    if req == num_reqs:
        # Tails: a gather through them reads row 0, which exists.
        for base in range(tl.load(starts_ptr + num_reqs), max_rows, BLOCK):
            tl.store(source_ptr + base + lanes, 0, mask=base + lanes < max_rows)
        for base in range(tl.load(logits_ptr + num_reqs), max_logits, BLOCK):
            tl.store(rows_ptr + base + lanes, 0, mask=base + lanes < max_logits)
    else:
        start, end = tl.load(starts_ptr + req), tl.load(starts_ptr + req + 1)
        before = tl.load(before_ptr + req)
        for base in range(start, end, BLOCK):
            row = base + lanes
            tl.store(source_ptr + row, before + row - start, mask=row < end)
        first, last = tl.load(logits_ptr + req), tl.load(logits_ptr + req + 1)
        for base in range(first, last, BLOCK):
            row = base + lanes
            # A window is the last rows of its request.
            tl.store(rows_ptr + row, end - last + row, mask=row < last)


def _num_warps(keys: int) -> int:
    # 4 to 8 keys per thread: a round is the latency of a block-wide sum, not work.
    return min(max(keys // 256, 1), 16)


def allocate_windows(
    out: WindowBuffers,
    # [M, K] float32 probabilities, written by the last draft pass
    confidence: torch.Tensor,
    # [M, K] float32 acceptance priors; None: the calibration's
    prior: torch.Tensor | None,
    requests: WindowRequests,
    # [1] int32 drafts to admit in the whole step
    budget: torch.Tensor,
    calibration: WindowCalibration | None = None,
) -> None:
    """Chooses the step's windows and lays out its rows; two launches, nothing read by the host."""
    num_reqs, width = requests.num_rows.shape[0], confidence.shape[1]
    by_kind = calibration is not None and calibration.prior is not None
    if calibration is not None and calibration.prior is not None:
        prior = calibration.prior
    if prior is None:
        raise ValueError("allocate_windows needs priors, per slot or with the calibration")
    rows = requests.confidence_rows
    block_r = triton.next_power_of_2(num_reqs)
    block_k = triton.next_power_of_2(width)
    dependent = dependent_launches(confidence.device)
    if max(out.source_rows.shape[0], out.logits_rows.shape[0]) > _MAX_ROWS:
        raise ValueError(
            f"{out.source_rows.shape[0]} rows do not fit the offsets' scan; at most {_MAX_ROWS} do"
        )
    _allocate_kernel[(1,)](
        out.admitted,
        out.windows,
        out.query_start_loc,
        out.cu_num_logits,
        out.before,
        out.counters,
        confidence,
        prior,
        requests.idx_mapping,
        requests.idx_mapping if rows is None else rows,
        requests.usable,
        requests.num_drafts,
        requests.num_rows,
        requests.capacity,
        requests.floor,
        budget,
        confidence if calibration is None else calibration.temperature,
        confidence if calibration is None else calibration.slope,
        confidence if calibration is None else calibration.offset,
        num_reqs,
        out.query_start_loc.shape[0],
        confidence.stride(0),
        0 if by_kind else width,
        width if by_kind else 0,
        K=width,
        CALIBRATE=calibration is not None,
        LOGITS=calibration is not None and calibration.logits,
        BLOCK_K=block_k,
        BLOCK_R=block_r,
        DEPENDENT=dependent,
        num_warps=_num_warps(block_k * block_r),
    )
    if out.source_rows.shape[0] + out.logits_rows.shape[0] == 0:
        return
    _row_maps_kernel[(num_reqs + 1,)](
        out.source_rows,
        out.logits_rows,
        out.query_start_loc,
        out.cu_num_logits,
        out.before,
        num_reqs,
        out.source_rows.shape[0],
        out.logits_rows.shape[0],
        BLOCK=128,
        DEPENDENT=dependent,
        num_warps=1,
        launch_pdl=dependent,
    )
