"""Device side of ragged attention (``ragged_attention.py`` says what the launches do together)."""

import triton
import triton.language as tl

from vllm_dspark.kernels.dependent import wait_previous


@triton.jit
def _tanh(x):
    # exp2 saturates to 0 and inf, where this is exactly -1 and 1.
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def _pages(table_ptr, first_key, num_keys, PAGE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of the BLOCK_N keys from `first_key` on (one page if a tile never leaves it).

    Past the request's keys: page 0, which exists.
    """
    keys = first_key
    if PAGE % BLOCK_N != 0:
        keys = first_key + tl.arange(0, BLOCK_N)
    return tl.load(table_ptr + keys // PAGE, mask=keys < num_keys, other=0)


@triton.jit
def ragged_attention_kernel(
    # [num_tokens, num_heads, head_dim]
    out_ptr,
    # [num_tokens, num_heads, head_dim]
    q_ptr,
    # [num_blocks, block_size, num_kv_heads, head_dim]
    k_ptr,
    # same shape and strides as k
    v_ptr,
    # [num_reqs, max_blocks] int32
    table_ptr,
    # [1 + max_items + max_merges, PLAN_WIDTH] int32
    plan_ptr,
    # [max_partials, num_kv_heads, TILE_ROWS, head_dim] float32
    partial_ptr,
    # [max_partials, num_kv_heads, TILE_ROWS] float32, base-2 log-sum-exp
    lse_ptr,
    # [num_heads] float32, read if HAS_SINKS
    sinks_ptr,
    # [1] float32 each, read if QUANTIZED
    k_scale_ptr,
    v_scale_ptr,
    scale,
    stride_ot,
    stride_qt,
    stride_qh,
    stride_kb,
    stride_ks,
    stride_kh,
    stride_table,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
    PLAN_WIDTH: tl.constexpr,
):
    item = tl.program_id(0)
    kv_head = tl.program_id(1)
    if item >= tl.load(plan_ptr):
        return
    row_ptr = plan_ptr + (1 + item) * PLAN_WIDTH
    req = tl.load(row_ptr)
    if req < 0:
        return
    first_token = tl.load(row_ptr + 1)
    num_tokens = tl.load(row_ptr + 2)
    first_position = tl.load(row_ptr + 3)
    num_keys = tl.load(row_ptr + 4)
    block_begin = tl.load(row_ptr + 5)
    block_end = tl.load(row_ptr + 6)
    chunk = tl.load(row_ptr + 7)
    num_chunks = tl.load(row_ptr + 8)
    slot = tl.load(row_ptr + 9)

    table_row = table_ptr + req.to(tl.int64) * stride_table
    # The table is read a tile ahead, so that the key loads of the loop hang on no other load of
    # their own iteration and the pipeline can run all its stages ahead.
    page = _pages(table_row, block_begin * BLOCK_N, num_keys, PAGE, BLOCK_N)

    rows = tl.arange(0, TILE_ROWS)
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = token < num_tokens
    position = first_position + token
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    row_mask = live[:, None] & in_dim[None, :]
    token_row = (first_token + token).to(tl.int64)
    q = tl.load(
        q_ptr + token_row[:, None] * stride_qt + head[:, None] * stride_qh + dims[None, :],
        mask=row_mask,
        other=0.0,
    )

    score_scale = scale
    if QUANTIZED:
        score_scale = scale * tl.load(k_scale_ptr)
    # Raw scores times `to_base2` are base-2 exponents; the factor is positive, so that the maximum
    # may be taken before it.
    to_base2 = score_scale * 1.4426950408889634
    if SOFT_CAP > 0.0:
        to_base2 = 1.4426950408889634
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS:
        # The sink is a key of its own: it belongs to exactly one chunk of the tile.
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(chunk == 0, sink, top)
        total = tl.where(chunk == 0, 1.0, total)
    acc = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)

    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_kh
    for block in range(block_begin, block_end):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = keys < num_keys
        offsets = page.to(tl.int64) * stride_kb + (keys % PAGE) * stride_ks
        page = _pages(table_row, (block + 1) * BLOCK_N, num_keys, PAGE, BLOCK_N)
        # Keys past the last are read from memory that exists and are masked as scores.
        if HEAD_DIM == BLOCK_D:
            k = tl.load(k_head + offsets[:, None] + dims[None, :])
        else:
            k = tl.load(k_head + offsets[:, None] + dims[None, :], mask=in_dim[None, :], other=0.0)
        scores = tl.dot(q, tl.trans(k.to(q.dtype)))
        if SOFT_CAP > 0.0:
            scores = SOFT_CAP * _tanh(scores * (score_scale / SOFT_CAP))
        if CAUSAL:
            # A live row's position is below the number of keys.
            seen = keys[None, :] <= position[:, None]
            if WINDOW > 0:
                seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        else:
            seen = valid[None, :]
            if WINDOW > 0:
                seen = seen & (tl.abs(keys[None, :] - position[:, None]) < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * to_base2)
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores * to_base2 - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
        # Values past the last key may be NaN, which a zero weight does not remove.
        v = tl.load(
            v_head + offsets[:, None] + dims[None, :],
            mask=valid[:, None] & in_dim[None, :],
            other=0.0,
        )
        acc = tl.dot(weights.to(q.dtype), v.to(q.dtype), acc)
        top = new_top

    v_scale = 1.0
    if QUANTIZED:
        v_scale = tl.load(v_scale_ptr)
    empty = total == 0.0
    acc = acc * (v_scale / tl.where(empty, 1.0, total))[:, None]
    if num_chunks <= 1:
        out_row = out_ptr + token_row[:, None] * stride_ot + head[:, None] * HEAD_DIM
        tl.store(out_row + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=row_mask)
    else:
        part = ((slot + chunk).to(tl.int64) * tl.num_programs(1) + kv_head) * TILE_ROWS + rows
        tl.store(partial_ptr + part[:, None] * HEAD_DIM + dims[None, :], acc, mask=row_mask)
        lse = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, total)))
        tl.store(lse_ptr + part, lse, mask=live)


@triton.jit
def merge_partials_kernel(
    # [num_tokens, num_heads, head_dim]
    out_ptr,
    # [1 + max_items + max_merges, PLAN_WIDTH] int32
    plan_ptr,
    # [max_partials, num_kv_heads, TILE_ROWS, head_dim] float32
    partial_ptr,
    # [max_partials, num_kv_heads, TILE_ROWS] float32
    lse_ptr,
    max_items,
    stride_ot,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr,
    CHUNKS: tl.constexpr,
    PLAN_WIDTH: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    wait_previous(DEPENDENT)
    merge = tl.program_id(0)
    kv_head = tl.program_id(1)
    if merge >= tl.load(plan_ptr + 1):
        return
    row_ptr = plan_ptr + (1 + max_items + merge) * PLAN_WIDTH
    first_token = tl.load(row_ptr)
    num_tokens = tl.load(row_ptr + 1)
    num_chunks = tl.load(row_ptr + 2)
    slot = tl.load(row_ptr + 3).to(tl.int64)
    rows = tl.program_id(2) * MERGE_ROWS + tl.arange(0, MERGE_ROWS)
    # num_chunks == 1: the tile's only chunk has written the output itself.
    if (num_chunks <= 1) | (tl.program_id(2) * MERGE_ROWS >= num_tokens * GROUP):
        return
    token = rows // GROUP
    head = kv_head * GROUP + rows % GROUP
    live = token < num_tokens
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    top = tl.full([MERGE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([MERGE_ROWS], tl.float32)
    acc = tl.zeros([MERGE_ROWS, BLOCK_D], tl.float32)
    for first in range(0, num_chunks, CHUNKS):
        chunks = first + tl.arange(0, CHUNKS)
        mask = (chunks < num_chunks)[:, None] & live[None, :]
        part = ((slot + chunks) * tl.num_programs(1) + kv_head)[:, None] * TILE_ROWS + rows[None, :]
        lse = tl.load(lse_ptr + part, mask=mask, other=float("-inf"))
        values = tl.load(
            partial_ptr + part[:, :, None] * HEAD_DIM + dims[None, None, :],
            mask=mask[:, :, None] & in_dim[None, None, :],
            other=0.0,
        )
        new_top = tl.maximum(top, tl.max(lse, 0))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(lse - base[None, :])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 0)
        acc = acc * decay[:, None] + tl.sum(weights[:, :, None] * values, 0)
        top = new_top
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    token_row = (first_token + token).to(tl.int64)
    out_row = out_ptr + token_row[:, None] * stride_ot + head[:, None] * HEAD_DIM
    mask = live[:, None] & in_dim[None, :]
    tl.store(out_row + dims[None, :], acc.to(out_ptr.dtype.element_ty), mask=mask)
