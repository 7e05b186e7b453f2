"""Twins of the kernels in vLLM's ``gpu/input_batch.py`` and ``gpu/buffer_utils.py``.

They build a step's inputs from per-request state and write its results back. Batch rows
are mapped to request-state rows by ``idx_mapping``; a negative entry is a padded row.
Checked against vLLM 0.32.0; 0.33.0 adds three parameters to ``_post_update_kernel`` (the
step's draft tokens are copied into request state) and splits long writes over programs.
"""

import ctypes

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array, flat, segments
from vllm_dspark.cpu.twins import RUNNER, twin_of

INPUT_BATCH = RUNNER + "input_batch."
INT32_BYTES = 4


@twin_of(RUNNER + "buffer_utils._apply_write_kernel")
def apply_write(
    output_ptr: torch.Tensor,
    output_stride: int | torch.Tensor,
    write_indices_ptr: torch.Tensor,
    write_starts_ptr: torch.Tensor,
    write_contents_ptr: torch.Tensor,
    write_cu_lens_ptr: torch.Tensor,
    write_group_ids_ptr: torch.Tensor | None,
    MULTI_GROUP: bool,
) -> None:
    """Scatter staged writes: write i puts its slice of the contents into one row."""
    rows = write_indices_ptr.tolist()
    starts = write_starts_ptr.tolist()
    ends = write_cu_lens_ptr.tolist()
    if MULTI_GROUP:
        assert write_group_ids_ptr is not None and isinstance(output_stride, torch.Tensor)
        addresses, strides = output_ptr.tolist(), output_stride.tolist()
        source = write_contents_ptr.data_ptr()
        groups, begin = write_group_ids_ptr.tolist(), 0
        for row, start, end, group in zip(rows, starts, ends, groups, strict=True):
            target = addresses[group] + (row * strides[group] + start) * INT32_BYTES
            size = (end - begin) * INT32_BYTES
            ctypes.memmove(target, source + begin * INT32_BYTES, size)
            begin = end
        return
    output, contents = flat(output_ptr), array(write_contents_ptr)
    begin = 0
    for row, start, end in zip(rows, starts, ends, strict=True):
        at = row * int(output_stride) + start
        output[at : at + end - begin] = contents[begin:end]
        begin = end


@twin_of(INPUT_BATCH + "_prepare_prefill_inputs_kernel")
def prepare_prefill_inputs(
    input_ids_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    next_prefill_tokens_stride: int,
    num_lookahead: int,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    prefill_lens_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
) -> None:
    """Copy each prefilling request's next tokens into the batch, and the ones after them aside."""
    input_ids, all_tokens = array(input_ids_ptr), array(all_token_ids_ptr)
    lookahead = array(next_prefill_tokens_ptr)
    prefill_lens, computed_lens = array(prefill_lens_ptr), array(num_computed_tokens_ptr)
    bounds = query_start_loc_ptr.tolist()
    for row, state in enumerate(idx_mapping_ptr.tolist()):
        computed, prefill_len = int(computed_lens[state]), int(prefill_lens[state])
        if state < 0 or computed >= prefill_len:
            continue
        start, end = bounds[row], bounds[row + 1]
        tokens = all_tokens[state, computed : computed + end - start]
        input_ids[start : start + tokens.shape[0]] = tokens
        position = computed + end - start
        following = all_tokens[state, position : min(position + num_lookahead, prefill_len)]
        lookahead[:num_lookahead, state] = 0
        lookahead[: following.shape[0], state] = following


@twin_of(INPUT_BATCH + "_prepare_pos_seq_lens_kernel")
def prepare_pos_seq_lens(
    pos_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    max_num_reqs: int,
) -> None:
    """Positions of all scheduled tokens, and sequence lengths with zeros after the batch."""
    states, seq_lens = array(idx_mapping_ptr), array(seq_lens_ptr)
    num_reqs = states.shape[0]
    computed = array(num_computed_tokens_ptr)[states]
    bounds = array(query_start_loc_ptr)[: num_reqs + 1]
    lengths = np.diff(bounds)
    seq_lens[:num_reqs] = computed + lengths
    seq_lens[num_reqs:max_num_reqs] = 0
    owner, offset = segments(lengths)
    array(pos_ptr)[bounds[:-1][owner] + offset] = computed[owner] + offset


@twin_of(INPUT_BATCH + "_combine_sampled_and_draft_tokens_kernel")
def combine_sampled_and_draft_tokens(
    input_ids_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor,
    draft_tokens_stride: int,
    cu_num_logits_ptr: torch.Tensor,
    logits_indices_ptr: torch.Tensor,
    NUM_NEW_SAMPLED_TOKENS: int = 1,
) -> None:
    """Rows whose logits are wanted; past the prefill also the last sampled token and its drafts."""
    states = array(idx_mapping_ptr)
    num_reqs = states.shape[0]
    input_ids = array(input_ids_ptr)
    query_ends = array(query_start_loc_ptr)[1 : num_reqs + 1]
    num_logits = np.diff(array(cu_num_logits_ptr)[: num_reqs + 1])
    logits_starts = query_ends - num_logits
    owner, offset = segments(num_logits)
    first = int(cu_num_logits_ptr[0])
    array(logits_indices_ptr)[first : first + owner.shape[0]] = logits_starts[owner] + offset

    seq_lens = array(seq_lens_ptr)[:num_reqs]
    prefill_lens = array(prefill_len_ptr)[states]
    decoding = seq_lens > prefill_lens
    if NUM_NEW_SAMPLED_TOKENS > 0:
        generated = decoding & (seq_lens - num_logits >= prefill_lens)
        last_sampled = flat(last_sampled_tokens_ptr)
        input_ids[logits_starts[generated]] = last_sampled[states[generated]]
    num_drafts = np.where(decoding, np.maximum(num_logits - NUM_NEW_SAMPLED_TOKENS, 0), 0)
    if num_drafts.any():
        owner, offset = segments(num_drafts)
        slots = (query_ends - num_drafts)[owner] + offset
        input_ids[slots] = array(draft_tokens_ptr)[states[owner], offset]


