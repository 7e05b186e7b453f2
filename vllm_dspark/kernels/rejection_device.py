"""Device functions that the kernels of ragged rejection share (``rejection_kernels.py``).

Scaled logits are base-2 exponents, logit * log2(e) / temperature, so that a probability is
exp2(scaled - top) * inverse with the row's own `top` and `inverse` (0 where nothing is finite).
"""

import triton
import triton.language as tl

from vllm_dspark.kernels.noise_device import fast_log, gumbel, key_words, token_bits, uniform

_LOG2E = tl.constexpr(1.4426950408889634)
_ACCEPT = tl.constexpr(1)
_RESAMPLE = tl.constexpr(2)


@triton.jit
def scaled_logits(logits, factor):
    """Base-2 exponents; NaN counts as -inf, +inf and overflow as the largest float32."""
    # The maximum of NaN and a number is the number.
    scaled = tl.maximum(logits.to(tl.float32) * factor, float("-inf"))
    return tl.minimum(scaled, 3.4028234663852886e38)


@triton.jit
def finite(top):
    """A maximum that may be subtracted: 0 for a row without finite logits."""
    return tl.where(top == float("-inf"), 0.0, top)


@triton.jit
def part_of(size, part, num_parts):
    """[first, last) of a part; multiples of 16, the last parts may be short or empty."""
    width = tl.cdiv(tl.cdiv(size, num_parts), 16) * 16
    first = part * width
    return first, tl.minimum(first + width, size)


