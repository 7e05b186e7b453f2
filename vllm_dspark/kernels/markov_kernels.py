"""Device side of the fused drafting head (``markov.py`` says what the launches do together)."""

import triton
import triton.language as tl

from vllm_dspark.kernels.noise_device import gumbel, key_words, token_bits


@triton.jit
def _tanh(x):
    return 1.0 - 2.0 / (tl.exp2(x * 2.8853900817779268) + 1.0)


@triton.jit
def _reduce_draft(value_ptr, index_ptr, rows, live, NUM_PARTS: tl.constexpr, BLOCK_P: tl.constexpr):
    """[rows] int32 draft id of the maximum; ties and rows without a finite logit: the lowest."""
    parts = tl.arange(0, BLOCK_P)
    mask = live[:, None] & (parts < NUM_PARTS)[None, :]
    offset = rows[:, None] * NUM_PARTS + parts[None, :]
    value = tl.load(value_ptr + offset, mask=mask, other=float("-inf"))
    index = tl.load(index_ptr + offset, mask=mask, other=2147483647)
    best = tl.max(value, 1)
    draft = tl.min(tl.where(value == best[:, None], index, 2147483647), 1)
    return tl.where(live, draft, 0)


@triton.jit
def _to_target(d2t_ptr, draft, live, HAS_D2T: tl.constexpr):
    target = draft.to(tl.int64)
    if HAS_D2T:
        target += tl.load(d2t_ptr + draft, mask=live, other=0)
    return target


