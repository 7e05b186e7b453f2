"""Builders of paged attention inputs whose unused memory is poison."""

from dataclasses import dataclass

import torch

POISON = 448.0  # finite in every dtype; a page or key that must not be read would dominate


@dataclass
class PagedCase:
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None


def paged_case(
    query_lens: list[int],
    seq_lens: list[int],
    shape,
    *,
    page: int = 16,
    dtype: torch.dtype = torch.float16,
    cache_dtype: torch.dtype | None = None,
    padded_tokens: int = 0,
    device: torch.device,
    seed: int = 0,
) -> PagedCase:
    """Requests with shuffled pages in vLLM 0.32's layout [blocks, kv heads, page, 2 * head_dim]."""
    generator = torch.Generator().manual_seed(seed)
    cache_dtype = cache_dtype or dtype
    pages = [-(-n // page) for n in seq_lens]
    num_blocks = sum(pages) + 3
    order = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    cache = torch.full((num_blocks, shape.num_kv_heads, page, 2 * shape.head_dim), POISON)
    table = torch.zeros(len(seq_lens), max([*pages, 1]) + 2, dtype=torch.int32)
    for req, count in enumerate(pages):
        for index in range(count):
            block = order.pop()
            table[req, index] = block
            filled = min(page, seq_lens[req] - index * page)
            values = torch.randn(
                shape.num_kv_heads, filled, 2 * shape.head_dim, generator=generator
            )
            cache[block, :, :filled] = values
    cache = cache.to(cache_dtype).to(device)
    k_cache, v_cache = cache.transpose(1, 2).split(shape.head_dim, dim=-1)
    starts = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    num_tokens = sum(query_lens) + padded_tokens
    q = torch.randn(num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    scales = (None, None)
    if cache_dtype.itemsize == 1:
        scales = (torch.tensor([0.7], device=device), torch.tensor([1.3], device=device))
    return PagedCase(
        q.to(dtype).to(device),
        k_cache,
        v_cache,
        table.to(device),
        starts.to(device),
        torch.tensor(seq_lens, dtype=torch.int32, device=device),
        *scales,
    )


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the difference over the norm of the expected; NaN propagates."""
    actual, expected = actual.double().cpu(), expected.double().cpu()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-9))