@twin_of(INPUT_BATCH + "_get_num_sampled_and_rejected_kernel")
def get_num_sampled_and_rejected(
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    seq_lens_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    prefill_len_ptr: torch.Tensor,
) -> None:
    """Logits rows that emitted a token and those that did not; none while prefilling in chunks."""
    states = array(idx_mapping_ptr)
    num_reqs = states.shape[0]
    chunked = array(seq_lens_ptr)[:num_reqs] < array(prefill_len_ptr)[states]
    num_sampled = array(num_sampled_ptr)[:num_reqs]
    num_sampled[chunked] = 0
    num_rejected = np.diff(array(cu_num_logits_ptr)[: num_reqs + 1]) - num_sampled
    num_rejected[chunked] = 0
    array(num_rejected_ptr)[:num_reqs] = num_rejected


def _append_sampled(
    states: Array,
    tokens: Array,
    all_tokens: Array,
    starts: Array,
    bin_counts: Array | None,
    num_sampled: Array,
) -> None:
    """Append each request's sampled tokens to its row, counting them where asked."""
    owner, offset = segments(np.maximum(num_sampled, 0))
    rows, sampled = states[owner], tokens[owner, offset]
    columns = starts[owner] + offset
    fits = columns < all_tokens.shape[1]
    all_tokens[rows[fits], columns[fits]] = sampled[fits]
    if bin_counts is not None:
        np.add.at(bin_counts, (rows, sampled), 1)


@twin_of(INPUT_BATCH + "_post_update_kernel")
def post_update(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    last_sampled_tokens_ptr: torch.Tensor,
    output_bin_counts_ptr: torch.Tensor | None,
    output_bin_counts_stride: int,
    sampled_tokens_ptr: torch.Tensor,
    sampled_tokens_stride: int,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor | None,
    all_token_ids_ptr: torch.Tensor,
    all_token_ids_stride: int,
    total_len_ptr: torch.Tensor,
    draft_tokens_ptr: torch.Tensor | None = None,
    draft_tokens_out_ptr: torch.Tensor | None = None,
    num_draft_tokens: int = 0,
) -> None:
    """Commit a step: append sampled tokens to request state, advance the computed lengths."""
    mapping = array(idx_mapping_ptr)
    rows = np.flatnonzero(mapping >= 0)
    states = mapping[rows]
    if draft_tokens_ptr is not None and draft_tokens_out_ptr is not None:
        array(draft_tokens_out_ptr)[states] = array(draft_tokens_ptr)[rows]
    num_sampled = array(num_sampled_ptr)[rows]
    tokens, total_len = array(sampled_tokens_ptr)[rows], array(total_len_ptr)
    _append_sampled(
        states,
        tokens,
        array(all_token_ids_ptr),
        total_len[states],
        None if output_bin_counts_ptr is None else array(output_bin_counts_ptr),
        num_sampled,
    )
    emitted = np.flatnonzero(num_sampled > 0)
    last = tokens[emitted, num_sampled[emitted] - 1]
    flat(last_sampled_tokens_ptr)[states[emitted]] = last
    total_len[states[emitted]] += num_sampled[emitted]
    advance = -array(num_rejected_ptr)[rows]
    if query_start_loc_ptr is not None:
        advance = advance + np.diff(array(query_start_loc_ptr)[: mapping.shape[0] + 1])[rows]
    array(num_computed_tokens_ptr)[states] += advance


@twin_of(INPUT_BATCH + "_post_update_num_computed_tokens_kernel")
def post_update_num_computed_tokens(
    idx_mapping_ptr: torch.Tensor,
    num_computed_tokens_ptr: torch.Tensor,
    query_start_loc_ptr: torch.Tensor,
) -> None:
    """Advance computed lengths by the scheduled query lengths (pooling models)."""
    states = array(idx_mapping_ptr)
    lengths = np.diff(array(query_start_loc_ptr)[: states.shape[0] + 1])
    array(num_computed_tokens_ptr)[states] += lengths


@twin_of(INPUT_BATCH + "_expand_idx_mapping_kernel")
def expand_idx_mapping(
    idx_mapping_ptr: torch.Tensor,
    expanded_idx_mapping_ptr: torch.Tensor,
    expanded_local_pos_ptr: torch.Tensor,
    cu_num_logits_ptr: torch.Tensor,
) -> None:
    """Per logits row: the request-state row it belongs to and its offset in the window."""
    states = array(idx_mapping_ptr)
    bounds = array(cu_num_logits_ptr)[: states.shape[0] + 1]
    owner, offset = segments(np.diff(bounds))
    rows = bounds[:-1][owner] + offset
    array(expanded_idx_mapping_ptr)[rows] = states[owner]
    array(expanded_local_pos_ptr)[rows] = offset
