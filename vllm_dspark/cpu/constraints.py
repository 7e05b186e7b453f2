"""Twins of the kernels that forbid or shift tokens by rule.

They live in vLLM's ``gpu/sample/{bad_words,logit_bias,min_p}.py`` and (the grammar bitmask)
``gpu/structured_outputs.py``.

Checked against vLLM 0.32.0, same kernel signatures in 0.33.0.
"""

from itertools import pairwise

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array, float_rows
from vllm_dspark.cpu.twins import RUNNER, twin_of

NEGATIVE_INFINITY = float("-inf")


@twin_of(RUNNER + "sample.bad_words._bad_words_kernel")
def bad_words(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    bad_word_token_ids_ptr: torch.Tensor,
    bad_word_token_ids_stride: int,
    bad_word_offsets_ptr: torch.Tensor,
    bad_word_offsets_stride: int,
    num_bad_words_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    total_len_ptr: torch.Tensor,
    input_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
) -> None:
    """Forbid the last token of a bad word whose other tokens end the output, drafts included."""
    num_bad_words, all_tokens = array(num_bad_words_ptr), array(all_token_ids_ptr)
    input_ids, local_pos = array(input_ids_ptr), array(expanded_local_pos_ptr)
    for row, state in enumerate(expanded_idx_mapping_ptr.tolist()):
        count = int(num_bad_words[state])
        if count == 0:
            continue
        position = int(local_pos[row])
        drafts = input_ids[row - position + 1 : row + 1]
        committed = all_tokens[state, int(prompt_len_ptr[state]) : int(total_len_ptr[state])]
        output = np.concatenate((committed, drafts))
        offsets = bad_word_offsets_ptr[state, : count + 1].tolist()
        words = array(bad_word_token_ids_ptr[state])
        for start, end in pairwise(offsets):
            prefix = words[start : end - 1]
            if prefix.shape[0] > output.shape[0]:
                continue
            if np.array_equal(output[output.shape[0] - prefix.shape[0] :], prefix):
                logits_ptr[row, int(words[end - 1])] = NEGATIVE_INFINITY


def _keep_only(logits: torch.Tensor, tokens: torch.Tensor, vocab_size: int) -> None:
    """Forbid every token of a row but the given ones."""
    kept = logits[tokens].clone()
    logits[:vocab_size] = NEGATIVE_INFINITY
    logits[tokens] = kept


def _forbid_stops(
    logits: torch.Tensor, stops: torch.Tensor, vocab_size: int, restore: bool
) -> None:
    """Forbid stop tokens; with ``restore``, not if that would leave the row nothing to sample."""
    saved = logits[stops].clone()
    logits[stops] = NEGATIVE_INFINITY
    if restore and not bool((logits[:vocab_size] > NEGATIVE_INFINITY).any()):
        logits[stops] = torch.where(torch.isfinite(saved), saved, logits[stops])


@twin_of(RUNNER + "sample.logit_bias._bias_kernel")
def logit_bias(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    vocab_size: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_ptr: torch.Tensor,
    allowed_token_ids_stride: int,
    num_logit_bias_ptr: torch.Tensor,
    bias_token_ids_ptr: torch.Tensor,
    bias_token_ids_stride: int,
    bias_ptr: torch.Tensor,
    bias_stride: int,
    pos_ptr: torch.Tensor,
    min_lens_ptr: torch.Tensor,
    num_stop_token_ids_ptr: torch.Tensor,
    restore_when_all_masked_ptr: torch.Tensor,
    stop_token_ids_ptr: torch.Tensor,
    stop_token_ids_stride: int,
    CHECK_ALL_MASKED_ROWS: bool,
) -> None:
    """Allowed tokens, then biases, then stop tokens forbidden before the minimum length."""
    num_allowed, num_bias = array(num_allowed_token_ids_ptr), array(num_logit_bias_ptr)
    num_stops, min_lens = array(num_stop_token_ids_ptr), array(min_lens_ptr)
    positions = array(pos_ptr)
    for row, state in enumerate(expanded_idx_mapping_ptr.tolist()):
        logits = logits_ptr[row]
        if count := int(num_allowed[state]):
            _keep_only(logits, allowed_token_ids_ptr[state, :count].long(), vocab_size)
        if count := int(num_bias[state]):
            tokens = bias_token_ids_ptr[state, :count].long()
            logits[tokens] = (logits[tokens] + bias_ptr[state, :count]).to(logits.dtype)
        count = int(num_stops[state])
        if count and positions[row] + 1 < min_lens[state]:
            restore = CHECK_ALL_MASKED_ROWS and bool(restore_when_all_masked_ptr[state])
            _forbid_stops(logits, stop_token_ids_ptr[state, :count].long(), vocab_size, restore)


def _forbidden(words: Array, vocab_size: int) -> Array:
    """Boolean [vocab_size]: tokens whose bit is not set; tokens past the mask are forbidden too."""
    bits = np.unpackbits(np.ascontiguousarray(words).view(np.uint8), bitorder="little")
    forbidden = np.ones(vocab_size, dtype=np.bool_)
    forbidden[: min(vocab_size, bits.shape[0])] = bits[:vocab_size] == 0
    return forbidden


@twin_of(RUNNER + "structured_outputs._apply_grammar_bitmask_kernel")
def apply_grammar_bitmask(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    logits_indices_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    bitmask_ptr: torch.Tensor,
    bitmask_stride: int,
    vocab_size: int,
    MASK_STRIDE: int,
) -> None:
    """Forbid what the grammar forbids in every logits row that exists for (request, position)."""
    bitmask, bounds = array(bitmask_ptr), array(cu_num_logits_ptr)
    for mask_row, key in enumerate(logits_indices_ptr.tolist()):
        request, position = divmod(key, MASK_STRIDE)
        row = int(bounds[request]) + position
        if row >= bounds[request + 1]:
            continue
        forbidden = torch.from_numpy(_forbidden(bitmask[mask_row], vocab_size))
        logits_ptr[row, :vocab_size].masked_fill_(forbidden, NEGATIVE_INFINITY)


@twin_of(RUNNER + "sample.min_p._min_p_kernel")
def min_p(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    min_p_ptr: torch.Tensor,
    vocab_size: int,
) -> None:
    """Forbid tokens whose probability is below min_p times that of the most likely one."""
    thresholds = array(min_p_ptr)[array(expanded_idx_mapping_ptr)]
    for row in np.flatnonzero(thresholds != 0.0).tolist():
        logits = logits_ptr[row, :vocab_size]
        values = float_rows(logits)
        lowest = np.fmax.reduce(values) + np.log(thresholds[row])
        logits.masked_fill_(torch.from_numpy(values < lowest), NEGATIVE_INFINITY)
