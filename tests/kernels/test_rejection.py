"""Ragged rejection against the reference, and against the distribution it must not change."""

from dataclasses import replace

import pytest
import torch

from vllm_dspark.kernels.protocols import RejectBatch, RejectRule, SamplingState
from vllm_dspark.kernels.reference import ReferenceRejectOps
from vllm_dspark.kernels.rejection import TritonRejectOps

SLOTS = 24


def make_batch(windows, num_drafts, vocab, *, seed=0, draft_vocab=None, cache_dtype=torch.float32):
    """Windows of 0..K+1 rows; drafts mostly likely under both models, some rejected."""
    generator = torch.Generator().manual_seed(seed)
    cu = torch.tensor([0, *windows]).cumsum(0).to(torch.int32)
    rows = int(cu[-1])
    slots = torch.randperm(SLOTS, generator=generator)[: len(windows)]
    target = torch.randn(max(rows, 1), vocab, generator=generator) * 2
    draft_logits = None
    if cache_dtype is not None:
        size = (SLOTS, num_drafts, draft_vocab or vocab)
        draft_logits = torch.randn(*size, generator=generator).to(cache_dtype)
    tokens = torch.randint(0, vocab, (rows,), generator=generator)
    position = torch.zeros(rows, dtype=torch.int64)
    for r, (start, end) in enumerate(zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True)):
        for column in range(end - start):
            position[start + column] = 1000 * r + column
            if column < end - start - 1 and column % 4 != 3:
                best = target[start + column].topk(3).indices
                tokens[start + column + 1] = best[
                    int(torch.randint(0, 3, (1,), generator=generator))
                ]
                if draft_logits is not None:
                    row = draft_logits[slots[r], column]
                    both = min(row.shape[0], vocab)
                    row[:both] = (row[:both].float() * 0.3 + target[start + column, :both]).to(
                        row.dtype
                    )
    temperature = torch.rand(SLOTS, generator=generator) + 0.3
    temperature[slots[::3]] = 0.0
    for r in range(0, len(windows), 3):  # greedy: make the first drafts the argmax
        for row in range(int(cu[r]), int(cu[r + 1]) - 1):
            if row % 3 != 2:
                tokens[row + 1] = target[row].argmax()
    seeds = torch.randint(-(2**62), 2**62, (SLOTS,), generator=generator)
    batch = RejectBatch(target[:rows], draft_logits, tokens, cu, position, slots)
    return batch, SamplingState(temperature, seeds)


def move(record, device):
    return type(record)(
        **{k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in vars(record).items()}
    )


def run(batch, state, rule, device):
    num_reqs = batch.cu_num_logits.shape[0] - 1
    ops = TritonRejectOps(num_reqs + 2, rule.num_drafts, batch.target_logits.shape[1], device)
    for scratch in vars(ops).values():
        if isinstance(scratch, torch.Tensor):
            scratch.fill_(9)
    return move(ops.reject(move(batch, device), move(state, device), move(rule, device)), "cpu")


def check(batch, state, rule, device):
    actual = run(batch, state, rule, device)
    expected = ReferenceRejectOps().reject(batch, state, rule)
    assert torch.equal(actual.verified, expected.verified)
    assert torch.equal(actual.accepted, expected.accepted)
    assert torch.equal(actual.num_sampled, expected.num_sampled)
    assert torch.equal(actual.sampled, expected.sampled)
    return actual


RAGGED = [4, 1, 3, 0, 5, 2, 1, 5, 0, 4, 3]


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.bfloat16, None], ids=str)
@pytest.mark.parametrize("vocab", [37, 2203])
def test_equals_the_reference(method, cache_dtype, vocab, device):
    for seed in range(3 if vocab < 100 else 1):
        batch, state = make_batch(RAGGED, 4, vocab, seed=seed, cache_dtype=cache_dtype)
        outcome = check(batch, state, RejectRule(4, method), device)
        assert outcome.accepted.sum() > 2, "the case must accept something to test anything"
        assert (outcome.accepted < outcome.verified).any()


