"""What drafting and rejection take and return; backends implement the two Protocols at the end.

Sizes: R requests of the step (padded rows included), K draft width, M request slots of the engine,
N verified rows of the step, V target vocabulary, V_d draft vocabulary, H drafter hidden size, r
Markov rank. `reference.py` is the specification of the operations.

Nothing here synchronises with a device: lengths that only the device knows stay there.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

MarkovKind = Literal["vanilla", "gated", "rnn"]
RejectMethod = Literal["standard", "block"]


@dataclass(frozen=True)
class MarkovHead:
    """Weights of the sequential head; a drafter of rank 0 has none."""

    kind: MarkovKind
    # [V_in, r], indexed by TARGET ids
    w1: torch.Tensor
    # [V_d, r]
    w2: torch.Tensor
    # gated: [r, H + r] on [h_k ; e]. rnn: [3r, 2r + H] on [s ; e ; h_k]. vanilla: None
    proj_weight: torch.Tensor | None = None
    # gated: [r]. rnn: [3r], order gate, candidate, output
    proj_bias: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        return int(self.w1.shape[1])


@dataclass(frozen=True)
class ConfidenceHead:
    """Weights of the acceptance predictor: logit = weight . x + bias, c = sigmoid(logit)."""

    # [H + r] if with_markov (x = [h_k ; W1[x_{k-1}]]), else [H]
    weight: torch.Tensor
    # scalar, or None
    bias: torch.Tensor | None
    with_markov: bool


@dataclass(frozen=True)
class DraftHead:
    """Everything of a drafter that follows its backbone and lm_head; fixed once loaded."""

    markov: MarkovHead | None
    confidence: ConfidenceHead | None
    # [V_d] int64 offsets, target id = id + d2t[id]; None: identity
    d2t: torch.Tensor | None = None
    # tanh cap of the base logits; the Markov bias is added uncapped
    soft_cap: float | None = None
    # factor on (capped base logits + bias), as vLLM's LogitsProcessor scales both terms
    logit_scale: float = 1.0


@dataclass(frozen=True)
class DraftBatch:
    """One step's drafting input, filled by the proposer after the backbone's forward pass."""

    # [R, K, V_d] bf16, f16 or f32: lm_head output, neither capped nor scaled
    base_logits: torch.Tensor
    # [R, K, H], what the lm_head was applied to
    hidden: torch.Tensor
    # [R] int64 target id of the token before draft 0
    anchor: torch.Tensor
    # [R] int32 or int64 slot in 0..M-1, any stride; -1: padded row, nothing of it is written
    req_index: torch.Tensor
    # [R, K] int64 position of the token being drafted
    position: torch.Tensor


@dataclass(frozen=True)
class SamplingState:
    """Per-slot sampling parameters, indexed by request slot."""

    # [M] float32; 0 means greedy
    temperature: torch.Tensor
    # [M] int64
    seeds: torch.Tensor


@dataclass(frozen=True)
class DraftOutput:
    """Buffers that `sample_block` writes."""

    # [R, K] int64 target ids
    tokens: torch.Tensor
    # [R, K] float32 logits (before the sigmoid); None: no confidence head, or not wanted
    confidence_logits: torch.Tensor | None = None
    # [M, K, >= V_d or V] logits before temperature, at target ids; None: greedy drafts.
    # Columns that no draft token maps to are never written: allocate it filled with -inf.
    # Rows of requests at temperature 0 are left as they are, since their rejection reads no draft.
    logits_cache: torch.Tensor | None = None


@dataclass(frozen=True)
class RejectBatch:
    """One step's verification input: window r is the rows cu_num_logits[r]..cu_num_logits[r+1]-1.

    The row j of a window holds the target's logits AFTER the window's input token j: row 0's input
    is the last sampled token, the input of row j >= 1 is draft j-1. So row j judges draft column j,
    which is the input of row j+1, and the last row gives the bonus token.
    """

    # [N, V] float32, or (Triton kernels) as the model gave them, bfloat16 or float16 where nothing
    # had to be applied: widened as they are read;
    # temperature, penalties, masks, top-k and top-p already applied
    target_logits: torch.Tensor
    # [M, K, V_c] as written by drafting, before temperature; None: drafts were argmaxes.
    # V_c < V: the missing columns were never drafted. V_c > V: drafts at ids >= V are rejected.
    draft_logits: torch.Tensor | None
    # [N] input token of each row; a negative draft ends its window (it is rejected there)
    draft_tokens: torch.Tensor
    # [R + 1] int32
    cu_num_logits: torch.Tensor
    # [N] int64 position of each row's input token
    pos: torch.Tensor
    # [R] request slot; read only for windows that have rows
    idx_mapping: torch.Tensor


@dataclass(frozen=True)
class RejectRule:
    """How drafts are judged; fixed for the engine's life."""

    # K
    num_drafts: int
    # "standard": token by token (Leviathan et al. 2023). "block": jointly (Sun et al. 2024).
    method: RejectMethod = "standard"
    # [K] P(accept column k | all before it accepted), replaces the test (benchmarks only)
    synthetic_rates: torch.Tensor | None = None


@dataclass(frozen=True)
class RejectOutcome:
    """Result of verification and the record that calibration and metrics read."""

    # [R, K + 1] int64 target ids, -1 past num_sampled
    sampled: torch.Tensor
    # [R] int32: accepted drafts + 1; 0 for a window without rows
    num_sampled: torch.Tensor
    # [R] int32: accepted drafts
    accepted: torch.Tensor
    # [R] int32: drafts in the window
    verified: torch.Tensor


class DraftOps(Protocol):
    """Sequential sampling of a drafted block."""

    def sample_block(
        self, head: DraftHead, batch: DraftBatch, state: SamplingState, out: DraftOutput
    ) -> None:
        """Write the block's tokens, confidences and cached logits into `out`."""
        ...


class RejectOps(Protocol):
    """Verification of ragged windows."""

    def reject(self, batch: RejectBatch, state: SamplingState, rule: RejectRule) -> RejectOutcome:
        """Accept a prefix of each window and draw the token after it."""
        ...
