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