@pytest.mark.parametrize("draft_vocab", [20, 90])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_other_draft_vocabulary(draft_vocab, method, device):
    """Columns the draft never had weigh nothing; ids past the target's are rejected."""
    batch, state = make_batch(RAGGED, 4, 50, draft_vocab=draft_vocab)
    batch.draft_tokens[1] = 70
    batch.draft_tokens[-1] = -1
    check(batch, state, RejectRule(4, method), device)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_half_precision_targets(method, device):
    """vLLM hands bfloat16 rows where no request changes them: equal to their float32 copy."""
    batch, state = make_batch(RAGGED, 4, 60, seed=3)
    half = replace(batch, target_logits=batch.target_logits.bfloat16())
    widened = replace(batch, target_logits=half.target_logits.float())
    rule = RejectRule(4, method)
    actual = run(half, state, rule, device)
    expected = ReferenceRejectOps().reject(widened, state, rule)
    assert torch.equal(actual.sampled, expected.sampled)
    assert torch.equal(actual.accepted, expected.accepted)


def test_several_vocabulary_parts(device):
    """A vocabulary large enough to be split between programs, with the winner in a late part."""
    batch, state = make_batch([3, 2], 2, 20_000)
    batch.target_logits[:, 19_990] += 12.0
    check(batch, state, RejectRule(2), device)


@pytest.mark.parametrize("method", ["standard", "block"])
def test_bad_rows(method, device):
    """NaN, infinities, empty draft and target rows: a defined token inside the vocabulary."""
    batch, state = make_batch([4, 4, 4, 4, 4, 4], 3, 40, seed=4)
    batch.target_logits[0, 3] = float("nan")
    batch.target_logits[5] = float("-inf")
    batch.target_logits[9, 7] = float("inf")
    batch.target_logits[12] = float("nan")
    batch.draft_logits[batch.idx_mapping[1], 1] = float("-inf")
    batch.draft_logits[batch.idx_mapping[2], 0, 5] = float("nan")
    batch.draft_logits[batch.idx_mapping[4], 0, 6] = float("inf")
    check(batch, state, RejectRule(3, method), device)


def test_synthetic_rates(device):
    batch, state = make_batch(RAGGED, 4, 60)
    rule = RejectRule(4, synthetic_rates=torch.tensor([0.9, 0.5, 1.0, 0.0]))
    check(batch, state, rule, device)


def test_chunking_does_not_change_a_request(device):
    """A request alone, and among others, gets the same tokens."""
    batch, state = make_batch(RAGGED, 4, 100, seed=9)
    whole = run(batch, state, RejectRule(4), device)
    for r in (0, 4, 7):
        start, end = batch.cu_num_logits[r : r + 2].tolist()
        part = RejectBatch(
            batch.target_logits[start:end],
            batch.draft_logits,
            batch.draft_tokens[start:end],
            torch.tensor([0, end - start], dtype=torch.int32),
            batch.pos[start:end],
            batch.idx_mapping[r : r + 1],
        )
        alone = run(part, state, RejectRule(4), device)
        assert torch.equal(alone.sampled[0], whole.sampled[r])


@pytest.mark.parametrize("method", ["standard", "block"])
def test_distribution_is_the_targets(method, device):
    """First emitted token over many seeds, drafts drawn from q: chi-square against p.

    One request per seed; 5 tokens, 4 degrees of freedom, limit 23.5: false alarm 1e-4 per method.
    """
    trials, vocab, num_drafts = 400, 5, 2
    generator = torch.Generator().manual_seed(1)
    p = torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    q = torch.tensor([0.1, 0.3, 0.3, 0.2, 0.1])
    drafts = torch.multinomial(q, trials * num_drafts, True, generator=generator).view(trials, -1)
    tokens = torch.cat([torch.zeros(trials, 1, dtype=torch.int64), drafts], 1).flatten()
    rows = trials * (num_drafts + 1)
    batch = RejectBatch(
        p.log().expand(rows, vocab).contiguous(),
        q.log().expand(trials, num_drafts, vocab).contiguous(),
        tokens,
        torch.arange(0, rows + 1, num_drafts + 1, dtype=torch.int32),
        torch.arange(rows) % (num_drafts + 1),
        torch.arange(trials),
    )
    seeds = torch.randint(-(2**62), 2**62, (trials,), generator=generator)
    outcome = run(
        batch, SamplingState(torch.ones(trials), seeds), RejectRule(num_drafts, method), device
    )
    counts = torch.bincount(outcome.sampled[:, 0], minlength=vocab).double()
    statistic = float(((counts - trials * p) ** 2 / (trials * p)).sum())
    assert statistic < 23.5
    expected = float(torch.minimum(p, q).sum())
    assert abs(float((outcome.accepted > 0).double().mean()) - expected) < 0.12 or method == "block"
