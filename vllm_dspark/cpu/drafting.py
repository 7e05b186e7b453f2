"""Twin of ``_prepare_dflash_inputs_kernel`` in vLLM's ``gpu/spec_decode/dflash/speculator.py``.

One block draft per request. Request r scheduled ``n`` target tokens of which ``num_rejected``
were refused; the rest is its valid context. After it come ``num_query_per_req`` query rows:
the bonus token (last sampled, or the next prefill token while prefilling in chunks), then
mask tokens. Checked against vLLM 0.32.0; 0.33.0 adds ``out_is_padding_ptr`` and clears the
padded queries' ids and positions with it.
"""

from dataclasses import dataclass

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array, flat, segments
from vllm_dspark.cpu.twins import RUNNER, twin_of


@dataclass(frozen=True)
class _Pages:
    """The drafter's block table and how positions map to its cache slots."""

    table: Array  # [num_reqs, max_num_blocks]
    block_size: int
    cp_size: int
    cp_rank: int
    interleave: int
    pad_slot: int

    def slots(self, rows: Array, positions: Array) -> Array:
        """Cache slots; the null block 0 and other ranks' positions give the pad slot."""
        span = self.block_size * self.cp_size
        columns = np.minimum(positions // span, self.table.shape[1] - 1)
        blocks = self.table[rows, columns].astype(np.int64)
        inside = positions % span
        local, owned = inside, blocks != 0
        if self.cp_size > 1:
            owned &= inside // self.interleave % self.cp_size == self.cp_rank
            rounds = inside // (self.interleave * self.cp_size)
            local = rounds * self.interleave + inside % self.interleave
        return np.where(owned, blocks * self.block_size + local, self.pad_slot)


def _context(
    pages: _Pages, bounds: Array, valid_ends: Array, target_positions: Array
) -> tuple[Array, Array, Array]:
    """(rows, positions, slots) of all target tokens; refused ones get position 0 and no slot."""
    owner, offset = segments(np.diff(bounds))
    rows = bounds[:-1][owner] + offset
    valid = rows < valid_ends[owner]
    positions = np.where(valid, target_positions[rows], 0)
    return rows, positions, np.where(valid, pages.slots(owner, positions), pages.pad_slot)


def _fill(buffer: Array, values: Array, size: int = 0, padding: int = 0) -> None:
    """Write ``values`` to the front of a flat buffer and ``padding`` after them up to ``size``."""
    buffer[: values.size] = values.reshape(-1)
    buffer[values.size : size] = padding


@twin_of(RUNNER + "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel")
def prepare_dflash_inputs(
    out_input_ids_ptr: torch.Tensor,
    out_query_positions_ptr: torch.Tensor,
    out_query_start_loc_ptr: torch.Tensor,
    out_seq_lens_ptr: torch.Tensor,
    out_query_slot_mapping_ptr: torch.Tensor,
    out_context_positions_ptr: torch.Tensor,
    out_context_slot_mapping_ptr: torch.Tensor,
    out_sample_indices_ptr: torch.Tensor,
    out_sample_pos_ptr: torch.Tensor,
    out_sample_idx_mapping_ptr: torch.Tensor,
    out_temperature_ptr: torch.Tensor,
    out_seeds_ptr: torch.Tensor,
    target_positions_ptr: torch.Tensor,
    target_query_start_loc_ptr: torch.Tensor,
    idx_mapping_ptr: torch.Tensor,
    last_sampled_ptr: torch.Tensor,
    next_prefill_tokens_ptr: torch.Tensor,
    num_sampled_ptr: torch.Tensor,
    num_rejected_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    block_table_ptr: torch.Tensor,
    block_table_stride: int,
    parallel_drafting_token_id: int,
    block_size: int,
    num_query_per_req: int,
    num_speculative_steps: int,
    max_num_reqs: int,
    max_num_tokens: int,
    max_model_len: int,
    cp_rank: int,
    SAMPLE_FROM_ANCHOR: bool,
    PAD_SLOT_ID: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    out_is_padding_ptr: torch.Tensor | None = None,
) -> None:
    """Context and query rows of a block draft, and which query rows are sampled from."""
    states = array(idx_mapping_ptr)
    num_reqs = states.shape[0]
    table = array(block_table_ptr)[:num_reqs]
    pages = _Pages(table, block_size, CP_SIZE, cp_rank, CP_INTERLEAVE, PAD_SLOT_ID)
    bounds = array(target_query_start_loc_ptr)[: num_reqs + 1]
    valid_ends = bounds[1:] - array(num_rejected_ptr)[:num_reqs]
    target_positions = array(target_positions_ptr)
    rows, positions, slots = _context(pages, bounds, valid_ends, target_positions)
    array(out_context_positions_ptr)[rows] = positions
    array(out_context_slot_mapping_ptr)[rows] = slots

    sampled = array(num_sampled_ptr)[:num_reqs] > 0
    next_prefill = flat(next_prefill_tokens_ptr)  # [num_lookahead, max_num_reqs], row 0 is next
    bonus = np.where(sampled, flat(last_sampled_ptr)[states], next_prefill[states])
    ids = np.full((num_reqs, num_query_per_req), parallel_drafting_token_id, dtype=np.int64)
    ids[:, 0] = bonus
    last_valid = target_positions[valid_ends - 1]
    query_positions = (last_valid + 1)[:, None] + np.arange(num_query_per_req)
    num_queries = ids.size
    padding = slice(num_queries, max_num_tokens)
    _fill(array(out_input_ids_ptr), ids)
    _fill(array(out_query_positions_ptr), np.minimum(query_positions, max_model_len - 1))
    query_rows = np.repeat(np.arange(num_reqs), num_query_per_req)
    _fill(array(out_query_slot_mapping_ptr), pages.slots(query_rows, query_positions.reshape(-1)))
    array(out_query_slot_mapping_ptr)[padding] = PAD_SLOT_ID
    if out_is_padding_ptr is not None:
        array(out_is_padding_ptr)[:num_queries] = False
        array(out_is_padding_ptr)[padding] = True
        array(out_input_ids_ptr)[padding] = 0
        array(out_query_positions_ptr)[padding] = 0

    skipped = 0 if SAMPLE_FROM_ANCHOR else 1
    max_samples = max_num_reqs * num_speculative_steps
    queries = np.arange(num_queries).reshape(num_reqs, num_query_per_req)
    _fill(array(out_sample_indices_ptr), queries[:, skipped:], max_samples, 0)
    _fill(array(out_sample_pos_ptr), query_positions[:, skipped:] + 1 - skipped, max_samples, 0)
    owners = np.repeat(states, num_speculative_steps)
    _fill(array(out_sample_idx_mapping_ptr), owners, max_samples, -1)
    _fill(array(out_query_start_loc_ptr), queries[:, 0], max_num_reqs + 1, num_queries)
    ends = np.minimum(last_valid + 1 + num_query_per_req, max_model_len)
    _fill(array(out_seq_lens_ptr), ends, max_num_reqs, 0)
    array(out_temperature_ptr)[states] = array(temperature_ptr)[states]
    array(out_seeds_ptr)[states] = array(seeds_ptr)[states]
