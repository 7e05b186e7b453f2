"""The drafter's block: attention for every K, preparation, context insertion, latent form."""

import pytest
import torch

from tests.kernels.attention_helpers import POISON, paged_case, relative_error
from vllm_dspark.kernels.attention_plan import AttentionShape
from vllm_dspark.kernels.attention_reference import (
    cache_rows_reference,
    latent_block_attention_reference,
    norm_rope_reference,
    ragged_attention_reference,
)
from vllm_dspark.kernels.block_attention import BlockAttention, latent_block_attention
from vllm_dspark.kernels.block_prepare import (
    ContextCaches,
    RotaryEmbedding,
    prepare_block,
    store_context_kv,
)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 5, 6, 7, 8, 16])
def test_every_block_size(block_size, device):
    """Scratch rows of length 0, page poison and shared scratch: nothing leaks between K's."""
    shape = AttentionShape(4, 1, 32, causal=False)
    lens = [90 + block_size, block_size, 0, 520, 0]
    case = paged_case([block_size] * 5, lens, shape, device=device)
    layer = BlockAttention(shape, 8, block_size, device)
    layer.workspace.partial.fill_(POISON)
    layer.workspace.lse.fill_(POISON)
    for seq_lens in (case.seq_lens, case.seq_lens.flip(0)):
        table = case.block_table if seq_lens is case.seq_lens else case.block_table.flip(0)
        out = torch.full_like(case.q, float("nan"))
        layer.plan_block(seq_lens)
        layer.forward(out, case.q, case.k_cache, case.v_cache, table)
        expected = torch.empty_like(case.q)
        ragged_attention_reference(
            expected,
            case.q,
            case.k_cache,
            case.v_cache,
            table,
            case.query_start_loc,
            seq_lens,
            layer.scale,
            shape,
        )
        assert relative_error(out, expected) < 2e-3
        for req, length in enumerate(seq_lens.tolist()):
            if length == 0:
                assert not out[req * block_size : (req + 1) * block_size].any()


def _rotary(rotary_dim, is_neox, device, positions=400):
    frequency = 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim)
    angle = torch.arange(positions)[:, None] * frequency
    return RotaryEmbedding(torch.cat([angle.cos(), angle.sin()], -1).to(device), is_neox)


def _caches(count, kv_heads, head_dim, dtype, device, page=16, num_blocks=9):
    caches = torch.full((count, num_blocks, kv_heads, page, 2 * head_dim), POISON, device=device)
    return [cache.transpose(1, 2).split(head_dim, -1) for cache in caches.to(dtype)]


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "rotary_dim"),
    [(6, 2, 64, 64), (5, 1, 80, 32), (9, 3, 128, 128)],
)
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_prepare_block(is_neox, heads, kv_heads, head_dim, rotary_dim, cache_dtype, device):
    generator = torch.Generator().manual_seed(0)
    tokens, eps, value_scale = 7, 1e-6, 1.5
    width = (heads + 2 * kv_heads) * head_dim
    qkv = torch.randn(tokens, width, generator=generator).half().to(device)
    q_weight, k_weight = (torch.rand(2, head_dim, generator=generator) + 0.5).half().to(device)
    positions = torch.tensor([0, 5, 399, 17, 3, 2, 1], device=device)
    slots = torch.tensor([16, 143, -1, 55, 90, -1, 17], device=device)
    rotary = _rotary(rotary_dim, is_neox, device)
    scales = (None, None)
    if cache_dtype.itemsize == 1:
        scales = (torch.tensor([0.02], device=device), torch.tensor([0.004], device=device))
    ((k_cache, v_cache),) = _caches(1, kv_heads, head_dim, cache_dtype, device)
    ((k_expected, v_expected),) = _caches(1, kv_heads, head_dim, cache_dtype, device)
    q_out = torch.full((tokens, heads, head_dim), float("nan"), dtype=torch.half, device=device)
    prepare_block(
        q_out, k_cache, v_cache, qkv, q_weight, k_weight, rotary, positions, slots, eps,
        value_scale, *scales,
    )  # fmt: skip
    split = qkv.view(tokens, -1, head_dim).split([heads, kv_heads, kv_heads], 1)
    cos_sin = rotary.cos_sin[positions][:, None]
    q = norm_rope_reference(split[0], q_weight, cos_sin, is_neox, eps)
    k = norm_rope_reference(split[1], k_weight, cos_sin, is_neox, eps)
    cache_rows_reference(k_expected, k, slots, scales[0])
    cache_rows_reference(v_expected, split[2].float() * value_scale, slots, scales[1])
    assert relative_error(q_out, q) < 1e-3
    # Rounding to fp8 may go the other way at a midpoint: one step of 2^-3, rarely.
    tolerance = 1e-3 if cache_dtype.itemsize == 2 else 1e-2
    assert relative_error(k_cache.float(), k_expected.float()) < tolerance
    assert relative_error(v_cache.float(), v_expected.float()) < tolerance


