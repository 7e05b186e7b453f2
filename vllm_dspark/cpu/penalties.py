"""Twins of the kernels in vLLM's ``gpu/sample/penalties.py``.

A penalty changes only tokens that occur in the prompt or in the output, so a row is
updated at those tokens alone. Checked against vLLM 0.32.0, same signatures in 0.33.0.
"""

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array
from vllm_dspark.cpu.twins import RUNNER, twin_of

PENALTIES = RUNNER + "sample.penalties."
WORD_BITS = 32


def _prompt_tokens(words: Array, vocab_size: int) -> Array:
    """Boolean [vocab_size]: bits set in the packed prompt mask."""
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    seen = np.zeros(vocab_size, dtype=np.bool_)
    seen[: min(vocab_size, bits.shape[0])] = bits[:vocab_size]
    return seen


@twin_of(PENALTIES + "_penalties_kernel")
def penalties(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    repetition_penalty_ptr: torch.Tensor,
    frequency_penalty_ptr: torch.Tensor,
    presence_penalty_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
    vocab_size: int,
) -> None:
    """Repetition, frequency and presence penalties, earlier drafts of the window included."""
    repetition, frequency = array(repetition_penalty_ptr), array(frequency_penalty_ptr)
    presence = array(presence_penalty_ptr)
    token_ids, local_pos = array(token_ids_ptr), array(expanded_local_pos_ptr)
    one = np.float32(1.0)
    for row, state in enumerate(expanded_idx_mapping_ptr.tolist()):
        scale, freq, pres = repetition[state], frequency[state], presence[state]
        if scale == 1.0 and freq == 0.0 and pres == 0.0:
            continue
        first = row - int(local_pos[row])
        drafts = token_ids[first + 1 : row + 1]
        counts = array(output_bin_counts_ptr[state])[:vocab_size]
        # vLLM marks slots that hold no draft with -1 (a step that begins inside the prefill)
        drafts = drafts[(drafts >= 0) & (drafts < vocab_size)]
        if drafts.shape[0]:
            counts = counts + np.bincount(drafts, minlength=vocab_size)
        touched = counts > 0
        if scale != 1.0:
            touched |= _prompt_tokens(array(prompt_bin_mask_ptr[state]), vocab_size)
        tokens = np.flatnonzero(touched)
        target = logits_ptr[row]
        values = target[tokens].float().numpy()
        if scale != 1.0:
            values = values * np.where(values > 0, one / scale, scale)
        occurrences = counts[tokens]
        values = values - freq * occurrences.astype(np.float32)
        values = values - pres * (occurrences > 0).astype(np.float32)
        target[tokens] = torch.from_numpy(values).to(target.dtype)


@twin_of(PENALTIES + "_bincount_kernel")
def bincount(
    expanded_idx_mapping_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prompt_len_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    prompt_bin_mask_ptr: torch.Tensor,
    prompt_bin_mask_stride: int,
    output_bin_counts_ptr: torch.Tensor,
    output_bin_counts_stride: int,
) -> None:
    """Mark a new request's prompt tokens and count the outputs it already has (preempted)."""
    all_tokens, prompt_mask = array(all_token_ids_ptr), array(prompt_bin_mask_ptr)
    output_counts = array(output_bin_counts_ptr)
    prompt_lens, prefill_lens = array(prompt_len_ptr), array(prefill_len_ptr)
    for state in expanded_idx_mapping_ptr.tolist():
        prompt_len, prefill_len = int(prompt_lens[state]), int(prefill_lens[state])
        prompt = np.unique(all_tokens[state, : min(prompt_len, prefill_len)])
        bits = np.left_shift(np.uint32(1), (prompt % WORD_BITS).astype(np.uint32))
        words = prompt_mask[state].view(np.uint32)
        np.bitwise_or.at(words, prompt // WORD_BITS, bits)
        np.add.at(output_counts[state], all_tokens[state, prompt_len:prefill_len], 1)
