"""Work list of the ragged attention kernels, built on the device from the device's lengths.

The host fixes a launch geometry at capture (`AttentionGeometry`): tile sizes, the largest number of
work items, scratch sizes. Each step one small kernel turns `query_start_loc` and `seq_lens` into
rows of work; all layers of the step read the same rows. A row is one query tile (`tile_tokens` or
fewer tokens of one request, times the query heads of one KV head) against one chunk of its keys.
Requests share no keys, so a tile never mixes requests; the window x group product fills it.

Chunk length, in key blocks. With total = sum over requests of tiles_r * span_r (span_r: key blocks
the request can see), 31 candidates from total / (4 * slots) to 2 * total / slots, at least
min_chunk, and one that splits nothing:
    n_r       = ceil(span_r / chunk), then chunk_r = ceil(span_r / n_r) (equal parts)
    items     = sum over requests of tiles_r * n_r
    mean      = total / items
    cost      = ceil(items / slots) * (mean + overhead) + (longest chunk_r - mean)
                + overhead if anything is split
and the cheapest is taken, the longest among equals: whole waves of `slots` resident blocks, each as
long as its mean item, and a tail as long as the longest item exceeds that. `overhead` is what an
item costs besides its keys (page lookup, first loads, partial result), in key blocks.
Bounds that make fixed buffers safe, for any lengths: a candidate may split into at most
`max_partials` rows, which the one that splits nothing always keeps. A split tile has two rows or
more, hence
    rows <= max_tiles + max_partials,    merges <= min(max_tiles, max_partials / 2)

Buffer: int32 [1 + max_items + max_merges, PLAN_WIDTH]. Row 0: number of items, number of merges.
Item: request (-1: hole), first token row, tokens, first token's position, keys visible to the tile,
first and last+1 key block, chunk index, chunks of the tile, first partial slot of the tile.
Merge: first token row, tokens, chunks, first partial slot.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from vllm_dspark.kernels.launch import (
    AttentionLaunch,
    Device,
    attention_launch,
    max_query_rows,
    min_query_rows,
)

PLAN_WIDTH = 12  # int32 fields of a row: 48 bytes, so a row never spans three sectors


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The layer's side of a launch: what does not change from step to step."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    causal: bool = True
    sliding_window: int = 0  # keys a query sees, itself included; 0: all
    soft_cap: float = 0.0
    has_sinks: bool = False
    cache_bytes: int = 2  # per element of the KV cache; only the launch depends on it

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class AttentionGeometry:
    """The launch's side: fixed when a graph is captured."""

    max_reqs: int
    max_query_len: int
    max_tiles: int
    max_items: int
    max_merges: int
    max_partials: int
    slots: int  # resident blocks per KV head
    tile_rows: int  # power of two, rows of the MMA tile
    tile_tokens: int
    min_chunk_blocks: int
    launch: AttentionLaunch

    @property
    def plan_rows(self) -> int:
        return 1 + self.max_items + self.max_merges


