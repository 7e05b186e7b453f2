"""DESIGN.md, losslessness trap 2, with the real operations.

A plan made from the PREVIOUS pass's confidences admits drafts of this pass. If a redrafted position
sees the noise of its first draft again, those confidences already know the token they admit, and
the emitted law tilts. One request in the text, many independent ones here: two tokens, target
(0.7, 0.3), drafts (0.5, 0.5), K = 3, c_1 = 0.8, c_k = 0.9 after token 0 and 0 after token 1,
steps per second (1, 0.5, 0.38, 0.36) for windows of 1..4 tokens.

z of the share of token 0 over REQUESTS * TOKENS = 300,000 independent tokens; |z| > 4.9 is a false
alarm of 1e-6. Measured here: z = -0.3 with the column in the key, z = 36 (share 0.730) without.
"""

import math

import torch

from vllm_dspark.cpu.draft_ops import CpuDraftOps
from vllm_dspark.cpu.reject_ops import CpuRejectOps
from vllm_dspark.kernels.protocols import (
    DraftBatch,
    DraftHead,
    DraftOutput,
    RejectBatch,
    RejectRule,
    SamplingState,
)

torch.set_num_threads(1)

WIDTH = 3
REQUESTS = 3_000
TOKENS = 100
TARGET = torch.tensor([0.7, 0.3])
STEPS_PER_SECOND = torch.tensor([1.0, 0.5, 0.38, 0.36])
HEAD = DraftHead(markov=None, confidence=None)
DRAFT_OPS, REJECT_OPS = CpuDraftOps(), CpuRejectOps()


def draft_by_column(state: SamplingState, position: torch.Tensor) -> DraftOutput:
    """The plugin's drafting: one block of K columns."""
    rows = position.shape[0]
    out = DraftOutput(torch.zeros(rows, WIDTH, dtype=torch.int64), None, new_cache(rows, WIDTH))
    DRAFT_OPS.sample_block(HEAD, batch_of(position, WIDTH), state, out)
    return out


def draft_by_position(state: SamplingState, position: torch.Tensor) -> DraftOutput:
    """The known-bad variant: every position drafted as if it were column 0, as in vLLM 0.32."""
    parts = []
    for k in range(WIDTH):
        out = DraftOutput(
            torch.zeros(position.shape[0], 1, dtype=torch.int64), None,
            new_cache(position.shape[0], 1),
        )  # fmt: skip
        DRAFT_OPS.sample_block(HEAD, batch_of(position + k, 1), state, out)
        parts.append(out)
    return DraftOutput(
        torch.cat([p.tokens for p in parts], 1), None, torch.cat([p.logits_cache for p in parts], 1)
    )


def new_cache(rows: int, width: int) -> torch.Tensor:
    return torch.full((rows, width, 2), float("-inf"))


def batch_of(position: torch.Tensor, width: int) -> DraftBatch:
    rows = position.shape[0]
    return DraftBatch(
        base_logits=torch.zeros(rows, width, 2),
        hidden=torch.zeros(rows, width, 1),
        anchor=torch.zeros(rows, dtype=torch.int64),
        req_index=torch.arange(rows),
        position=position[:, None] + 1 + torch.arange(width),
    )


def lagged_windows(drafts: torch.Tensor) -> torch.Tensor:
    """Rows of the NEXT step's window, from this pass's confidences: the best goodput."""
    confidence = torch.full(drafts.shape, 0.8)
    confidence[:, 1:] = torch.where(drafts[:, :-1] == 0, 0.9, 0.0)
    survival = confidence.cumprod(dim=1)
    tokens = 1 + torch.cat([torch.zeros(len(drafts), 1), survival.cumsum(dim=1)], dim=1)
    return 1 + (tokens * STEPS_PER_SECOND).argmax(dim=1)


def share_of_token_0(draft) -> float:
    state = SamplingState(torch.ones(REQUESTS), torch.arange(REQUESTS) * 7919)
    position = torch.full((REQUESTS,), 5)
    last = torch.zeros(REQUESTS, dtype=torch.int64)
    zeros, count = torch.zeros(REQUESTS), torch.zeros(REQUESTS, dtype=torch.int64)
    windows = torch.ones(REQUESTS, dtype=torch.int64)
    columns = torch.arange(WIDTH + 1)
    while int(count.min()) < TOKENS:
        drafted = draft(state, position)
        inputs = torch.cat([last[:, None], drafted.tokens], dim=1)
        used = columns < windows[:, None]
        batch = RejectBatch(
            target_logits=TARGET.log().expand(int(used.sum()), 2).contiguous(),
            draft_logits=drafted.logits_cache,
            draft_tokens=inputs[used],
            cu_num_logits=torch.cat([torch.zeros(1, dtype=torch.int64), windows.cumsum(0)]).int(),
            pos=(position[:, None] + columns)[used],
            idx_mapping=torch.arange(REQUESTS),
        )
        outcome = REJECT_OPS.reject(batch, state, RejectRule(WIDTH))
        # The first TOKENS tokens of each request and no more: a fixed count has no length bias.
        counted = (columns < outcome.num_sampled[:, None]) & (count[:, None] + columns < TOKENS)
        zeros += ((outcome.sampled == 0) & counted).sum(dim=1)
        num_sampled = outcome.num_sampled.long()
        last = outcome.sampled.gather(1, num_sampled[:, None] - 1)[:, 0]
        position, count = position + num_sampled, count + num_sampled
        windows = lagged_windows(drafted.tokens)
    return float(zeros.sum()) / (REQUESTS * TOKENS)


def z_score(share: float) -> float:
    return (share - 0.7) / math.sqrt(0.7 * 0.3 / (REQUESTS * TOKENS))


def test_noise_by_position_and_column_is_lossless():
    assert abs(z_score(share_of_token_0(draft_by_column))) < 4.9


def test_noise_by_position_alone_is_caught():
    assert z_score(share_of_token_0(draft_by_position)) > 15
