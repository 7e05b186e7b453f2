"""Sequential block sampling on a CPU (`DraftOps`); numba does what touches the vocabulary.

Per column one torch.mm for the Markov bias (W2 kept transposed in float32: 0.3 ms for 49152 x 32 on
one core, and more rows are nearly free; bfloat16 measured slower) and one call of `_draft_column`:
adding the base logits, rounding and storing for rejection, (Gumbel) argmax.
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


@njit(cache=True, nogil=True)
def _add_base(base, scale, logits):  # type: ignore[no-untyped-def]
    """logits = clean(scale * (base + logits)); both [V], base float32 or bfloat16 bits."""
    for t in range(base.size):
        logits[t] = clean((widen(base[t]) + logits[t]) * scale)


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


# Python's error model would test every division for zero and keep the loop scalar.
@njit(cache=True, nogil=True, error_model="numpy")
def _draft_column(  # type: ignore[no-untyped-def]
    # [R, K, V]
    base,
    scale,
    # [R, V] float32: the Markov bias; scratch afterwards
    logits,
    # [M, K, >= V], or empty
    cache,
    column,
    # [R] slot (-1: padded), [R, K]
    slots,
    position,
    # [M]
    temperature,
    seeds,
    # [V] offsets, or empty
    d2t,
    # [blocks of V] int32 scratch
    block_keys,
    # [R, K] int64 target ids, written
    tokens,
):
    vocab = base.shape[2]
    for row in range(base.shape[0]):
        slot = slots[row]
        if slot < 0:
            continue
        scores = logits[row]
        _add_base(base[row, column], scale, scores)
        heat = temperature[slot]
        if heat > 0 and cache.size:
            _store_rounded(scores, cache[slot, column], d2t)
            for t in range(vocab):
                scores[t] = scores[t] / heat
            lo, hi = key_words(seeds[slot], position[row, column], column, _DRAFT)
            drawn = gumbel_argmax(scores, vocab, d2t, lo, hi, block_keys)
        else:
            drawn, _ = argmax(scores, vocab)
        tokens[row, column] = drawn + d2t[drawn] if d2t.size else drawn


def as_elements(tensor: torch.Tensor) -> Array:
    """Zero-copy numpy view that `widen` understands: float32, or bfloat16 as its int16 bits."""
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.view(torch.int16)
    view: Array = tensor.detach().numpy()
    return view


def as_indices(tensor: torch.Tensor) -> Array:
    """Contiguous int64 view, a copy only if it is not one: one layout, one compilation."""
    view: Array = tensor.long().contiguous().numpy()
    return view


@dataclass(frozen=True)
class _Prepared:
    """A head's weights in the layout of `_draft_column`."""

    head: DraftHead
    # [r, V_d] float32, or None without a Markov head
    w2t: torch.Tensor | None
    # [V_d], or empty
    d2t: Array


def _prepare(head: DraftHead) -> _Prepared:
    w2t = None if head.markov is None else head.markov.w2.detach().float().T.contiguous()
    d2t = np.empty(0, np.int64) if head.d2t is None else as_indices(head.d2t)
    return _Prepared(head, w2t, d2t)


class CpuDraftOps:
    """`DraftOps` for CPU tensors; keeps scratch and the prepared weights of the last head."""

    def __init__(self) -> None:
        self._prepared: _Prepared | None = None
        self._logits = torch.empty(0, 0)

    def _weights(self, head: DraftHead) -> _Prepared:
        if self._prepared is None or self._prepared.head is not head:
            self._prepared = _prepare(head)
        return self._prepared

    def _scratch(self, num_rows: int, vocab: int) -> torch.Tensor:
        if self._logits.shape[0] < num_rows or self._logits.shape[1] != vocab:
            self._logits = torch.empty(num_rows, vocab)
        return self._logits[:num_rows]

    def sample_block(
        self, head: DraftHead, batch: DraftBatch, state: SamplingState, out: DraftOutput
    ) -> None:
        num_rows, width, vocab = batch.base_logits.shape
        weights = self._weights(head)
        base = as_elements(_plain_logits(batch.base_logits, head.soft_cap).contiguous())
        scratch = self._scratch(num_rows, vocab)
        block_keys = np.empty(-(-vocab // BLOCK), np.int32)
        cache = _cache_elements(out.logits_cache)
        slots = as_indices(batch.req_index)
        position, tokens = as_indices(batch.position), out.tokens.numpy()
        temperature, seeds = as_elements(state.temperature), as_indices(state.seeds)

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
                    latent, recurrent = markov_latent(head.markov, latent, hidden[:, k], recurrent)
            if weights.w2t is None:
                scratch.zero_()
            else:
                torch.mm(latent, weights.w2t, out=scratch)
            _draft_column(
                base, np.float32(head.logit_scale), scratch.numpy(), cache, k,
                slots, position, temperature, seeds, weights.d2t, block_keys, tokens,
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
