"""Ragged paged attention against its twin: lengths, layouts and modifiers that break tilings."""

import pytest
import torch

from tests.kernels.attention_helpers import paged_case, relative_error
from vllm_dspark.kernels.attention_plan import AttentionShape
from vllm_dspark.kernels.attention_reference import ragged_attention_reference
from vllm_dspark.kernels.ragged_attention import RaggedAttention

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}


def check(case, shape, device, *, max_reqs=None, max_query_len=None, max_tokens=None, sinks=None):
    query_lens = case.query_start_loc.diff()
    layer = RaggedAttention(
        shape,
        max_reqs or len(query_lens),
        max_tokens or case.q.shape[0],
        max_query_len or int(query_lens.max()),
        device,
    )
    # Uninitialised scratch must not matter.
    layer.workspace.partial.fill_(float("nan"))
    layer.workspace.lse.fill_(float("nan"))
    layer.workspace.plan.fill_(2**30)
    out = torch.full_like(case.q, float("nan"))
    layer.plan(case.query_start_loc, case.seq_lens)
    layer.forward(
        out, case.q, case.k_cache, case.v_cache, case.block_table, sinks, case.k_scale, case.v_scale
    )
    expected = torch.full_like(case.q, float("nan"))
    ragged_attention_reference(
        expected,
        case.q,
        case.k_cache,
        case.v_cache,
        case.block_table,
        case.query_start_loc,
        case.seq_lens,
        layer.scale,
        shape,
        sinks,
        case.k_scale,
        case.v_scale,
    )
    used = int(case.query_start_loc[-1])
    assert relative_error(out[:used], expected[:used]) < TOLERANCE[case.q.dtype]
    assert out[used:].isnan().all(), "padded rows must stay untouched"
    return layer


# Uneven windows beside a prefill chunk, a request with keys but no queries (padding), one token of
# context, and a tail that is not a multiple of any tile.
MIXED = ([1, 8, 3, 0, 37, 1], [1, 200, 65, 0, 37, 530])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"),
    [(9, 3, 64), (8, 2, 128), (8, 1, 64), (4, 4, 80), (16, 2, 256)],
)
def test_mixed_windows(heads, kv_heads, head_dim, device):
    shape = AttentionShape(heads, kv_heads, head_dim)
    case = paged_case(*MIXED, shape, padded_tokens=5, device=device)
    check(case, shape, device)


@pytest.mark.parametrize("page", [16, 24, 128, 256])
def test_page_sizes(page, device):
    """Pages smaller than, not dividing, equal to and larger than a key tile."""
    shape = AttentionShape(6, 2, 64)
    check(paged_case(*MIXED, shape, page=page, device=device), shape, device)


@pytest.mark.parametrize("windows", [[1] * 5, [8] * 5, [1, 2, 4, 8, 1], [5, 5, 1, 1, 1]])
def test_one_geometry_serves_all_windows(windows, device):
    """Same geometry, other lengths: nothing may depend on the lengths it was made for."""
    shape = AttentionShape(9, 3, 64)
    case = paged_case(windows, [700, 9, 33, 128, 400], shape, device=device)
    check(case, shape, device, max_reqs=7, max_query_len=8, max_tokens=56)


@pytest.mark.parametrize("shape", [
    AttentionShape(4, 2, 64, sliding_window=50),
    AttentionShape(4, 2, 64, sliding_window=1),
    AttentionShape(4, 2, 64, soft_cap=5.0),
    AttentionShape(4, 2, 64, has_sinks=True),
    AttentionShape(4, 2, 64, sliding_window=33, soft_cap=3.0, has_sinks=True),
    AttentionShape(4, 2, 64, causal=False),
    AttentionShape(4, 2, 64, causal=False, sliding_window=40),
])  # fmt: skip
def test_score_modifiers(shape, device):
    case = paged_case([5, 70, 1, 8], [600, 190, 300, 8], shape, device=device)
    generator = torch.Generator().manual_seed(4)
    sinks = torch.randn(4, generator=generator).to(device) if shape.has_sinks else None
    check(case, shape, device, sinks=sinks)


@pytest.mark.parametrize(
    "cache_dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2], ids=str
)
def test_cache_dtypes(cache_dtype, device):
    shape = AttentionShape(6, 2, 64)
    case = paged_case(
        *MIXED, shape, dtype=torch.bfloat16, cache_dtype=cache_dtype, padded_tokens=2, device=device
    )
    check(case, shape, device)


def test_split_rows_stay_within_their_bounds(device):
    """One long request among short ones splits; counts stay within the buffers."""
    shape = AttentionShape(4, 2, 64)
    case = paged_case([3, 1, 1, 1], [3000, 5, 9, 2], shape, device=device)
    layer = check(case, shape, device)
    items, merges = layer.workspace.plan[0, :2].tolist()
    assert items > 4, "the long request should have been split"
    assert merges == 1
    assert items <= layer.geometry.max_items
    rows = layer.workspace.plan[1 : 1 + items]
    assert int((rows[:, 9] + rows[:, 8]).max()) <= layer.geometry.max_partials


def test_queries_without_keys_give_zeros(device):
    """A scratch row of a padded batch: NaN there would spread through the next layer's norms."""
    shape = AttentionShape(4, 2, 64, causal=False)
    case = paged_case([4, 4, 4], [40, 0, 17], shape, device=device)
    check(case, shape, device)


def test_layout_is_taken_from_strides(device):
    """The cache in [blocks, page, heads, dim] order (separate K and V) works without a copy."""
    shape = AttentionShape(4, 2, 64)
    case = paged_case([2, 9], [77, 130], shape, device=device)
    case.k_cache, case.v_cache = case.k_cache.contiguous(), case.v_cache.contiguous()
    check(case, shape, device)


@pytest.mark.parametrize("seed", range(6))
def test_random_compositions(seed, device):
    generator = torch.Generator().manual_seed(seed)
    count = int(torch.randint(1, 9, (1,), generator=generator))
    windows = torch.randint(0, 9, (count,), generator=generator).tolist()
    windows[0] = max(windows[0], 1)
    context = torch.randint(0, 700, (count,), generator=generator).tolist()
    lens = [w + c if w else 0 for w, c in zip(windows, context, strict=True)]
    shape = AttentionShape(8, 2, 64, sliding_window=[0, 100][seed % 2])
    check(paged_case(windows, lens, shape, device=device, seed=seed), shape, device)
