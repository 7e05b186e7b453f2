"""Device side of ragged rejection (``rejection.py`` says what the launches do together)."""

import triton
import triton.language as tl

from vllm_dspark.kernels.noise_device import gumbel, key_words, token_bits, uniform

_INT_MAX = tl.constexpr(2147483647)
_ACCEPT = tl.constexpr(1)
_RESAMPLE = tl.constexpr(2)


@triton.jit
def _clean(logits):
    """NaN counts as -inf, +inf as the largest float32."""
    bounded = tl.minimum(logits, 3.4028234663852886e38)
    return tl.where(logits == logits, bounded, float("-inf"))


@triton.jit
def _mass(logits, top, inverse_sum):
    """exp(logits - top) * inverse_sum; 0 for a row without finite logits (inverse_sum 0)."""
    return tl.exp(logits - tl.where(top == float("-inf"), 0.0, top)) * inverse_sum


@triton.jit
def _row_sum(row_ptr, first, last, divisor, BLOCK_V: tl.constexpr):
    """(maximum, sum of exponentials relative to it, lowest argmax) of a slice of one row."""
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    index = tl.full([], 2147483647, tl.int32)
    for base in range(first, last, BLOCK_V):
        cols = base + tl.arange(0, BLOCK_V)
        mask = cols < last
        values = tl.load(row_ptr + cols, mask=mask, other=float("-inf")).to(tl.float32)
        values = _clean(values / divisor)
        tile_top = tl.max(values, 0)
        tile_index = tl.min(tl.where((values == tile_top) & mask, cols, 2147483647), 0)
        # Tiles ascend, so an equal maximum keeps the lower index; -inf never replaces the first.
        index = tl.where((tile_top > top) | (index == 2147483647), tile_index, index)
        new_top = tl.maximum(top, tile_top)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(values - shift), 0)
        top = new_top
    return top, total, index


