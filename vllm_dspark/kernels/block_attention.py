"""Attention of the drafter's block: K queries per request over context and block, not causal.

`BlockAttention` is the ragged kernel with uniform query lengths; K of 1..16 differ only in the row
tile (16, 32, ... rows of K x group), so a drafter compiles at most a few variants and scales,
strides, lengths and batch sizes are run-time values. A request of length 0 (scratch row of a padded
batch) yields zeros.

`latent_block_attention` is the windowed MLA form (DeepSeek-V4's embedded drafter): one latent
vector of `latent_dim` (+ `rope_dim`) per key, shared by all heads,
    score_h(p, j) = scale * (q_h[:latent] . c_j + q_h[latent:] . r_j),    j > p - window
    output_h(p)   = sum_j softmax(score_h(p))_j c_j,    a sink per head in the denominator
A block is no longer than the window, so every query sees the whole block. At most window + K keys
per request: one program per row tile reads them all, nothing is split.
"""

import torch
import triton
import triton.language as tl

from vllm_dspark.kernels.attention_plan import AttentionShape
from vllm_dspark.kernels.launch import describe_device, latent_launch
from vllm_dspark.kernels.ragged_attention import RaggedAttention

_MAX_BLOCK = 16


class BlockAttention(RaggedAttention):
    """Buffers and launches for blocks of `block_size` queries in up to `max_reqs` requests."""

    def __init__(
        self,
        shape: AttentionShape,
        max_reqs: int,
        block_size: int,
        device: torch.device,
        scale: float | None = None,
    ) -> None:
        if not 1 <= block_size <= _MAX_BLOCK:
            raise ValueError(f"block of {block_size} tokens; the kernel covers 1..{_MAX_BLOCK}")
        super().__init__(shape, max_reqs, max_reqs * block_size, block_size, device, scale)
        self.query_start_loc = (
            torch.arange(max_reqs + 1, dtype=torch.int32, device=device) * block_size
        )

    def plan_block(self, seq_lens: torch.Tensor) -> None:
        """Plans requests of these total lengths, [num_reqs] int32: context and block, or 0."""
        self.plan(self.query_start_loc[: seq_lens.shape[0] + 1], seq_lens)


