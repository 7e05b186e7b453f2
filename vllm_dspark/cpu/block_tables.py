"""Twins of the kernels in vLLM's ``gpu/block_table.py``.

Block tables arrive as addresses, one per KV-cache group, each int32
[max_num_reqs, max_num_blocks] with a row stride of max_num_blocks. Checked against vLLM
0.32.0; 0.33.0 adds the sliding-window parameters of ``_gather_block_tables_kernel``.
"""

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array, int32_table, segments
from vllm_dspark.cpu.twins import RUNNER, twin_of

BLOCK_TABLE = RUNNER + "block_table."


@twin_of(BLOCK_TABLE + "_gather_block_tables_kernel")
def gather_block_tables(
    batch_idx_to_req_idx: torch.Tensor,
    src_block_table_ptrs: torch.Tensor,
    dst_block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    num_blocks_ptr: torch.Tensor,
    num_blocks_stride: int,
    num_reqs: int,
    num_computed_tokens_ptr: torch.Tensor | None = None,
    sliding_window_reach_ptr: torch.Tensor | None = None,
    block_sizes_ptr: torch.Tensor | None = None,
    MASK_SLIDING_WINDOW: bool = False,
) -> None:
    """Copy the batch's block-table rows to the forward pass's tables and zero the rows after them.

    The kernel zeroes up to the padded batch; the padded size is only in the launch grid, so
    all remaining rows (as many as request slots) are zeroed here.
    """
    num_blocks = array(num_blocks_ptr)
    max_num_reqs = num_blocks.shape[1]
    states = batch_idx_to_req_idx.tolist()[:num_reqs]
    sources, targets = src_block_table_ptrs.tolist(), dst_block_table_ptrs.tolist()
    for group, stride in enumerate(block_table_strides.tolist()):
        source = int32_table(sources[group], max_num_reqs, stride)
        target = int32_table(targets[group], max_num_reqs, stride)
        for row, state in enumerate(states):
            count = num_blocks[group, state]
            target[row, :count] = source[state, :count]
            if MASK_SLIDING_WINDOW:
                assert num_computed_tokens_ptr is not None
                assert sliding_window_reach_ptr is not None and block_sizes_ptr is not None
                reach = int(sliding_window_reach_ptr[group])
                below = max(int(num_computed_tokens_ptr[state]) - reach, 0)
                num_null = below // int(block_sizes_ptr[group]) if reach > 0 else 0
                target[row, : min(num_null, count)] = 0
        target[num_reqs:] = 0


def _local_positions(
    positions: Array,
    block_size: int,
    cp_size: int,
    cp_rank: int,
    interleave: int,
    sharded: bool,
) -> tuple[Array, Array]:
    """(position inside this rank's share of the cache, whether this rank owns it)."""
    owned = np.ones(positions.shape[0], dtype=np.bool_)
    if cp_size == 1 or not sharded:
        return positions, owned
    virtual = block_size * cp_size
    inside = positions % virtual
    owned = inside // interleave % cp_size == cp_rank
    local = inside // (interleave * cp_size) * interleave + inside % interleave
    return positions // virtual * block_size + local, owned


@twin_of(BLOCK_TABLE + "_compute_slot_mappings_kernel")
def compute_slot_mappings(
    max_num_tokens: int,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    pos: torch.Tensor,
    block_table_ptrs: torch.Tensor,
    block_table_strides: torch.Tensor,
    block_sizes: torch.Tensor,
    slot_mapping_enabled: torch.Tensor,
    dcp_sharded: torch.Tensor,
    slot_mappings_ptr: torch.Tensor,
    slot_mappings_stride: int,
    cp_rank: int,
    CP_SIZE: int,
    CP_INTERLEAVE: int,
    PAD_ID: int,
) -> None:
    """Cache slot of every scheduled token per group; padding and padded requests get PAD_ID."""
    states = array(idx_mapping)
    num_reqs = states.shape[0]
    bounds = array(query_start_loc)[: num_reqs + 1]
    first, total = int(bounds[0]), int(bounds[-1])
    owner, _ = segments(np.diff(bounds))
    token_states = states[owner]
    real = token_states >= 0
    positions = array(pos)[first:total]
    num_rows = int(states.max(initial=-1)) + 1
    slot_mappings = array(slot_mappings_ptr)
    for group, address in enumerate(block_table_ptrs.tolist()):
        slots = slot_mappings[group]
        slots[total:max_num_tokens] = PAD_ID
        if num_rows == 0 or not slot_mapping_enabled[group]:
            slots[first:total] = PAD_ID
            continue
        block_size = int(block_sizes[group])
        local, owned = _local_positions(
            positions, block_size, CP_SIZE, cp_rank, CP_INTERLEAVE, bool(dcp_sharded[group])
        )
        table = int32_table(address, num_rows, int(block_table_strides[group]))
        mapped = real & owned
        columns = np.where(mapped, local // block_size, 0)
        blocks = table[token_states, columns].astype(np.int64)
        slots[first:total] = np.where(mapped, blocks * block_size + local % block_size, PAD_ID)
