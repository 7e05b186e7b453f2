"""The fused drafting head against the reference, column by column and token for token."""

import pytest
import torch

from vllm_dspark.kernels.markov import TritonDraftOps
from vllm_dspark.kernels.protocols import (
    ConfidenceHead,
    DraftBatch,
    DraftHead,
    DraftOutput,
    MarkovHead,
    SamplingState,
)
from vllm_dspark.kernels.reference import ReferenceDraftOps

SLOTS = 80


def make_head(kind, vocab, rank, hidden, *, target_vocab=None, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(3)

    def normal(*size, scale=1.0):
        return (torch.randn(*size, generator=generator) * scale).to(dtype)

    target_vocab = target_vocab or vocab
    markov = None
    if kind is not None:
        proj = {
            "vanilla": None,
            "gated": (rank, hidden + rank),
            "rnn": (3 * rank, 2 * rank + hidden),
        }
        size = proj[kind]
        markov = MarkovHead(
            kind,
            normal(target_vocab, rank),
            normal(vocab, rank, scale=rank**-0.5),
            None if size is None else normal(*size, scale=hidden**-0.5),
            None if size is None else normal(size[0]),
        )
    d2t = None
    if target_vocab != vocab:
        ids = torch.randperm(target_vocab, generator=generator)[:vocab].sort().values
        d2t = ids - torch.arange(vocab)
    width = hidden + (rank if kind is not None else 0)
    confidence = ConfidenceHead(
        normal(width, scale=hidden**-0.5).float(), torch.tensor(0.3), kind is not None
    )
    return DraftHead(markov, confidence, d2t, **options)


def make_step(num_reqs, columns, vocab, hidden, *, target_vocab=None, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    req_index = torch.randperm(SLOTS, generator=generator)[:num_reqs]
    if num_reqs > 2:
        req_index[1] = -1  # a padded row between live ones
    # As the engine hands it over: the first column of a [R, K] buffer that repeats the slot.
    req_index = torch.stack([req_index] * columns, 1)[:, 0]
    batch = DraftBatch(
        (torch.randn(num_reqs, columns, vocab, generator=generator) * 2).to(dtype),
        torch.randn(num_reqs, columns, hidden, generator=generator).to(dtype),
        torch.randint(0, target_vocab or vocab, (num_reqs,), generator=generator),
        req_index,
        torch.randint(0, 2**33, (num_reqs, columns), generator=generator),
    )
    temperature = torch.rand(SLOTS, generator=generator) + 0.2
    temperature[::3] = 0.0
    seeds = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
    return batch, SamplingState(temperature, seeds)


def make_output(num_reqs, columns, width, cache_dtype):
    cache = None
    if cache_dtype is not None:
        cache = torch.full((SLOTS, columns, width), float("-inf"), dtype=cache_dtype)
    return DraftOutput(
        torch.full((num_reqs, columns), -7), torch.full((num_reqs, columns), -7.0), cache
    )


def to_device(record, device):
    values = {}
    for name, value in vars(record).items():
        if isinstance(value, torch.Tensor):
            values[name] = value.to(device)
        elif hasattr(value, "__dataclass_fields__"):
            values[name] = to_device(value, device)
        else:
            values[name] = value
    return type(record)(**values)


def run_both(head, batch, state, device, *, cache_dtype, width):
    num_reqs, columns, vocab = batch.base_logits.shape
    expected = make_output(num_reqs, columns, width, cache_dtype)
    ReferenceDraftOps().sample_block(head, batch, state, expected)
    actual = to_device(make_output(num_reqs, columns, width, cache_dtype), device)
    head = to_device(head, device)
    ops = TritonDraftOps(head, num_reqs + 3, columns, vocab, device)
    # Scratch must not matter: a stale maximum would win every comparison.
    for scratch in (ops._value, ops._state, ops._latent, ops._projected):
        scratch.fill_(6e4)
    ops._index.fill_(5)
    ops.sample_block(head, to_device(batch, device), to_device(state, device), actual)
    return to_device(actual, "cpu"), expected


def compare(actual, expected, *, tolerance=1e-4):
    assert torch.equal(actual.tokens, expected.tokens)
    torch.testing.assert_close(
        actual.confidence_logits, expected.confidence_logits, rtol=tolerance, atol=tolerance
    )
    if expected.logits_cache is not None:
        torch.testing.assert_close(
            actual.logits_cache.float(),
            expected.logits_cache.float(),
            rtol=tolerance,
            atol=tolerance,
        )


@pytest.mark.parametrize("kind", [None, "vanilla", "gated", "rnn"])
@pytest.mark.parametrize("num_reqs", [3, 19])
@pytest.mark.parametrize("cached", [False, True])
def test_heads(kind, num_reqs, cached, device):
    """Fused reduction (few rows) and the separate one (19 rows); odd vocab, odd rank."""
    head = make_head(kind, 701, 24, 40)
    batch, state = make_step(num_reqs, 3, 701, 40)
    cache_dtype = torch.float32 if cached else None
    compare(*run_both(head, batch, state, device, cache_dtype=cache_dtype, width=701))


def test_many_rows(device):
    """More than 32 rows take the wide tile, more than 64 a second row block."""
    head = make_head("vanilla", 333, 16, 32)
    for num_reqs in (33, 70):
        batch, state = make_step(num_reqs, 3, 333, 32)
        compare(*run_both(head, batch, state, device, cache_dtype=torch.float32, width=333))


@pytest.mark.parametrize("num_reqs", [3, 20])
def test_reduced_vocabulary(num_reqs, device):
    """Tokens, the next column's embedding, noise and cached columns are all in target ids."""
    head = make_head("vanilla", 300, 16, 32, target_vocab=1000)
    batch, state = make_step(num_reqs, 3, 300, 32, target_vocab=1000)
    compare(*run_both(head, batch, state, device, cache_dtype=torch.float32, width=1000))


def test_cap_scale_and_padded_cache(device):
    """Soft cap on the base alone, scale on the sum; a wider cache keeps its -inf."""
    head = make_head("gated", 257, 16, 32, soft_cap=4.0, logit_scale=0.5)
    batch, state = make_step(4, 3, 257, 32)
    actual, expected = run_both(head, batch, state, device, cache_dtype=torch.float32, width=300)
    compare(actual, expected)
    assert torch.isneginf(actual.logits_cache[..., 257:]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_draws_from_the_stored_row(dtype, device):
    """What is drawn from is what was stored: redo the draw from the cache."""
    from vllm_dspark.kernels import noise

    head = make_head("vanilla", 700, 32, 64, dtype=dtype)
    batch, state = make_step(6, 4, 700, 64, dtype=dtype)
    actual, _ = run_both(head, batch, state, device, cache_dtype=dtype, width=700)
    for row, slot in enumerate(batch.req_index.tolist()):
        if slot < 0 or state.temperature[slot] == 0:
            continue
        for column in range(4):
            lo, hi = noise.key_words(
                state.seeds[slot], batch.position[row, column], column, noise.DRAFT
            )
            draw = noise.gumbel(noise.token_bits(lo, hi, torch.arange(700)))
            scores = actual.logits_cache[slot, column].float() / state.temperature[slot] + draw
            token = actual.tokens[row, column]
            assert scores[token] >= scores.max() - 1e-5, "a near tie may flip, nothing else"


def test_bad_logits(device):
    """NaN counts as -inf, +inf as a tie of the largest, a row of NaN yields draft id 0."""
    head = make_head(None, 300, 0, 16)
    batch, state = make_step(3, 2, 300, 16)
    batch.base_logits[0, 0, 5] = float("nan")
    batch.base_logits[0, 1] = float("nan")
    batch.base_logits[2, 0, [40, 290]] = float("inf")
    state.temperature[:] = 0.0
    actual, expected = run_both(head, batch, state, device, cache_dtype=None, width=300)
    assert torch.equal(actual.tokens, expected.tokens)
    assert actual.tokens[0, 1] == 0
    assert actual.tokens[2, 0] == 40


def test_ties_take_the_lowest_id_in_either_direction(device):
    """Odd columns walk backwards: the last maximum seen must not win."""
    head = make_head(None, 900, 0, 16)
    batch, state = make_step(3, 2, 900, 16)
    batch.base_logits.fill_(1.0)
    state.temperature[:] = 0.0
    actual, _ = run_both(head, batch, state, device, cache_dtype=None, width=900)
    assert (actual.tokens[0] == 0).all()
    assert (actual.tokens[1] == -7).all(), "a padded row must not be written"
