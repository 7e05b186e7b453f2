"""Builders of random drafting and rejection inputs, awkward on purpose, and their comparison."""

from dataclasses import dataclass

import torch

from vllm_dspark.kernels.protocols import (
    ConfidenceHead,
    DraftBatch,
    DraftHead,
    DraftOutput,
    MarkovHead,
    RejectBatch,
    SamplingState,
)

NEG_INF = float("-inf")


@dataclass(frozen=True)
class Shape:
    """R rows, K columns, target vocabulary V, draft vocabulary V_d, hidden H, rank r, slots M."""

    rows: int = 4
    width: int = 3
    vocab: int = 37
    draft_vocab: int = 37
    hidden: int = 8
    rank: int = 4
    slots: int = 6


def draft_head(
    shape: Shape,
    gen: torch.Generator,
    kind: str | None = "vanilla",
    confidence: str | None = "markov",
    dtype: torch.dtype = torch.float32,
) -> DraftHead:
    """Random head; kind None: no Markov head; confidence 'markov', 'plain' or None."""

    def normal(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=gen).to(dtype)

    h, r = shape.hidden, shape.rank
    projections = {"gated": (r, h + r), "rnn": (3 * r, 2 * r + h)}
    markov = None
    if kind is not None:
        size = projections.get(kind)
        markov = MarkovHead(
            kind=kind,
            w1=normal(shape.vocab, r),
            w2=normal(shape.draft_vocab, r),
            proj_weight=normal(*size) * 0.5 if size else None,
            proj_bias=normal(size[0]) if size else None,
        )
    scorer = None
    if confidence is not None:
        width = h + (r if confidence == "markov" else 0)
        bias = torch.tensor(0.25) if confidence == "markov" else None
        scorer = ConfidenceHead(normal(width), bias, confidence == "markov")
    d2t = None
    if shape.draft_vocab < shape.vocab:
        ids = torch.randperm(shape.vocab, generator=gen)[: shape.draft_vocab].sort().values
        d2t = ids - torch.arange(shape.draft_vocab)
    return DraftHead(markov, scorer, d2t)


def draft_batch(
    shape: Shape, gen: torch.Generator, dtype: torch.dtype = torch.float32, padded: int = 1
) -> DraftBatch:
    """Random drafting input whose last `padded` rows belong to no request."""
    slots = torch.randperm(shape.slots, generator=gen)[: shape.rows]
    if padded:
        slots[-padded:] = -1
    anchor = torch.randint(0, shape.vocab, (shape.rows,), generator=gen)
    anchor[slots < 0] = 2**40  # a padded row's anchor must not be used
    start = torch.randint(0, 9000, (shape.rows, 1), generator=gen)
    return DraftBatch(
        base_logits=(torch.randn(shape.rows, shape.width, shape.draft_vocab, generator=gen) * 2).to(
            dtype
        ),
        hidden=torch.randn(shape.rows, shape.width, shape.hidden, generator=gen).to(dtype),
        anchor=anchor,
        req_index=slots,
        position=start + torch.arange(shape.width),
    )


def sampling_state(
    shape: Shape, gen: torch.Generator, temperature: float | None = None
) -> SamplingState:
    """Random seeds over all of int64; temperatures mixed, zero among them, unless given."""
    choice = torch.tensor([0.0, 0.4, 1.0, 1.7])
    heat = choice[torch.randint(0, 4, (shape.slots,), generator=gen)]
    if temperature is not None:
        heat = torch.full((shape.slots,), temperature)
    seeds = torch.randint(-(2**63), 2**63 - 1, (shape.slots,), generator=gen)
    return SamplingState(heat, seeds)


def draft_output(shape: Shape, cache: torch.dtype | None) -> DraftOutput:
    """Fresh buffers with recognisable untouched values."""
    return DraftOutput(
        tokens=torch.full((shape.rows, shape.width), -7),
        confidence_logits=torch.full((shape.rows, shape.width), -77.0),
        logits_cache=None
        if cache is None
        else torch.full((shape.slots, shape.width, shape.vocab), NEG_INF, dtype=cache),
    )


def reject_batch(
    shape: Shape,
    gen: torch.Generator,
    state: SamplingState,
    cache: torch.dtype | None,
    cache_vocab: int | None = None,
) -> RejectBatch:
    """Ragged windows, empty ones among them, whose drafts come from q near p; some are invalid."""
    windows = torch.randint(0, shape.width + 2, (shape.rows,), generator=gen)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), windows.cumsum(0)])
    num_rows = int(bounds[-1])
    slots = torch.randperm(shape.slots, generator=gen)[: shape.rows]
    target = torch.randn(num_rows, shape.vocab, generator=gen) * 2
    cached = torch.randn(shape.slots, shape.width, cache_vocab or shape.vocab, generator=gen)
    shared = min(cached.shape[2], shape.vocab)
    drafts = torch.randint(0, shape.vocab, (num_rows,), generator=gen)
    for r in range(shape.rows):
        slot, start = slots[r], int(bounds[r])
        heat = float(state.temperature[slot]) or 1.0
        for j in range(int(windows[r]) - 1):
            cached[slot, j, :shared] += target[start + j, :shared] * heat
            if cache is None or state.temperature[slot] == 0:
                drafts[start + j + 1] = target[start + j].argmax()
            else:
                q = torch.softmax(cached[slot, j].to(cache).float() / heat, -1)
                drafts[start + j + 1] = torch.multinomial(q, 1, generator=gen)[0]
            if torch.rand((), generator=gen) < 0.1:
                drafts[start + j + 1] = -1
    return RejectBatch(
        target_logits=target,
        draft_logits=None if cache is None else cached.to(cache),
        draft_tokens=drafts,
        cu_num_logits=bounds.to(torch.int32),
        pos=torch.randint(0, 9000, (num_rows,), generator=gen),
        idx_mapping=slots,
    )


def assert_same_outcome(got, expected) -> None:
    for field in ("sampled", "num_sampled", "accepted", "verified"):
        a, b = getattr(got, field), getattr(expected, field)
        assert torch.equal(a, b), f"{field}: {a.tolist()} != {b.tolist()}"
        assert a.dtype == b.dtype, f"{field}: {a.dtype} != {b.dtype}"


def assert_same_draft(got: DraftOutput, expected: DraftOutput) -> None:
    assert torch.equal(got.tokens, expected.tokens)
    torch.testing.assert_close(
        got.confidence_logits, expected.confidence_logits, rtol=1e-4, atol=1e-4
    )
    if expected.logits_cache is not None:
        # one rounding step of the cache's dtype, where float32 sums differ in the last bit
        tolerance = 1e-2 if expected.logits_cache.dtype == torch.bfloat16 else 1e-4
        torch.testing.assert_close(
            got.logits_cache, expected.logits_cache, rtol=tolerance, atol=tolerance
        )