@triton.jit
def row_sum(row_ptr, first, last, factor, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """(maximum, sum of exponentials relative to it) of a slice of one row."""
    # Every lane keeps its own maximum and sum: one reduction per slice instead of one per tile.
    lanes = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    top = tl.full([LANES], float("-inf"), tl.float32)
    total = tl.zeros([LANES], tl.float32)
    for base in range(first, last, GROUPS * LANES):
        cols = base + lanes
        values = tl.load(row_ptr + cols, mask=cols < last, other=float("-inf"))
        values = scaled_logits(values, factor)
        new_top = tl.maximum(top, tl.max(values, 0))
        shift = finite(new_top)
        total = total * tl.exp2(top - shift) + tl.sum(tl.exp2(values - shift[None, :]), 0)
        top = new_top
    best = tl.max(top, 0)
    return best, tl.sum(total * tl.exp2(top - finite(best)), 0)


@triton.jit
def row_argmax(row_ptr, first, last, GROUPS: tl.constexpr, LANES: tl.constexpr):
    """(maximum, its lowest column) of a slice of one row of scaled logits."""
    lanes = tl.arange(0, GROUPS)[:, None] * LANES + tl.arange(0, LANES)[None, :]
    best = tl.full([GROUPS, LANES], float("-inf"), tl.float32)
    index = first + lanes
    for base in range(first, last, GROUPS * LANES):
        cols = base + lanes
        values = tl.load(row_ptr + cols, mask=cols < last, other=float("-inf"))
        values = scaled_logits(values, _LOG2E)
        # Tiles ascend, so an equal value keeps the lower column.
        index = tl.where(values > best, cols, index)
        best = tl.maximum(best, values)
    top = tl.max(tl.max(best, 1), 0)
    return top, tl.min(tl.min(tl.where(best == top, index, 2147483647), 1), 0)


@triton.jit
def combine_parts(top_ptr, sum_ptr, at, mask):
    """[rows] maximum and inverse sum from [rows, parts]; inverse 0 where nothing is finite."""
    top = tl.load(top_ptr + at, mask=mask, other=float("-inf"))
    total = tl.load(sum_ptr + at, mask=mask, other=0.0)
    row_top = tl.max(top, 1)
    row_total = tl.sum(total * tl.exp2(top - finite(row_top)[:, None]), 1)
    positive = row_total > 0.0
    return row_top, tl.where(positive, 1.0 / tl.where(positive, row_total, 1.0), 0.0)


@triton.jit
def accept_uniforms(seed, position, columns):
    """The acceptance draw of each row, [rows]."""
    lo, hi = key_words(position * 0 + seed, position, columns, _ACCEPT)
    return uniform(token_bits(lo, hi, columns * 0))


@triton.jit
def prefix_length(ok, columns, num_drafts):
    """Number of leading columns that are `ok`, at most `num_drafts`."""
    return tl.min(tl.where(ok, num_drafts, tl.minimum(columns, num_drafts)), 0)


@triton.jit
def at_column(values, columns, column):
    """Entry `column` of a small vector."""
    return tl.sum(tl.where(columns == column, values, 0), 0)


@triton.jit
def judge_greedy(
    drafts, argmax, has_finite, u, rates_ptr, columns, num_drafts, vocab, SYNTHETIC: tl.constexpr
):
    """(accepted drafts, token after them) of a request at temperature 0."""
    ok = (drafts == argmax) & has_finite
    if SYNTHETIC:
        rate = tl.load(rates_ptr + columns, mask=columns < num_drafts, other=0.0)
        ok = (u < rate) & (drafts >= 0) & (drafts < vocab)
    accepted = prefix_length((columns < num_drafts) & ok, columns, num_drafts)
    return accepted, at_column(argmax, columns, accepted)


@triton.jit
def weights(
    target_row,
    draft_row,
    cols,
    mask,
    draft_limit,
    draft,
    draft_factor,
    top,
    inverse,
    q_top,
    q_inverse,
    HAS_DRAFT: tl.constexpr,
):
    """(scaled target logit minus the row's top, p, q) of a tile of one row."""
    target = tl.load(target_row + cols, mask=mask, other=float("-inf"))
    relative = scaled_logits(target, _LOG2E) - finite(top)
    p = tl.exp2(relative) * inverse
    if HAS_DRAFT:
        cached = tl.load(draft_row + cols, mask=mask & (cols < draft_limit), other=float("-inf"))
        q = tl.exp2(scaled_logits(cached, draft_factor) - finite(q_top)) * q_inverse
    else:
        q = tl.where(cols == draft, 1.0, 0.0)
    return relative, p, q


@triton.jit
def window_probabilities(
    stats_ptr,
    target_ptr,
    draft_ptr,
    drafts,
    req,
    num_reqs,
    start,
    num_drafts,
    slot,
    draft_factor,
    vocab,
    draft_vocab,
    stride_target,
    stride_dm,
    stride_dk,
    NUM_DRAFTS: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    BLOCK_J: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """[J] of a window: p and q of the drafts, which can be judged, and the four row statistics."""
    columns = tl.arange(0, BLOCK_J)
    parts = tl.arange(0, BLOCK_S)
    in_parts = (parts < NUM_PARTS)[None, :]
    has_draft = columns < num_drafts
    row = (start + columns).to(tl.int64)
    at = (req * (NUM_DRAFTS + 1) + columns)[:, None] * NUM_PARTS + parts[None, :]
    plane = num_reqs * (NUM_DRAFTS + 1) * NUM_PARTS
    top, inverse = combine_parts(
        stats_ptr, stats_ptr + plane, at, (columns <= num_drafts)[:, None] & in_parts
    )
    judgeable = has_draft & (drafts >= 0) & (drafts < vocab)
    picked = tl.load(target_ptr + row * stride_target + drafts, mask=judgeable, other=float("-inf"))
    p = tl.exp2(scaled_logits(picked, _LOG2E) - finite(top)) * inverse
    q = tl.full([BLOCK_J], 1.0, tl.float32)
    q_top = tl.full([BLOCK_J], float("-inf"), tl.float32)
    q_inverse = tl.zeros([BLOCK_J], tl.float32)
    if HAS_DRAFT:
        q_top, q_inverse = combine_parts(
            stats_ptr + 2 * plane, stats_ptr + 3 * plane, at, has_draft[:, None] & in_parts
        )
        # An id past the cache's columns was never drafted: weight zero, not its neighbour's.
        cached = judgeable & (drafts < draft_vocab)
        q_row = draft_ptr + slot * stride_dm + columns * stride_dk
        picked = tl.load(q_row + drafts, mask=cached, other=float("-inf"))
        q = tl.exp2(scaled_logits(picked, draft_factor) - finite(q_top)) * q_inverse
        judgeable = judgeable & (q_inverse > 0.0)
    return p, q, judgeable, top, inverse, q_top, q_inverse


@triton.jit
def draw_from_target(target_row, first, last, top, lo, hi, BLOCK_V: tl.constexpr):
    """(best score, its column) of log p + noise over a slice; log p up to the row's constant."""
    lanes = tl.arange(0, BLOCK_V)
    best = tl.full([BLOCK_V], float("-inf"), tl.float32)
    index = first + lanes
    for base in range(first, last, BLOCK_V):
        cols = base + lanes
        target = tl.load(target_row + cols, mask=cols < last, other=float("-inf"))
        relative = scaled_logits(target, _LOG2E) - finite(top)
        score = relative * 0.6931471805599453 + gumbel(token_bits(lo, hi, cols))
        index = tl.where(score > best, cols, index)
        best = tl.maximum(best, score)
    value = tl.max(best, 0)
    return value, tl.min(tl.where(best == value, index, 2147483647), 0)


@triton.jit
def draw_from_residual(
    target_row,
    draft_row,
    first,
    last,
    draft_limit,
    draft,
    draft_factor,
    top,
    inverse,
    q_top,
    q_inverse,
    ratio,
    lo,
    hi,
    HAS_DRAFT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    """The same of log(max(ratio p - q, 0)), and of log p for when that is empty."""
    lanes = tl.arange(0, BLOCK_V)
    best, best_p = (
        tl.full([BLOCK_V], float("-inf"), tl.float32),
        tl.full([BLOCK_V], float("-inf"), tl.float32),
    )
    index, index_p = first + lanes, first + lanes
    for base in range(first, last, BLOCK_V):
        cols = base + lanes
        relative, p, q = weights(
            target_row,
            draft_row,
            cols,
            cols < last,
            draft_limit,
            draft,
            draft_factor,
            top,
            inverse,
            q_top,
            q_inverse,
            HAS_DRAFT,
        )
        noise = gumbel(token_bits(lo, hi, cols))
        weight = ratio * p - q
        score = tl.where(weight > 0.0, fast_log(tl.maximum(weight, 1.2e-38)) + noise, float("-inf"))
        index = tl.where(score > best, cols, index)
        best = tl.maximum(best, score)
        score = relative * 0.6931471805599453 + noise
        index_p = tl.where(score > best_p, cols, index_p)
        best_p = tl.maximum(best_p, score)
    value, value_p = tl.max(best, 0), tl.max(best_p, 0)
    column = tl.min(tl.where(best == value, index, 2147483647), 0)
    return value, column, value_p, tl.min(tl.where(best_p == value_p, index_p, 2147483647), 0)


@triton.jit
def resample_words(seed, position, column):
    """Noise key of the token drawn after `column` accepted drafts."""
    return key_words(seed, position, column, _RESAMPLE)
