"""Sequential block sampling on a CPU (`DraftOps`), numba for everything that touches the vocabulary.

Per column one call of `_draft_column`: base logits plus Markov bias, block by block so that a block
of W2 serves all rows while it is in the cache; then per row the rounding and storing for rejection
and the (Gumbel) argmax. W2 is kept transposed, [r, V_d] in its own dtype, so that the product runs
along the vocabulary without horizontal sums.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import njit

from vllm_dspark.cpu.numeric import (
    BLOCK,
    argmax,
    clean,
    float_of,
    gumbel_argmax,
    key_words,
    to_bf16,
    widen,
)
from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels import noise
from vllm_dspark.kernels.protocols import DraftBatch, DraftHead, DraftOutput, SamplingState
from vllm_dspark.kernels.reference import confidence_logit, markov_latent

Array = npt.NDArray[Any]

_DRAFT = noise.DRAFT


@njit(cache=True, nogil=True, fastmath={"contract"})
def _biased_logits(base, latent, w2t, scale, logits):  # type: ignore[no-untyped-def]
    """logits[:, :V] = clean(scale * (base + latent @ w2t)).

    base: [R, V] float32 or int16 (bfloat16 bits); latent: [R, r] float32; w2t: [r, V] as base.
    """
    num_rows, vocab = base.shape
    rank = latent.shape[1]
    for start in range(0, vocab, BLOCK):
        stop = min(start + BLOCK, vocab)
        for row in range(num_rows):
            source = base[row, start:stop]
            acc = logits[row, start:stop]
            for t in range(acc.size):
                acc[t] = widen(source[t])
            paired = rank - rank % 4
            for j in range(0, paired, 4):
                y0, y1, y2, y3 = (
                    latent[row, j],
                    latent[row, j + 1],
                    latent[row, j + 2],
                    latent[row, j + 3],
                )
                w0, w1 = w2t[j, start:stop], w2t[j + 1, start:stop]
                w2, w3 = w2t[j + 2, start:stop], w2t[j + 3, start:stop]
                for t in range(acc.size):
                    acc[t] += (
                        y0 * widen(w0[t]) + y1 * widen(w1[t]) + y2 * widen(w2[t]) + y3 * widen(w3[t])
                    )
            for j in range(paired, rank):
                y0 = latent[row, j]
                w0 = w2t[j, start:stop]
                for t in range(acc.size):
                    acc[t] += y0 * widen(w0[t])
            for t in range(acc.size):
                acc[t] = clean(acc[t] * scale)


@njit(cache=True, nogil=True)
def _store_rounded(logits, cache_row, d2t):  # type: ignore[no-untyped-def]
    """Round logits [V] to the cache's dtype in place and store them at their target ids."""
    if cache_row.itemsize == 2:
        for t in range(logits.size):
            word = to_bf16(logits[t])
            logits[t] = float_of(np.int32(word << np.int32(16)))
            if d2t.size == 0:
                cache_row[t] = word
        for t in range(d2t.size):
            cache_row[t + d2t[t]] = to_bf16(logits[t])
    else:
        if d2t.size == 0:
            cache_row[: logits.size] = logits
        for t in range(d2t.size):
            cache_row[t + d2t[t]] = logits[t]


@njit(cache=True, nogil=True)
def _draft_column(  # type: ignore[no-untyped-def]
    # [R, V] of this column
    base,
    # [R, r] float32, [r, V]
    latent,
    w2t,
    scale,
    # [M, K, >= V], or empty
    cache,
    column,
    # [R]: slot (-1: padded), position
    slots,
    position,
    # [M]
    temperature,
    seeds,
    # [V] offsets, or empty
    d2t,
    # scratch: [>= R, V] float32, [blocks of V] int32
    logits,
    block_keys,
    # [R] int64 target ids, written
    tokens,
):
    vocab = base.shape[1]
    _biased_logits(base, latent, w2t, scale, logits)
    for row in range(base.shape[0]):
        slot = slots[row]
        if slot < 0:
            continue
        scores = logits[row, :vocab]
        if temperature[slot] > 0 and cache.size:
            _store_rounded(scores, cache[slot, column], d2t)
            for t in range(vocab):
                scores[t] = scores[t] / temperature[slot]
            lo, hi = key_words(seeds[slot], position[row], column, _DRAFT)
            drawn = gumbel_argmax(scores, vocab, d2t, lo, hi, block_keys)
        else:
            drawn, _ = argmax(scores, vocab)
        tokens[row] = drawn + d2t[drawn] if d2t.size else drawn


