"""Ragged rejection: verification of windows of 1..K+1 rows, greedy and sampled, standard and block.

The rules are those of ``reference.py``. Launches (S parts share a row's vocabulary):
    row_stats    [R, K+1, S]  maximum, sum and argmax of each target row; maximum and sum of each
                              cached draft row over its temperature
    judge        [R]          p(x), q(x) of all columns at once; accepted prefix (standard, greedy)
                              or the joint ratios (block)
    block_mass   [R, K+1, S]  block only: sum(max(ratio_i p_i - q_i, 0))
    block_judge  [R]          block only: the longest passing prefix
    resample     [R, S]       argmax(log w + Gumbel) over the row after the accepted prefix, w from
                              the residual and, for when that is empty, from p
    outcome      [R]          tokens and the record of the step
Every row is read once, and one more row per request to resample. Windows may come in any chunks: a
request's result depends on its own rows, seed and positions only.

Probabilities are float32 relative to the row's maximum (the reference: float64), so an acceptance
test can differ from the reference where u q and p agree to about 1e-6, and nowhere else.
"""

import torch
import triton

from vllm_dspark.kernels.launch import describe_device, rejection_parts
from vllm_dspark.kernels.protocols import RejectBatch, RejectOutcome, RejectRule, SamplingState
from vllm_dspark.kernels.rejection_kernels import (
    block_judge_kernel,
    block_mass_kernel,
    judge_kernel,
    outcome_kernel,
    resample_kernel,
    row_stats_kernel,
)

