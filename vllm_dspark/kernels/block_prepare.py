"""The drafter's attention inputs in one pass: RMSNorm, RoPE and the paged KV insertion.

Two entries share the arithmetic (float32 throughout, one rounding at the end):
    prepare_block      the K query tokens of each request: q, k, v from the layer's fused
                       projection; q goes to a dense buffer, k and v into the layer's cache
    store_context_kv   context tokens, all layers in one launch: k and v from the stacked projection
                       [num_tokens, num_layers, 2, num_kv_heads, head_dim] into every layer's cache
Per head x with weight w:  y = x * rsqrt(mean(x^2) + eps) * w, then for the first rotary_dim
dimensions, with partner p(d) and sign s(d) (neox: d +- rotary_dim / 2; interleaved: d ^ 1)
    y'_d = y_d cos + s(d) y_{p(d)} sin
v is only scaled. A slot < 0 (padding, rejected suffix, evicted page) writes nothing to a cache; an
fp8 cache stores x / scale, clamped to its range.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

# Heads a program takes at once: 8 x 128 bf16 is 2 KB in flight per program and load.
_HEADS_PER_PROGRAM = 8


@dataclass(frozen=True, slots=True)
class RotaryEmbedding:
    """vLLM's cache of cosines and sines."""

    # [max_position, rotary_dim]: cosines, then sines
    cos_sin: torch.Tensor
    is_neox: bool = True

    @property
    def dim(self) -> int:
        return int(self.cos_sin.shape[1])


