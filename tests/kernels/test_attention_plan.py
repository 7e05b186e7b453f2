"""The work list: every key of every query tile in exactly one row, and within the buffers."""

import random
from itertools import pairwise

import pytest
import torch

from vllm_dspark.kernels.attention_plan import AttentionShape, attention_geometry, plan_attention
from vllm_dspark.kernels.launch import typical_device

SHAPES = [
    AttentionShape(32, 8, 128),
    AttentionShape(9, 3, 64),
    AttentionShape(64, 8, 128),
    AttentionShape(8, 1, 64, sliding_window=300),
    AttentionShape(4, 4, 80, causal=False),
    AttentionShape(4, 2, 64, causal=False, sliding_window=100),
]


def make_plan(shape, query, seq, max_query, max_tokens, device):
    geometry = attention_geometry(shape, len(query), max_tokens, max_query, typical_device(90))
    plan = torch.full((geometry.plan_rows + 1, 12), -7, dtype=torch.int32, device=device)
    starts = torch.tensor([0, *query]).cumsum(0).int().to(device)
    plan_attention(
        plan[:-1], starts, torch.tensor(seq, dtype=torch.int32, device=device), shape, geometry
    )
    assert (plan[-1] == -7).all(), "wrote past the buffer"
    return geometry, starts.tolist(), plan.cpu()


def visible(shape, first, last, seq_len):
    """[begin, end) of the keys that tokens at positions first..last may see."""
    begin, end = 0, min(last + 1, seq_len) if shape.causal else seq_len
    if shape.sliding_window:
        begin = max(first - shape.sliding_window + 1, 0)
        if not shape.causal:
            end = min(last + shape.sliding_window, seq_len)
    return begin, end


def check_plan(shape, query, seq, geometry, starts, plan):
    num_items, num_merges = plan[0, :2].tolist()
    assert num_items <= geometry.max_items and num_merges <= geometry.max_merges
    tiles, slots = {}, set()
    for req, token, tokens, position, keys, begin, end, chunk, chunks, slot in plan[
        1 : 1 + num_items, :10
    ].tolist():
        if req < 0:
            continue
        tiles.setdefault((req, token), []).append((begin, end, chunk, chunks))
        assert 1 <= tokens <= geometry.tile_tokens
        assert position == seq[req] - query[req] + token - starts[req]
        low, high = visible(shape, position, position + tokens - 1, seq[req])
        assert keys == high, "keys visible to the tile"
        if chunks > 1:
            assert slot + chunks <= geometry.max_partials
            assert slot + chunk not in slots, "two rows share a partial result"
            slots.add(slot + chunk)
        assert begin >= low // geometry.launch.block_n
    for req, (rows, length) in enumerate(zip(query, seq, strict=True)):
        for base in range(0, rows, geometry.tile_tokens):
            parts = sorted(tiles.pop((req, starts[req] + base)))
            last = min(base + geometry.tile_tokens, rows) - 1
            context = length - rows
            low, high = visible(shape, context + base, context + last, length)
            assert [part[2] for part in parts] == list(range(parts[0][3]))
            assert parts[0][0] == low // geometry.launch.block_n
            assert parts[-1][1] == -(-high // geometry.launch.block_n)
            for left, right in pairwise(parts):
                assert left[1] == right[0] and left[0] < left[1]
    assert not tiles, "rows of no request"


@pytest.mark.parametrize("seed", range(24))
def test_random_steps(seed, device):
    rng = random.Random(seed)
    shape = SHAPES[seed % len(SHAPES)]
    max_query = rng.choice([1, 4, 8, 300])
    num_reqs = rng.randint(1, 40)
    query = [rng.randint(0, max_query) for _ in range(num_reqs)]
    seq = [q + rng.choice([0, 5, 700, 40_000]) if q else 0 for q in query]
    tokens = max(sum(query), num_reqs)
    planned = make_plan(shape, query, seq, max_query, tokens, device)
    check_plan(shape, query, seq, *planned)


@pytest.mark.parametrize(
    ("num_reqs", "context", "items"), [(1, 512, 8), (8, 32_768, 32), (32, 2048, 32), (33, 64, 33)]
)
def test_one_wave_where_one_is_possible(num_reqs, context, items, device):
    """132 SMs, two blocks each, 8 KV heads: 33 slots; chunks of 64 keys or more."""
    shape, query = SHAPES[0], [8] * num_reqs
    seq = [context] * num_reqs
    geometry, starts, plan = make_plan(shape, query, seq, 8, 8 * num_reqs, device)
    assert geometry.slots == 33
    check_plan(shape, query, seq, geometry, starts, plan)
    assert int(plan[0, 0]) == items
