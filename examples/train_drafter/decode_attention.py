"""Attention of one new token per sequence over a padded KV cache.

q [B, heads, D], keys and values [B, kv_heads, T, D], lengths [B] -> [B, heads, D]; entries at or
past `lengths` are not read. On a GPU a small Triton kernel reads only the used part of the cache,
which is where generation spends its time; elsewhere the torch twin runs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

try:
    import triton
    import triton.language as tl
except ImportError:  # a CPU-only torch may come without Triton
    triton = None


def decode_attention_reference(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """The specification, in torch."""
    group = q.shape[1] // keys.shape[1]
    # The queries of one KV head become the query axis: no copy of the cache per head.
    grouped = q.unflatten(1, (keys.shape[1], group))
    used = torch.arange(keys.shape[2], device=q.device) < lengths[:, None]
    mixed = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=used[:, None, None])
    return mixed.flatten(1, 2)


if triton is not None:

    @triton.jit
    def _decode_attention_kernel(
        q_ptr,  # [B, KV_HEADS * GROUP, D]
        k_ptr,  # [B, KV_HEADS, T, D]
        v_ptr,  # [B, KV_HEADS, T, D]
        length_ptr,  # [B]
        out_ptr,  # [B, KV_HEADS * GROUP, D]
        scale,
        T,
        KV_HEADS: tl.constexpr,
        GROUP: tl.constexpr,
        D: tl.constexpr,
        ROWS: tl.constexpr,  # GROUP padded to what tl.dot accepts
        BLOCK: tl.constexpr,
    ):
        batch = tl.program_id(0)
        head = tl.program_id(1)
        length = tl.load(length_ptr + batch)
        rows = tl.arange(0, ROWS)
        dims = tl.arange(0, D)
        q_at = ((batch * KV_HEADS + head) * GROUP + rows[:, None]) * D + dims[None, :]
        row_ok = (rows < GROUP)[:, None]
        q = tl.load(q_ptr + q_at, mask=row_ok, other=0.0)
        # int64: slots * heads * length * D passes 2**31.
        base = (batch * KV_HEADS + head).to(tl.int64) * T * D
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, D], tl.float32)
        for start in range(0, length, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            used = cols < length
            k_at = base + cols[None, :] * D + dims[:, None]
            k = tl.load(k_ptr + k_at, mask=used[None, :], other=0.0)
            scores = tl.dot(q, k) * scale
            scores = tl.where(used[None, :], scores, float("-inf"))
            new_best = tl.maximum(best, tl.max(scores, 1))
            weights = tl.exp(scores - new_best[:, None])
            shrink = tl.exp(best - new_best)
            v_at = base + cols[:, None] * D + dims[None, :]
            v = tl.load(v_ptr + v_at, mask=used[:, None], other=0.0)
            total = total * shrink + tl.sum(weights, 1)
            acc = acc * shrink[:, None] + tl.dot(weights.to(v.dtype), v)
            best = new_best
        out = acc / total[:, None]
        tl.store(out_ptr + q_at, out.to(out_ptr.dtype.element_ty), mask=row_ok)


def decode_attention_triton(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """The Triton path; inputs must be contiguous, D a power of two."""
    batch, heads, dim = q.shape
    kv_heads, length = keys.shape[1], keys.shape[2]
    q = q.contiguous()
    out = torch.empty_like(q)
    _decode_attention_kernel[(batch, kv_heads)](
        q,
        keys,
        values,
        lengths,
        out,
        dim**-0.5,
        length,
        KV_HEADS=kv_heads,
        GROUP=heads // kv_heads,
        D=dim,
        ROWS=16,
        BLOCK=64,
        num_warps=2,
    )
    return out


def decode_attention(q: Tensor, keys: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    """Pick the Triton path on a GPU, the reference elsewhere."""
    if q.is_cuda and triton is not None:
        return decode_attention_triton(q, keys, values, lengths)
    return decode_attention_reference(q, keys, values, lengths)