@triton.jit
def _norm_rope(
    # [heads, 1] pointers to the first element of each head
    x_ptr,
    # [heads, 1] pointers to each head's weight
    weight_ptr,
    # pointer to the position's row of cos_sin
    rotary_ptr,
    mask,
    dims,
    eps,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
):
    half: tl.constexpr = ROTARY_DIM // 2
    rotated = dims < ROTARY_DIM
    if IS_NEOX:
        lower = dims < half
        partner = tl.where(lower, dims + half, dims - half)
        angle = tl.where(lower, dims, dims - half)
    else:
        lower = dims % 2 == 0
        partner = tl.where(lower, dims + 1, dims - 1)
        angle = dims // 2
    partner = tl.where(rotated, partner, dims)
    x = tl.load(x_ptr + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    other = tl.load(x_ptr + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + dims[None, :], mask=mask, other=0.0).to(tl.float32)
    weight_other = tl.load(weight_ptr + partner[None, :], mask=mask, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
    cos = tl.load(rotary_ptr + angle, mask=rotated, other=1.0).to(tl.float32)
    sin = tl.load(rotary_ptr + half + angle, mask=rotated, other=0.0).to(tl.float32)
    sin = tl.where(lower, -sin, sin)
    return x * inverse * weight * cos[None, :] + other * inverse * weight_other * sin[None, :]


@triton.jit
def _to_cache(value, scale, dtype: tl.constexpr, LIMIT: tl.constexpr):
    if LIMIT > 0:
        value = tl.minimum(tl.maximum(value / scale, -LIMIT), LIMIT)
    return value.to(dtype)


@triton.jit
def _prepare_block_kernel(
    # [num_tokens, num_heads, head_dim]
    q_out_ptr,
    # [num_blocks, page, num_kv_heads, head_dim] each
    k_cache_ptr,
    v_cache_ptr,
    # [num_tokens, (num_heads + 2 num_kv_heads) * head_dim]
    qkv_ptr,
    # [head_dim] each
    q_weight_ptr,
    k_weight_ptr,
    # [max_position, rotary_dim]
    cos_sin_ptr,
    # [num_tokens] int64 each
    position_ptr,
    slot_ptr,
    # [1] float32, read for an fp8 cache
    k_scale_ptr,
    v_scale_ptr,
    eps,
    value_scale,
    stride_qkv,
    stride_kb,
    stride_ks,
    stride_kh,
    PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    in_dim = dims < HEAD_DIM
    is_query = head < NUM_HEADS
    is_key = (head >= NUM_HEADS) & (head < NUM_HEADS + NUM_KV_HEADS)
    is_value = (head >= NUM_HEADS + NUM_KV_HEADS) & (head < NUM_HEADS + 2 * NUM_KV_HEADS)
    x_ptr = qkv_ptr + token * stride_qkv + head[:, None] * HEAD_DIM
    weight_ptr = tl.where(is_query[:, None], q_weight_ptr, k_weight_ptr)
    rotary_ptr = cos_sin_ptr + tl.load(position_ptr + token) * ROTARY_DIM
    normed = (is_query | is_key)[:, None] & in_dim[None, :]
    y = _norm_rope(x_ptr, weight_ptr, rotary_ptr, normed, dims, eps, HEAD_DIM, ROTARY_DIM, IS_NEOX)
    q_mask = is_query[:, None] & in_dim[None, :]
    q_out = q_out_ptr + (token * NUM_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(q_out, y.to(q_out_ptr.dtype.element_ty), mask=q_mask)

    slot = tl.load(slot_ptr + token)
    if slot >= 0:
        row = (slot // PAGE) * stride_kb + (slot % PAGE) * stride_ks
        dtype = k_cache_ptr.dtype.element_ty
        k_scale, v_scale = 1.0, 1.0
        if LIMIT > 0:
            k_scale, v_scale = tl.load(k_scale_ptr), tl.load(v_scale_ptr)
        k_out = k_cache_ptr + row + (head - NUM_HEADS)[:, None] * stride_kh + dims[None, :]
        k_mask = is_key[:, None] & in_dim[None, :]
        tl.store(k_out, _to_cache(y, k_scale, dtype, LIMIT), mask=k_mask)
        v_mask = is_value[:, None] & in_dim[None, :]
        v = tl.load(x_ptr + dims[None, :], mask=v_mask, other=0.0).to(tl.float32) * value_scale
        v_head = (head - NUM_HEADS - NUM_KV_HEADS)[:, None]
        v_out = v_cache_ptr + row + v_head * stride_kh + dims[None, :]
        tl.store(v_out, _to_cache(v, v_scale, dtype, LIMIT), mask=v_mask)


def prepare_block(
    # [num_tokens, num_heads, head_dim], contiguous
    q_out: torch.Tensor,
    # [num_blocks, page, num_kv_heads, head_dim], equal strides, contiguous rows
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    # [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]
    qkv: torch.Tensor,
    # [head_dim]
    q_weight: torch.Tensor,
    k_weight: torch.Tensor,
    rotary: RotaryEmbedding,
    # [num_tokens] int64
    positions: torch.Tensor,
    slots: torch.Tensor,
    eps: float,
    value_scale: float = 1.0,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> None:
    """Normed and rotated queries into `q_out`, keys and values into the cache."""
    num_tokens, num_heads, head_dim = q_out.shape
    num_kv_heads = k_cache.shape[2]
    if k_cache.stride() != v_cache.stride():
        raise ValueError(f"K and V strides differ: {k_cache.stride()}, {v_cache.stride()}")
    block_h = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads + 2 * num_kv_heads))
    grid = (num_tokens, triton.cdiv(num_heads + 2 * num_kv_heads, block_h))
    _prepare_block_kernel[grid](
        q_out,
        k_cache,
        v_cache,
        qkv,
        q_weight,
        k_weight,
        rotary.cos_sin,
        positions,
        slots,
        q_weight if k_scale is None else k_scale,
        q_weight if v_scale is None else v_scale,
        eps,
        value_scale,
        qkv.stride(0),
        k_cache.stride(0),
        k_cache.stride(1),
        k_cache.stride(2),
        PAGE=k_cache.shape[1],
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary.dim,
        IS_NEOX=rotary.is_neox,
        LIMIT=_quantized_limit(k_cache, k_scale, v_scale),
        BLOCK_H=block_h,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


@triton.jit
def _store_context_kernel(
    # [num_layers] int64 addresses of each layer's K view and V view
    k_address_ptr,
    v_address_ptr,
    # any tensor of the caches' dtype
    dtype_ptr,
    # [num_tokens, num_layers, 2, num_kv_heads, head_dim]
    kv_ptr,
    # [num_layers, head_dim]
    weight_ptr,
    # [max_position, rotary_dim]
    cos_sin_ptr,
    # [num_tokens] int64
    position_ptr,
    # [num_layers, num_tokens] int64
    slot_ptr,
    # [num_layers] float32 each, read for an fp8 cache
    k_scale_ptr,
    v_scale_ptr,
    eps,
    value_scale,
    stride_slot,
    stride_kb,
    stride_ks,
    stride_kh,
    PAGE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    IS_NEOX: tl.constexpr,
    LIMIT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    layer = tl.program_id(1)
    slot = tl.load(slot_ptr + layer * stride_slot + token)
    if slot < 0:
        return
    head = tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    mask = (head < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    plane: tl.constexpr = NUM_KV_HEADS * HEAD_DIM
    x_ptr = kv_ptr + (token * tl.num_programs(1) + layer) * 2 * plane + head[:, None] * HEAD_DIM
    weight_row = weight_ptr + layer * HEAD_DIM + head[:, None] * 0
    rotary_ptr = cos_sin_ptr + tl.load(position_ptr + token) * ROTARY_DIM
    k = _norm_rope(x_ptr, weight_row, rotary_ptr, mask, dims, eps, HEAD_DIM, ROTARY_DIM, IS_NEOX)
    v = tl.load(x_ptr + plane + dims[None, :], mask=mask, other=0.0).to(tl.float32) * value_scale
    k_scale, v_scale = 1.0, 1.0
    if LIMIT > 0:
        k_scale, v_scale = tl.load(k_scale_ptr + layer), tl.load(v_scale_ptr + layer)
    dtype = dtype_ptr.dtype.element_ty
    k_cache = tl.load(k_address_ptr + layer).to(tl.pointer_type(dtype))
    v_cache = tl.load(v_address_ptr + layer).to(tl.pointer_type(dtype))
    offset = (slot // PAGE) * stride_kb + (slot % PAGE) * stride_ks
    offset = offset + head[:, None] * stride_kh + dims[None, :]
    tl.store(k_cache + offset, _to_cache(k, k_scale, dtype, LIMIT), mask=mask)
    tl.store(v_cache + offset, _to_cache(v, v_scale, dtype, LIMIT), mask=mask)


class ContextCaches:
    """The drafter layers' caches, as one launch addresses them; they must outlive this object."""

    def __init__(
        self,
        # per layer [num_blocks, page, num_kv_heads, head_dim], all of one shape and stride
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
        # [num_layers] float32 each, for an fp8 cache
        k_scales: torch.Tensor | None = None,
        v_scales: torch.Tensor | None = None,
    ) -> None:
        first = k_caches[0]
        for cache in [*k_caches, *v_caches]:
            if cache.stride() != first.stride() or cache.dtype != first.dtype:
                raise ValueError(
                    f"drafter layers differ in cache layout: {cache.dtype} {cache.stride()} and "
                    f"{first.dtype} {first.stride()}; store them one layer at a time"
                )
        self.k_caches, self.v_caches = k_caches, v_caches
        self.k_scales, self.v_scales = k_scales, v_scales
        addresses = [[cache.data_ptr() for cache in caches] for caches in (k_caches, v_caches)]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=first.device)


def store_context_kv(
    caches: ContextCaches,
    # [num_tokens, num_layers, 2, num_kv_heads, head_dim], contiguous
    kv: torch.Tensor,
    # [num_layers, head_dim]
    k_weights: torch.Tensor,
    rotary: RotaryEmbedding,
    # [num_tokens] int64
    positions: torch.Tensor,
    # [num_layers, num_tokens] int64, or [num_tokens] for all layers
    slots: torch.Tensor,
    eps: float,
    value_scale: float = 1.0,
) -> None:
    """Context keys and values of all drafter layers into their caches."""
    num_tokens, num_layers, _, num_kv_heads, head_dim = kv.shape
    if not kv.is_contiguous() or not k_weights.is_contiguous():
        raise ValueError("the stacked projection and the stacked norm weights must be contiguous")
    cache = caches.k_caches[0]
    unused = k_weights
    _store_context_kernel[(num_tokens, num_layers)](
        caches.addresses[0],
        caches.addresses[1],
        cache,
        kv,
        k_weights,
        rotary.cos_sin,
        positions,
        slots,
        unused if caches.k_scales is None else caches.k_scales,
        unused if caches.v_scales is None else caches.v_scales,
        eps,
        value_scale,
        0 if slots.dim() == 1 else slots.stride(0),
        cache.stride(0),
        cache.stride(1),
        cache.stride(2),
        PAGE=cache.shape[1],
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        ROTARY_DIM=rotary.dim,
        IS_NEOX=rotary.is_neox,
        LIMIT=_quantized_limit(cache, caches.k_scales, caches.v_scales),
        BLOCK_H=triton.next_power_of_2(num_kv_heads),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=4,
    )


def _quantized_limit(
    cache: torch.Tensor, k_scale: torch.Tensor | None, v_scale: torch.Tensor | None
) -> float:
    """Largest finite value of an fp8 cache; 0 for a cache that is not quantized."""
    if cache.element_size() != 1:
        return 0.0
    if cache.dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise ValueError(f"8-bit KV cache of dtype {cache.dtype}: view it as a float8 dtype")
    if k_scale is None or v_scale is None:
        raise ValueError("an fp8 KV cache needs K and V scales")
    return float(torch.finfo(cache.dtype).max)
