"""Twin of ``_rejection_kernel`` in vLLM's ``gpu/spec_decode/rejection_sampler_utils.py``.

It judges every request's window: greedy, token by token, or by block verification, on the
statistics of ``vllm_dspark.cpu.window_stats``. Checked against vLLM 0.32.0. In 0.33.0 block
verification draws from a seed per step (``STEP_SEEDS``), and method "fly"
(FLY_WINDOW_SIZE > 0) exists, which is refused here.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array
from vllm_dspark.cpu.gumbel import step_seed
from vllm_dspark.cpu.noise import philox_uniforms
from vllm_dspark.cpu.softmax_stats import padded_sum
from vllm_dspark.cpu.twins import twin_of
from vllm_dspark.cpu.window_stats import UTILS, Statistics


def leading(flags: Array) -> int:
    """Number of true entries before the first false one."""
    return int(flags.shape[0] if flags.all() else flags.argmin())


@dataclass
class _Verdict:
    """Outcome of one request's window."""

    accepted: int
    tokens: Array  # what goes to the sampled row, from column 0
    target_lse: float = 0.0
    draft_lse: float = 0.0


def _judge_greedy(
    drafts: Array, maxima: Array, argmaxes: Array, uniforms: Array, rates: Array | None
) -> _Verdict:
    """Accept while the draft is the target's argmax; the argmax replaces the first that is not."""
    best = np.where(np.isnan(maxima), -np.inf, maxima).argmax(axis=1)
    targets = argmaxes[np.arange(drafts.shape[0]), best]
    agreed = targets == np.maximum(drafts, 0) if rates is None else uniforms < rates
    accepted = leading(agreed & (drafts >= 0))
    tokens = drafts[: accepted + 1].copy()
    if accepted < drafts.shape[0]:
        tokens[accepted] = targets[accepted]
    return _Verdict(accepted, tokens)


def _judge_tokens(
    drafts: Array,
    stats: Statistics,
    start: int,
    state: int,
    temperature: np.float32,
    uniforms: Array,
    rates: Array | None,
) -> _Verdict:
    """Accept draft x while target(x) > u * draft(x); a placeholder ends the window unjudged."""
    judged = leading(drafts >= 0)
    steps = np.arange(judged)
    rows, tokens = start + steps, drafts[:judged]
    if judged == 0:
        return _Verdict(0, tokens)
    if rates is None:
        bound = np.log(uniforms[:judged]) + stats.draft_logprobs(
            state, steps, rows, tokens, temperature
        )
        agreed = stats.target_logprobs(rows, tokens) > bound
    else:
        agreed = uniforms[:judged] < rates[:judged]
    accepted = leading(agreed)
    last = np.array([start + min(accepted, judged - 1)])
    return _Verdict(
        accepted,
        tokens[: accepted + 1],
        float(stats.target_lse(last)[0]),
        float(stats.draft_lse(last)[0]),
    )


def _residual_mass(
    stats: Statistics, partials: Array | None, p: np.float32, row: int, token: int
) -> np.float32:
    """Mass that block verification would resample from at ``row``, whose draft is ``token``."""
    if partials is not None:
        return padded_sum(partials[row], stats.padded_blocks)
    score = stats.target_logprobs(np.array([row]), np.array([token]))
    return np.float32(p * (np.float32(1.0) - np.exp(score)[0]))


def _judge_block(
    drafts: Array,
    stats: Statistics,
    start: int,
    uniforms: Array,
    log_p: Array,
    partials: Array | None,
) -> _Verdict:
    """Accept the longest prefix whose test passes (Sun et al. 2024, arXiv:2403.10444)."""
    judged = leading(drafts >= 0)
    one, accepted = np.float32(1.0), 0
    for step in range(judged):
        p = np.exp(log_p[start + step])
        threshold = p
        if step + 1 < drafts.shape[0] and drafts[step + 1] >= 0:
            mass = _residual_mass(stats, partials, p, start + step + 1, int(drafts[step + 1]))
            rest = mass + one - p
            threshold = mass / rest if rest > 0.0 else one
        if uniforms[step] <= threshold:
            accepted = step + 1
    verdict = _Verdict(accepted, drafts[:judged])
    if accepted < drafts.shape[0]:
        row = np.array([start + accepted])
        verdict.target_lse = float(stats.target_lse(row)[0])
        verdict.draft_lse = float(stats.draft_lse(row)[0])
    return verdict