@triton.jit(do_not_specialize=["column"])
def sample_column_kernel(
    # [2, R, NUM_PARTS] float32, half column % 2 written, the other read if GATHER
    value_ptr,
    # [2, R, NUM_PARTS] int32
    index_ptr,
    # [R, K] int64
    tokens_ptr,
    # [M, K, >= V] logits, written if SAMPLE
    cache_ptr,
    # [R, K, V]
    base_ptr,
    # [V_in, rank] if GATHER, else y [R, rank]
    latent_ptr,
    # [V, rank]
    w2_ptr,
    # [V] int64
    d2t_ptr,
    # [R] int64
    anchor_ptr,
    # [R] int64
    req_index_ptr,
    # [R, K] int64
    position_ptr,
    # [M] float32
    temperature_ptr,
    # [M] int64
    seeds_ptr,
    num_reqs,
    vocab,
    column,
    stride_cm,
    stride_ck,
    stride_br,
    stride_bk,
    stride_latent,
    stride_pos,
    stride_tok,
    stride_req,
    FIRST: tl.constexpr,
    BACKWARDS: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_V: tl.constexpr,
    STAGES: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    GATHER: tl.constexpr,
    SAMPLE: tl.constexpr,
    HAS_D2T: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SCALE: tl.constexpr,
):
    part = tl.program_id(1)
    num_tiles = tl.cdiv(vocab, BLOCK_V)
    per_part = tl.cdiv(num_tiles, NUM_PARTS)
    first = part * per_part
    last = tl.minimum(first + per_part, num_tiles)
    lanes = tl.arange(0, BLOCK_V)
    ranks = tl.arange(0, BLOCK_K)
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(req_index_ptr + rows * stride_req, mask=rows < num_reqs, other=-1).to(tl.int64)
    live = slot >= 0
    half = num_reqs * NUM_PARTS
    row64 = rows.to(tl.int64)
    if RANK > 0:
        latent_row = row64
        if GATHER:
            if FIRST:
                latent_row = tl.load(anchor_ptr + rows, mask=live, other=0)
            else:
                other = ((column + 1) % 2) * half
                draft = _reduce_draft(
                    value_ptr + other, index_ptr + other, rows, live, NUM_PARTS, BLOCK_P
                )
                latent_row = _to_target(d2t_ptr, draft, live, HAS_D2T)
                if part == 0:
                    out = tokens_ptr + row64 * stride_tok + (column - 1)
                    tl.store(out, latent_row, mask=live)
        latent = tl.load(
            latent_ptr + latent_row[None, :] * stride_latent + ranks[:, None],
            mask=live[None, :] & (ranks < RANK)[:, None],
            other=0.0,
        ).to(w2_ptr.dtype.element_ty)

    hot = live
    if SAMPLE:
        temperature = tl.load(temperature_ptr + slot, mask=live, other=0.0)
        hot = temperature > 0.0
        inverse_temperature = 1.0 / tl.where(hot, temperature, 1.0)
        seed = tl.load(seeds_ptr + slot, mask=live, other=0)
        position = tl.load(position_ptr + row64 * stride_pos + column, mask=live, other=0)
        lo, hi = key_words(seed, position, tl.zeros_like(rows) + column, 0)
        cache_row = cache_ptr + slot * stride_cm + column * stride_ck
    base_row = base_ptr + row64 * stride_br + column * stride_bk

    # The vocabulary is the long side of the tile, so that 8 requests fill a matrix instruction and
    # W2 feeds it from shared memory. Each lane keeps its own best; one reduction ends the part.
    best = tl.full([BLOCK_V, BLOCK_R], float("-inf"), tl.float32)
    best_tile = tl.zeros([BLOCK_V, BLOCK_R], tl.int32) + first
    for step in tl.range(first, last, num_stages=STAGES):
        tile = step
        if BACKWARDS:
            tile = first + last - 1 - step
        cols = tile * BLOCK_V + lanes
        in_vocab = cols < vocab
        mask = in_vocab[:, None] & live[None, :]
        # Columns past the vocabulary are -inf from here on.
        logits = tl.load(base_row[None, :] + cols[:, None], mask=mask, other=float("-inf"))
        logits = logits.to(tl.float32)
        if SOFT_CAP > 0.0:
            logits = tl.where(mask, SOFT_CAP * _tanh(logits / SOFT_CAP), float("-inf"))
        if RANK > 0:
            w2_mask = in_vocab[:, None]
            if RANK != BLOCK_K:
                w2_mask = w2_mask & (ranks < RANK)[None, :]
            w2_tile = w2_ptr + tile.to(tl.int64) * (BLOCK_V * RANK)
            w2 = tl.load(w2_tile + lanes[:, None] * RANK + ranks[None, :], mask=w2_mask, other=0.0)
            logits += tl.dot(w2, latent, input_precision="ieee")
        logits = logits * SCALE
        # NaN counts as -inf (the maximum with a number is the number), +inf as the largest float32.
        logits = tl.minimum(tl.maximum(logits, float("-inf")), 3.4028234663852886e38)
        score = logits
        if SAMPLE:
            target = _to_target(d2t_ptr, cols, in_vocab, HAS_D2T)
            stored = logits.to(cache_ptr.dtype.element_ty)
            tl.store(
                cache_row[None, :] + target[:, None],
                stored,
                mask=mask & hot[None, :],
                eviction_policy="evict_first",
            )
            noise = gumbel(token_bits(lo[None, :], hi[None, :], target[:, None]))
            noisy = stored.to(tl.float32) * inverse_temperature[None, :] + noise
            score = tl.where(hot[None, :], noisy, logits)
        # Of equal scores the lowest id: the later tile of a backward walk, else the earlier.
        better = score >= best if BACKWARDS else score > best
        best = tl.where(better, score, best)
        best_tile = tl.where(better, tile, best_tile)
    row_best = tl.max(best, 0)
    ids = tl.where(best == row_best[None, :], best_tile * BLOCK_V + lanes[:, None], 2147483647)
    offset = (column % 2) * half + rows * NUM_PARTS + part
    tl.store(value_ptr + offset, row_best, mask=rows < num_reqs)
    tl.store(index_ptr + offset, tl.min(ids, 0), mask=rows < num_reqs)


