"""Twins of the kernels that draw the token after the accepted prefix.

``_resample_kernel`` and ``_insert_resampled_kernel`` of vLLM's
``gpu/spec_decode/rejection_sampler_utils.py``.

It is drawn from the target where every draft was accepted (bonus), and from the residual
max(target - draft, 0) where one was refused, with the Gumbel noise of its position.
Checked against vLLM 0.32.0, same signatures in 0.33.0. Watermarked requests are refused:
vLLM's keyed draw has no native twin.
"""

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array, float_rows
from vllm_dspark.cpu.gumbel import block_argmax, noised
from vllm_dspark.cpu.twins import twin_of
from vllm_dspark.cpu.window_stats import UTILS


def residual_logits(target_logprobs: Array, draft_logprobs: Array) -> Array:
    """log(max(exp(t) - exp(d), 0)) = t + log1p(-exp(d - t)), -inf where the draft weighs more."""
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        ratio = np.exp(draft_logprobs - target_logprobs)
        residual: Array = np.where(ratio < 1.0, target_logprobs + np.log1p(-ratio), -np.inf)
    return residual


@twin_of(UTILS + "_resample_kernel")
def resample(
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_logits_ptr: torch.Tensor | None,
    draft_logits_stride_0: int,
    draft_logits_stride_1: int,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    rejected_step_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    draft_sampled_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    cumulative_log_p_ptr: torch.Tensor | None,
    vocab_size: int,
    BLOCK_SIZE: int,
    HAS_DRAFT_LOGITS: bool,
    USE_FP64: bool,
    USE_BLOCK_VERIFICATION: bool,
    WATERMARK: bool = False,
) -> None:
    """Per request and block, the winner among the noised residual logits."""
    if WATERMARK:
        raise NotImplementedError("watermarking has no native CPU implementation")
    tokens, maxima = array(resampled_local_argmax_ptr), array(resampled_local_max_ptr)
    target_lse = array(target_rejected_logsumexp_ptr)
    draft_lse = array(draft_rejected_logsumexp_ptr)
    states, draft_sampled = array(expanded_idx_mapping_ptr), array(draft_sampled_ptr)
    temperatures, seeds, positions = array(temp_ptr), array(seed_ptr), array(pos_ptr)
    steps, bounds = rejected_step_ptr.tolist(), cu_num_logits_ptr.tolist()
    for request in range(len(bounds) - 1):
        step = steps[request]
        row = bounds[request] + step
        is_bonus = row == bounds[request + 1] - 1
        state = int(states[row])
        temperature = temperatures[state] if state >= 0 else np.float32(0.0)
        if temperature == 0.0 and not is_bonus:
            continue
        values = float_rows(target_logits_ptr[row], vocab_size)
        refused = -1 if is_bonus else int(draft_sampled[row + 1])
        if refused >= 0 and HAS_DRAFT_LOGITS:
            assert draft_logits_ptr is not None
            target = values - target_lse[request]
            if USE_BLOCK_VERIFICATION and step > 0:
                assert cumulative_log_p_ptr is not None
                target = target + array(cumulative_log_p_ptr)[row - 1]
            drafts = float_rows(draft_logits_ptr[state, step], vocab_size)
            values = residual_logits(target, drafts / temperature - draft_lse[request])
        elif refused >= 0:
            values = values.copy()
            values[refused] = -np.inf
        if temperature != 0.0:
            values = noised(values, int(seeds[state]), int(positions[row]), False, USE_FP64)
        block_argmax(values, BLOCK_SIZE, tokens[request], maxima[request])


@twin_of(UTILS + "_insert_resampled_kernel")
def insert_resampled(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    resampled_local_argmax_ptr: torch.Tensor,
    resampled_local_argmax_stride: int,
    resampled_local_max_ptr: torch.Tensor,
    resampled_local_max_stride: int,
    resample_num_blocks: int,
    cu_num_logits_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
) -> None:
    """Put the resampled token after the accepted drafts (greedy refusals have theirs already)."""
    sampled, num_sampled = array(sampled_ptr), array(num_sampled_ptr)
    bounds = array(cu_num_logits_ptr)
    num_reqs = bounds.shape[0] - 1
    accepted = num_sampled[:num_reqs].copy()
    rows = bounds[:num_reqs] + accepted
    num_sampled[:num_reqs] += 1
    greedy = array(temp_ptr)[array(expanded_idx_mapping_ptr)[rows]] == 0.0
    drawn = np.flatnonzero(~greedy | (rows == bounds[1:] - 1))
    maxima = array(resampled_local_max_ptr)[drawn, :resample_num_blocks]
    best = np.where(np.isnan(maxima), -np.inf, maxima).argmax(axis=1)
    sampled[drawn, accepted[drawn]] = array(resampled_local_argmax_ptr)[drawn, best]
