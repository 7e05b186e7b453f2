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

from vllm_dspark.kernels.attention_plan import (
    PLAN_WIDTH,
    AttentionGeometry,
    AttentionShape,
    attention_geometry,
    plan_attention,
)
from vllm_dspark.kernels.dependent import dependent_launches
from vllm_dspark.kernels.launch import AttentionLaunch, describe_device
from vllm_dspark.kernels.ragged_attention_kernels import (
    merge_partials_kernel,
    ragged_attention_kernel,
)

_MERGE_VALUES = 32  # rows of partial results that a merge program reads at once


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
    dependent = dependent_launches(q.device)
    ragged_attention_kernel[(geometry.max_items, shape.num_kv_heads)](
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
    used_rows = min(geometry.max_query_len, geometry.tile_tokens) * group
    # About a thousand programs; a program of one row reads many partial results at once, so that a
    # long context split over every SM is merged in few rounds.
    merge_rows = 1
    while (
        merge_rows < 8 and geometry.max_merges * shape.num_kv_heads * used_rows > 1024 * merge_rows
    ):
        merge_rows *= 2
    merge_partials_kernel[
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
        CHUNKS=_MERGE_VALUES // merge_rows,
        PLAN_WIDTH=PLAN_WIDTH,
        DEPENDENT=dependent,
        num_warps=4,
        launch_pdl=dependent,
    )


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Partial results; geometries whose launches run one after another share one."""

    # [rows * head_dim] float32
    partial: torch.Tensor
    # [rows] float32
    lse: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionWorkspace:
    """Buffers of one geometry; layers that run one after another share them."""

    plan: torch.Tensor
    partial: torch.Tensor
    lse: torch.Tensor


def _allocate_scratch(rows: int, head_dim: int, device: torch.device) -> AttentionScratch:
    return AttentionScratch(
        partial=torch.empty(rows * head_dim, dtype=torch.float32, device=device),
        lse=torch.empty(rows, dtype=torch.float32, device=device),
    )


def shared_scratch(shape: AttentionShape, device: torch.device) -> AttentionScratch:
    """Scratch that any geometry of `shape` on `device` fits into."""
    described = describe_device(device)
    rows = max(
        geometry.max_partials * geometry.tile_rows
        for geometry in (
            attention_geometry(shape, 1, length, length, described)
            for length in (1 << bit for bit in range(10))
        )
    )
    return _allocate_scratch(rows * shape.num_kv_heads, shape.head_dim, device)


def attention_workspace(
    shape: AttentionShape,
    geometry: AttentionGeometry,
    device: torch.device,
    scratch: AttentionScratch | None = None,
) -> AttentionWorkspace:
    """Allocates what `scratch` does not give; once, outside any capture."""
    rows = geometry.max_partials * shape.num_kv_heads * geometry.tile_rows
    if scratch is None:
        scratch = _allocate_scratch(rows, shape.head_dim, device)
    if scratch.lse.numel() < rows:
        raise ValueError(f"scratch of {scratch.lse.numel()} rows; this geometry needs {rows}")
    plan = torch.zeros(geometry.plan_rows, PLAN_WIDTH, dtype=torch.int32, device=device)
    return AttentionWorkspace(plan, scratch.partial, scratch.lse)


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
        scratch: AttentionScratch | None = None,
    ) -> None:
        self.shape = shape
        self.scale = 1.0 / math.sqrt(shape.head_dim) if scale is None else scale
        self.geometry = attention_geometry(
            shape, max_reqs, max_tokens, max_query_len, describe_device(device), launch
        )
        self.workspace = attention_workspace(shape, self.geometry, device, scratch)

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