@triton.jit(do_not_specialize=["column"])
def latent_kernel(
    # [R, rank] in W2's dtype, written
    latent_ptr,
    # [2, R, rank] float32, half column % 2 written if rnn
    state_ptr,
    # [R, K] int64
    tokens_ptr,
    # [2, R, NUM_PARTS]
    value_ptr,
    index_ptr,
    # [R] int64
    anchor_ptr,
    # [R] int64
    req_index_ptr,
    # [V] int64
    d2t_ptr,
    # [V_in, rank]
    w1_ptr,
    # gated [rank, rank] on e; rnn [3 rank, 2 rank] on [s ; e]; a view of proj_weight
    proj_ptr,
    # [R, K, rank or 3 rank] hidden part of the projection, bias included
    projected_ptr,
    num_reqs,
    column,
    stride_proj,
    stride_tok,
    stride_req,
    FIRST: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    KIND: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_O: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_D2T: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    outs = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    live = tl.load(req_index_ptr + rows * stride_req, mask=rows < num_reqs, other=-1) >= 0
    row64 = rows.to(tl.int64)
    if FIRST:
        token = tl.load(anchor_ptr + rows, mask=live, other=0)
    else:
        other = ((column + 1) % 2) * num_reqs * NUM_PARTS
        draft = _reduce_draft(value_ptr + other, index_ptr + other, rows, live, NUM_PARTS, BLOCK_P)
        token = _to_target(d2t_ptr, draft, live, HAS_D2T)
        if tl.program_id(1) == 0:
            tl.store(tokens_ptr + row64 * stride_tok + (column - 1), token, mask=live)
    in_out = outs < RANK
    out_mask = live[:, None] & in_out[None, :]
    embed_out = tl.load(w1_ptr + token[:, None] * RANK + outs[None, :], mask=out_mask, other=0.0)
    if KIND == 0:
        latent = embed_out.to(tl.float32)
    else:
        width: tl.constexpr = RANK * (KIND * 2 - 1)  # gated: rank, rnn: 3 rank
        hidden_at = (row64 * NUM_COLUMNS + column)[:, None] * width + outs[None, :]
        gate = tl.load(projected_ptr + hidden_at, mask=out_mask, other=0.0).to(tl.float32)
        if KIND == 2:
            at = projected_ptr + hidden_at + RANK
            candidate = tl.load(at, mask=out_mask, other=0.0).to(tl.float32)
            latent = tl.load(at + RANK, mask=out_mask, other=0.0).to(tl.float32)
        state_row = state_ptr + ((column + 1) % 2) * num_reqs * RANK + row64[:, None] * RANK
        for base in range(0, RANK, BLOCK_K):
            ranks = base + tl.arange(0, BLOCK_K)
            in_rank = ranks < RANK
            row_mask = live[:, None] & in_rank[None, :]
            mask = in_rank[:, None] & in_out[None, :]
            embed = tl.load(
                w1_ptr + token[:, None] * RANK + ranks[None, :], mask=row_mask, other=0.0
            )
            embed = embed.to(proj_ptr.dtype.element_ty)
            weight_at = proj_ptr + outs[None, :] * stride_proj + ranks[:, None]
            if KIND == 1:
                weight = tl.load(weight_at, mask=mask, other=0.0)
                gate = tl.dot(embed, weight, gate, input_precision="ieee")
            else:
                section = RANK * stride_proj
                weight = tl.load(weight_at + RANK, mask=mask, other=0.0)
                gate = tl.dot(embed, weight, gate, input_precision="ieee")
                weight = tl.load(weight_at + section + RANK, mask=mask, other=0.0)
                candidate = tl.dot(embed, weight, candidate, input_precision="ieee")
                weight = tl.load(weight_at + 2 * section + RANK, mask=mask, other=0.0)
                latent = tl.dot(embed, weight, latent, input_precision="ieee")
                if not FIRST:
                    # High and low halves: the state loses nothing to the weights' dtype.
                    state = tl.load(state_row + ranks[None, :], mask=row_mask, other=0.0)
                    high = state.to(embed.dtype)
                    low = (state - high.to(tl.float32)).to(embed.dtype)
                    weight = tl.load(weight_at, mask=mask, other=0.0)
                    gate = tl.dot(high, weight, gate, input_precision="ieee")
                    gate = tl.dot(low, weight, gate, input_precision="ieee")
                    weight = tl.load(weight_at + section, mask=mask, other=0.0)
                    candidate = tl.dot(high, weight, candidate, input_precision="ieee")
                    candidate = tl.dot(low, weight, candidate, input_precision="ieee")
                    weight = tl.load(weight_at + 2 * section, mask=mask, other=0.0)
                    latent = tl.dot(high, weight, latent, input_precision="ieee")
                    latent = tl.dot(low, weight, latent, input_precision="ieee")
        gate = 1.0 / (1.0 + tl.exp(-gate))
        if KIND == 1:
            latent = embed_out.to(tl.float32) * gate
        else:
            new_state = (1.0 - gate) * _tanh(candidate)
            if not FIRST:
                new_state += gate * tl.load(state_row + outs[None, :], mask=out_mask, other=0.0)
            write = state_ptr + (column % 2) * num_reqs * RANK + row64[:, None] * RANK
            tl.store(write + outs[None, :], new_state, mask=out_mask)
            latent = _tanh(latent)
    at = row64[:, None] * RANK + outs[None, :]
    tl.store(latent_ptr + at, latent.to(latent_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def finish_block_kernel(
    # [R, K] int64
    tokens_ptr,
    # [R, K] float32, written if HAS_CONFIDENCE
    confidence_ptr,
    # [2, R, NUM_PARTS]
    value_ptr,
    index_ptr,
    # [R] int64
    anchor_ptr,
    # [R] int64
    req_index_ptr,
    # [V] int64
    d2t_ptr,
    # [R, K, H]
    hidden_ptr,
    # [H + rank] or [H]
    weight_ptr,
    # [1]
    bias_ptr,
    # [V_in, rank]
    w1_ptr,
    num_reqs,
    stride_tok,
    stride_req,
    stride_conf,
    stride_hr,
    stride_hk,
    HIDDEN: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    HAS_D2T: tl.constexpr,
    HAS_CONFIDENCE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1)
    if tl.load(req_index_ptr + row * stride_req) < 0:
        return
    if column == NUM_COLUMNS - 1:
        half = ((NUM_COLUMNS + 1) % 2) * num_reqs * NUM_PARTS
        one = tl.arange(0, 1)
        draft = _reduce_draft(
            value_ptr + half, index_ptr + half, row + one, one == 0, NUM_PARTS, BLOCK_P
        )
        target = _to_target(d2t_ptr, draft, one == 0, HAS_D2T)
        tl.store(tokens_ptr + row * stride_tok + column + one, target)
    if HAS_CONFIDENCE:
        total = tl.zeros([BLOCK_H], tl.float32)
        hidden_row = hidden_ptr + row * stride_hr + column * stride_hk
        for base in range(0, HIDDEN, BLOCK_H):
            at = base + tl.arange(0, BLOCK_H)
            mask = at < HIDDEN
            hidden = tl.load(hidden_row + at, mask=mask, other=0.0).to(tl.float32)
            total += hidden * tl.load(weight_ptr + at, mask=mask, other=0.0).to(tl.float32)
        logit = tl.sum(total, 0)
        if RANK > 0:
            # Written by an earlier launch, never by this one.
            previous = tl.load(tokens_ptr + row * stride_tok + tl.maximum(column - 1, 0))
            token = tl.where(column == 0, tl.load(anchor_ptr + row), previous)
            ranks = tl.arange(0, BLOCK_K)
            mask = ranks < RANK
            embed = tl.load(w1_ptr + token * RANK + ranks, mask=mask, other=0.0).to(tl.float32)
            weight = tl.load(weight_ptr + HIDDEN + ranks, mask=mask, other=0.0).to(tl.float32)
            logit += tl.sum(embed * weight, 0)
        if HAS_BIAS:
            logit += tl.load(bias_ptr).to(tl.float32)
        tl.store(confidence_ptr + row * stride_conf + column, logit)
