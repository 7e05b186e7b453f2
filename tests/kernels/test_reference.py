"""The specification itself: head equations against an independent float64 transcription of the
paper, and the rejection contract on windows worked out by hand."""

import dataclasses
import math

import pytest
import torch

from tests.support import blocks
from vllm_dspark.kernels.protocols import DraftOutput, RejectBatch, RejectRule, SamplingState
from vllm_dspark.kernels.reference import ReferenceDraftOps, ReferenceRejectOps, probabilities

torch.set_num_threads(1)

SHAPE = blocks.Shape(rows=2, width=4, vocab=9, draft_vocab=9, hidden=5, rank=3, slots=2)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def linear(weight, bias, x: list[float]) -> list[float]:
    return [
        sum(w * v for w, v in zip(row, x, strict=True)) + b
        for row, b in zip(weight.tolist(), bias.tolist(), strict=True)
    ]


def drafts_by_hand(head, hidden, base, anchor):
    """One request in plain Python numbers: (tokens, confidence logits)."""
    markov, scorer = head.markov, head.confidence
    state = [0.0] * markov.rank
    prev, tokens, confidences = anchor, [], []
    for k in range(len(base)):
        e = markov.w1[prev].tolist()
        h = hidden[k].tolist()
        if markov.kind == "vanilla":
            y = e
        elif markov.kind == "gated":
            gate = linear(markov.proj_weight, markov.proj_bias, h + e)
            y = [sigmoid(g) * v for g, v in zip(gate, e, strict=True)]
        else:
            out = linear(markov.proj_weight, markov.proj_bias, state + e + h)
            r = markov.rank
            z, c, o = out[:r], out[r : 2 * r], out[2 * r :]
            state = [
                sigmoid(a) * s + (1 - sigmoid(a)) * math.tanh(b)
                for a, s, b in zip(z, state, c, strict=True)
            ]
            y = [math.tanh(v) for v in o]
        bias = linear(markov.w2, torch.zeros(len(markov.w2)), y)
        cap = head.soft_cap
        logits = [
            head.logit_scale * ((math.tanh(x / cap) * cap if cap else x) + b)
            for x, b in zip(base[k].tolist(), bias, strict=True)
        ]
        x = h + e if scorer.with_markov else h
        confidences.append(linear(scorer.weight[None], scorer.bias[None], x)[0])
        prev = max(range(len(logits)), key=logits.__getitem__)
        tokens.append(prev)
    return tokens, confidences


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("change", [{}, {"soft_cap": 1.5}, {"soft_cap": 2.0, "logit_scale": 0.3}])
def test_heads_follow_the_paper(kind, change):
    for seed in range(5):
        gen = torch.Generator().manual_seed(seed)
        head = dataclasses.replace(blocks.draft_head(SHAPE, gen, kind), **change)
        batch = blocks.draft_batch(SHAPE, gen, padded=0)
        out = blocks.draft_output(SHAPE, None)
        state = blocks.sampling_state(SHAPE, gen, 0.0)
        ReferenceDraftOps(torch.float64).sample_block(head, batch, state, out)
        for r in range(SHAPE.rows):
            tokens, confidences = drafts_by_hand(
                head, batch.hidden[r], batch.base_logits[r], int(batch.anchor[r])
            )
            assert out.tokens[r].tolist() == tokens
            expected = torch.tensor(confidences)
            torch.testing.assert_close(out.confidence_logits[r], expected, rtol=1e-6, atol=1e-6)


def test_the_first_confidence_sees_the_anchor():
    gen = torch.Generator().manual_seed(0)
    head = blocks.draft_head(SHAPE, gen, "gated")
    batch = blocks.draft_batch(SHAPE, gen, padded=0)
    out = blocks.draft_output(SHAPE, None)
    ReferenceDraftOps().sample_block(head, batch, blocks.sampling_state(SHAPE, gen, 0.0), out)
    x = torch.cat([batch.hidden[:, 0], head.markov.w1[batch.anchor]], dim=-1)
    expected = x @ head.confidence.weight + head.confidence.bias
    torch.testing.assert_close(out.confidence_logits[:, 0], expected)


def test_seeds_decide_draws_and_rows_do_not():
    """A request draws the same block alone, in another row, beside others."""
    gen = torch.Generator().manual_seed(1)
    head = blocks.draft_head(SHAPE, gen)
    batch = blocks.draft_batch(SHAPE, gen, padded=0)
    state = blocks.sampling_state(SHAPE, gen, 1.0)
    together, alone = (blocks.draft_output(SHAPE, torch.float32) for _ in range(2))
    ReferenceDraftOps().sample_block(head, batch, state, together)
    fields = {f.name: getattr(batch, f.name)[1:] for f in dataclasses.fields(batch)}
    half = DraftOutput(alone.tokens[1:], alone.confidence_logits[1:], alone.logits_cache)
    ReferenceDraftOps().sample_block(head, dataclasses.replace(batch, **fields), state, half)
    assert torch.equal(half.tokens[0], together.tokens[1])


def judge(windows, temperature, method):
    """Outcome of windows [(input tokens, the only possible next token of each row)]."""
    inputs = [token for window, _ in windows for token in window]
    nexts = [token for _, following in windows for token in following]
    logits = torch.full((len(nexts), 6), float("-inf"))
    logits[torch.arange(len(nexts)), torch.tensor(nexts)] = 0.0
    sizes = torch.tensor([0] + [len(window) for window, _ in windows])
    slots = torch.arange(len(windows))
    batch = RejectBatch(
        target_logits=logits,
        draft_logits=None,
        draft_tokens=torch.tensor(inputs),
        cu_num_logits=sizes.cumsum(0).to(torch.int32),
        pos=torch.arange(len(nexts)),
        idx_mapping=slots,
    )
    state = SamplingState(torch.full((len(windows),), temperature), slots)
    return ReferenceRejectOps().reject(batch, state, RejectRule(3, method))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_contract_on_deterministic_targets(temperature, method):
    """A one-hot target leaves no chance at any temperature: row j judges the input of row j+1."""
    windows = [
        ([0, 1, 2, 3], [1, 2, 3, 4]),  # all three drafts accepted, then the bonus token
        ([0, 1, 2], [1, 5, 3]),  # the second draft is wrong
        ([4], [0]),  # no draft
        ([0, 2, -1], [2, 2, 2]),  # a placeholder ends the window
        ([], []),  # a padded request
    ]
    outcome = judge(windows, temperature, method)
    assert outcome.sampled.tolist() == [
        [1, 2, 3, 4], [1, 5, -1, -1], [0, -1, -1, -1], [2, 2, -1, -1], [-1, -1, -1, -1],
    ]  # fmt: skip
    assert outcome.num_sampled.tolist() == [4, 2, 1, 2, 0]
    assert outcome.accepted.tolist() == [3, 1, 0, 1, 0]
    assert outcome.verified.tolist() == [3, 2, 0, 2, 0]
    assert outcome.num_sampled.dtype == torch.int32 and outcome.sampled.dtype == torch.int64


def test_probabilities_of_awkward_rows():
    inf, nan = float("inf"), float("nan")
    assert probabilities(torch.tensor([nan, nan, -inf])).tolist() == [0, 0, 0]
    assert probabilities(torch.tensor([inf, 0.0, inf])).tolist() == [0.5, 0, 0.5]
    assert probabilities(torch.tensor([nan, 1.0, 1.0])).tolist() == [0, 0.5, 0.5]
    assert probabilities(torch.tensor([-inf, -1e30])).tolist() == [0, 1]
