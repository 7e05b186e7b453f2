"""A toy target and drafter of a few tokens, run through the real drafting and rejection operations.

The target is first order: p(next | last). The drafter's base logits and Markov bias give another
first-order law, wrong on purpose. Every request is one independent sample (its own seed), so the
emitted tokens of R requests are R draws from a law that can be written down exactly.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from vllm_dspark.kernels.protocols import (
    DraftBatch,
    DraftHead,
    DraftOps,
    DraftOutput,
    MarkovHead,
    RejectBatch,
    RejectOps,
    RejectOutcome,
    RejectRule,
    SamplingState,
)

VOCAB = 5
WIDTH = 3
START = 2  # the token before the first sampled one
# windows(step, draft tokens [R, K]) -> rows of each request's window, 1..K+1
Windows = Callable[[int, torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Toy:
    """Logits of both laws before temperature; greedy drafts when `cached` is False."""

    target: torch.Tensor  # [V, V], row: last token
    head: DraftHead
    base: torch.Tensor  # [V]
    temperature: float = 0.7
    cached: bool = True

    def target_law(self) -> torch.Tensor:
        """[V, V] p(next | last)."""
        return torch.softmax(self.target.double() / self.temperature, dim=-1)

    def draft_law(self) -> torch.Tensor:
        """[V, V] q(next | last), one-hot for greedy drafts."""
        assert self.head.markov is not None
        logits = self.base + self.head.markov.w1 @ self.head.markov.w2.T
        if not self.cached:
            return torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).double()
        return torch.softmax(logits.double() / self.temperature, dim=-1)


def make_toy(cached: bool, temperature: float = 0.7) -> Toy:
    gen = torch.Generator().manual_seed(11)
    target = torch.randn(VOCAB, VOCAB, generator=gen)
    # An embedding of full rank: the drafter's law is the target's plus noise, so that windows are
    # accepted to every length.
    w2 = (target + 1.5 * torch.randn(VOCAB, VOCAB, generator=gen)).T.contiguous()
    markov = MarkovHead("vanilla", torch.eye(VOCAB), w2)
    base = 0.3 * torch.randn(VOCAB, generator=gen)
    return Toy(target, DraftHead(markov, None), base, temperature, cached)


def full_windows(step: int, drafts: torch.Tensor) -> torch.Tensor:
    return torch.full((drafts.shape[0],), WIDTH + 1)


def random_windows(step: int, drafts: torch.Tensor) -> torch.Tensor:
    """Lengths drawn without looking at the drafts, as any plan from lagged data is."""
    gen = torch.Generator().manual_seed(1000 + step)
    return torch.randint(1, WIDTH + 2, (drafts.shape[0],), generator=gen)


def draft(
    toy: Toy, ops: DraftOps, state: SamplingState, anchor: torch.Tensor, position: torch.Tensor
) -> DraftOutput:
    """One block per request; position: of each anchor."""
    rows = anchor.shape[0]
    out = DraftOutput(
        tokens=torch.zeros(rows, WIDTH, dtype=torch.int64),
        logits_cache=torch.full((rows, WIDTH, VOCAB), float("-inf")) if toy.cached else None,
    )
    batch = DraftBatch(
        base_logits=toy.base.expand(rows, WIDTH, VOCAB).contiguous(),
        hidden=torch.zeros(rows, WIDTH, 1),
        anchor=anchor,
        req_index=torch.arange(rows),
        position=position[:, None] + 1 + torch.arange(WIDTH),
    )
    ops.sample_block(toy.head, batch, state, out)
    return out


def verify(
    toy: Toy,
    ops: RejectOps,
    state: SamplingState,
    rule: RejectRule,
    anchor: torch.Tensor,
    position: torch.Tensor,
    drafted: DraftOutput,
    windows: torch.Tensor,
) -> RejectOutcome:
    """Judge the first windows - 1 drafts of each request."""
    inputs = torch.cat([anchor[:, None], drafted.tokens], dim=1)
    columns = torch.arange(WIDTH + 1)
    used = columns < windows[:, None]
    batch = RejectBatch(
        target_logits=toy.target[inputs[used]] / toy.temperature,
        draft_logits=drafted.logits_cache,
        draft_tokens=inputs[used],
        cu_num_logits=torch.cat([torch.zeros(1, dtype=torch.int64), windows.cumsum(0)]).int(),
        pos=(position[:, None] + columns)[used],
        idx_mapping=torch.arange(anchor.shape[0]),
    )
    return ops.reject(batch, state, rule)


def generate(
    toy: Toy,
    ops: tuple[DraftOps, RejectOps],
    rule: RejectRule,
    windows: Windows,
    requests: int,
    length: int = 3,
    first_seed: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """([R, length] first emitted tokens of each request, [R] accepted drafts of its first step)."""
    state = SamplingState(
        torch.full((requests,), toy.temperature), first_seed + torch.arange(requests)
    )
    emitted = torch.full((requests, length), -1)
    count = torch.zeros(requests, dtype=torch.int64)
    anchor = torch.full((requests,), START)
    position = torch.full((requests,), 10)
    first_accepted = None
    step = 0
    while int(count.min()) < length:
        drafted = draft(toy, ops[0], state, anchor, position)
        outcome = verify(
            toy, ops[1], state, rule, anchor, position, drafted, windows(step, drafted.tokens)
        )
        first_accepted = outcome.accepted if first_accepted is None else first_accepted
        for column in range(WIDTH + 1):
            live = (column < outcome.num_sampled) & (count + column < length)
            rows = live.nonzero().flatten()
            emitted[rows, count[rows] + column] = outcome.sampled[rows, column]
        num_sampled = outcome.num_sampled.long()
        anchor = outcome.sampled.gather(1, num_sampled[:, None] - 1)[:, 0]
        position = position + num_sampled
        count = count + num_sampled
        step += 1
    assert first_accepted is not None
    return emitted, first_accepted


def sequence_law(toy: Toy, length: int = 3) -> torch.Tensor:
    """[V ** length] exact law of the first tokens, first token most significant."""
    p = toy.target_law()
    law = p[START]
    for _ in range(length - 1):
        law = (law[:, None] * p[torch.arange(len(law)) % VOCAB]).flatten()
    return law


def sequence_counts(emitted: torch.Tensor) -> torch.Tensor:
    """[V ** length] how often each sequence was emitted."""
    weights = VOCAB ** torch.arange(emitted.shape[1] - 1, -1, -1)
    return torch.bincount((emitted * weights).sum(-1), minlength=VOCAB ** emitted.shape[1])
