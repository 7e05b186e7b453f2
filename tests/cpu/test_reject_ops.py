"""The numba rejection sampler and the vectorised torch one, against the reference."""

import dataclasses

import pytest
import torch

from tests.support import blocks
from vllm_dspark.cpu.reject_ops import CpuRejectOps
from vllm_dspark.errors import DSparkError
from vllm_dspark.kernels.protocols import RejectRule
from vllm_dspark.kernels.reference import ReferenceRejectOps
from vllm_dspark.sampling.rejection import TorchRejectOps

torch.set_num_threads(1)

OPS = {"numba": CpuRejectOps(), "torch": TorchRejectOps()}
pytestmark = pytest.mark.parametrize("ops", OPS.values(), ids=OPS.keys())

SHAPES = {
    "tiny": blocks.Shape(rows=6, width=3, vocab=5, slots=8),
    "odd": blocks.Shape(rows=5, width=7, vocab=1031, slots=5),
    "block_edge": blocks.Shape(rows=3, width=2, vocab=513, slots=3),
    "one": blocks.Shape(rows=1, width=1, vocab=64, slots=1),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("cache", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_matches_the_reference(ops, name, cache, method):
    shape = SHAPES[name]
    rule = RejectRule(shape.width, method)
    for seed in range(8):
        gen = torch.Generator().manual_seed(seed)
        state = blocks.sampling_state(shape, gen)
        batch = blocks.reject_batch(shape, gen, state, cache)
        expected = ReferenceRejectOps().reject(batch, state, rule)
        blocks.assert_same_outcome(ops.reject(batch, state, rule), expected)


@pytest.mark.parametrize("cache_vocab", [20, 50])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_cache_narrower_or_wider_than_the_target(ops, cache_vocab, method):
    """Columns missing from the cache have q = 0; drafts past the target vocabulary are rejected."""
    shape = blocks.Shape(rows=8, width=3, vocab=37, slots=8)
    rule = RejectRule(shape.width, method)
    for seed in range(6):
        gen = torch.Generator().manual_seed(seed)
        state = blocks.sampling_state(shape, gen)
        batch = blocks.reject_batch(shape, gen, state, torch.float32, cache_vocab)
        expected = ReferenceRejectOps().reject(batch, state, rule)
        blocks.assert_same_outcome(ops.reject(batch, state, rule), expected)
        assert expected.sampled.max() < shape.vocab


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("heat", [0.0, 0.8])
@pytest.mark.parametrize("value", [float("nan"), float("-inf"), float("inf")])
def test_bad_target_rows(ops, value, heat, method):
    """Whole or partly bad rows: no crash, no id out of range, and the reference's answer."""
    shape = blocks.Shape(rows=6, width=3, vocab=600, slots=6)
    rule = RejectRule(shape.width, method)
    for seed in range(6):
        gen = torch.Generator().manual_seed(seed)
        state = blocks.sampling_state(shape, gen, heat)
        for cache in (None, torch.float32):
            batch = blocks.reject_batch(shape, gen, state, cache)
            batch.target_logits[::3] = value
            batch.target_logits[1::3, ::2] = value
            expected = ReferenceRejectOps().reject(batch, state, rule)
            blocks.assert_same_outcome(ops.reject(batch, state, rule), expected)
            live = torch.arange(shape.width + 1) < expected.num_sampled[:, None]
            assert ((expected.sampled >= 0) == live).all()
            assert expected.sampled.max() < shape.vocab


@pytest.mark.parametrize("method", ["standard", "block"])
def test_bad_draft_rows_are_rejected(ops, method):
    """A cached row without a finite logit says nothing about its draft."""
    shape = blocks.Shape(rows=8, width=3, vocab=40, slots=8)
    rule = RejectRule(shape.width, method)
    gen = torch.Generator().manual_seed(0)
    state = blocks.sampling_state(shape, gen, 1.0)
    batch = blocks.reject_batch(shape, gen, state, torch.float32)
    batch.draft_logits[:, 1] = float("nan")
    expected = ReferenceRejectOps().reject(batch, state, rule)
    blocks.assert_same_outcome(ops.reject(batch, state, rule), expected)
    assert expected.accepted.max() <= 1


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_synthetic_rates(ops, heat):
    shape = blocks.Shape(rows=8, width=3, vocab=40, slots=8)
    rule = RejectRule(shape.width, synthetic_rates=torch.tensor([0.9, 0.5, 0.0]))
    for seed in range(6):
        gen = torch.Generator().manual_seed(seed)
        state = blocks.sampling_state(shape, gen, heat)
        batch = blocks.reject_batch(shape, gen, state, torch.float32)
        expected = ReferenceRejectOps().reject(batch, state, rule)
        blocks.assert_same_outcome(ops.reject(batch, state, rule), expected)
        assert expected.accepted.max() <= 2
    with pytest.raises(DSparkError, match="standard"):
        ops.reject(batch, state, dataclasses.replace(rule, method="block"))


def test_all_windows_empty(ops):
    shape = blocks.Shape()
    gen = torch.Generator().manual_seed(0)
    state = blocks.sampling_state(shape, gen)
    batch = blocks.reject_batch(shape, gen, state, None)
    batch = dataclasses.replace(
        batch,
        target_logits=batch.target_logits[:0],
        draft_tokens=batch.draft_tokens[:0],
        pos=batch.pos[:0],
        cu_num_logits=torch.zeros_like(batch.cu_num_logits),
        idx_mapping=torch.full_like(batch.idx_mapping, -1),
    )
    got = ops.reject(batch, state, RejectRule(shape.width))
    assert got.num_sampled.tolist() == [0] * shape.rows and (got.sampled == -1).all()


def test_trailing_rows_of_no_window_are_ignored(ops):
    """A padded step: more rows than cu_num_logits claims."""
    shape = blocks.Shape(rows=4, width=3, vocab=40, slots=4)
    gen = torch.Generator().manual_seed(3)
    state = blocks.sampling_state(shape, gen)
    batch = blocks.reject_batch(shape, gen, state, torch.float32)
    rule = RejectRule(shape.width)
    expected = ops.reject(batch, state, rule)
    padded = dataclasses.replace(
        batch,
        target_logits=torch.cat([batch.target_logits, torch.full((3, 40), float("nan"))]),
        draft_tokens=torch.cat([batch.draft_tokens, torch.full((3,), 2**40)]),
        pos=torch.cat([batch.pos, torch.zeros(3, dtype=torch.int64)]),
    )
    blocks.assert_same_outcome(ops.reject(padded, state, rule), expected)


def test_a_request_is_independent_of_its_batch(ops):
    """The same window alone and among others gives the same tokens."""
    shape = blocks.Shape(rows=6, width=3, vocab=40, slots=8)
    gen = torch.Generator().manual_seed(5)
    state = blocks.sampling_state(shape, gen, 1.0)
    batch = blocks.reject_batch(shape, gen, state, torch.float32)
    rule = RejectRule(shape.width)
    together = ops.reject(batch, state, rule)
    bounds = batch.cu_num_logits.tolist()
    for r in range(shape.rows):
        rows = slice(bounds[r], bounds[r + 1])
        alone = dataclasses.replace(
            batch,
            target_logits=batch.target_logits[rows],
            draft_tokens=batch.draft_tokens[rows],
            pos=batch.pos[rows],
            cu_num_logits=torch.tensor([0, bounds[r + 1] - bounds[r]], dtype=torch.int32),
            idx_mapping=batch.idx_mapping[r : r + 1],
        )
        assert torch.equal(ops.reject(alone, state, rule).sampled[0], together.sampled[r])


def test_other_integer_types(ops):
    """vLLM's token ids and slots are int32, its window bounds int32 or int64."""
    shape = SHAPES["odd"]
    gen = torch.Generator().manual_seed(9)
    state = blocks.sampling_state(shape, gen)
    batch = blocks.reject_batch(shape, gen, state, torch.bfloat16)
    rule = RejectRule(shape.width)
    narrow = dataclasses.replace(
        batch,
        draft_tokens=batch.draft_tokens.int(),
        idx_mapping=batch.idx_mapping.int(),
        cu_num_logits=batch.cu_num_logits.long(),
    )
    blocks.assert_same_outcome(ops.reject(narrow, state, rule), ops.reject(batch, state, rule))
