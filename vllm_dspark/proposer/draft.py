"""Layout of a drafted block, and the buffers that live across steps.

Anchor-first (DeepSpec): K queries at positions p .. p+K-1, the anchor (the last sampled token, at
position p) and K-1 masks; query k predicts position p+1+k. Bonus-anchor (legacy speculators): 1+K
queries, the anchor and K masks; mask k at position p+1+k predicts that very position. So draft k is
the token of position p+1+k in both, and only its query differs.
"""

from dataclasses import dataclass

import torch

from vllm_dspark.kernels.protocols import DraftOutput

NEG_INF = float("-inf")


@dataclass(frozen=True)
class BlockLayout:
    """Queries of one request's block."""

    num_drafts: int
    sample_from_anchor: bool

    @property
    def num_queries(self) -> int:
        return self.num_drafts if self.sample_from_anchor else 1 + self.num_drafts

    @property
    def first_sampled(self) -> int:
        """Query that predicts draft 0."""
        return 0 if self.sample_from_anchor else 1

    def query_tokens(self, anchor: torch.Tensor, mask_token_id: int) -> torch.Tensor:
        """[R, Q] input ids of the blocks; anchor: [R]."""
        tokens = torch.full(
            (anchor.shape[0], self.num_queries), mask_token_id,
            dtype=anchor.dtype, device=anchor.device,
        )  # fmt: skip
        tokens[:, 0] = anchor
        return tokens

    def query_positions(self, anchor_position: torch.Tensor) -> torch.Tensor:
        """[R, Q] positions of the queries; anchor_position: [R]."""
        offsets = torch.arange(self.num_queries, device=anchor_position.device)
        return anchor_position[:, None] + offsets

    def draft_positions(self, anchor_position: torch.Tensor) -> torch.Tensor:
        """[R, K] positions of the drafted tokens."""
        offsets = torch.arange(self.num_drafts, device=anchor_position.device)
        return anchor_position[:, None] + 1 + offsets

    def sampled_queries(self, num_reqs: int, device: torch.device | str) -> torch.Tensor:
        """[R, K] flat indices, into the R * Q queries, of those that predict a draft."""
        starts = torch.arange(num_reqs, device=device)[:, None] * self.num_queries
        return starts + self.first_sampled + torch.arange(self.num_drafts, device=device)


def new_logits_cache(
    max_requests: int,
    num_drafts: int,
    vocab_size: int,
    dtype: torch.dtype,
    device: torch.device | str,
) -> torch.Tensor:
    """[M, K, V] cache of draft logits; -inf, since ids no draft maps to are never written."""
    return torch.full((max_requests, num_drafts, vocab_size), NEG_INF, dtype=dtype, device=device)


@dataclass(frozen=True)
class DraftBuffers:
    """Static output buffers of drafting: fixed addresses, so that a captured graph can write them.

    Allocated once; `rows(R)` gives the views of one step.
    """

    # [M, K] int64
    tokens: torch.Tensor
    # [M, K] float32 logits, or None when nothing reads confidences
    confidence_logits: torch.Tensor | None
    # [M, K, V] by request slot, or None for greedy drafts
    logits_cache: torch.Tensor | None

    @classmethod
    def allocate(
        cls,
        max_requests: int,
        num_drafts: int,
        device: torch.device | str,
        *,
        with_confidence: bool,
        cache_vocab: int | None = None,
        cache_dtype: torch.dtype = torch.bfloat16,
    ) -> "DraftBuffers":
        """cache_vocab: the target's vocabulary for probabilistic drafts, None for greedy ones."""
        cache = None
        if cache_vocab is not None:
            cache = new_logits_cache(max_requests, num_drafts, cache_vocab, cache_dtype, device)
        size = (max_requests, num_drafts)
        return cls(
            tokens=torch.zeros(size, dtype=torch.int64, device=device),
            confidence_logits=torch.zeros(size, device=device) if with_confidence else None,
            logits_cache=cache,
        )

    def rows(self, num_reqs: int) -> DraftOutput:
        """Output of a step of `num_reqs` rows."""
        confidence = self.confidence_logits
        return DraftOutput(
            tokens=self.tokens[:num_reqs],
            confidence_logits=None if confidence is None else confidence[:num_reqs],
            logits_cache=self.logits_cache,
        )