@pytest.mark.parametrize("per_layer_slots", [False, True])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_store_context_kv(per_layer_slots, cache_dtype, device):
    """All layers in one launch, each into its own cache; padded and rejected rows write nothing."""
    generator = torch.Generator().manual_seed(2)
    layers, tokens, kv_heads, head_dim, eps = 3, 6, 2, 64, 1e-5
    kv = torch.randn(tokens, layers, 2, kv_heads, head_dim, generator=generator).half().to(device)
    weights = (torch.rand(layers, head_dim, generator=generator) + 0.5).half().to(device)
    positions = torch.tensor([9, 8, 7, 0, 0, 300], device=device)
    slots = torch.tensor([20, 21, 22, -1, -1, 140], device=device)
    if per_layer_slots:
        slots = torch.stack([slots, slots - 2, torch.full_like(slots, -1)])
    rotary = _rotary(head_dim, True, device)
    scales = (None, None)
    if cache_dtype.itemsize == 1:
        scales = (
            torch.full((layers,), 0.03, device=device),
            torch.full((layers,), 0.02, device=device),
        )
    actual = _caches(layers, kv_heads, head_dim, cache_dtype, device)
    expected = _caches(layers, kv_heads, head_dim, cache_dtype, device)
    caches = ContextCaches([k for k, _ in actual], [v for _, v in actual], *scales)
    store_context_kv(caches, kv, weights, rotary, positions, slots, eps)
    cos_sin = rotary.cos_sin[positions][:, None]
    for layer in range(layers):
        rows = slots[layer] if per_layer_slots else slots
        k = norm_rope_reference(kv[:, layer, 0], weights[layer], cos_sin, True, eps)
        layer_scales = [None if s is None else s[layer] for s in scales]
        cache_rows_reference(expected[layer][0], k, rows, layer_scales[0])
        cache_rows_reference(expected[layer][1], kv[:, layer, 1], rows, layer_scales[1])
        for side in (0, 1):
            error = relative_error(actual[layer][side].float(), expected[layer][side].float())
            assert error < (1e-3 if cache_dtype.itemsize == 2 else 1e-2)


@pytest.mark.parametrize("block_size", [1, 5, 8])
@pytest.mark.parametrize(("latent", "rope"), [(128, 64), (64, 0)])
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn], ids=str)
def test_latent_block(block_size, latent, rope, cache_dtype, device):
    """Window edge inside and at a page, short contexts, scratch rows, with and without sinks."""
    generator = torch.Generator().manual_seed(4)
    heads, window, page = 5, 40, 16
    lens = torch.tensor([200, block_size, 0, 41 + block_size, 33], dtype=torch.int32)
    cache = torch.randn(60, page, latent + rope, generator=generator) * 0.5
    table = torch.randperm(60, generator=generator)[:50].view(5, 10).to(torch.int32)
    table = torch.cat([table, torch.randint(0, 60, (5, 5), generator=generator).int()], 1)
    q = torch.randn(5 * block_size, heads, latent + rope, generator=generator)
    cache, q = cache.to(cache_dtype).to(device), q.half().to(device)
    table, lens = table.to(device), lens.to(device)
    scale = None if cache_dtype.itemsize == 2 else torch.tensor([0.8], device=device)
    for sinks in (None, torch.randn(heads, generator=generator).to(device)):
        out = torch.full((5 * block_size, heads, latent), float("nan"), device=device).half()
        latent_block_attention(out, q, cache, table, lens, 0.1, window, sinks, scale)
        expected = torch.empty_like(out)
        latent_block_attention_reference(expected, q, cache, table, lens, 0.1, window, sinks, scale)
        assert relative_error(out, expected) < 2e-3
