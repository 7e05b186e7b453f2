"""Device side of ragged rejection (``rejection.py`` says what the launches do together).

Sizes: R requests, J = K + 1 columns, S parts of the vocabulary, N rows, M slots. Arguments that
several kernels take:
    target_ptr       [N, V] float32, float16 or bfloat16
    draft_ptr        [M, K, V_c]
    tokens_ptr       [N] input tokens
    cu_ptr           [R + 1] int32
    pos_ptr          [N] int64
    mapping_ptr      [R]
    temperature_ptr  [M] float32
    seeds_ptr        [M] int64
    stats_ptr        [4, R, J, S] float32: target maximum and sum, draft maximum and sum
    argmax_ptr       [R, J, S] int32, of requests at temperature 0
    rows_ptr         [5, R, J] float32, block only: target top, inverse sum, draft top, inverse sum,
                     joint ratio
    length_ptr       [R] int32, block only: drafts that can be judged
    mass_ptr         [R, J, S] float32, block only: parts of sum(max(ratio p - q, 0))
"""

import triton
import triton.language as tl

from vllm_dspark.kernels.dependent import launch_next, wait_previous
from vllm_dspark.kernels.rejection_block import judge_block
from vllm_dspark.kernels.rejection_device import (
    accept_uniforms,
    at_column,
    draw_from_residual,
    draw_from_target,
    judge_greedy,
    part_of,
    prefix_length,
    resample_words,
    row_argmax,
    row_sum,
    window_probabilities,
)

_LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def row_stats_kernel(
    stats_ptr,
    argmax_ptr,
    # [R] int32, zeroed
    done_ptr,
    target_ptr,
    draft_ptr,
    cu_ptr,
    mapping_ptr,
    temperature_ptr,
    vocab,
    draft_vocab,
    stride_target,
    stride_dm,
    stride_dk,
    HAS_DRAFT: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Launch 1: what each slice of each row contributes to its maximum, sum and argmax."""
    launch_next(DEPENDENT)
    req, column, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_parts = tl.num_programs(2)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    row = start + column
    if row >= end:
        return
    if (column == 0) & (part == 0):
        tl.store(done_ptr + req, 0)
    slot = tl.load(mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    at = (req * tl.num_programs(1) + column) * num_parts + part
    plane = tl.num_programs(0) * tl.num_programs(1) * num_parts
    first, last = part_of(vocab, part, num_parts)
    target_row = target_ptr + row.to(tl.int64) * stride_target
    if temperature == 0.0:
        top, index = row_argmax(target_row, first, last, GROUPS, LANES)
        tl.store(stats_ptr + at, top)
        tl.store(argmax_ptr + at, index)
    else:
        top, total = row_sum(target_row, first, last, _LOG2E, GROUPS, LANES)
        tl.store(stats_ptr + at, top)
        tl.store(stats_ptr + plane + at, total)
        if HAS_DRAFT:  # noqa: SIM102 - known when compiled, the next when run
            if row + 1 < end:
                first, last = part_of(draft_vocab, part, num_parts)
                draft_row = draft_ptr + slot * stride_dm + column * stride_dk
                top, total = row_sum(draft_row, first, last, _LOG2E / temperature, GROUPS, LANES)
                tl.store(stats_ptr + 2 * plane + at, top)
                tl.store(stats_ptr + 3 * plane + at, total)


@triton.jit
def _row_argmaxes(
    stats_ptr,
    argmax_ptr,
    req,
    num_drafts,
    NUM_DRAFTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """[J] argmax of each target row of a window, and whether the row has a finite logit."""
    columns, parts = tl.arange(0, BLOCK_J), tl.arange(0, BLOCK_S)
    at = (req * (NUM_DRAFTS + 1) + columns)[:, None] * NUM_PARTS + parts[None, :]
    mask = (columns <= num_drafts)[:, None] & (parts < NUM_PARTS)[None, :]
    tops = tl.load(stats_ptr + at, mask=mask, other=float("-inf"))
    index = tl.load(argmax_ptr + at, mask=mask, other=2147483647)
    top = tl.max(tops, 1)
    return tl.min(tl.where(tops == top[:, None], index, 2147483647), 1), top > float("-inf")


@triton.jit
def _winner(value_ptr, index_ptr, req, num_reqs, NUM_PARTS: tl.constexpr, BLOCK_S: tl.constexpr):
    """Token of the best score over the parts; a residual without any weight falls back to p."""
    parts = tl.arange(0, BLOCK_S)
    mask = parts < NUM_PARTS
    at = req * NUM_PARTS + parts
    values = tl.load(value_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    if tl.max(values, 0) == float("-inf"):
        at += num_reqs * NUM_PARTS
        values = tl.load(value_ptr + at, mask=mask, other=float("-inf"), cache_modifier=".cg")
    index = tl.load(index_ptr + at, mask=mask, other=2147483647, cache_modifier=".cg")
    best = tl.max(values, 0)
    return tl.min(tl.where((values == best) & mask, index, 2147483647), 0).to(tl.int64)


@triton.jit
def resample_kernel(
    # [R, J] int64, [R] int32 each: the outcome
    sampled_ptr,
    num_sampled_ptr,
    accepted_ptr,
    verified_ptr,
    # [2, R, S] float32 and int32: best of the residual, best of p
    value_ptr,
    index_ptr,
    # [R] int32: parts that are done
    done_ptr,
    stats_ptr,
    argmax_ptr,
    rows_ptr,
    length_ptr,
    mass_ptr,
    target_ptr,
    draft_ptr,
    tokens_ptr,
    cu_ptr,
    pos_ptr,
    mapping_ptr,
    temperature_ptr,
    seeds_ptr,
    # [K] float32
    rates_ptr,
    vocab,
    draft_vocab,
    stride_target,
    stride_dm,
    stride_dk,
    NUM_DRAFTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    SYNTHETIC: tl.constexpr,
    BLOCK_METHOD: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Last launch: judges the window, draws over a slice; a request's last part writes its outcome.

    Every part judges anew: a few kilobytes from L2 cost less than a launch of their own.
    """
    wait_previous(DEPENDENT)
    req, part = tl.program_id(0), tl.program_id(1)
    num_reqs = tl.num_programs(0)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    columns = tl.arange(0, BLOCK_J)
    out = sampled_ptr + req.to(tl.int64) * (NUM_DRAFTS + 1) + columns
    in_row = columns <= NUM_DRAFTS
    if start >= end:
        if part == 0:
            tl.store(out, tl.full([BLOCK_J], -1, tl.int64), mask=in_row)
            tl.store(num_sampled_ptr + req, 0)
            tl.store(accepted_ptr + req, 0)
            tl.store(verified_ptr + req, 0)
        return
    num_drafts = end - start - 1
    slot = tl.load(mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    seed = tl.load(seeds_ptr + slot)
    in_window = columns <= num_drafts
    position = tl.load(pos_ptr + start + columns, mask=in_window, other=0)
    drafts = tl.load(tokens_ptr + start + columns + 1, mask=columns < num_drafts, other=-1)
    drafts = drafts.to(tl.int64)
    u = accept_uniforms(seed, position, columns)
    is_last = part == 0
    if temperature == 0.0:
        argmax, has_finite = _row_argmaxes(
            stats_ptr, argmax_ptr, req, num_drafts, NUM_DRAFTS, NUM_PARTS, BLOCK_J, BLOCK_S
        )
        accepted, token32 = judge_greedy(
            drafts, argmax, has_finite, u, rates_ptr, columns, num_drafts, vocab, SYNTHETIC
        )
        token = token32.to(tl.int64)
    else:
        draft_factor = _LOG2E / temperature
        if BLOCK_METHOD:
            length = tl.load(length_ptr + req)
            accepted = judge_block(
                mass_ptr, rows_ptr, req, num_reqs, length, u, NUM_DRAFTS, NUM_PARTS, BLOCK_J,
                BLOCK_S,
            )  # fmt: skip
            residual = accepted < length
            rows_at = req * (NUM_DRAFTS + 1) + accepted
            plane = num_reqs * (NUM_DRAFTS + 1)
            top, inverse = tl.load(rows_ptr + rows_at), tl.load(rows_ptr + plane + rows_at)
            q_top = tl.load(rows_ptr + 2 * plane + rows_at)
            q_inverse = tl.load(rows_ptr + 3 * plane + rows_at)
            ratio = tl.load(rows_ptr + 4 * plane + rows_at)
        else:
            p, q, judgeable, tops, inverses, q_tops, q_inverses = window_probabilities(
                stats_ptr, target_ptr, draft_ptr, drafts, req, num_reqs, start, num_drafts, slot,
                draft_factor, vocab, draft_vocab, stride_target, stride_dm, stride_dk, NUM_DRAFTS,
                NUM_PARTS, HAS_DRAFT, BLOCK_J, BLOCK_S,
            )  # fmt: skip
            ok = u * q < p
            if SYNTHETIC:
                ok = u < tl.load(rates_ptr + columns, mask=columns < NUM_DRAFTS, other=0.0)
            accepted = prefix_length(ok & judgeable, columns, num_drafts)
            residual = at_column(judgeable.to(tl.int32), columns, accepted) > 0
            top, inverse = (
                at_column(tops, columns, accepted),
                at_column(inverses, columns, accepted),
            )
            q_top = at_column(q_tops, columns, accepted)
            q_inverse = at_column(q_inverses, columns, accepted)
            ratio = tl.full([], 1.0, tl.float32)
        row = (start + accepted).to(tl.int64)
        lo, hi = resample_words(seed, at_column(position, columns, accepted), accepted)
        first, last = part_of(vocab, part, NUM_PARTS)
        target_row = target_ptr + row * stride_target
        value = tl.full([], float("-inf"), tl.float32)
        index = tl.full([], 2147483647, tl.int32)
        if residual:
            draft_row = draft_ptr + slot * stride_dm + accepted * stride_dk
            value, index, value_p, index_p = draw_from_residual(
                target_row, draft_row, first, last, draft_vocab,
                at_column(drafts, columns, accepted).to(tl.int32), draft_factor, top, inverse,
                q_top, q_inverse, ratio, lo, hi, HAS_DRAFT, BLOCK_V,
            )  # fmt: skip
        else:
            value_p, index_p = draw_from_target(target_row, first, last, top, lo, hi, BLOCK_V)
        at = req * NUM_PARTS + part
        half = num_reqs * NUM_PARTS
        tl.store(value_ptr + at, value)
        tl.store(index_ptr + at, index)
        tl.store(value_ptr + half + at, value_p)
        tl.store(index_ptr + half + at, index_p)
        # The release makes this part's stores visible to whichever part finds itself the last, and
        # the acquire those of the others to it; L1 is bypassed below.
        tl.debug_barrier()
        before = tl.atomic_add(done_ptr + req, 1, sem="acq_rel")
        tl.debug_barrier()
        is_last = before == NUM_PARTS - 1
        token = tl.full([], 0, tl.int64)
        if is_last:
            token = _winner(value_ptr, index_ptr, req, num_reqs, NUM_PARTS, BLOCK_S)
    if is_last:
        kept = tl.where(columns < accepted, drafts, -1)
        tl.store(out, tl.where(columns == accepted, token, kept), mask=in_row)
        tl.store(num_sampled_ptr + req, accepted + 1)
        tl.store(accepted_ptr + req, accepted)
        tl.store(verified_ptr + req, num_drafts)