@triton.jit
def _latent_attention_kernel(
    # [num_tokens, num_heads, LATENT]
    out_ptr,
    # [num_tokens, num_heads, LATENT + ROPE]
    q_ptr,
    # [num_blocks, page, LATENT + ROPE]
    cache_ptr,
    # [num_reqs, max_blocks] int32
    table_ptr,
    # [num_reqs] int32
    seq_lens_ptr,
    # [num_heads] float32, read if HAS_SINKS
    sinks_ptr,
    # [1] float32, read if QUANTIZED
    scale_ptr,
    scale,
    block_size,
    num_heads,
    window,
    stride_qt,
    stride_qh,
    stride_cb,
    stride_cs,
    stride_table,
    PAGE: tl.constexpr,
    LATENT: tl.constexpr,
    ROPE: tl.constexpr,
    BLOCK_ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUANTIZED: tl.constexpr,
):
    req = tl.program_id(0).to(tl.int64)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = rows // num_heads, rows % num_heads
    live = token < block_size
    seq_len = tl.load(seq_lens_ptr + req)
    latents = tl.arange(0, LATENT)
    token_row = req * block_size + token
    q_row = q_ptr + token_row[:, None] * stride_qt + head[:, None] * stride_qh
    q = tl.load(q_row + latents[None, :], mask=live[:, None], other=0.0)
    if ROPE > 0:
        ropes = tl.arange(0, BLOCK_ROPE)
        q_rope = tl.load(
            q_row + LATENT + ropes[None, :], mask=live[:, None] & (ropes < ROPE)[None, :], other=0.0
        )
    cache_scale = 1.0
    if QUANTIZED:
        cache_scale = tl.load(scale_ptr)
    score_scale = scale * cache_scale * 1.4426950408889634
    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if HAS_SINKS:
        top = tl.load(sinks_ptr + head, mask=live, other=0.0).to(tl.float32) * 1.4426950408889634
        total = total + 1.0
    acc = tl.zeros([BLOCK_M, LATENT], tl.float32)
    context = tl.maximum(seq_len - block_size, 0)
    position = context + token
    first = tl.maximum(context + (tl.program_id(1) * BLOCK_M) // num_heads - window + 1, 0)
    for base in range(first, seq_len, BLOCK_N):
        keys = base + tl.arange(0, BLOCK_N)
        valid = keys < seq_len
        page = tl.load(table_ptr + req * stride_table + keys // PAGE, mask=valid, other=0)
        offset = page.to(tl.int64) * stride_cb + (keys % PAGE).to(tl.int64) * stride_cs
        latent = tl.load(
            cache_ptr + offset[:, None] + latents[None, :], mask=valid[:, None], other=0.0
        ).to(q.dtype)
        scores = tl.dot(q, tl.trans(latent))
        if ROPE > 0:
            rope = tl.load(
                cache_ptr + offset[None, :] + LATENT + ropes[:, None],
                mask=valid[None, :] & (ropes < ROPE)[:, None],
                other=0.0,
            )
            scores = tl.dot(q_rope, rope.to(q.dtype), scores)
        seen = valid[None, :] & (keys[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores * score_scale, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weights = tl.exp2(scores - shift[:, None])
        decay = tl.exp2(top - shift)
        total = total * decay + tl.sum(weights, 1)
        acc = tl.dot(weights.to(q.dtype), latent, acc * decay[:, None])
        top = new_top
    acc = acc * (cache_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out = out_ptr + (token_row * num_heads + head)[:, None] * LATENT + latents[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=live[:, None])


def latent_block_attention(
    # [num_reqs * block_size, num_heads, latent_dim], contiguous
    out: torch.Tensor,
    # [num_reqs * block_size, num_heads, latent_dim + rope_dim]
    q: torch.Tensor,
    # [num_blocks, page, latent_dim + rope_dim], last dimension contiguous
    cache: torch.Tensor,
    # [num_reqs, max_blocks] int32
    block_table: torch.Tensor,
    # [num_reqs] int32 context and block, or 0
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
    cache_scale: torch.Tensor | None = None,
) -> None:
    """Windowed latent attention of one block per request."""
    num_reqs, num_heads, latent_dim = seq_lens.shape[0], out.shape[1], out.shape[2]
    block_size = out.shape[0] // num_reqs
    rope_dim = q.shape[2] - latent_dim
    quantized = cache.element_size() == 1
    if triton.next_power_of_2(latent_dim) != latent_dim or not out.is_contiguous():
        raise ValueError(f"latent_dim {latent_dim} must be a power of two and `out` contiguous")
    if block_size > window:
        raise ValueError(f"block of {block_size} queries is wider than the window of {window} keys")
    if quantized and cache_scale is None:
        raise ValueError("an fp8 latent cache needs its scale (one-element tensor)")
    launch = latent_launch(describe_device(out.device).arch, block_size * num_heads)
    grid = (num_reqs, triton.cdiv(block_size * num_heads, launch.block_m))
    _latent_attention_kernel[grid](
        out,
        q,
        cache,
        block_table,
        seq_lens,
        seq_lens if sinks is None else sinks,
        seq_lens if cache_scale is None else cache_scale,
        scale,
        block_size,
        num_heads,
        window,
        q.stride(0),
        q.stride(1),
        cache.stride(0),
        cache.stride(1),
        block_table.stride(0),
        PAGE=cache.shape[1],
        LATENT=latent_dim,
        ROPE=rope_dim,
        BLOCK_ROPE=max(triton.next_power_of_2(max(rope_dim, 1)), 16),
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        HAS_SINKS=sinks is not None,
        QUANTIZED=quantized,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
