"""Kernels that report scores: log-probabilities, ranks, sampling masks, NaN counts."""

import pytest
import torch

from tests.cpu.test_sampling_twins import logits_rows, spoiled
from tests.cpu.twin_check import compare, interpreted, ints, native


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_of_listed_tokens(dtype: torch.dtype) -> None:
    logits = logits_rows(35, 700, dtype)
    logits[1, ::3] = float("-inf")
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "output_ptr": torch.zeros(35, 5),
        "logits_ptr": logits,
        "logits_stride": 700,
        "topk_ids_ptr": torch.randint(0, 700, (35, 5), generator=generator),
        "topk_ids_stride": 5,
        "topk": 5,
        "vocab_size": 700,
        "BLOCK_SIZE": 128,
        "TOPK_BLOCK_SIZE": 4,
    }
    close = {"output_ptr": 2e-6}
    compare("sample.logprob._topk_log_softmax_kernel", (35,), arguments, close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_count_ties_and_ignore_nan(dtype: torch.dtype) -> None:
    """No row ranks a token of -inf: the kernel would count its own padding there.

    The interpreter compares bfloat16 by its bits, so it gets the logits as float32.
    """
    logits = spoiled(logits_rows(34, 130, dtype))
    logits[2], logits[3] = logits[5], 1.0
    arguments = {
        "output_ptr": torch.zeros(34, dtype=torch.int64),
        "logits_ptr": logits.float(),
        "logits_stride": 130,
        "token_ids_ptr": torch.arange(34, dtype=torch.int64),
        "vocab_size": 130,
        "BLOCK_SIZE": 64,
    }
    expected = compare("sample.logprob._ranks_kernel", (34,), arguments)["output_ptr"]
    arguments["logits_ptr"] = logits
    native("vllm.v1.worker.gpu.sample.logprob._ranks_kernel")(**arguments)
    assert torch.equal(arguments["output_ptr"], expected)


@pytest.mark.parametrize("num_topk", [0, 2])
def test_columns_of_a_logprobs_row(num_topk: int) -> None:
    arguments = {
        "out_token_ids_ptr": torch.zeros(3, 5, dtype=torch.int64),
        "out_token_ids_stride": 5,
        "out_valid_mask_ptr": torch.zeros(3, 5, dtype=torch.bool),
        "out_valid_mask_stride": 5,
        "sampled_token_ids_ptr": ints(11, 12, 13, dtype=torch.int64),
        "topk_indices_ptr": torch.arange(6, dtype=torch.int32).view(3, 2),
        "topk_indices_stride": 2,
        "expanded_idx_mapping_ptr": ints(4, 0, 2, dtype=torch.int64),
        "num_per_req_token_ids_ptr": ints(4, 0, 1, 0, 0),
        "per_req_token_ids_ptr": torch.arange(30, dtype=torch.int32).view(5, 6),
        "per_req_token_ids_stride": 6,
        "NUM_TOPK": num_topk,
        "PADDED_COLS": 4,
    }
    compare("sample.logprob._fill_logprob_token_ids_kernel", (3,), arguments)


def test_prompt_logprobs_are_of_the_following_token() -> None:
    arguments = {
        "prompt_logprobs_token_ids_ptr": torch.zeros(6, dtype=torch.int64),
        "query_start_loc_ptr": ints(0, 1, 4, 6),
        "idx_mapping_ptr": ints(2, 0, 1, dtype=torch.int64),
        "num_computed_tokens_ptr": ints(3, 0, 5),
        "all_token_ids_ptr": torch.arange(60, dtype=torch.int32).view(3, 20),
        "all_token_ids_stride": 20,
        "BLOCK_SIZE": 2,
    }
    compare("sample.prompt_logprob._prompt_logprobs_token_ids_kernel", (3,), arguments)


def test_sampled_tokens_are_laid_out_by_logits_row() -> None:
    arguments = {
        "flat_sampled_ptr": torch.zeros(9, dtype=torch.int64),
        "sampled_ptr": torch.arange(12).view(3, 4),
        "sampled_stride": 4,
        "num_sampled_ptr": ints(3, 0, 2),
        "cu_num_logits_ptr": ints(0, 4, 5, 9),
    }
    compare("spec_decode.rejection_sampler._flatten_sampled_kernel", (3,), arguments)


def test_sampling_masks() -> None:
    logits = logits_rows(5, 45, torch.float32)
    logits[:, ::2] = float("-inf")
    logits[1, 7] = float("inf")
    arguments = {
        "logits_ptr": logits,
        "logits_row_stride": 45,
        "logits_col_stride": 1,
        "cu_num_logits_ptr": ints(0, 3, 5),
        "num_sampled_tokens_ptr": ints(2, 1),
        "token_ids_ptr": torch.zeros(6, 10, dtype=torch.int32),
        "token_ids_row_stride": 10,
        "packed_mask_ptr": torch.zeros(6, 6, dtype=torch.uint8),
        "packed_mask_row_stride": 6,
        "counts_ptr": torch.full((6,), -7, dtype=torch.int32),
        "vocab_size": 45,
        "max_num_kept": 10,
        "ROWS_PER_REQUEST": 3,
        "BLOCK_SIZE": 64,
    }
    compare("sample.output._compact_sampling_mask_kernel", (6,), arguments)


def test_nans_are_counted() -> None:
    """The interpreter has no isnan, so the expectation is written out."""
    logits = spoiled(logits_rows(4, 33, torch.bfloat16))
    counted = torch.full((4,), -7, dtype=torch.int32)
    name = "vllm.v1.worker.gpu.metrics.logits._num_nans_kernel"
    assert interpreted(name).arg_names[:2] == ["logits_ptr", "logits_stride"]
    native(name)(logits, 33, counted, 33, BLOCK_SIZE=8)
    assert counted.tolist() == [7, 0, 0, 0]
