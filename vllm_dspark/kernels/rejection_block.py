"""Block verification's share of ragged rejection; arguments as in ``rejection_kernels.py``."""

import triton
import triton.language as tl

from vllm_dspark.kernels.dependent import launch_next, wait_previous
from vllm_dspark.kernels.rejection_device import (
    at_column,
    part_of,
    prefix_length,
    weights,
    window_probabilities,
)

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def block_ratios_kernel(
    rows_ptr,
    length_ptr,
    stats_ptr,
    target_ptr,
    draft_ptr,
    tokens_ptr,
    cu_ptr,
    mapping_ptr,
    temperature_ptr,
    vocab,
    draft_vocab,
    stride_target,
    stride_dm,
    stride_dk,
    NUM_DRAFTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Block only: row statistics and joint ratios of every window of a sampled request."""
    launch_next(DEPENDENT)
    wait_previous(DEPENDENT)
    req = tl.program_id(0)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    if start >= end:
        return
    slot = tl.load(mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    if temperature == 0.0:
        return
    num_drafts = end - start - 1
    columns = tl.arange(0, BLOCK_J)
    drafts = tl.load(tokens_ptr + start + columns + 1, mask=columns < num_drafts, other=-1)
    p, q, judgeable, top, inverse, q_top, q_inverse = window_probabilities(
        stats_ptr, target_ptr, draft_ptr, drafts.to(tl.int64), req, tl.num_programs(0), start,
        num_drafts, slot, _LOG2E / temperature, vocab, draft_vocab, stride_target, stride_dm,
        stride_dk, NUM_DRAFTS, NUM_PARTS, HAS_DRAFT, BLOCK_J, BLOCK_S,
    )  # fmt: skip
    base = req * (NUM_DRAFTS + 1)
    plane = tl.num_programs(0) * (NUM_DRAFTS + 1)
    in_window = columns <= num_drafts
    tl.store(rows_ptr + base + columns, top, mask=in_window)
    tl.store(rows_ptr + plane + base + columns, inverse, mask=in_window)
    tl.store(rows_ptr + 2 * plane + base + columns, q_top, mask=in_window)
    tl.store(rows_ptr + 3 * plane + base + columns, q_inverse, mask=in_window)
    tl.store(length_ptr + req, prefix_length(judgeable, columns, num_drafts))
    ratio = tl.full([], 1.0, tl.float32)
    tl.store(rows_ptr + 4 * plane + base, ratio)
    for i in tl.static_range(NUM_DRAFTS):
        p_i = at_column(p, columns, i) * ratio
        q_i = at_column(q, columns, i)
        whole = tl.where(p_i > 0.0, 1.0, 0.0)
        ratio = tl.where(p_i >= q_i, whole, p_i / tl.where(q_i > 0.0, q_i, 1.0))
        tl.store(rows_ptr + 4 * plane + base + i + 1, ratio)


@triton.jit
def block_mass_kernel(
    mass_ptr,
    rows_ptr,
    length_ptr,
    target_ptr,
    draft_ptr,
    tokens_ptr,
    cu_ptr,
    mapping_ptr,
    temperature_ptr,
    vocab,
    draft_vocab,
    stride_target,
    stride_dm,
    stride_dk,
    HAS_DRAFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Block only: parts of sum(max(ratio_i p_i - q_i, 0)) of the columns that are tested by it."""
    launch_next(DEPENDENT)
    wait_previous(DEPENDENT)
    req, column, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    if start >= end:
        return
    slot = tl.load(mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    if temperature == 0.0:
        return
    # Column 0 is never tested (its ratio is 1), the last one is tested by its ratio alone.
    if (column == 0) | (column >= tl.load(length_ptr + req)):
        return
    at = req * tl.num_programs(1) + column
    plane = tl.num_programs(0) * tl.num_programs(1)
    top, inverse = tl.load(rows_ptr + at), tl.load(rows_ptr + plane + at)
    q_top, q_inverse = tl.load(rows_ptr + 2 * plane + at), tl.load(rows_ptr + 3 * plane + at)
    ratio = tl.load(rows_ptr + 4 * plane + at)
    row = (start + column).to(tl.int64)
    draft = tl.load(tokens_ptr + row + 1)
    first, last = part_of(vocab, part, tl.num_programs(2))
    total = tl.zeros([BLOCK_V], tl.float32)
    for base in range(first, last, BLOCK_V):
        cols = base + tl.arange(0, BLOCK_V)
        _, p, q = weights(
            target_ptr + row * stride_target, draft_ptr + slot * stride_dm + column * stride_dk,
            cols, cols < last, draft_vocab, draft, _LOG2E / temperature, top, inverse, q_top,
            q_inverse, HAS_DRAFT,
        )  # fmt: skip
        total += tl.maximum(ratio * p - q, 0.0)
    tl.store(mass_ptr + at * tl.num_programs(2) + part, tl.sum(total, 0))


@triton.jit
def judge_block(
    mass_ptr,
    rows_ptr,
    req,
    num_reqs,
    length,
    u,
    NUM_DRAFTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """Longest passing prefix; entry i - 1 of the vectors is the test of length i."""
    tests = tl.arange(0, BLOCK_J)
    parts = tl.arange(0, BLOCK_S)
    live = tests < length
    middle = tests + 1 < length
    rows_at = req * (NUM_DRAFTS + 1) + tests + 1
    ratio = tl.load(rows_ptr + 4 * num_reqs * (NUM_DRAFTS + 1) + rows_at, mask=live, other=0.0)
    mass = tl.load(
        mass_ptr + rows_at[:, None] * NUM_PARTS + parts[None, :],
        mask=middle[:, None] & (parts < NUM_PARTS)[None, :],
        other=0.0,
    )
    mass = tl.sum(mass, 1)
    rest = mass + 1.0 - ratio
    inside = tl.where(rest > 0.0, mass / tl.where(rest > 0.0, rest, 1.0), 1.0)
    h = tl.where(middle, inside, ratio)
    return tl.max(tl.where(live & (u <= h), tests + 1, 0), 0)
