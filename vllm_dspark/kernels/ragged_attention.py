"""Paged attention for verification: any mix of window lengths and prefill chunks in one launch.

Layout. K and V are views [num_blocks, block_size, num_kv_heads, head_dim] of vLLM's cache with
equal strides and a contiguous last dimension, whatever the physical order (vLLM 0.32 hands a
backend [num_blocks, num_kv_heads, block_size, 2 * head_dim], of which K and V are
``cache.transpose(1, 2).split(head_dim, -1)``). A query of position p sees key j
    causal       if p - window < j <= p
    non-causal   if |p - j| < window                     (no window: every j)
    score_j = cap(scale * k_scale * q . k_j),            cap(x) = soft_cap * tanh(x / soft_cap)
    output  = v_scale * sum_j softmax(score)_j v_j,      a sink adds exp(sink_h) to the denominator

Row m of a tile is token m // group, head m % group of the KV head: one request's window x group
rows fill an MMA tile and read each key once. ``attention_plan`` says which rows and keys each
program takes; programs past the step's item count leave at once, so one captured launch serves
every composition of its padded size. Chunked tiles leave normalised partial outputs and base-2
log-sum-exp in scratch; a second launch combines them (no atomics: bitwise repeatable).
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dspark.kernels.attention_plan import (
    PLAN_WIDTH,
    AttentionGeometry,
    AttentionShape,
    attention_geometry,
    plan_attention,
)
from vllm_dspark.kernels.launch import AttentionLaunch, describe_device

LOG2E = 1.4426950408889634
_MERGE_CHUNKS = 8  # partial results a merge program reads at once


@triton.jit
def _tanh(x):
    # exp2 saturates to 0 and inf, where this is exactly -1 and 1.
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def _key_offsets(
    table_ptr, keys, valid, stride_kb, stride_ks, PAGE: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Element offset of each key's row in the cache, for one request's block table."""
    if PAGE % BLOCK_N == 0:
        first = tl.min(keys, 0)
        page = tl.load(table_ptr + first // PAGE).to(tl.int64)
        return page * stride_kb + (keys % PAGE).to(tl.int64) * stride_ks
    page = tl.load(table_ptr + keys // PAGE, mask=valid, other=0).to(tl.int64)
    return page * stride_kb + (keys % PAGE).to(tl.int64) * stride_ks


@triton.jit
def _ragged_attention_kernel(
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

    k_scale = 1.0
    if QUANTIZED:
        k_scale = tl.load(k_scale_ptr)
    score_scale = scale * k_scale
    top = tl.full([TILE_ROWS], float("-inf"), tl.float32)
    total = tl.zeros([TILE_ROWS], tl.float32)
    if HAS_SINKS:
        # The sink is a key of its own: it belongs to exactly one chunk of the tile.
        sink = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.where(chunk == 0, sink, top)
        total = tl.where(chunk == 0, 1.0, total)
    acc = tl.zeros([TILE_ROWS, BLOCK_D], tl.float32)

    table_row = table_ptr + req.to(tl.int64) * stride_table
    k_head = k_ptr + kv_head.to(tl.int64) * stride_kh
    v_head = v_ptr + kv_head.to(tl.int64) * stride_kh
    for block in range(block_begin, block_end):
        keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
        valid = keys < num_keys
        offsets = _key_offsets(table_row, keys, valid, stride_kb, stride_ks, PAGE, BLOCK_N)
        k = tl.load(
            k_head + offsets[None, :] + dims[:, None],
            mask=valid[None, :] & in_dim[:, None],
            other=0.0,
        )
        scores = tl.dot(q, k.to(q.dtype)) * score_scale
        if SOFT_CAP > 0.0:
            scores = SOFT_CAP * _tanh(scores / SOFT_CAP)
        scores = scores * 1.4426950408889634
        seen = valid[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= position[:, None])
            if WINDOW > 0:
                seen = seen & (keys[None, :] > position[:, None] - WINDOW)
        elif WINDOW > 0:
            seen = seen & (tl.abs(keys[None, :] - position[:, None]) < WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(top - base)
        total = total * decay + tl.sum(weights, 1)
        acc = acc * decay[:, None]
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
def _merge_partials_kernel(
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
):
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


def ragged_attention(
    # [num_tokens, num_heads, head_dim], last two dimensions contiguous; padded rows are not written
    out: torch.Tensor,
    # [num_tokens, num_heads, head_dim], last dimension contiguous
    q: torch.Tensor,
    # [num_blocks, block_size, num_kv_heads, head_dim], last dimension contiguous
    k_cache: torch.Tensor,
    # same shape and strides as k_cache
    v_cache: torch.Tensor,
    # [num_reqs, max_blocks] int32
    block_table: torch.Tensor,
    scale: float,
    shape: AttentionShape,
    geometry: AttentionGeometry,
    workspace: "AttentionWorkspace",
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Attention of the step that ``plan_attention`` last planned into `workspace`."""
    _check_inputs(out, q, k_cache, v_cache, shape, sinks, k_scale, v_scale)
    launch = geometry.launch
    group, head_dim = shape.group, shape.head_dim
    block_d = max(triton.next_power_of_2(head_dim), 16)
    unused = workspace.lse
    _ragged_attention_kernel[(geometry.max_items, shape.num_kv_heads)](
        out,
        q,
        k_cache,
        v_cache,
        block_table,
        workspace.plan,
        workspace.partial,
        workspace.lse,
        unused if sinks is None else sinks,
        unused if k_scale is None else k_scale,
        unused if v_scale is None else v_scale,
        scale,
        out.stride(0),
        q.stride(0),
        q.stride(1),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        block_table.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        TILE_ROWS=geometry.tile_rows,
        BLOCK_N=launch.block_n,
        PAGE=k_cache.shape[1],
        CAUSAL=shape.causal,
        WINDOW=shape.sliding_window,
        SOFT_CAP=shape.soft_cap,
        HAS_SINKS=shape.has_sinks,
        QUANTIZED=k_cache.element_size() == 1,
        PLAN_WIDTH=PLAN_WIDTH,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    used_rows = geometry.tile_tokens * group
    # Few tiles: one row per program for parallelism. Many: four, to launch fewer empty programs.
    merge_rows = 1 if geometry.max_merges * shape.num_kv_heads * used_rows <= 4096 else 4
    _merge_partials_kernel[
        (geometry.max_merges, shape.num_kv_heads, triton.cdiv(used_rows, merge_rows))
    ](
        out,
        workspace.plan,
        workspace.partial,
        workspace.lse,
        geometry.max_items,
        out.stride(0),
        GROUP=group,
        HEAD_DIM=head_dim,
        BLOCK_D=block_d,
        TILE_ROWS=geometry.tile_rows,
        MERGE_ROWS=merge_rows,
        CHUNKS=_MERGE_CHUNKS,
        PLAN_WIDTH=PLAN_WIDTH,
        num_warps=4,
    )


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Buffers of one geometry; layers that run one after another share them."""

    plan: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor


def attention_workspace(
    shape: AttentionShape, geometry: AttentionGeometry, device: torch.device
) -> AttentionWorkspace:
    """Allocates the buffers; once, outside any capture."""
    rows = geometry.max_partials * shape.num_kv_heads * geometry.tile_rows
    return AttentionWorkspace(
        plan=torch.zeros(geometry.plan_rows, PLAN_WIDTH, dtype=torch.int32, device=device),
        partial=torch.empty(rows * shape.head_dim, dtype=torch.float32, device=device),
        lse=torch.empty(rows, dtype=torch.float32, device=device),
    )


class RaggedAttention:
    """One launch geometry with its buffers: ``plan`` once per step, ``forward`` once per layer."""

    def __init__(
        self,
        shape: AttentionShape,
        max_reqs: int,
        max_tokens: int,
        max_query_len: int,
        device: torch.device,
        scale: float | None = None,
        launch: AttentionLaunch | None = None,
    ) -> None:
        self.shape = shape
        self.scale = 1.0 / math.sqrt(shape.head_dim) if scale is None else scale
        self.geometry = attention_geometry(
            shape, max_reqs, max_tokens, max_query_len, describe_device(device), launch
        )
        self.workspace = attention_workspace(shape, self.geometry, device)

    def plan(self, query_start_loc: torch.Tensor, seq_lens: torch.Tensor) -> None:
        """Builds the work list on the device from this step's lengths."""
        plan_attention(self.workspace.plan, query_start_loc, seq_lens, self.shape, self.geometry)

    def forward(
        self,
        out: torch.Tensor,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        block_table: torch.Tensor,
        sinks: torch.Tensor | None = None,
        k_scale: torch.Tensor | None = None,
        v_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of one layer into `out`."""
        ragged_attention(
            out,
            q,
            k_cache,
            v_cache,
            block_table,
            self.scale,
            self.shape,
            self.geometry,
            self.workspace,
            sinks,
            k_scale,
            v_scale,
        )
        return out


def _check_inputs(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    shape: AttentionShape,
    sinks: torch.Tensor | None,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
) -> None:
    if k_cache.stride() != v_cache.stride() or k_cache.stride(-1) != 1:
        raise ValueError(
            f"K and V views must have equal strides and contiguous rows, got {k_cache.stride()} "
            f"and {v_cache.stride()}; split one cache tensor along its last dimension"
        )
    if q.shape[1:] != (shape.num_heads, shape.head_dim) or q.stride(-1) != 1:
        raise ValueError(f"q has shape {tuple(q.shape)}, strides {q.stride()}; layer is {shape}")
    if out.stride(1) != shape.head_dim or out.stride(2) != 1:
        raise ValueError(f"out must be contiguous within a token, got strides {out.stride()}")
    if (sinks is not None) != shape.has_sinks:
        raise ValueError(f"sinks given: {sinks is not None}, layer has sinks: {shape.has_sinks}")
    if k_cache.element_size() == 1:
        if k_cache.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
            raise ValueError(
                f"8-bit KV cache of dtype {k_cache.dtype}: view it as float8_e4m3fn or float8_e5m2"
            )
        if k_scale is None or v_scale is None:
            raise ValueError("an fp8 KV cache needs k_scale and v_scale (one-element tensors)")