def attention_geometry(
    shape: AttentionShape,
    max_reqs: int,
    max_tokens: int,
    max_query_len: int,
    device: Device,
    launch: AttentionLaunch | None = None,
) -> AttentionGeometry:
    """Geometry for steps of up to `max_tokens` tokens in `max_reqs` requests of `max_query_len`.

    `launch` overrides the table (benchmark sweeps).
    """
    if shape.num_heads % shape.num_kv_heads:
        raise ValueError(
            f"num_heads {shape.num_heads} is not a multiple of num_kv_heads {shape.num_kv_heads}"
        )
    most_rows = max_query_rows(device.arch, shape.head_dim)
    if shape.group > most_rows:
        raise ValueError(
            f"{shape.group} query heads per KV head of {shape.head_dim} dimensions exceed the "
            f"{most_rows} rows of a tile on sm_{device.arch}; use kernels='reference'"
        )
    least_rows = min_query_rows(device.arch, shape.head_dim, shape.cache_bytes)
    wanted = min(max(max_query_len * shape.group, least_rows), most_rows)
    tile_rows = triton.next_power_of_2(wanted)
    tile_tokens = tile_rows // shape.group
    launch = launch or attention_launch(device.arch, tile_rows, shape.head_dim, shape.cache_bytes)
    max_reqs = max(1, min(max_reqs, max_tokens))
    if max_query_len <= tile_tokens:
        max_tiles = max_reqs
    else:
        max_tiles = (max_tokens + max_reqs * (tile_tokens - 1)) // tile_tokens
    slots = max(1, device.num_sms * launch.blocks_per_sm // shape.num_kv_heads)
    max_partials = max(2, launch.waves * slots)
    return AttentionGeometry(
        max_reqs=max_reqs,
        max_query_len=max_query_len,
        max_tiles=max_tiles,
        max_items=max_tiles + max_partials,
        max_merges=min(max_tiles, max_partials // 2),
        max_partials=max_partials,
        slots=slots,
        tile_rows=tile_rows,
        tile_tokens=tile_tokens,
        min_chunk_blocks=triton.cdiv(launch.min_chunk, launch.block_n),
        launch=launch,
    )


@triton.jit
def _choose_chunk(
    tiles,
    span,
    SLOTS: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    OVERHEAD: tl.constexpr,
):
    """Chunk length of the cheapest candidate (module docstring); tiles, span: [num_reqs]."""
    longest = tl.max(tl.where(tiles > 0, span, 0), 0)
    total = tl.sum(tiles * span, 0).to(tl.float32)
    step = tl.arange(0, 32)
    spread = total / SLOTS * tl.exp2(step.to(tl.float32) * 0.1 - 2.0)
    chunks = tl.where(step == 31, longest, tl.ceil(spread).to(tl.int32))
    chunks = tl.maximum(tl.minimum(chunks, longest), MIN_CHUNK)
    # Quotients in float32: its error of 2**-22 and the added 2**-20 cannot reach the next integer
    # below 2**18 key blocks, and an integer division here would be most of the kernel.
    sizes, lengths = chunks.to(tl.float32)[None, :], span.to(tl.float32)[:, None]
    count = tl.maximum(tl.floor((lengths + (sizes - 1.0)) / sizes * 1.00000095367431640625), 1.0)
    rows = tiles.to(tl.float32)[:, None] * count
    split_rows = tl.sum(tl.where(count > 1.0, rows, 0.0), 0)
    items = tl.maximum(tl.sum(rows, 0), 1.0)
    largest = tl.max(tl.where((tiles > 0)[:, None], tl.ceil(lengths / count), 0.0), 0)
    mean = total / items
    cost = tl.ceil(items / SLOTS) * (mean + OVERHEAD) + (largest - mean)
    cost += tl.where(split_rows > 0, OVERHEAD, 0.0)
    cost = tl.where(split_rows <= MAX_PARTIALS, cost, float("inf"))
    return tl.max(tl.where(cost == tl.min(cost, 0), chunks, 0), 0)


@triton.jit
def attention_plan_kernel(
    # [1 + max_items + max_merges, PLAN_WIDTH] int32
    plan_ptr,
    # [num_reqs + 1] int32
    query_start_loc_ptr,
    # [num_reqs] int32
    seq_lens_ptr,
    num_reqs,
    max_items,
    SLOTS: tl.constexpr,
    MAX_PARTIALS: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    OVERHEAD: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    PLAN_WIDTH: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    req = tl.program_id(0)
    all_reqs = tl.arange(0, BLOCK_R)
    in_batch = all_reqs < num_reqs
    start = tl.load(query_start_loc_ptr + all_reqs, mask=in_batch, other=0)
    end = tl.load(query_start_loc_ptr + all_reqs + 1, mask=in_batch, other=0)
    seq_len = tl.maximum(tl.load(seq_lens_ptr + all_reqs, mask=in_batch, other=0), 0)
    query_len = tl.maximum(end - start, 0)
    tiles = tl.cdiv(query_len, TILE_TOKENS)
    context = tl.maximum(seq_len - query_len, 0)
    first_block = tl.zeros_like(seq_len)
    if WINDOW > 0:
        first_block = tl.maximum(context - WINDOW + 1, 0) // BLOCK_N
    span = tl.cdiv(seq_len, BLOCK_N) - first_block
    if WINDOW > 0:
        # A tile sees at most its window on one side or both, plus its own tokens.
        reach = (WINDOW if CAUSAL else 2 * WINDOW) + TILE_TOKENS
        span = tl.minimum(span, (reach + BLOCK_N - 1) // BLOCK_N + 1)
    chunk = _choose_chunk(tiles, span, SLOTS, MAX_PARTIALS, MIN_CHUNK, OVERHEAD)
    # A request with queries but no keys still owns one row, which writes zeros.
    num_chunks = tl.maximum(tl.cdiv(span, chunk), 1)
    items = tiles * num_chunks
    split = num_chunks > 1
    before = all_reqs < req
    own = all_reqs == req
    item_base = tl.sum(tl.where(before, items, 0), 0)
    slot_base = tl.sum(tl.where(before & split, items, 0), 0)
    merge_base = tl.sum(tl.where(before & split, tiles, 0), 0)
    if req == 0:
        tl.store(plan_ptr, tl.sum(items, 0))
        tl.store(plan_ptr + 1, tl.sum(tl.where(split, tiles, 0), 0))

    my_start = tl.sum(tl.where(own, start, 0), 0)
    my_query = tl.sum(tl.where(own, query_len, 0), 0)
    my_context = tl.sum(tl.where(own, context, 0), 0)
    my_seq = tl.sum(tl.where(own, seq_len, 0), 0)
    my_chunks = tl.sum(tl.where(own, num_chunks, 0), 0)
    my_span = tl.sum(tl.where(own, span, 0), 0)
    my_items = tl.sum(tl.where(own, items, 0), 0)
    chunk_blocks = tl.maximum(tl.cdiv(my_span, my_chunks), 1)
    for base in range(0, my_items, BLOCK_I):
        item = base + tl.arange(0, BLOCK_I)
        tile = item // my_chunks
        chunk_idx = item % my_chunks
        token = tile * TILE_TOKENS
        tokens = tl.minimum(my_query - token, TILE_TOKENS)
        position = my_context + token
        keys = tl.zeros_like(item) + my_seq
        low = tl.zeros_like(item)
        if CAUSAL:
            keys = tl.minimum(position + tokens, my_seq)
        if WINDOW > 0:
            low = tl.maximum(position - WINDOW + 1, 0) // BLOCK_N
            if not CAUSAL:
                keys = tl.minimum(position + tokens - 1 + WINDOW, my_seq)
        high = tl.cdiv(keys, BLOCK_N)
        tile_chunks = tl.maximum(tl.cdiv(high - low, chunk_blocks), 1)
        block_begin = low + chunk_idx * chunk_blocks
        block_end = tl.minimum(block_begin + chunk_blocks, high)
        slot = slot_base + tile * my_chunks
        live = item < my_items
        row = plan_ptr + (1 + item_base + item) * PLAN_WIDTH
        tl.store(row, tl.where(chunk_idx < tile_chunks, req, -1), mask=live)
        tl.store(row + 1, my_start + token, mask=live)
        tl.store(row + 2, tokens, mask=live)
        tl.store(row + 3, position, mask=live)
        tl.store(row + 4, keys, mask=live)
        tl.store(row + 5, block_begin, mask=live)
        tl.store(row + 6, block_end, mask=live)
        tl.store(row + 7, chunk_idx, mask=live)
        tl.store(row + 8, tile_chunks, mask=live)
        tl.store(row + 9, slot, mask=live)
        merge = live & (chunk_idx == 0) & (tl.zeros_like(item) + my_chunks > 1)
        row = plan_ptr + (1 + max_items + merge_base + tile) * PLAN_WIDTH
        tl.store(row, my_start + token, mask=merge)
        tl.store(row + 1, tokens, mask=merge)
        tl.store(row + 2, tile_chunks, mask=merge)
        tl.store(row + 3, slot, mask=merge)


def plan_attention(
    # [plan_rows, PLAN_WIDTH] int32
    plan: torch.Tensor,
    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor,
    # [num_reqs] int32
    seq_lens: torch.Tensor,
    shape: AttentionShape,
    geometry: AttentionGeometry,
) -> None:
    """Writes the step's work list; once per step, before the first layer."""
    num_reqs = seq_lens.shape[0]
    if num_reqs > geometry.max_reqs:
        raise ValueError(f"{num_reqs} requests exceed the geometry's {geometry.max_reqs}")
    attention_plan_kernel[(num_reqs,)](
        plan,
        query_start_loc,
        seq_lens,
        num_reqs,
        geometry.max_items,
        SLOTS=geometry.slots,
        MAX_PARTIALS=geometry.max_partials,
        MIN_CHUNK=geometry.min_chunk_blocks,
        OVERHEAD=geometry.launch.overhead_blocks,
        TILE_TOKENS=geometry.tile_tokens,
        BLOCK_N=geometry.launch.block_n,
        CAUSAL=shape.causal,
        WINDOW=shape.sliding_window,
        PLAN_WIDTH=PLAN_WIDTH,
        BLOCK_R=triton.next_power_of_2(num_reqs),
        BLOCK_I=32,
        num_warps=1 if num_reqs <= 16 else 4 if num_reqs <= 128 else 8,
    )
