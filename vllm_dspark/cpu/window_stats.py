"""Twins of the statistics kernels in vLLM's ``gpu/spec_decode/rejection_sampler_utils.py``.

They run before verification (``vllm_dspark.cpu.rejection``): which draft each logits row
judges, blocked softmax statistics of target and draft, and block verification's running
ratios and residual masses. Logits row l of a request holds the target's distribution after
its l-th window token; ``draft_sampled[l + 1]`` is the draft it judges, -1 a placeholder
that is never accepted, and the last row of a request (bonus) judges nothing. Draft logits
are stored before temperature. Checked against vLLM 0.32.0; in 0.33.0 two of the kernels
take num_logits in place of num_speculative_steps.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array, float_rows
from vllm_dspark.cpu.gumbel import block_argmax
from vllm_dspark.cpu.softmax_stats import blocks_of, logsumexp, max_and_sumexp
from vllm_dspark.cpu.twins import RUNNER, twin_of

SAMPLER = RUNNER + "spec_decode.rejection_sampler."
UTILS = RUNNER + "spec_decode.rejection_sampler_utils."


def bonus_rows(local_pos: Array, num_speculative_steps: int | None) -> Array:
    """Boolean per logits row: the row judges no draft.

    With a step count a row at that position is one (0.32); without, the last row of its
    request (0.33, where windows may end earlier).
    """
    if num_speculative_steps is not None:
        full: Array = local_pos >= num_speculative_steps
        return full
    last: Array = np.append(local_pos[1:], 0) == 0
    return last


@twin_of(SAMPLER + "_gather_draft_sampled_kernel")
def gather_draft_sampled(
    draft_sampled_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    positions_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    num_logits: int,
) -> None:
    """Input token and position of each logits row; drafts inside the prefill become -1."""
    rows = array(logits_indices_ptr)[:num_logits]
    positions = array(positions_ptr)[rows]
    local_pos = array(expanded_local_pos_ptr)[:num_logits]
    prefill_lens = array(prefill_len_ptr)[array(expanded_idx_mapping_ptr)[:num_logits]]
    placeholder = (local_pos > 0) & (positions - local_pos < prefill_lens)
    array(draft_sampled_ptr)[:num_logits] = np.where(placeholder, -1, array(input_ids_ptr)[rows])
    array(pos_ptr)[:num_logits] = positions


@twin_of(UTILS + "_compute_local_logits_stats_kernel")
def local_logits_stats(
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    num_speculative_steps: int | None = None,
    num_logits: int | None = None,
) -> None:
    """Per row and block: the target's argmax where greedy, softmax statistics where sampled."""
    argmaxes, maxima = array(target_local_argmax_ptr), array(target_local_max_ptr)
    sumexps = array(target_local_sumexp_ptr)
    draft_maxima, draft_sumexps = array(draft_local_max_ptr), array(draft_local_sumexp_ptr)
    local_pos, temperatures = array(expanded_local_pos_ptr), array(temp_ptr)
    states = array(expanded_idx_mapping_ptr)
    for row in np.flatnonzero(~bonus_rows(local_pos, num_speculative_steps)).tolist():
        state = int(states[row])
        values = float_rows(target_logits_ptr[row], vocab_size)
        if temperatures[state] == 0.0:
            block_argmax(values, BLOCK_SIZE, argmaxes[row], maxima[row])
            continue
        maxima[row], sumexps[row] = max_and_sumexp(values, BLOCK_SIZE)
        if HAS_DRAFT_LOGITS:
            assert draft_logits_ptr is not None
            drafts = float_rows(draft_logits_ptr[state, int(local_pos[row])], vocab_size)
            scaled = drafts / temperatures[state]
            draft_maxima[row], draft_sumexps[row] = max_and_sumexp(scaled, BLOCK_SIZE)


@dataclass(frozen=True)
class Statistics:
    """Logits and block statistics that score drafted tokens, as the kernels get them."""

    target_logits: torch.Tensor  # [num_logits, V], temperature applied
    target_max: Array  # [num_logits, num_blocks]
    target_sumexp: Array
    draft_logits: torch.Tensor | None  # [max_num_reqs, K, V], before temperature
    draft_max: Array
    draft_sumexp: Array
    padded_blocks: int

    def target_lse(self, rows: Array) -> Array:
        """Log-sum-exp of the target's logits in these rows."""
        return logsumexp(self.target_max[rows], self.target_sumexp[rows], self.padded_blocks)

    def draft_lse(self, rows: Array) -> Array:
        """Log-sum-exp of the draft's scaled logits; 0 for a draft that is a point mass."""
        if self.draft_logits is None:
            return np.zeros(rows.shape[0], dtype=np.float32)
        return logsumexp(self.draft_max[rows], self.draft_sumexp[rows], self.padded_blocks)

    def target_logprobs(self, rows: Array, tokens: Array) -> Array:
        """Log-probability of one token per row under the target."""
        logits = self.target_logits[torch.from_numpy(rows), torch.from_numpy(tokens)]
        scores: Array = logits.float().numpy() - self.target_lse(rows)
        return scores

    def draft_logprobs(
        self, state: int, steps: Array, rows: Array, tokens: Array, temperature: np.float32
    ) -> Array:
        """Log-probability of one token per row under the draft; 0 for a point mass."""
        if self.draft_logits is None:
            return np.zeros(rows.shape[0], dtype=np.float32)
        chosen = self.draft_logits[state][torch.from_numpy(steps), torch.from_numpy(tokens)]
        scores: Array = chosen.float().numpy() / temperature - self.draft_lse(rows)
        return scores