def as_elements(tensor: torch.Tensor) -> Array:
    """Zero-copy numpy view that `widen` understands: float32, or bfloat16 as its int16 bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    view: Array = tensor.detach().numpy()
    return view


@dataclass(frozen=True)
class _Prepared:
    """A head's weights in the layout of `_draft_column`."""

    head: DraftHead
    # [r, V_d]
    w2t: Array
    # [V_d], or empty
    d2t: Array


def _prepare(head: DraftHead, vocab: int) -> _Prepared:
    w2t: Array = np.empty((0, vocab), np.float32)
    if head.markov is not None:
        w2 = head.markov.w2
        w2 = w2 if w2.dtype in (torch.bfloat16, torch.float32) else w2.float()
        w2t = as_elements(w2.T.contiguous())
    d2t = np.empty(0, np.int64) if head.d2t is None else head.d2t.long().contiguous().numpy()
    return _Prepared(head, w2t, d2t)


class CpuDraftOps:
    """`DraftOps` for CPU tensors; keeps scratch and the prepared weights of the last head."""

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None
        self._logits: Array = np.empty((0, 0), np.float32)

    def _weights(self, head: DraftHead, vocab: int) -> _Prepared:
        if self._prepared is None or self._prepared.head is not head:
            self._prepared = _prepare(head, vocab)
        return self._prepared

    def _scratch(self, num_rows: int, vocab: int) -> Array:
        if self._logits.shape[0] < num_rows or self._logits.shape[1] != vocab:
            self._logits = np.empty((num_rows, vocab), np.float32)
        return self._logits

    def sample_block(
        self, head: DraftHead, batch: DraftBatch, state: SamplingState, out: DraftOutput
    ) -> None:
        num_rows, width, vocab = batch.base_logits.shape
        weights = self._weights(head, vocab)
        base = as_elements(_plain_logits(batch.base_logits, head.soft_cap))
        scratch = self._scratch(num_rows, vocab)
        block_keys = np.empty(-(-vocab // BLOCK), np.int32)
        cache = _cache_elements(out.logits_cache)
        slots = batch.req_index.numpy()
        position, tokens = batch.position.numpy(), out.tokens.numpy()
        temperature, seeds = state.temperature.numpy(), state.seeds.numpy()

        rank = head.markov.rank if head.markov else 0
        embeds = torch.empty(num_rows, width, rank)
        recurrent = torch.zeros(num_rows, rank)
        hidden = _hidden_if_used(head, batch, out)
        # A padded row's anchor is not an id; any embedding will do for it.
        prev = batch.anchor.masked_fill(batch.req_index < 0, 0)
        for k in range(width):
            latent = embeds[:, k]
            if head.markov is not None:
                embeds[:, k] = head.markov.w1[prev]
                if hidden is not None:
                    latent, recurrent = markov_latent(
                        head.markov, latent, hidden[:, k], recurrent
                    )
            _draft_column(
                base[:, k], latent.numpy(), weights.w2t, np.float32(head.logit_scale),
                cache, k, slots, position[:, k], temperature, seeds, weights.d2t,
                scratch, block_keys, tokens[:, k],
            )  # fmt: skip
            prev = out.tokens[:, k].masked_fill(batch.req_index < 0, 0)
        if head.confidence is not None and out.confidence_logits is not None:
            assert hidden is not None, "confidence needs hidden states"
            logits = confidence_logit(head.confidence, hidden, embeds)
            padded = (batch.req_index < 0)[:, None]
            out.confidence_logits.copy_(torch.where(padded, out.confidence_logits, logits))


def _plain_logits(base: torch.Tensor, soft_cap: float | None) -> torch.Tensor:
    """Base logits capped, in a dtype that the kernels read."""
    if soft_cap is not None:
        return torch.tanh(base.float() / soft_cap) * soft_cap
    return base if base.dtype in (torch.bfloat16, torch.float32) else base.float()


def _hidden_if_used(head: DraftHead, batch: DraftBatch, out: DraftOutput) -> torch.Tensor | None:
    confident = head.confidence is not None and out.confidence_logits is not None
    stateful = head.markov is not None and head.markov.kind != "vanilla"
    return batch.hidden.float() if confident or stateful else None


def _cache_elements(cache: torch.Tensor | None) -> Array:
    if cache is None:
        return np.empty((0, 0, 0), np.float32)
    if cache.dtype not in (torch.bfloat16, torch.float32):
        raise DrafterError(
            f"the CPU draws drafts into a bfloat16 or float32 logits cache, not {cache.dtype}: "
            "allocate the cache as float32"
        )
    return as_elements(cache)
