"""Torch twins of the attention kernels: the specification, slow and on any device, in float32."""

import torch

from vllm_dspark.kernels.attention_plan import AttentionShape


def gather_pages(cache: torch.Tensor, block_row: torch.Tensor, num_keys: int) -> torch.Tensor:
    """[num_keys, num_kv_heads, head_dim] float32 of one request's pages."""
    page = cache.shape[1]
    keys = torch.arange(num_keys, device=cache.device)
    return cache[block_row[keys // page].long(), keys % page].float()


def attention_reference(
    # [num_query, num_heads, head_dim]
    q: torch.Tensor,
    # [num_keys, num_kv_heads, head_dim]
    keys: torch.Tensor,
    values: torch.Tensor,
    # [num_query]
    positions: torch.Tensor,
    scale: float,
    shape: AttentionShape,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """One request's attention, [num_query, num_heads, head_dim] float32."""
    num_query, num_keys = q.shape[0], keys.shape[0]
    if num_keys == 0:
        return torch.zeros(num_query, shape.num_heads, values.shape[-1], device=q.device)
    keys = keys.float().repeat_interleave(shape.group, dim=1)
    values = values.float().repeat_interleave(shape.group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * scale
    if shape.soft_cap > 0:
        scores = shape.soft_cap * torch.tanh(scores / shape.soft_cap)
    distance = positions[:, None] - torch.arange(num_keys, device=q.device)[None, :]
    seen = torch.ones_like(distance, dtype=torch.bool)
    if shape.causal:
        seen &= distance >= 0
    if shape.sliding_window:
        seen &= distance.abs() < shape.sliding_window
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = sinks.float()[:, None, None].expand(-1, num_query, 1)
        scores = torch.cat([scores, column], dim=-1)
    weights = torch.softmax(scores, dim=-1).nan_to_num(0.0)[..., :num_keys]
    return torch.einsum("hqk,khd->qhd", weights, values)


def ragged_attention_reference(
    out: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    shape: AttentionShape,
    sinks: torch.Tensor | None = None,
    k_scale: torch.Tensor | None = None,
    v_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of ``RaggedAttention.plan`` followed by ``forward``."""
    starts = query_start_loc.tolist()
    for req, num_keys in enumerate(seq_lens.tolist()):
        begin, end = starts[req], starts[req + 1]
        if end <= begin:
            continue
        keys = gather_pages(k_cache, block_table[req], num_keys)
        values = gather_pages(v_cache, block_table[req], num_keys)
        if k_scale is not None:
            keys = keys * k_scale
        if v_scale is not None:
            values = values * v_scale
        first = max(num_keys - (end - begin), 0)
        positions = first + torch.arange(end - begin, device=q.device)
        result = attention_reference(q[begin:end], keys, values, positions, scale, shape, sinks)
        out[begin:end] = result.to(out.dtype)
    return out


def norm_rope_reference(
    # [..., head_dim]
    x: torch.Tensor,
    # broadcastable to x
    weight: torch.Tensor,
    # [..., rotary_dim] cosines and sines of each row
    cos_sin: torch.Tensor,
    is_neox: bool,
    eps: float,
) -> torch.Tensor:
    """RMSNorm and RoPE in float32."""
    x = x.float()
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.float()
    cos, sin = cos_sin.float().chunk(2, dim=-1)
    rotary = cos_sin.shape[-1]
    rotated = y[..., :rotary].clone()
    half = rotary // 2
    first, second = (
        (rotated[..., :half], rotated[..., half:])
        if is_neox
        else (rotated[..., ::2], rotated[..., 1::2])
    )
    a, b = first * cos - second * sin, second * cos + first * sin
    rotated = torch.cat([a, b], -1) if is_neox else torch.stack([a, b], -1).flatten(-2)
    return torch.cat([rotated, y[..., rotary:]], -1)


def cache_rows_reference(
    cache: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor, scale: torch.Tensor | None
) -> None:
    """Writes [num_tokens, num_kv_heads, head_dim] into a paged cache; slots < 0 are skipped."""
    page = cache.shape[1]
    if scale is not None:
        limit = torch.finfo(cache.dtype).max
        rows = (rows.float() / scale).clamp(-limit, limit)
    keep = slots >= 0
    cache[slots[keep] // page, slots[keep] % page] = rows[keep].to(cache.dtype)


def latent_block_attention_reference(
    out: torch.Tensor,
    q: torch.Tensor,
    cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    window: int,
    sinks: torch.Tensor | None = None,
    cache_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Twin of ``latent_block_attention``."""
    latent_dim = out.shape[2]
    block_size = out.shape[0] // len(seq_lens)
    for req, num_keys in enumerate(seq_lens.tolist()):
        rows = slice(req * block_size, (req + 1) * block_size)
        if num_keys == 0:
            out[rows] = 0
            continue
        keys = gather_pages(cache[:, :, None], block_table[req], num_keys)
        if cache_scale is not None:
            keys = keys * cache_scale
        shape = AttentionShape(q.shape[1], 1, q.shape[2], causal=False, sliding_window=window)
        positions = max(num_keys - block_size, 0) + torch.arange(block_size, device=q.device)
        values = keys[..., :latent_dim]
        out[rows] = attention_reference(q[rows], keys, values, positions, scale, shape, sinks).to(
            out.dtype
        )
    return out
