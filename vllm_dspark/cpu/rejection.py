"""Twins of the verification kernels in vLLM's ``gpu/spec_decode/rejection_sampler_utils.py``.

Logits row l of a request holds the target's distribution after its l-th window token;
``draft_sampled[l + 1]`` is the draft it judges, -1 a placeholder that is never accepted,
and the last row of a request (bonus) judges nothing. Draft logits are stored before
temperature. Checked against vLLM 0.32.0. In 0.33.0 the statistics kernels take num_logits
in place of num_speculative_steps, block verification draws from a seed per step
(``STEP_SEEDS``), and method "fly" (FLY_WINDOW_SIZE > 0) exists, which is refused here.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array, float_rows
from vllm_dspark.cpu.gumbel import block_argmax, step_seed
from vllm_dspark.cpu.noise import philox_uniforms
from vllm_dspark.cpu.softmax_stats import blocks_of, logsumexp, max_and_sumexp, padded_sum
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
    return np.append(local_pos[1:], 0) == 0


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


def leading(flags: Array) -> int:
    """Number of true entries before the first false one."""
    return int(flags.shape[0] if flags.all() else flags.argmin())


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


@dataclass
class _Verdict:
    """Outcome of one request's window."""

    accepted: int
    tokens: Array  # what goes to the sampled row, from column 0
    target_lse: Any = np.float32(0.0)
    draft_lse: Any = np.float32(0.0)


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
        accepted, tokens[: accepted + 1], stats.target_lse(last)[0], stats.draft_lse(last)[0]
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
    drafts: Array, stats: Statistics, start: int, uniforms: Array, log_p: Array, partials: Array | None
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
        verdict.target_lse, verdict.draft_lse = stats.target_lse(row)[0], stats.draft_lse(row)[0]
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
    target_lse, draft_lse = array(target_rejected_logsumexp_ptr), array(draft_rejected_logsumexp_ptr)
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
        uniforms = philox_uniforms(np.array(stream, dtype=np.int64), positions[start : start + count])
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
