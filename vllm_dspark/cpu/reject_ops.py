"""Verification of ragged windows on a CPU (`RejectOps`) in numba, one request after the other.

Only what a request's outcome needs is computed: at temperature 0 one argmax per row up to the first
rejection; at T > 0 the normalisers of the rows up to the first rejection, then one draw. Block
verification needs every row of the window. Probabilities are float32 with sums carried in float64.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from vllm_dspark.cpu.draft_ops import as_elements, as_indices
from vllm_dspark.cpu.numeric import (
    BLOCK,
    KEY_NEG_INF,
    argmax,
    clean,
    exp_nonpositive,
    gumbel_argmax,
    key_value,
    key_words,
    max_key,
    token_bits,
    uniform,
    widen,
)
from vllm_dspark.errors import DSparkError
from vllm_dspark.kernels import noise
from vllm_dspark.kernels.protocols import (
    RejectBatch,
    RejectOutcome,
    RejectRule,
    SamplingState,
)

Array = npt.NDArray[Any]

_ACCEPT = noise.ACCEPT
_RESAMPLE = noise.RESAMPLE
_STANDARD = 0
_BLOCK_JOINT = 1
_NO_D2T: Array = np.empty(0, np.int64)


@njit(cache=True, nogil=True, fastmath={"reassoc", "nsz"})
def _sum(values):  # type: ignore[no-untyped-def]
    total = np.float32(0.0)
    for t in range(values.size):
        total += values[t]
    return total


@njit(cache=True, nogil=True, error_model="numpy")
def _normaliser(row, heat, scratch):  # type: ignore[no-untyped-def]
    """(max, sum of exp(. - max)) of clean(row / heat); the sum is 0 if no logit is finite.

    row: [V] float32 or bfloat16 bits; heat: float32, 1 for processed logits.
    """
    top_key = KEY_NEG_INF
    for start in range(0, row.size, BLOCK):
        key = max_key(row[start : start + BLOCK])
        top_key = key if key > top_key else top_key
    if top_key == KEY_NEG_INF:
        return np.float32(0.0), 0.0
    top = clean(key_value(top_key) / heat)
    total = 0.0
    for start in range(0, row.size, BLOCK):
        block = row[start : start + BLOCK]
        terms = scratch[: block.size]
        for t in range(block.size):
            terms[t] = exp_nonpositive(clean(widen(block[t]) / heat) - top)
        total += np.float64(_sum(terms))
    return top, total


@njit(cache=True, nogil=True, error_model="numpy")
def _probability(logit, heat, top, total):  # type: ignore[no-untyped-def]
    """exp(clean(logit / heat)) under a normaliser."""
    if total == 0.0:
        return 0.0
    return np.float64(exp_nonpositive(np.float32(clean(logit / heat) - top))) / total


@njit(cache=True, nogil=True, error_model="numpy")
def _residual(  # type: ignore[no-untyped-def]
    # [V] float32 and its normaliser
    target,
    p_top,
    p_total,
    # factor on p
    ratio,
    # [V_c] and its normaliser; empty: one-hot at `draft`
    cached,
    heat,
    q_top,
    q_total,
    draft,
    # [V] float32, written: max(ratio * p - q, 0)
    weights,
):
    """Write the residual weights and return their sum."""
    vocab = target.size
    p_scale = np.float32(ratio / p_total) if p_total > 0.0 else np.float32(0.0)
    shared = min(cached.size, vocab)
    q_scale = np.float32(1.0 / q_total) if shared else np.float32(0.0)
    total = 0.0
    for start in range(0, vocab, BLOCK):
        block = target[start : start + BLOCK]
        out = weights[start : start + BLOCK]
        for t in range(block.size):
            out[t] = p_scale * exp_nonpositive(clean(block[t]) - p_top)
        both = cached[start : min(start + BLOCK, shared)] if start < shared else cached[:0]
        for t in range(both.size):
            q = q_scale * exp_nonpositive(clean(widen(both[t]) / heat) - q_top)
            rest = np.float32(out[t] - q)
            out[t] = rest if rest > np.float32(0.0) else np.float32(0.0)
        if cached.size == 0 and start <= draft < start + block.size:
            out[draft - start] = np.float32(0.0)
        total += np.float64(_sum(out))
    return total


@njit(cache=True, nogil=True)
def _draw_logits(row, scores, seed, pos, column, block_keys):  # type: ignore[no-untyped-def]
    """Token drawn from softmax(row) with the RESAMPLE noise of the key."""
    top_key = KEY_NEG_INF
    for start in range(0, row.size, BLOCK):
        top_key = max(top_key, max_key(row[start : start + BLOCK]))
    # Relative to the top, so that the noise is not lost beside large logits
    top = clean(key_value(top_key)) if top_key != KEY_NEG_INF else np.float32(0.0)
    for t in range(row.size):
        scores[t] = clean(row[t]) - top
    lo, hi = key_words(seed, pos, column, _RESAMPLE)
    return gumbel_argmax(scores, row.size, _NO_D2T, lo, hi, block_keys)


@njit(cache=True, nogil=True)
def _draw_weights(weights, seed, pos, column, block_keys):  # type: ignore[no-untyped-def]
    """Token drawn from unnormalised weights, which are overwritten by their logarithms."""
    for t in range(weights.size):
        if weights[t] > np.float32(0.0):
            weights[t] = np.float32(math.log(weights[t]))
        else:
            weights[t] = np.float32(-np.inf)
    lo, hi = key_words(seed, pos, column, _RESAMPLE)
    return gumbel_argmax(weights, weights.size, _NO_D2T, lo, hi, block_keys)


@njit(cache=True, nogil=True)
def _accept_draw(seed, pos, column):  # type: ignore[no-untyped-def]
    lo, hi = key_words(seed, pos, column, _ACCEPT)
    return np.float64(uniform(token_bits(lo, hi, np.uint32(0))))


@njit(cache=True, nogil=True)
def _greedy_window(target, drafts, seed, pos, rates, sampled):  # type: ignore[no-untyped-def]
    """Temperature 0; returns the number of sampled tokens."""
    last = target.shape[0] - 1
    for i in range(last + 1):
        best, valid = argmax(target[i], target.shape[1])
        if i == last:
            break
        x = drafts[i + 1]
        accept = valid and x == best
        if rates.size:
            in_vocab = 0 <= x < target.shape[1]
            accept = in_vocab and _accept_draw(seed, pos[i], i) < rates[i]
        if not accept:
            break
        sampled[i] = x
    sampled[i] = best
    return i + 1


@njit(cache=True, nogil=True, error_model="numpy")
def _standard_window(  # type: ignore[no-untyped-def]
    # [W, V], [K, V_c] or empty, [W], scalar, scalar, [W], [K] or empty
    target,
    cached,
    drafts,
    heat,
    seed,
    pos,
    rates,
    # scratch
    weights,
    terms,
    block_keys,
    # [K + 1], written
    sampled,
):
    """Token by token; returns the number of sampled tokens."""
    one = np.float32(1.0)
    last, vocab = target.shape[0] - 1, target.shape[1]
    for i in range(last):
        x = drafts[i + 1]
        if x < 0 or x >= vocab:
            sampled[i] = _draw_logits(target[i], weights, seed, pos[i], i, block_keys)
            return i + 1
        q_top, q_total, q_x = np.float32(0.0), 1.0, 1.0
        q_row = cached[0, :0]
        if cached.size:
            q_row = cached[i]
            q_top, q_total = _normaliser(q_row, heat, terms)
            if q_total == 0.0:
                sampled[i] = _draw_logits(target[i], weights, seed, pos[i], i, block_keys)
                return i + 1
            q_x = 0.0
            if x < q_row.size:
                q_x = _probability(widen(q_row[x]), heat, q_top, q_total)
        p_top, p_total = _normaliser(target[i], one, terms)
        accept = _accept_draw(seed, pos[i], i) * q_x < _probability(
            target[i, x], one, p_top, p_total
        )
        if rates.size:
            accept = _accept_draw(seed, pos[i], i) < rates[i]
        if accept:
            sampled[i] = x
            continue
        mass = _residual(target[i], p_top, p_total, 1.0, q_row, heat, q_top, q_total, x, weights)
        if mass > 0.0:
            sampled[i] = _draw_weights(weights, seed, pos[i], i, block_keys)
        else:
            sampled[i] = _draw_logits(target[i], weights, seed, pos[i], i, block_keys)
        return i + 1
    sampled[last] = _draw_logits(target[last], weights, seed, pos[last], last, block_keys)
    return last + 1


@njit(cache=True, nogil=True, error_model="numpy")
def _judgeable_length(target, cached, drafts, heat, terms, q_norms):  # type: ignore[no-untyped-def]
    """Drafts before the first that cannot be judged; fills q_norms [K, 2] for them."""
    last, vocab = target.shape[0] - 1, target.shape[1]
    for i in range(last):
        if drafts[i + 1] < 0 or drafts[i + 1] >= vocab:
            return i
        if cached.size:
            q_norms[i, 0], q_norms[i, 1] = _normaliser(cached[i], heat, terms)
            if q_norms[i, 1] == 0.0:
                return i
    return last


@njit(cache=True, nogil=True, error_model="numpy")
def _clipped_ratio(p, q):  # type: ignore[no-untyped-def]
    """min(1, p / q), with 0 / 0 = 0."""
    if p >= q:
        return 1.0 if p > 0.0 else 0.0
    return p / q


@njit(cache=True, nogil=True, error_model="numpy")
def _block_window(  # type: ignore[no-untyped-def]
    target, cached, drafts, heat, seed, pos, weights, terms, block_keys, sampled
):
    """Jointly (Sun et al. 2024); arguments as `_standard_window`."""
    one = np.float32(1.0)
    q_norms = np.zeros((target.shape[0], 2))
    length = _judgeable_length(target, cached, drafts, heat, terms, q_norms)
    accepted, accepted_ratio, ratio = 0, 1.0, 1.0
    p_top, p_total = _normaliser(target[0], one, terms)
    q_row = cached[0, :0]
    for i in range(1, length + 1):
        x = drafts[i]
        sampled[i - 1] = x
        joint = ratio * _probability(target[i - 1, x], one, p_top, p_total)
        q_x = 1.0
        if cached.size:
            q_x = 0.0
            if x < cached.shape[1]:
                q_top, q_total = np.float32(q_norms[i - 1, 0]), q_norms[i - 1, 1]
                q_x = _probability(widen(cached[i - 1, x]), heat, q_top, q_total)
        ratio = _clipped_ratio(joint, q_x)
        h = ratio
        if i < length:
            p_top, p_total = _normaliser(target[i], one, terms)
            if cached.size:
                q_row = cached[i]
            mass = _residual(
                target[i], p_top, p_total, ratio,
                q_row, heat, np.float32(q_norms[i, 0]), q_norms[i, 1], drafts[i + 1], weights,
            )  # fmt: skip
            rest = mass + 1.0 - ratio
            h = mass / rest if rest > 0.0 else 1.0
        if _accept_draw(seed, pos[i - 1], i - 1) <= h:
            accepted, accepted_ratio = i, ratio
    mass = 0.0
    if accepted < length:
        p_top, p_total = _normaliser(target[accepted], one, terms)
        if cached.size:
            q_row = cached[accepted]
        mass = _residual(
            target[accepted], p_top, p_total, accepted_ratio, q_row, heat,
            np.float32(q_norms[accepted, 0]), q_norms[accepted, 1], drafts[accepted + 1], weights,
        )  # fmt: skip
    if mass > 0.0:
        drawn = _draw_weights(weights, seed, pos[accepted], accepted, block_keys)
    else:
        drawn = _draw_logits(target[accepted], weights, seed, pos[accepted], accepted, block_keys)
    sampled[accepted] = drawn
    sampled[accepted + 1 :] = -1
    return accepted + 1


@njit(cache=True, nogil=True)
def _reject_all(  # type: ignore[no-untyped-def]
    # [N, V], [M, K, V_c] or empty, [N], [R + 1], [N], [R], [M], [M]
    target,
    cached,
    drafts,
    bounds,
    pos,
    slots,
    temperature,
    seeds,
    # [K] or empty
    rates,
    method,
    # [R, K + 1] filled with -1, [R]
    sampled,
    num_sampled,
):
    vocab = target.shape[1]
    weights = np.empty(vocab, np.float32)
    terms = np.empty(BLOCK, np.float32)
    block_keys = np.empty((vocab + BLOCK - 1) // BLOCK, np.int32)
    for r in range(bounds.size - 1):
        start, end = bounds[r], bounds[r + 1]
        if start == end:
            continue
        slot = slots[r]
        rows, inputs, places = target[start:end], drafts[start:end], pos[start:end]
        q_rows = cached[slot] if cached.size else cached.reshape(1, 0)
        heat = temperature[slot]
        if heat == 0.0:
            count = _greedy_window(rows, inputs, seeds[slot], places, rates, sampled[r])
        elif method == _BLOCK_JOINT:
            count = _block_window(
                rows, q_rows, inputs, heat, seeds[slot], places,
                weights, terms, block_keys, sampled[r],
            )  # fmt: skip
        else:
            count = _standard_window(
                rows, q_rows, inputs, heat, seeds[slot], places, rates,
                weights, terms, block_keys, sampled[r],
            )  # fmt: skip
        num_sampled[r] = count


class CpuRejectOps:
    """`RejectOps` for CPU tensors."""

    def reject(self, batch: RejectBatch, state: SamplingState, rule: RejectRule) -> RejectOutcome:
        num_reqs = batch.cu_num_logits.shape[0] - 1
        sampled = torch.full((num_reqs, rule.num_drafts + 1), -1, dtype=torch.int64)
        num_sampled = torch.zeros(num_reqs, dtype=torch.int32)
        if rule.synthetic_rates is not None and rule.method == "block":
            raise DSparkError("synthetic acceptance rates need method 'standard', not 'block'")
        _reject_all(
            as_elements(batch.target_logits.float().contiguous()),
            _draft_elements(batch.draft_logits),
            as_indices(batch.draft_tokens),
            as_indices(batch.cu_num_logits),
            as_indices(batch.pos),
            as_indices(batch.idx_mapping),
            as_elements(state.temperature),
            as_indices(state.seeds),
            _rates(rule),
            _BLOCK_JOINT if rule.method == "block" else _STANDARD,
            sampled.numpy(),
            num_sampled.numpy(),
        )
        verified = (batch.cu_num_logits.diff().to(torch.int32) - 1).clamp_min(0)
        return RejectOutcome(sampled, num_sampled, (num_sampled - 1).clamp_min(0), verified)


def _rates(rule: RejectRule) -> Array:
    if rule.synthetic_rates is None:
        return np.empty(0, np.float32)
    return as_elements(rule.synthetic_rates.float())


def _draft_elements(draft_logits: torch.Tensor | None) -> Array:
    if draft_logits is None:
        return np.empty((0, 0, 0), np.float32)
    if draft_logits.dtype not in (torch.bfloat16, torch.float32):
        draft_logits = draft_logits.float()
    return as_elements(draft_logits)
