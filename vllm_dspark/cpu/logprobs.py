"""Twins of the kernels that report scores.

They live in vLLM's ``gpu/sample/{logprob,prompt_logprob,output}.py``, ``gpu/metrics/logits.py``
and (``_flatten_sampled_kernel``) ``gpu/spec_decode/rejection_sampler.py``.

Nothing sampled depends on these; they may differ from the interpreter in the last bits of
a sum. Checked against vLLM 0.32.0, same signatures in 0.33.0.
"""

import numpy as np
import torch

from vllm_dspark.cpu.arrays import array, float_rows, segments
from vllm_dspark.cpu.twins import RUNNER, twin_of

LOGPROB = RUNNER + "sample.logprob."
# Rows converted to float32 at a time, so that a prompt's logits are never copied whole.
ROWS_AT_ONCE = 32


@twin_of(LOGPROB + "_topk_log_softmax_kernel")
def topk_log_softmax(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    topk_ids_ptr: torch.Tensor,
    topk_ids_stride: int,
    topk: int,
    vocab_size: int,
) -> None:
    """Log-probabilities of the listed tokens of each row."""
    for start in range(0, logits_ptr.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        logits = logits_ptr[rows, :vocab_size].float()
        largest = logits.amax(dim=1, keepdim=True)
        total = torch.log(torch.exp(logits - largest).sum(dim=1, keepdim=True))
        chosen = logits.gather(1, topk_ids_ptr[rows, :topk])
        output_ptr[rows, :topk] = chosen - largest - total


@twin_of(LOGPROB + "_ranks_kernel")
def ranks(
    output_ptr: torch.Tensor,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    token_ids_ptr: torch.Tensor,
    vocab_size: int,
) -> None:
    """How many tokens of each row score at least as high as the given one (itself included)."""
    for start in range(0, logits_ptr.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        chosen = logits_ptr[rows].gather(1, token_ids_ptr[rows].long().unsqueeze(1))
        output_ptr[rows] = (logits_ptr[rows, :vocab_size] >= chosen).sum(dim=1)


@twin_of(LOGPROB + "_fill_logprob_token_ids_kernel")
def fill_logprob_token_ids(
    out_token_ids_ptr: torch.Tensor,
    out_token_ids_stride: int,
    out_valid_mask_ptr: torch.Tensor,
    out_valid_mask_stride: int,
    sampled_token_ids_ptr: torch.Tensor,
    topk_indices_ptr: torch.Tensor,
    topk_indices_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    num_per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_ptr: torch.Tensor,
    per_req_token_ids_stride: int,
    NUM_TOPK: int,
) -> None:
    """Columns of a logprobs row: the sampled token, then the request's own list or the top k."""
    out_ids, out_valid = array(out_token_ids_ptr), array(out_valid_mask_ptr)
    out_ids[:, 0] = array(sampled_token_ids_ptr)
    out_valid[:, 0] = True
    num_custom, custom = array(num_per_req_token_ids_ptr), array(per_req_token_ids_ptr)
    for row, state in enumerate(expanded_idx_mapping_ptr.tolist()):
        count = int(num_custom[state])
        ids = custom[state, :count] if count > 0 else array(topk_indices_ptr)[row, :NUM_TOPK]
        out_ids[row, 1 : 1 + ids.shape[0]] = ids
        out_valid[row, 1 : 1 + ids.shape[0]] = True


@twin_of(RUNNER + "sample.prompt_logprob._prompt_logprobs_token_ids_kernel")
def prompt_logprobs_token_ids(
    prompt_logprobs_token_ids_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
) -> None:
    """The token that follows each scheduled prompt position (0 past the end of the row)."""
    states = array(idx_mapping_ptr)
    bounds = array(query_start_loc_ptr)[: states.shape[0] + 1]
    owner, offset = segments(np.diff(bounds))
    all_tokens = array(all_token_ids_ptr)
    columns = array(num_computed_tokens_ptr)[states][owner] + 1 + offset
    inside = columns < all_tokens.shape[1]
    tokens = all_tokens[states[owner], np.where(inside, columns, 0)]
    array(prompt_logprobs_token_ids_ptr)[bounds[:-1][owner] + offset] = np.where(inside, tokens, 0)


@twin_of(RUNNER + "spec_decode.rejection_sampler._flatten_sampled_kernel")
def flatten_sampled(
    flat_sampled_ptr: torch.Tensor,
    sampled_ptr: torch.Tensor,
    sampled_stride: int,
    num_sampled_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
) -> None:
    """Sampled tokens of all requests laid out by logits row."""
    num_reqs = cu_num_logits_ptr.shape[0] - 1
    starts = array(cu_num_logits_ptr)[:num_reqs]
    owner, offset = segments(array(num_sampled_ptr)[:num_reqs])
    array(flat_sampled_ptr)[starts[owner] + offset] = array(sampled_ptr)[owner, offset]


@twin_of(RUNNER + "metrics.logits._num_nans_kernel")
def num_nans(
    logits_ptr: torch.Tensor, logits_stride: int, num_nans_ptr: torch.Tensor, vocab_size: int
) -> None:
    """NaN logits per row."""
    num_nans_ptr.copy_(torch.isnan(logits_ptr[:, :vocab_size]).sum(dim=1))


@twin_of(RUNNER + "sample.output._compact_sampling_mask_kernel")
def compact_sampling_mask(
    logits_ptr: torch.Tensor,
    logits_row_stride: int,
    logits_col_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    num_sampled_tokens_ptr: torch.Tensor,
    token_ids_ptr: torch.Tensor,
    token_ids_row_stride: int,
    packed_mask_ptr: torch.Tensor,
    packed_mask_row_stride: int,
    counts_ptr: torch.Tensor,
    vocab_size: int,
    max_num_kept: int,
    ROWS_PER_REQUEST: int,
) -> None:
    """Tokens with finite logits of each sampled row: as ids (the first ones), bits and a count."""
    token_ids, packed, counts = array(token_ids_ptr), array(packed_mask_ptr), array(counts_ptr)
    starts, num_sampled = array(cu_num_logits_ptr), array(num_sampled_tokens_ptr)
    for row in range(counts.shape[0]):
        request, slot = divmod(row, ROWS_PER_REQUEST)
        if slot >= num_sampled[request]:
            counts[row] = 0
            continue
        source = int(starts[request]) + slot
        keep = np.isfinite(float_rows(logits_ptr[source], vocab_size))
        ids = np.flatnonzero(keep)
        counts[row] = ids.shape[0]
        token_ids[row, : min(ids.shape[0], max_num_kept)] = ids[:max_num_kept]
        packed[row] = np.packbits(keep, bitorder="little")
