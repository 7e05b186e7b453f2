"""The numba block sampler against the reference, on awkward shapes and values."""

import dataclasses

import numpy as np
import pytest
import torch

from tests.support import blocks
from vllm_dspark.cpu import numeric
from vllm_dspark.cpu.draft_ops import CpuDraftOps
from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels import noise
from vllm_dspark.kernels.reference import ReferenceDraftOps

torch.set_num_threads(1)

SHAPES = {
    "tiny": blocks.Shape(vocab=5, draft_vocab=5, rank=2),
    "odd": blocks.Shape(rows=3, width=7, vocab=1031, draft_vocab=1031, rank=5),
    "block_edge": blocks.Shape(vocab=numeric.BLOCK + 1, draft_vocab=numeric.BLOCK + 1),
    "reduced": blocks.Shape(vocab=700, draft_vocab=523, rank=8),
    "one_row": blocks.Shape(rows=1, width=1, vocab=64, draft_vocab=64, slots=1),
}


def compare(shape, head, batch, state, cache):
    expected, got = blocks.draft_output(shape, cache), blocks.draft_output(shape, cache)
    ReferenceDraftOps().sample_block(head, batch, state, expected)
    CpuDraftOps().sample_block(head, batch, state, got)
    blocks.assert_same_draft(got, expected)
    return got


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("cache", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
def test_matches_the_reference(name, cache, kind):
    shape = SHAPES[name]
    for seed in range(4):
        gen = torch.Generator().manual_seed(seed)
        dtype = torch.bfloat16 if seed % 2 else torch.float32
        confidence = None if kind is None and seed == 0 else "markov" if kind else "plain"
        head = blocks.draft_head(shape, gen, kind, confidence, dtype)
        batch = blocks.draft_batch(shape, gen, dtype, padded=min(1, shape.rows - 1))
        compare(shape, head, batch, blocks.sampling_state(shape, gen), cache)


@pytest.mark.parametrize("change", [{"soft_cap": 3.0}, {"logit_scale": 0.25},
                                    {"soft_cap": 2.0, "logit_scale": 1.5}])  # fmt: skip
def test_cap_and_scale(change):
    shape = SHAPES["odd"]
    gen = torch.Generator().manual_seed(1)
    head = dataclasses.replace(blocks.draft_head(shape, gen), **change)
    batch = blocks.draft_batch(shape, gen, torch.float16)
    compare(shape, head, batch, blocks.sampling_state(shape, gen), torch.float32)


def test_non_finite_logits():
    """NaN and -inf are never drawn, +inf is, an empty row gives the first id."""
    shape = dataclasses.replace(SHAPES["odd"], width=4)
    gen = torch.Generator().manual_seed(2)
    batch = blocks.draft_batch(shape, gen, padded=0)
    batch.base_logits[:, 0, ::2] = float("nan")
    batch.base_logits[:, 1, 1:] = float("-inf")
    batch.base_logits[:, 2] = float("nan")
    batch.base_logits[:, 3, 1000] = float("inf")
    head = blocks.draft_head(shape, gen)
    for heat in (0.0, 0.7):
        state = blocks.sampling_state(shape, gen, heat)
        got = compare(shape, head, batch, state, torch.float32)
        assert (got.tokens[:, 0] % 2 == 1).all()
        assert (got.tokens[:, 1] == 0).all() and (got.tokens[:, 2] == 0).all()
        assert (got.tokens[:, 3] == 1000).all()


def test_ties_go_to_the_lowest_id():
    shape = blocks.Shape(vocab=2000, draft_vocab=2000)
    gen = torch.Generator().manual_seed(3)
    batch = blocks.draft_batch(shape, gen, torch.bfloat16, padded=0)
    batch.base_logits.zero_()
    batch.base_logits[:, :, 700:1500] = 4.0
    head = blocks.draft_head(shape, gen, kind=None, confidence="plain")
    got = compare(shape, head, batch, blocks.sampling_state(shape, gen, 0.0), None)
    assert (got.tokens == 700).all()


def test_padded_rows_and_greedy_slots_are_left_alone():
    shape = blocks.Shape(rows=4, slots=6)
    gen = torch.Generator().manual_seed(4)
    batch = blocks.draft_batch(shape, gen, padded=2)
    got = compare(
        shape, blocks.draft_head(shape, gen), batch, blocks.sampling_state(shape, gen, 1.0),
        torch.float32,
    )  # fmt: skip
    assert (got.tokens[-2:] == -7).all() and (got.confidence_logits[-2:] == -77).all()
    written = got.logits_cache.isfinite().any(-1).any(-1)
    assert sorted(written.nonzero().flatten().tolist()) == sorted(batch.req_index[:2].tolist())


def test_reduced_vocabulary_lands_at_target_ids():
    shape = SHAPES["reduced"]
    gen = torch.Generator().manual_seed(5)
    head = blocks.draft_head(shape, gen)
    batch = blocks.draft_batch(shape, gen, padded=0)
    got = compare(shape, head, batch, blocks.sampling_state(shape, gen, 1.0), torch.bfloat16)
    ids = torch.arange(shape.draft_vocab) + head.d2t
    finite = got.logits_cache[batch.req_index].isfinite()
    assert finite[..., ids].all() and finite.sum() == finite[..., ids].sum()
    assert torch.isin(got.tokens, ids).all()


def test_what_was_drawn_from_is_what_was_cached():
    """A bfloat16 cache: redrawing from the stored row gives the same token."""
    shape = blocks.Shape(rows=16, width=1, vocab=300, draft_vocab=300, slots=16)
    gen = torch.Generator().manual_seed(6)
    batch = blocks.draft_batch(shape, gen, padded=0)
    batch.base_logits.mul_(0.02).add_(8.0)  # nearly flat: bfloat16 rounding makes many ties
    state = blocks.sampling_state(shape, gen, 0.6)
    out = blocks.draft_output(shape, torch.bfloat16)
    head = blocks.draft_head(shape, gen, kind=None, confidence="plain")
    CpuDraftOps().sample_block(head, batch, state, out)
    slots = batch.req_index
    g = noise.gumbel_rows(
        state.seeds[slots], batch.position[:, 0], 0, noise.DRAFT, torch.arange(shape.vocab)
    )
    stored = out.logits_cache[slots, 0].float() / state.temperature[slots][:, None]
    assert torch.equal((stored + g).argmax(-1), out.tokens[:, 0])


def test_an_unsupported_cache_is_refused_by_name():
    shape = blocks.Shape()
    gen = torch.Generator().manual_seed(7)
    with pytest.raises(DrafterError, match=r"float16.*allocate the cache as float32"):
        CpuDraftOps().sample_block(
            blocks.draft_head(shape, gen), blocks.draft_batch(shape, gen),
            blocks.sampling_state(shape, gen), blocks.draft_output(shape, torch.float16),
        )  # fmt: skip


@pytest.mark.parametrize("spread", [0.05, 1.0, 6.0])
@pytest.mark.parametrize("size", [1, 511, 513, 49152])
def test_pruned_argmax_is_the_full_argmax(spread, size):
    """Flat rows prune little and peaked ones nearly all; neither changes the winner."""
    empty = np.empty(0, np.int64)
    keys = np.empty(-(-size // numeric.BLOCK), np.int32)
    for seed in range(12):
        gen = torch.Generator().manual_seed(seed)
        scores = torch.randn(size, generator=gen) * spread + 100 * (seed % 3 - 1)
        lo, hi = noise.key_words(torch.tensor(seed), torch.tensor(seed * 77), seed % 7, noise.DRAFT)
        full = scores + noise.gumbel(noise.token_bits(lo, hi, torch.arange(size)))
        words = numeric.key_words(seed, seed * 77, seed % 7, noise.DRAFT)
        got = numeric.gumbel_argmax(scores.numpy(), size, empty, *words, keys)
        assert full[got] >= full.max() - 4e-6 * max(1, abs(float(full.max())))


def test_other_integer_types_and_strides():
    """As an engine hands them over: int32 slots cut from a wider table, rows of larger buffers."""
    shape = SHAPES["odd"]
    gen = torch.Generator().manual_seed(8)
    head, batch = blocks.draft_head(shape, gen), blocks.draft_batch(shape, gen)
    state = blocks.sampling_state(shape, gen)
    expected = compare(shape, head, batch, state, torch.float32)
    table = torch.stack([batch.req_index, batch.req_index + 9], dim=1).to(torch.int32)
    wide = torch.cat([batch.base_logits, batch.base_logits], dim=-1)[..., : shape.draft_vocab]
    strided = dataclasses.replace(batch, req_index=table[:, 0], base_logits=wide)
    got = blocks.draft_output(shape, torch.float32)
    CpuDraftOps().sample_block(head, strided, state, got)
    blocks.assert_same_draft(got, expected)
