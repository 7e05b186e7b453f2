"""Inputs of a block draft: context rows, query rows and the rows that are sampled from."""

import pytest
import torch

from tests.cpu.twin_check import compare, cumulative, ints

NAME = "spec_decode.dflash.speculator._prepare_dflash_inputs_kernel"
MAX_REQS = 5
STEPS = 4


@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(
    ("lengths", "rejected"), [([5], [0]), ([5, 1, 9], [4, 0, 0]), ([1, 5, 5], [0, 2, 4])]
)
def test_block_draft_inputs(
    lengths: list[int], rejected: list[int], cp_size: int, anchor: bool
) -> None:
    """Refused rows keep no slot, the null block 0 is never written, positions are clamped."""
    generator = torch.Generator().manual_seed(sum(lengths))
    num_reqs, total, queries = len(lengths), sum(lengths), STEPS if anchor else STEPS + 1
    starts = [3, 0, 41][:num_reqs]
    positions = torch.cat([torch.arange(n) + s for n, s in zip(lengths, starts, strict=True)])
    table = torch.randint(0, 9, (MAX_REQS, 6), generator=generator, dtype=torch.int32)
    compare(
        NAME,
        (num_reqs, 4),
        {
            "out_input_ids_ptr": torch.full((40,), -7, dtype=torch.int32),
            "out_query_positions_ptr": torch.full((40,), -7, dtype=torch.int64),
            "out_query_start_loc_ptr": torch.full((MAX_REQS + 1,), -7, dtype=torch.int32),
            "out_seq_lens_ptr": torch.full((MAX_REQS,), -7, dtype=torch.int32),
            "out_query_slot_mapping_ptr": torch.full((40,), -7, dtype=torch.int64),
            "out_context_positions_ptr": torch.full((total + 2,), -7, dtype=torch.int64),
            "out_context_slot_mapping_ptr": torch.full((total + 2,), -7, dtype=torch.int64),
            "out_sample_indices_ptr": torch.full((MAX_REQS * STEPS,), -7, dtype=torch.int64),
            "out_sample_pos_ptr": torch.full((MAX_REQS * STEPS,), -7, dtype=torch.int64),
            "out_sample_idx_mapping_ptr": torch.full((MAX_REQS * STEPS,), -7, dtype=torch.int32),
            "out_temperature_ptr": torch.zeros(MAX_REQS),
            "out_seeds_ptr": torch.zeros(MAX_REQS, dtype=torch.int64),
            "target_positions_ptr": positions,
            "target_query_start_loc_ptr": cumulative(lengths),
            "idx_mapping_ptr": ints(*[4, 0, 2][:num_reqs], dtype=torch.int64),
            "last_sampled_ptr": ints(31, 32, 33, 34, 35, dtype=torch.int64).view(-1, 1),
            "next_prefill_tokens_ptr": ints(21, 22, 23, 24, 25).repeat(2, 1),
            "num_sampled_ptr": ints(*[1, 0, 3][:num_reqs]),
            "num_rejected_ptr": ints(*rejected),
            "temperature_ptr": torch.arange(5) / 4,
            "seeds_ptr": torch.arange(5) - 2,
            "block_table_ptr": table,
            "block_table_stride": 6,
            "parallel_drafting_token_id": 999,
            "block_size": 8,
            "num_query_per_req": queries,
            "num_speculative_steps": STEPS,
            "max_num_reqs": MAX_REQS,
            "max_num_tokens": 40,
            "max_model_len": 52,
            "cp_rank": cp_size - 1,
            "SAMPLE_FROM_ANCHOR": anchor,
            "PAD_SLOT_ID": -1,
            "CP_SIZE": cp_size,
            "CP_INTERLEAVE": 2,
            "BLOCK_SIZE": 4,
        },
    )