@triton.jit
def row_stats_kernel(
    # [4, R, J, S] float32: target maximum and sum, draft maximum and sum
    stats_ptr,
    # [R, J, S] int32
    argmax_ptr,
    # [N, V]
    target_ptr,
    # [M, K, V_c]
    draft_ptr,
    # [R + 1] int32
    cu_ptr,
    # [R]
    mapping_ptr,
    # [M] float32
    temperature_ptr,
    vocab,
    draft_vocab,
    stride_target,
    stride_dm,
    stride_dk,
    HAS_DRAFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    req, column, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    num_parts = tl.num_programs(2)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    row = start + column
    if row >= end:
        return
    at = (req * tl.num_programs(1) + column) * num_parts + part
    plane = tl.num_programs(0) * tl.num_programs(1) * num_parts
    width = tl.cdiv(tl.cdiv(vocab, num_parts), 16) * 16
    first = part * width
    target_row = target_ptr + row.to(tl.int64) * stride_target
    top, total, index = _row_sum(target_row, first, tl.minimum(first + width, vocab), 1.0, BLOCK_V)
    tl.store(stats_ptr + at, top)
    tl.store(stats_ptr + plane + at, total)
    tl.store(argmax_ptr + at, index)
    if HAS_DRAFT:
        slot = tl.load(mapping_ptr + req).to(tl.int64)
        temperature = tl.load(temperature_ptr + slot)
        if (temperature > 0.0) & (row + 1 < end):
            width = tl.cdiv(tl.cdiv(draft_vocab, num_parts), 16) * 16
            first = part * width
            top, total, index = _row_sum(
                draft_ptr + slot * stride_dm + column * stride_dk,
                first,
                tl.minimum(first + width, draft_vocab),
                temperature,
                BLOCK_V,
            )
            tl.store(stats_ptr + 2 * plane + at, top)
            tl.store(stats_ptr + 3 * plane + at, total)


@triton.jit
def _combine(stats_ptr, at, plane, mask):
    """Maximum and inverse sum of rows from their parts; inverse 0 where nothing is finite."""
    top = tl.load(stats_ptr + at, mask=mask, other=float("-inf"))
    total = tl.load(stats_ptr + plane + at, mask=mask, other=0.0)
    row_top = tl.max(top, 1)
    shift = tl.where(row_top == float("-inf"), 0.0, row_top)
    row_sum = tl.sum(total * tl.exp(top - shift[:, None]), 1)
    return row_top, tl.where(row_sum > 0.0, 1.0 / tl.where(row_sum > 0.0, row_sum, 1.0), 0.0)


@triton.jit
def judge_kernel(
    # [R] int32 accepted drafts (standard, greedy) or judgeable drafts (block)
    accepted_ptr,
    # [R] int64 token after the accepted drafts, written for greedy requests
    token_ptr,
    # [5, R, J] float32: target top, inverse sum, draft top, inverse sum, block's joint ratio
    rows_ptr,
    # [R] int32: 0 greedy, 1 sample from p, 2 sample from the residual
    mode_ptr,
    # [4, R, J, S], [R, J, S]
    stats_ptr,
    argmax_ptr,
    # [N, V]
    target_ptr,
    # [M, K, V_c]
    draft_ptr,
    # [N] input tokens
    tokens_ptr,
    # [R + 1] int32
    cu_ptr,
    # [N] int64
    pos_ptr,
    # [R]
    mapping_ptr,
    # [M] float32
    temperature_ptr,
    # [M] int64
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
):
    req = tl.program_id(0)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    if start >= end:
        return
    num_drafts = end - start - 1
    slot = tl.load(mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    columns = tl.arange(0, BLOCK_J)
    parts = tl.arange(0, BLOCK_S)
    in_window = columns <= num_drafts
    has_draft = columns < num_drafts
    row = (start + columns).to(tl.int64)
    at = (req * (NUM_DRAFTS + 1) + columns)[:, None] * NUM_PARTS + parts[None, :]
    plane = tl.num_programs(0) * (NUM_DRAFTS + 1) * NUM_PARTS
    mask = in_window[:, None] & (parts < NUM_PARTS)[None, :]
    top, inverse = _combine(stats_ptr, at, plane, mask)
    best = tl.load(stats_ptr + at, mask=mask, other=float("-inf"))
    index = tl.load(argmax_ptr + at, mask=mask, other=2147483647)
    argmax = tl.min(tl.where(best == top[:, None], index, 2147483647), 1)

    drafts = tl.load(tokens_ptr + row + 1, mask=has_draft, other=-1).to(tl.int64)
    known = (drafts >= 0) & (drafts < vocab)
    seed = tl.load(seeds_ptr + slot)
    position = tl.load(pos_ptr + row, mask=in_window, other=0)
    lo, hi = key_words(position * 0 + seed, position, columns, _ACCEPT)
    u = uniform(token_bits(lo, hi, columns * 0))
    if SYNTHETIC:
        rate = tl.load(rates_ptr + columns, mask=columns < NUM_DRAFTS, other=0.0)

    if temperature == 0.0:
        ok = (drafts == argmax) & (inverse > 0.0)
        if SYNTHETIC:
            ok = (u < rate) & known
        accepted = tl.min(tl.where(has_draft & ok, num_drafts, tl.minimum(columns, num_drafts)), 0)
        tl.store(accepted_ptr + req, accepted)
        tl.store(token_ptr + req, tl.sum(tl.where(columns == accepted, argmax, 0), 0).to(tl.int64))
        tl.store(mode_ptr + req, 0)
    else:
        picked = tl.load(
            target_ptr + row * stride_target + drafts, mask=has_draft & known, other=float("-inf")
        ).to(tl.float32)
        p = _mass(_clean(picked), top, inverse)
        judgeable = has_draft & known
        rows_at = req * (NUM_DRAFTS + 1) + columns
        rows_plane = tl.num_programs(0) * (NUM_DRAFTS + 1)
        tl.store(rows_ptr + rows_at, top, mask=in_window)
        tl.store(rows_ptr + rows_plane + rows_at, inverse, mask=in_window)
        if HAS_DRAFT:
            q_mask = has_draft[:, None] & (parts < NUM_PARTS)[None, :]
            q_top, q_inverse = _combine(stats_ptr + 2 * plane, at, plane, q_mask)
            q_row = draft_ptr + slot * stride_dm + columns * stride_dk
            # An id past the cache's columns was never drafted: weight zero, not its neighbour's.
            cached = judgeable & (drafts < draft_vocab)
            picked = tl.load(q_row + drafts, mask=cached, other=float("-inf")).to(tl.float32)
            q = _mass(_clean(picked / temperature), q_top, q_inverse)
            judgeable = judgeable & (q_inverse > 0.0)
            tl.store(rows_ptr + 2 * rows_plane + rows_at, q_top, mask=in_window)
            tl.store(rows_ptr + 3 * rows_plane + rows_at, q_inverse, mask=in_window)
        else:
            q = tl.full([BLOCK_J], 1.0, tl.float32)
        if BLOCK_METHOD:
            length = tl.min(tl.where(judgeable, num_drafts, tl.minimum(columns, num_drafts)), 0)
            ratio = tl.full([], 1.0, tl.float32)
            for i in tl.static_range(NUM_DRAFTS):
                p_i = tl.sum(tl.where(columns == i, p, 0.0), 0) * ratio
                q_i = tl.sum(tl.where(columns == i, q, 0.0), 0)
                whole = tl.where(p_i > 0.0, 1.0, 0.0)
                ratio = tl.where(p_i >= q_i, whole, p_i / tl.where(q_i > 0.0, q_i, 1.0))
                tl.store(rows_ptr + 4 * rows_plane + req * (NUM_DRAFTS + 1) + i + 1, ratio)
            tl.store(rows_ptr + 4 * rows_plane + req * (NUM_DRAFTS + 1), 1.0)
            tl.store(accepted_ptr + req, length)
            tl.store(mode_ptr + req, 1)
        else:
            ok = u * q < p
            if SYNTHETIC:
                ok = u < rate
            ok = ok & judgeable
            accepted = tl.min(tl.where(ok, num_drafts, tl.minimum(columns, num_drafts)), 0)
            residual = tl.sum(tl.where((columns == accepted) & judgeable, 1, 0), 0)
            tl.store(rows_ptr + 4 * rows_plane + rows_at, 1.0, mask=in_window)
            tl.store(accepted_ptr + req, accepted)
            tl.store(mode_ptr + req, 1 + residual)


@triton.jit
def _weights(
    target_row,
    draft_row,
    cols,
    mask,
    draft_vocab,
    draft,
    temperature,
    top,
    inverse,
    q_top,
    q_inverse,
    HAS_DRAFT: tl.constexpr,
):
    """(p, q) of a tile of one row."""
    target = tl.load(target_row + cols, mask=mask, other=float("-inf")).to(tl.float32)
    p = _mass(_clean(target), top, inverse)
    if HAS_DRAFT:
        cached = tl.load(draft_row + cols, mask=mask & (cols < draft_vocab), other=float("-inf"))
        q = _mass(_clean(cached.to(tl.float32) / temperature), q_top, q_inverse)
    else:
        q = tl.where(cols == draft, 1.0, 0.0)
    return p, q


@triton.jit
def block_mass_kernel(
    # [R, J, S] float32: parts of sum(max(ratio_i * p_i - q_i, 0))
    mass_ptr,
    # [5, R, J] float32
    rows_ptr,
    # [R] int32 judgeable drafts
    length_ptr,
    # [R] int32
    mode_ptr,
    # [N, V], [M, K, V_c]
    target_ptr,
    draft_ptr,
    # [N]
    tokens_ptr,
    # [R + 1] int32
    cu_ptr,
    # [R]
    mapping_ptr,
    # [M] float32
    temperature_ptr,
    vocab,
    draft_vocab,
    stride_target,
    stride_dm,
    stride_dk,
    HAS_DRAFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    req, column, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    if start >= end:
        return
    if tl.load(mode_ptr + req) == 0:
        return
    # Column 0 is never tested (its ratio is 1), the last one is tested by its ratio alone.
    if (column == 0) | (column >= tl.load(length_ptr + req)):
        return
    slot = tl.load(mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    at = req * tl.num_programs(1) + column
    plane = tl.num_programs(0) * tl.num_programs(1)
    top, inverse = tl.load(rows_ptr + at), tl.load(rows_ptr + plane + at)
    ratio = tl.load(rows_ptr + 4 * plane + at)
    q_top, q_inverse = 0.0, 0.0
    if HAS_DRAFT:
        q_top, q_inverse = tl.load(rows_ptr + 2 * plane + at), tl.load(rows_ptr + 3 * plane + at)
    row = (start + column).to(tl.int64)
    draft = tl.load(tokens_ptr + row + 1)
    width = tl.cdiv(tl.cdiv(vocab, tl.num_programs(2)), 16) * 16
    first = part * width
    last = tl.minimum(first + width, vocab)
    total = tl.zeros([BLOCK_V], tl.float32)
    for base in range(first, last, BLOCK_V):
        cols = base + tl.arange(0, BLOCK_V)
        p, q = _weights(
            target_ptr + row * stride_target,
            draft_ptr + slot * stride_dm + column * stride_dk,
            cols,
            cols < last,
            draft_vocab,
            draft,
            temperature,
            top,
            inverse,
            q_top,
            q_inverse,
            HAS_DRAFT,
        )
        total += tl.maximum(ratio * p - q, 0.0)
    tl.store(mass_ptr + at * tl.num_programs(2) + part, tl.sum(total, 0))


@triton.jit
def block_judge_kernel(
    # [R] int32: judgeable drafts, overwritten by accepted drafts
    accepted_ptr,
    # [R] int32
    mode_ptr,
    # [R, J, S] float32
    mass_ptr,
    # [5, R, J] float32
    rows_ptr,
    # [R + 1] int32
    cu_ptr,
    # [N] int64
    pos_ptr,
    # [R]
    mapping_ptr,
    # [M] int64
    seeds_ptr,
    NUM_DRAFTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    req = tl.program_id(0)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    if start >= end:
        return
    if tl.load(mode_ptr + req) == 0:
        return
    length = tl.load(accepted_ptr + req)
    # Entry i - 1 of these vectors is the test of length i.
    tests = tl.arange(0, BLOCK_J)
    parts = tl.arange(0, BLOCK_S)
    live = tests < length
    middle = tests + 1 < length
    rows_at = req * (NUM_DRAFTS + 1) + tests + 1
    plane = tl.num_programs(0) * (NUM_DRAFTS + 1)
    ratio = tl.load(rows_ptr + 4 * plane + rows_at, mask=live, other=0.0)
    mass = tl.sum(
        tl.load(
            mass_ptr + rows_at[:, None] * NUM_PARTS + parts[None, :],
            mask=middle[:, None] & (parts < NUM_PARTS)[None, :],
            other=0.0,
        ),
        1,
    )
    rest = mass + 1.0 - ratio
    inside = tl.where(rest > 0.0, mass / tl.where(rest > 0.0, rest, 1.0), 1.0)
    h = tl.where(middle, inside, ratio)
    seed = tl.load(seeds_ptr + tl.load(mapping_ptr + req).to(tl.int64))
    position = tl.load(pos_ptr + start + tests, mask=live, other=0)
    lo, hi = key_words(position * 0 + seed, position, tests, _ACCEPT)
    u = uniform(token_bits(lo, hi, tests * 0))
    accepted = tl.max(tl.where(live & (u <= h), tests + 1, 0), 0)
    tl.store(accepted_ptr + req, accepted)
    tl.store(mode_ptr + req, tl.where(accepted < length, 2, 1))


@triton.jit
def resample_kernel(
    # [2, R, S] float32: best score from the residual, from p
    value_ptr,
    # [2, R, S] int32
    index_ptr,
    # [R] int32
    accepted_ptr,
    mode_ptr,
    # [5, R, J] float32
    rows_ptr,
    # [N, V], [M, K, V_c]
    target_ptr,
    draft_ptr,
    # [N]
    tokens_ptr,
    # [R + 1] int32
    cu_ptr,
    # [N] int64
    pos_ptr,
    # [R]
    mapping_ptr,
    # [M] float32, [M] int64
    temperature_ptr,
    seeds_ptr,
    vocab,
    draft_vocab,
    stride_target,
    stride_dm,
    stride_dk,
    NUM_DRAFTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    req, part = tl.program_id(0), tl.program_id(1)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    if start >= end:
        return
    mode = tl.load(mode_ptr + req)
    if mode == 0:
        return
    slot = tl.load(mapping_ptr + req).to(tl.int64)
    temperature = tl.load(temperature_ptr + slot)
    column = tl.load(accepted_ptr + req)
    at = req * (NUM_DRAFTS + 1) + column
    plane = tl.num_programs(0) * (NUM_DRAFTS + 1)
    top, inverse = tl.load(rows_ptr + at), tl.load(rows_ptr + plane + at)
    row = (start + column).to(tl.int64)
    ratio, draft = 1.0, -1
    q_top, q_inverse = float("-inf"), 0.0
    if mode == 2:
        ratio = tl.load(rows_ptr + 4 * plane + at)
        draft = tl.load(tokens_ptr + row + 1).to(tl.int32)
        if HAS_DRAFT:
            q_top = tl.load(rows_ptr + 2 * plane + at)
            q_inverse = tl.load(rows_ptr + 3 * plane + at)
    lo, hi = key_words(tl.load(seeds_ptr + slot), tl.load(pos_ptr + row), column, _RESAMPLE)
    width = tl.cdiv(tl.cdiv(vocab, tl.num_programs(1)), 16) * 16
    first = part * width
    last = tl.minimum(first + width, vocab)
    # The last row has no draft column; the pointer is clamped, the mask reads nothing from it.
    draft_row = draft_ptr + slot * stride_dm + tl.minimum(column, NUM_DRAFTS - 1) * stride_dk
    limit = tl.where(mode == 2, draft_vocab, 0)
    best, best_p = tl.full([], float("-inf"), tl.float32), tl.full([], float("-inf"), tl.float32)
    index, index_p = tl.full([], 2147483647, tl.int32), tl.full([], 2147483647, tl.int32)
    for base in range(first, last, BLOCK_V):
        cols = base + tl.arange(0, BLOCK_V)
        mask = cols < last
        p, q = _weights(
            target_ptr + row * stride_target,
            draft_row,
            cols,
            mask,
            limit,
            draft,
            temperature,
            top,
            inverse,
            q_top,
            q_inverse,
            HAS_DRAFT,
        )
        noise = gumbel(token_bits(lo, hi, cols))
        weight = tl.where(mask, tl.maximum(ratio * p - q, 0.0), 0.0)
        score = tl.where(weight > 0.0, tl.log(weight) + noise, float("-inf"))
        tile = tl.max(score, 0)
        tile_index = tl.min(tl.where((score == tile) & mask, cols, 2147483647), 0)
        index = tl.where((tile > best) | (index == 2147483647), tile_index, index)
        best = tl.maximum(best, tile)
        score = tl.where(mask & (p > 0.0), tl.log(p) + noise, float("-inf"))
        tile = tl.max(score, 0)
        tile_index = tl.min(tl.where((score == tile) & mask, cols, 2147483647), 0)
        index_p = tl.where((tile > best_p) | (index_p == 2147483647), tile_index, index_p)
        best_p = tl.maximum(best_p, tile)
    out = req * tl.num_programs(1) + part
    half = tl.num_programs(0) * tl.num_programs(1)
    tl.store(value_ptr + out, best)
    tl.store(index_ptr + out, index)
    tl.store(value_ptr + half + out, best_p)
    tl.store(index_ptr + half + out, index_p)


@triton.jit
def outcome_kernel(
    # [R, K + 1] int64
    sampled_ptr,
    # [R] int32 each
    num_sampled_ptr,
    accepted_out_ptr,
    verified_ptr,
    # [R] int32, [R] int64, [R] int32
    accepted_ptr,
    token_ptr,
    mode_ptr,
    # [2, R, S]
    value_ptr,
    index_ptr,
    # [N]
    tokens_ptr,
    # [R + 1] int32
    cu_ptr,
    NUM_DRAFTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    req = tl.program_id(0)
    start, end = tl.load(cu_ptr + req), tl.load(cu_ptr + req + 1)
    columns = tl.arange(0, BLOCK_J)
    out = sampled_ptr + req.to(tl.int64) * (NUM_DRAFTS + 1) + columns
    in_row = columns <= NUM_DRAFTS
    if start >= end:
        tl.store(out, tl.full([BLOCK_J], -1, tl.int64), mask=in_row)
        tl.store(num_sampled_ptr + req, 0)
        tl.store(accepted_out_ptr + req, 0)
        tl.store(verified_ptr + req, 0)
    else:
        accepted = tl.load(accepted_ptr + req)
        token = tl.load(token_ptr + req)
        if tl.load(mode_ptr + req) != 0:
            parts = tl.arange(0, BLOCK_S)
            mask = parts < NUM_PARTS
            at = req * NUM_PARTS + parts
            half = tl.num_programs(0) * NUM_PARTS
            value = tl.load(value_ptr + at, mask=mask, other=float("-inf"))
            # A residual without any weight falls back to p.
            if tl.max(value, 0) == float("-inf"):
                at += half
                value = tl.load(value_ptr + at, mask=mask, other=float("-inf"))
            index = tl.load(index_ptr + at, mask=mask, other=2147483647)
            winners = tl.where((value == tl.max(value, 0)) & mask, index, 2147483647)
            token = tl.min(winners, 0).to(tl.int64)
        drafts = tl.load(tokens_ptr + start + 1 + columns, mask=columns < accepted, other=-1)
        row = tl.where(columns == accepted, token, drafts.to(tl.int64))
        tl.store(out, row, mask=in_row)
        tl.store(num_sampled_ptr + req, accepted + 1)
        tl.store(accepted_out_ptr + req, accepted)
        tl.store(verified_ptr + req, end - start - 1)
