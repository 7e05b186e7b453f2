"""Block tables are reached by address, so each form runs on tables of its own."""

import pytest
import torch

from tests.cpu.twin_check import cumulative, interpreted, ints, native

GATHER = "vllm.v1.worker.gpu.block_table._gather_block_tables_kernel"
SLOTS = "vllm.v1.worker.gpu.block_table._compute_slot_mappings_kernel"
MAX_REQS = 6
WIDTHS = (7, 3)  # blocks per request in each KV-cache group


def tables(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(1, 90, (MAX_REQS, width), generator=generator, dtype=torch.int32)
        for width in WIDTHS
    ]


def addresses(blocks: list[torch.Tensor]) -> torch.Tensor:
    return torch.tensor([b.data_ptr() for b in blocks], dtype=torch.uint64)


@pytest.mark.parametrize("states", [[], [2], [5, 0, 3]])
def test_rows_are_gathered_and_the_rest_zeroed(states: list[int]) -> None:
    """Stale block ids after the batch could be read by a padded request."""
    source = tables(1)
    num_blocks = torch.tensor([[7, 1, 0, 4, 5, 6], [3, 1, 0, 2, 3, 1]], dtype=torch.int32)
    results = []
    for form in (interpreted(GATHER)[(2, MAX_REQS)], native(GATHER)):
        target = tables(2)
        form(
            batch_idx_to_req_idx=torch.tensor(states, dtype=torch.int64),
            src_block_table_ptrs=addresses(source),
            dst_block_table_ptrs=addresses(target),
            block_table_strides=torch.tensor(WIDTHS),
            num_blocks_ptr=num_blocks,
            num_blocks_stride=MAX_REQS,
            num_reqs=len(states),
            BLOCK_SIZE=4,
        )
        results.append(target)
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("enabled", [(True, True), (True, False)])
@pytest.mark.parametrize("states", [[2], [5, -1, 3], [-1]])
def test_slots_of_scheduled_tokens(
    states: list[int], enabled: tuple[bool, bool], cp_size: int
) -> None:
    """-1 marks a padded request, whose table row must not be read."""
    lengths = [4, 2, 1][: len(states)]
    positions = torch.tensor([3, 4, 5, 6, 0, 1, 11][: sum(lengths)], dtype=torch.int64)
    source = tables(3)
    results = []
    for form in (interpreted(SLOTS)[(2, len(states) + 1)], native(SLOTS)):
        mappings = torch.full((2, 12), -7, dtype=torch.int64)
        form(
            max_num_tokens=12,
            idx_mapping=torch.tensor(states, dtype=torch.int64),
            query_start_loc=cumulative(lengths),
            pos=positions,
            block_table_ptrs=addresses(source),
            block_table_strides=torch.tensor(WIDTHS),
            block_sizes=ints(2, 4),
            slot_mapping_enabled=torch.tensor(enabled),
            dcp_sharded=torch.tensor([True, False]),
            slot_mappings_ptr=mappings,
            slot_mappings_stride=12,
            cp_rank=cp_size - 1,
            CP_SIZE=cp_size,
            CP_INTERLEAVE=1,
            PAD_ID=-1,
            TRITON_BLOCK_SIZE=2,
        )
        results.append(mappings)
    assert torch.equal(*results)
