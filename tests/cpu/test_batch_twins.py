"""Batch bookkeeping: inputs built and results committed exactly as the kernels do."""

import pytest
import torch

from tests.cpu.twin_check import compare, cumulative, ints

MAX_REQS = 6
WIDTH = 23  # max_model_len


def random_state(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def tokens(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randint(1, 999, shape, generator=generator, dtype=torch.int32)


def test_staged_writes_of_uneven_lengths() -> None:
    contents = torch.arange(100, 109, dtype=torch.int32)
    arguments = {
        "output_ptr": torch.zeros(MAX_REQS, WIDTH, dtype=torch.int32),
        "output_stride": WIDTH,
        "write_indices_ptr": ints(4, 0, 4),
        "write_starts_ptr": ints(0, 19, 7),
        "write_contents_ptr": contents,
        "write_cu_lens_ptr": ints(3, 7, 9),
        "write_group_ids_ptr": None,
        "BLOCK_SIZE": 4,
        "MULTI_GROUP": False,
    }
    compare("buffer_utils._apply_write_kernel", (3,), arguments)


def test_staged_writes_of_one_element_and_float_contents() -> None:
    arguments = {
        "output_ptr": torch.zeros(MAX_REQS),
        "output_stride": 1,
        "write_indices_ptr": ints(5, 1),
        "write_starts_ptr": ints(0, 0),
        "write_contents_ptr": torch.tensor([0.25, -1.5]),
        "write_cu_lens_ptr": ints(1, 2),
        "write_group_ids_ptr": None,
        "BLOCK_SIZE": 4,
        "MULTI_GROUP": False,
    }
    compare("buffer_utils._apply_write_kernel", (2,), arguments)


def test_staged_writes_to_several_tables_by_address() -> None:
    """Tables are reached by address, so each form gets its own; a wrong stride would overlap."""
    from tests.cpu.twin_check import interpreted, native

    name = "vllm.v1.worker.gpu.buffer_utils._apply_write_kernel"
    results = []
    for form in (interpreted(name)[(3,)], native(name)):
        tables = [torch.zeros(4, 8, dtype=torch.int32), torch.zeros(4, 5, dtype=torch.int32)]
        form(
            output_ptr=torch.tensor([t.data_ptr() for t in tables], dtype=torch.uint64),
            output_stride=torch.tensor([8, 5]),
            write_indices_ptr=ints(1, 3, 0),
            write_starts_ptr=ints(2, 0, 4),
            write_contents_ptr=torch.arange(1, 8, dtype=torch.int32),
            write_cu_lens_ptr=ints(4, 6, 7),
            write_group_ids_ptr=ints(0, 1, 1),
            BLOCK_SIZE=2,
            MULTI_GROUP=True,
        )
        results.append(tables)
    for theirs, ours in zip(*results, strict=True):
        assert torch.equal(theirs, ours)


@pytest.mark.parametrize("num_lookahead", [1, 3])
def test_prefill_inputs_with_decoding_rows_between(num_lookahead: int) -> None:
    generator = random_state(num_lookahead)
    lengths = [3, 1, 5]
    arguments = {
        "input_ids_ptr": torch.full((12,), -7, dtype=torch.int32),
        "next_prefill_tokens_ptr": torch.full((num_lookahead, MAX_REQS), -7, dtype=torch.int32),
        "next_prefill_tokens_stride": MAX_REQS,
        "num_lookahead": num_lookahead,
        "idx_mapping_ptr": ints(4, 0, 2, dtype=torch.int64),
        "query_start_loc_ptr": cumulative([*lengths, 0, 0]),
        "all_token_ids_ptr": tokens(generator, MAX_REQS, WIDTH),
        "all_token_ids_stride": WIDTH,
        "prefill_lens_ptr": ints(5, 0, 9, 0, 10, 0),
        "num_computed_tokens_ptr": ints(5, 0, 4, 0, 6, 0),
        "BLOCK_SIZE": 2,
        "LOOKAHEAD_BLOCK": 1 if num_lookahead == 1 else 4,
    }
    compare("input_batch._prepare_prefill_inputs_kernel", (3,), arguments)


@pytest.mark.parametrize("lengths", [[], [1, 1, 1, 1], [7], [3, 1, 9, 2]])
def test_positions_and_sequence_lengths(lengths: list[int]) -> None:
    states = torch.tensor([5, 0, 3, 1][: len(lengths)], dtype=torch.int64)
    arguments = {
        "pos_ptr": torch.full((20,), -7, dtype=torch.int64),
        "seq_lens_ptr": torch.full((MAX_REQS,), -7, dtype=torch.int32),
        "idx_mapping_ptr": states,
        "query_start_loc_ptr": cumulative(lengths),
        "num_computed_tokens_ptr": ints(11, 0, 5, 2, 8, 13),
        "max_num_reqs": MAX_REQS,
        "BLOCK_SIZE": 4,
    }
    grid = (len(lengths) + 1,)
    compare("input_batch._prepare_pos_seq_lens_kernel", grid, arguments)


def test_padded_query_starts_are_ignored() -> None:
    """query_start_loc is longer than the batch where a graph pads it."""
    arguments = {
        "pos_ptr": torch.full((8,), -7, dtype=torch.int64),
        "seq_lens_ptr": torch.full((MAX_REQS,), -7, dtype=torch.int32),
        "idx_mapping_ptr": ints(2, 1, dtype=torch.int64),
        "query_start_loc_ptr": ints(0, 2, 5, 5, 5, 5, 5),
        "num_computed_tokens_ptr": ints(11, 0, 5, 2, 8, 13),
        "max_num_reqs": MAX_REQS,
        "BLOCK_SIZE": 4,
    }
    compare("input_batch._prepare_pos_seq_lens_kernel", (3,), arguments)


@pytest.mark.parametrize("new_tokens", [0, 1])
@pytest.mark.parametrize("drafts", [[0, 0, 0, 0], [4, 0, 2, 1]])
def test_sampled_and_draft_tokens_enter_the_batch(drafts: list[int], new_tokens: int) -> None:
    """Rows: decoding, chunked prefill, last prefill chunk, window that straddles the prefill."""
    generator = random_state(sum(drafts))
    num_logits = [d + 1 for d in drafts]
    lengths = [n if i in (0, 3) else n + 2 for i, n in enumerate(num_logits)]
    if new_tokens == 0:
        num_logits = [max(n - 1, 1) for n in num_logits]
    seq_lens = [9 + lengths[0], lengths[1], lengths[2], 6 + lengths[3]]
    prefill = [9, seq_lens[1] + 4, seq_lens[2], seq_lens[3] - 1]
    prefill_len = torch.zeros(MAX_REQS, dtype=torch.int32)
    states = [5, 0, 3, 1]
    prefill_len[states] = torch.tensor(prefill, dtype=torch.int32)
    arguments = {
        "input_ids_ptr": torch.full((sum(lengths),), -7, dtype=torch.int32),
        "idx_mapping_ptr": ints(*states, dtype=torch.int64),
        "last_sampled_tokens_ptr": tokens(generator, MAX_REQS, 1).long(),
        "query_start_loc_ptr": cumulative(lengths),
        "seq_lens_ptr": torch.tensor(seq_lens, dtype=torch.int32),
        "prefill_len_ptr": prefill_len,
        "draft_tokens_ptr": tokens(generator, MAX_REQS, 5).long(),
        "draft_tokens_stride": 5,
        "cu_num_logits_ptr": cumulative(num_logits),
        "logits_indices_ptr": torch.full((sum(num_logits),), -7, dtype=torch.int64),
        "BLOCK_SIZE": 8,
        "NUM_NEW_SAMPLED_TOKENS": new_tokens,
    }
    compare("input_batch._combine_sampled_and_draft_tokens_kernel", (4,), arguments)


def test_sampled_and_rejected_counts() -> None:
    arguments = {
        "num_sampled_ptr": ints(3, 1, 1, 5),
        "num_rejected_ptr": ints(-7, -7, -7, -7),
        "seq_lens_ptr": ints(20, 4, 9, 30),
        "cu_num_logits_ptr": cumulative([5, 1, 1, 5]),
        "idx_mapping_ptr": ints(5, 0, 3, 1, dtype=torch.int64),
        "prefill_len_ptr": ints(8, 30, 0, 9, 0, 7),
    }
    compare("input_batch._get_num_sampled_and_rejected_kernel", (4,), arguments)


@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("queried", [False, True])
def test_step_results_are_committed(counted: bool, queried: bool) -> None:
    """Row 1 is padded (-1), row 2 sampled nothing, row 3 repeats a token."""
    generator = random_state(7)
    sampled = tokens(generator, 4, 5).long() % 31
    sampled[3] = 17
    arguments = {
        "idx_mapping_ptr": ints(5, -1, 3, 1),
        "num_computed_tokens_ptr": ints(11, 9, 5, 2, 8, 13),
        "last_sampled_tokens_ptr": torch.full((MAX_REQS, 1), -7, dtype=torch.int64),
        "output_bin_counts_ptr": torch.zeros(MAX_REQS, 31, dtype=torch.int32) if counted else None,
        "output_bin_counts_stride": 31 if counted else 0,
        "sampled_tokens_ptr": sampled,
        "sampled_tokens_stride": 5,
        "num_sampled_ptr": ints(5, 2, 0, 3),
        "num_rejected_ptr": ints(0, 1, 0, 2),
        "query_start_loc_ptr": cumulative([5, 3, 7, 5]) if queried else None,
        "all_token_ids_ptr": tokens(generator, MAX_REQS, WIDTH),
        "all_token_ids_stride": WIDTH,
        "total_len_ptr": ints(12, 10, 6, 3, 9, 14),
    }
    compare("input_batch._post_update_kernel", (4,), arguments)


def test_pooling_step_advances_computed_lengths() -> None:
    arguments = {
        "idx_mapping_ptr": ints(5, 0, 3, dtype=torch.int64),
        "num_computed_tokens_ptr": ints(11, 9, 5, 2, 8, 13),
        "query_start_loc_ptr": cumulative([2, 1, 4]),
    }
    compare("input_batch._post_update_num_computed_tokens_kernel", (3,), arguments)


@pytest.mark.parametrize("lengths", [[1], [3, 1, 5], [0, 2]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_mapping_is_expanded_to_logits_rows(lengths: list[int], dtype: torch.dtype) -> None:
    total = sum(lengths)
    arguments = {
        "idx_mapping_ptr": ints(*[4, 0, 2][: len(lengths)], dtype=dtype),
        "expanded_idx_mapping_ptr": torch.full((total,), -7, dtype=dtype),
        "expanded_local_pos_ptr": torch.full((total,), -7, dtype=torch.int32),
        "cu_num_logits_ptr": cumulative(lengths),
        "BLOCK_SIZE": 8,
    }
    compare("input_batch._expand_idx_mapping_kernel", (len(lengths),), arguments)