@twin_of(UTILS + "_rejection_kernel")
def reject(
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    rejected_steps_ptr: torch.Tensor,
    target_rejected_logsumexp_ptr: torch.Tensor,
    draft_rejected_logsumexp_ptr: torch.Tensor,
    target_logits_ptr: torch.Tensor,
    target_logits_stride: int,
    target_local_argmax_ptr: torch.Tensor,
    target_local_argmax_stride: int,
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
    seed_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    synthetic_conditional_rates_ptr: torch.Tensor | None,
    cumulative_log_p_ptr: torch.Tensor | None,
    local_residual_mass_ptr: torch.Tensor | None,
    local_residual_mass_stride: int,
    PADDED_VOCAB_NUM_BLOCKS: int,
    HAS_DRAFT_LOGITS: bool,
    SYNTHETIC_MODE: bool,
    USE_BLOCK_VERIFICATION: bool,
    FLY_WINDOW_SIZE: int = 0,
    STEP_SEEDS: bool = False,
) -> None:
    """Accepted length and tokens of every request's window, and the statistics to resample with."""
    if FLY_WINDOW_SIZE > 0:
        raise NotImplementedError('rejection_sample_method "fly" has no native CPU implementation')
    stats = Statistics(
        target_logits_ptr,
        array(target_local_max_ptr),
        array(target_local_sumexp_ptr),
        draft_logits_ptr if HAS_DRAFT_LOGITS else None,
        array(draft_local_max_ptr),
        array(draft_local_sumexp_ptr),
        PADDED_VOCAB_NUM_BLOCKS,
    )
    argmaxes, draft_sampled = array(target_local_argmax_ptr), array(draft_sampled_ptr)
    sampled, lengths = array(sampled_ptr), array(rejected_steps_ptr)
    target_lse = array(target_rejected_logsumexp_ptr)
    draft_lse = array(draft_rejected_logsumexp_ptr)
    temperatures, seeds, positions = array(temp_ptr), array(seed_ptr), array(pos_ptr)
    rates = None
    if SYNTHETIC_MODE:
        assert synthetic_conditional_rates_ptr is not None
        rates = array(synthetic_conditional_rates_ptr)
    log_p = None if cumulative_log_p_ptr is None else array(cumulative_log_p_ptr)
    partials = None if local_residual_mass_ptr is None else array(local_residual_mass_ptr)
    bounds = cu_num_logits_ptr.tolist()
    for request, state in enumerate(idx_mapping_ptr.tolist()):
        start, end = bounds[request], bounds[request + 1]
        drafts = draft_sampled[start + 1 : end].astype(np.int64)
        count, temperature, seed = drafts.shape[0], temperatures[state], int(seeds[state])
        mixed = STEP_SEEDS and USE_BLOCK_VERIFICATION
        stream = [step_seed(seed, step) if mixed else seed for step in range(count)]
        uniforms = philox_uniforms(
            np.array(stream, dtype=np.int64), positions[start : start + count]
        )
        limits = None if rates is None else rates[:count]
        if temperature == 0.0:
            window = slice(start, start + count)
            verdict = _judge_greedy(
                drafts, stats.target_max[window], argmaxes[window], uniforms, limits
            )
        elif USE_BLOCK_VERIFICATION:
            assert log_p is not None
            verdict = _judge_block(drafts, stats, start, uniforms, log_p, partials)
        else:
            verdict = _judge_tokens(drafts, stats, start, state, temperature, uniforms, limits)
        lengths[request] = verdict.accepted
        sampled[request, : verdict.tokens.shape[0]] = verdict.tokens
        target_lse[request], draft_lse[request] = verdict.target_lse, verdict.draft_lse