_BLOCK_V = 2048
# What comes in 16 bits is widened as it is read: a float32 copy would double the traffic.
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class TritonRejectOps:
    """`RejectOps` with scratch for up to `max_reqs` requests.

    Tokens and their numbers are tensors of their own; the rest is valid until the next call.
    """

    def __init__(self, max_reqs: int, num_drafts: int, vocab: int, device: torch.device) -> None:
        self.max_reqs, self.num_drafts, self.vocab = max_reqs, num_drafts, vocab
        self.device = describe_device(device)
        columns = num_drafts + 1
        parts = max(
            n * rejection_parts(self.device, n, columns, vocab) for n in range(1, max_reqs + 1)
        )

        def floats(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.float32, device=device)

        def ints(size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self._stats, self._argmax = floats(4 * parts * columns), ints(parts * columns)
        self._rows, self._mass = floats(5 * max_reqs * columns), floats(parts * columns)
        self._accepted, self._mode = ints(max_reqs), ints(max_reqs)
        self._token = torch.zeros(max_reqs, dtype=torch.int64, device=device)
        self._value, self._index = floats(2 * parts), ints(2 * parts)
        self._accepted_out, self._verified = ints(max_reqs), ints(max_reqs)

    def reject(self, batch: RejectBatch, state: SamplingState, rule: RejectRule) -> RejectOutcome:
        """Accepts a prefix of each window and draws the token after it."""
        num_reqs = batch.cu_num_logits.shape[0] - 1
        self._check(batch, rule, num_reqs)
        columns, vocab = rule.num_drafts + 1, batch.target_logits.shape[1]
        num_parts = rejection_parts(self.device, num_reqs, columns, vocab)
        has_draft = batch.draft_logits is not None
        draft = batch.target_logits if batch.draft_logits is None else batch.draft_logits
        draft_strides = (draft.stride(0), draft.stride(1)) if has_draft else (0, 0)
        draft_vocab = draft.shape[-1]
        block = rule.method == "block"
        rates = state.temperature if rule.synthetic_rates is None else rule.synthetic_rates
        sizes = {
            "NUM_PARTS": num_parts,
            "BLOCK_J": triton.next_power_of_2(columns),
            "BLOCK_S": triton.next_power_of_2(num_parts),
        }
        vocab_args = (vocab, draft_vocab, batch.target_logits.stride(0), *draft_strides)
        row_stats_kernel[(num_reqs, columns, num_parts)](
            self._stats,
            self._argmax,
            batch.target_logits,
            draft,
            batch.cu_num_logits,
            batch.idx_mapping,
            state.temperature,
            *vocab_args,
            HAS_DRAFT=has_draft,
            BLOCK_V=_BLOCK_V,
            num_warps=4,
        )
        judge_kernel[(num_reqs,)](
            self._accepted,
            self._token,
            self._rows,
            self._mode,
            self._stats,
            self._argmax,
            batch.target_logits,
            draft,
            batch.draft_tokens,
            batch.cu_num_logits,
            batch.pos,
            batch.idx_mapping,
            state.temperature,
            state.seeds,
            rates,
            *vocab_args,
            NUM_DRAFTS=rule.num_drafts,
            HAS_DRAFT=has_draft,
            SYNTHETIC=rule.synthetic_rates is not None,
            BLOCK_METHOD=block,
            num_warps=1,
            **sizes,
        )
        if block:
            self._judge_block(batch, state, rule, draft, vocab_args, has_draft, sizes)
        resample_kernel[(num_reqs, num_parts)](
            self._value,
            self._index,
            self._accepted,
            self._mode,
            self._rows,
            batch.target_logits,
            draft,
            batch.draft_tokens,
            batch.cu_num_logits,
            batch.pos,
            batch.idx_mapping,
            state.temperature,
            state.seeds,
            *vocab_args,
            NUM_DRAFTS=rule.num_drafts,
            HAS_DRAFT=has_draft,
            BLOCK_V=_BLOCK_V // 2,
            num_warps=4,
        )
        # The engine reads these later, on its copy stream, when the next step is under way.
        sampled = self._token.new_empty((num_reqs, columns))
        num_sampled = self._accepted.new_empty(num_reqs)
        outcome_kernel[(num_reqs,)](
            sampled,
            num_sampled,
            self._accepted_out,
            self._verified,
            self._accepted,
            self._token,
            self._mode,
            self._value,
            self._index,
            batch.draft_tokens,
            batch.cu_num_logits,
            NUM_DRAFTS=rule.num_drafts,
            num_warps=1,
            **sizes,
        )
        return RejectOutcome(
            sampled, num_sampled, self._accepted_out[:num_reqs], self._verified[:num_reqs]
        )

    def _judge_block(
        self,
        batch: RejectBatch,
        state: SamplingState,
        rule: RejectRule,
        draft: torch.Tensor,
        vocab_args: tuple[int, ...],
        has_draft: bool,
        sizes: dict[str, int],
    ) -> None:
        num_reqs = batch.cu_num_logits.shape[0] - 1
        block_mass_kernel[(num_reqs, rule.num_drafts + 1, sizes["NUM_PARTS"])](
            self._mass,
            self._rows,
            self._accepted,
            self._mode,
            batch.target_logits,
            draft,
            batch.draft_tokens,
            batch.cu_num_logits,
            batch.idx_mapping,
            state.temperature,
            *vocab_args,
            HAS_DRAFT=has_draft,
            BLOCK_V=_BLOCK_V,
            num_warps=4,
        )
        block_judge_kernel[(num_reqs,)](
            self._accepted,
            self._mode,
            self._mass,
            self._rows,
            batch.cu_num_logits,
            batch.pos,
            batch.idx_mapping,
            state.seeds,
            NUM_DRAFTS=rule.num_drafts,
            num_warps=1,
            **sizes,
        )

    def _check(self, batch: RejectBatch, rule: RejectRule, num_reqs: int) -> None:
        if num_reqs > self.max_reqs or rule.num_drafts != self.num_drafts:
            raise ValueError(
                f"{num_reqs} requests of {rule.num_drafts} drafts do not fit buffers made for "
                f"{self.max_reqs} of {self.num_drafts}"
            )
        if batch.target_logits.dtype not in _DTYPES or batch.target_logits.stride(1) != 1:
            raise ValueError(
                f"target_logits must be float32, bfloat16 or float16 with contiguous rows, got "
                f"{batch.target_logits.dtype} with strides {batch.target_logits.stride()}"
            )