@twin_of(UTILS + "_compute_cumulative_log_p_kernel")
def cumulative_log_p(
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
) -> None:
    """Block verification's running ratio: log p_i = min(log p_{i-1} + log(target/draft), 0)."""
    stats = Statistics(
        target_logits_ptr,
        array(target_local_max_ptr),
        array(target_local_sumexp_ptr),
        draft_logits_ptr if HAS_DRAFT_LOGITS else None,
        array(draft_local_max_ptr),
        array(draft_local_sumexp_ptr),
        PADDED_VOCAB_NUM_BLOCKS,
    )
    output, draft_sampled = array(cumulative_log_p_ptr), array(draft_sampled_ptr)
    temperatures, bounds = array(temp_ptr), cu_num_logits_ptr.tolist()
    for request, state in enumerate(idx_mapping_ptr.tolist()):
        start, end = bounds[request], bounds[request + 1]
        if temperatures[state] == 0.0 or end - start < 2:
            continue
        drafts = draft_sampled[start + 1 : end].astype(np.int64)
        steps = np.flatnonzero(drafts >= 0)  # a placeholder carries the last value on
        rows, tokens = start + steps, drafts[steps]
        ratios = np.zeros(drafts.shape[0], dtype=np.float32)
        draft_scores = stats.draft_logprobs(state, steps, rows, tokens, temperatures[state])
        ratios[steps] = stats.target_logprobs(rows, tokens) - draft_scores
        log_p = np.float32(0.0)
        for step, ratio in enumerate(ratios):
            if drafts[step] >= 0:
                log_p = np.minimum(log_p + ratio, np.float32(0.0))
            output[start + step] = log_p


@twin_of(UTILS + "_compute_local_residual_mass_kernel")
def local_residual_mass(
    local_residual_mass_ptr: torch.Tensor,
    local_residual_mass_stride: int,
    cumulative_log_p_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_max_ptr: torch.Tensor,
    target_local_max_stride: int,
    target_local_sumexp_ptr: torch.Tensor,
    target_local_sumexp_stride: int,
    draft_logits_ptr: torch.Tensor,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_local_max_ptr: torch.Tensor,
    draft_local_max_stride: int,
    draft_local_sumexp_ptr: torch.Tensor,
    draft_local_sumexp_stride: int,
    draft_sampled_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    num_speculative_steps: int | None = None,
    num_logits: int | None = None,
) -> None:
    """Block verification: per block, the sum over tokens of max(p * target - draft, 0)."""
    stats = Statistics(
        target_logits_ptr,
        array(target_local_max_ptr),
        array(target_local_sumexp_ptr),
        draft_logits_ptr,
        array(draft_local_max_ptr),
        array(draft_local_sumexp_ptr),
        PADDED_VOCAB_NUM_BLOCKS,
    )
    output, log_p = array(local_residual_mass_ptr), array(cumulative_log_p_ptr)
    local_pos, states = array(expanded_local_pos_ptr), array(expanded_idx_mapping_ptr)
    temperatures, draft_sampled = array(temp_ptr), array(draft_sampled_ptr)
    wanted = (local_pos > 0) & ~bonus_rows(local_pos, num_speculative_steps)
    wanted[-1] = False
    wanted[:-1] &= draft_sampled[1 : wanted.shape[0]] >= 0
    for row in np.flatnonzero(wanted & (temperatures[states] != 0.0)).tolist():
        state, here = int(states[row]), np.array([row])
        target = float_rows(target_logits_ptr[row], vocab_size) - stats.target_lse(here)
        drafts = float_rows(draft_logits_ptr[state, int(local_pos[row])], vocab_size)
        scores = drafts / temperatures[state] - stats.draft_lse(here)
        excess = np.maximum(np.exp(log_p[row - 1]) * np.exp(target) - np.exp(scores), 0.0)
        output[row] = blocks_of(excess, BLOCK_SIZE, 0.0).sum(axis=1)
