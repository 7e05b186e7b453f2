"""Sampling kernels: the same noise to the bit, so the same tokens."""

from typing import Any

import numpy as np
import pytest
import torch

from tests.cpu.twin_check import compare, ints
from vllm_dspark.cpu.noise import CHUNK, gumbel_noise, gumbel_noise64

STATES = 5
AWKWARD_VOCABS = (37, 256, 1027)


def logits_rows(rows: int, vocab: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, vocab, generator=generator) * 3).to(dtype)


def spoiled(logits: torch.Tensor) -> torch.Tensor:
    """Some NaN, some -inf, one row with a single finite logit, none all NaN in a block."""
    logits[0, ::5] = float("nan")
    logits[1, ::3] = float("-inf")
    logits[2, 1:] = float("-inf")
    return logits


def gumbel_arguments(
    logits: torch.Tensor, block: int, fp64: bool, **changes: Any
) -> dict[str, Any]:
    rows, vocab = logits.shape
    num_blocks = -(-vocab // block)
    seeds = [7, -3, (1 << 62) + 5, 0, -(1 << 63)]
    positions = [0, 5, 1 << 31, 77, 12345][:rows]
    maxima = torch.float64 if fp64 else torch.float32
    arguments: dict[str, Any] = {
        "local_argmax_ptr": torch.full((rows, num_blocks), -7, dtype=torch.int64),
        "local_argmax_stride": num_blocks,
        "local_max_ptr": torch.zeros(rows, num_blocks, dtype=maxima),
        "local_max_stride": num_blocks,
        "logits_cache_ptr": None,
        "logits_cache_stride_0": 0,
        "logits_cache_stride_1": 0,
        "logits_cache_col_ptr": None,
        "logits_cache_source_ptr": None,
        "logits_cache_source_stride": 0,
        "logits_ptr": logits,
        "logits_stride": vocab,
        "expanded_idx_mapping_ptr": ints(*[3, 0, 4, 1, 2][:rows], dtype=torch.int64),
        "seeds_ptr": ints(*seeds, dtype=torch.int64),
        "pos_ptr": ints(*positions, dtype=torch.int64),
        "temp_ptr": torch.tensor([0.7, 1.0, 0.0, 1.3, 0.25]),
        "vocab_size": vocab,
        "BLOCK_SIZE": block,
        "IS_DRAFTING": False,
        "APPLY_TEMPERATURE": True,
        "USE_FP64": fp64,
        "PER_TOKEN_COL": False,
    }
    return arguments | changes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", AWKWARD_VOCABS)
@pytest.mark.parametrize("drafting", [False, True])
def test_gumbel_sampling_is_equal_to_the_bit(
    vocab: int, dtype: torch.dtype, drafting: bool
) -> None:
    logits = spoiled(logits_rows(5, vocab, dtype))
    arguments = gumbel_arguments(logits, 128, False, IS_DRAFTING=drafting)
    grid = tuple(arguments["local_argmax_ptr"].shape)
    compare("sample.gumbel._gumbel_sample_kernel", grid, arguments)


@pytest.mark.parametrize("apply_temperature", [False, True])
def test_gumbel_sampling_in_fp64(apply_temperature: bool) -> None:
    arguments = gumbel_arguments(
        logits_rows(5, 500, torch.float32), 128, True, APPLY_TEMPERATURE=apply_temperature
    )
    grid = tuple(arguments["local_argmax_ptr"].shape)
    compare("sample.gumbel._gumbel_sample_kernel", grid, arguments)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_logits_are_cached_and_padded_rows_write_nothing(
    dtype: torch.dtype, per_token: bool
) -> None:
    logits = logits_rows(4, 200, dtype)
    columns = ints(2, 0, 1, 2) if per_token else torch.tensor(1, dtype=torch.int32)
    arguments = gumbel_arguments(
        logits,
        64,
        False,
        logits_cache_ptr=torch.zeros(STATES, 3, 200, dtype=dtype),
        logits_cache_stride_0=600,
        logits_cache_stride_1=200,
        logits_cache_col_ptr=columns,
        logits_cache_source_ptr=logits_rows(4, 200, dtype, seed=9),
        logits_cache_source_stride=200,
        expanded_idx_mapping_ptr=ints(3, -1, 4, 0, dtype=torch.int64),
        IS_DRAFTING=True,
        PER_TOKEN_COL=per_token,
    )
    grid = tuple(arguments["local_argmax_ptr"].shape)
    compare("sample.gumbel._gumbel_sample_kernel", grid, arguments)


def test_a_row_of_a_wider_buffer_is_sampled_within_the_vocabulary() -> None:
    logits = logits_rows(3, 96, torch.float32)
    logits[:, 90:] = 1e9
    arguments = gumbel_arguments(logits, 32, False, vocab_size=90)
    grid = tuple(arguments["local_argmax_ptr"].shape)
    compare("sample.gumbel._gumbel_sample_kernel", grid, arguments)


def test_noise_is_made_chunk_by_chunk() -> None:
    """A vocabulary beyond one chunk draws the noise of the kernel in every chunk."""
    vocab = 2 * CHUNK + 5
    arguments = gumbel_arguments(torch.zeros(2, vocab), 1024, False)
    grid = tuple(arguments["local_argmax_ptr"].shape)
    compare("sample.gumbel._gumbel_sample_kernel", grid, arguments)


def test_no_rows_is_no_work() -> None:
    arguments = gumbel_arguments(logits_rows(0, 40, torch.float32), 32, False)
    compare("sample.gumbel._gumbel_sample_kernel", (0, 2), arguments)


@pytest.mark.parametrize("noise", [gumbel_noise, gumbel_noise64])
def test_noise_follows_the_gumbel_distribution(noise: Any) -> None:
    """Kolmogorov-Smirnov against exp(-exp(-x)); critical value for a 1e-6 false-alarm rate."""
    drawn = np.sort(noise(11, 3, 100_000).astype(np.float64))
    expected = np.exp(-np.exp(-drawn))
    ranks = np.arange(1, drawn.shape[0] + 1) / drawn.shape[0]
    assert np.abs(expected - ranks).max() < np.sqrt(np.log(2 / 1e-6) / (2 * drawn.shape[0]))


def test_temperature_skips_greedy_and_neutral_rows() -> None:
    """float32 only, as vLLM calls it (the interpreter truncates where it stores bfloat16)."""
    logits = logits_rows(5, 133, torch.float32)
    arguments = {
        "logits_ptr": logits,
        "logits_stride": 133,
        "expanded_idx_mapping_ptr": ints(3, 0, 4, 1, 2, dtype=torch.int64),
        "temperature_ptr": torch.tensor([0.7, 1.0, 0.0, 1.3, 0.25]),
        "vocab_size": 130,
        "BLOCK_SIZE": 64,
    }
    compare("sample.gumbel._temperature_kernel", (5, 3), arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_min_p(dtype: torch.dtype) -> None:
    logits = spoiled(logits_rows(4, 301, dtype))
    arguments = {
        "logits_ptr": logits,
        "logits_stride": 301,
        "expanded_idx_mapping_ptr": ints(3, 0, 4, 1, dtype=torch.int64),
        "min_p_ptr": torch.tensor([0.1, 0.0, 0.5, 0.02, 0.9]),
        "vocab_size": 301,
        "BLOCK_SIZE": 64,
    }
    compare("sample.min_p._min_p_kernel", (4,), arguments)


@pytest.mark.parametrize("drafts", [(3, 3), (-1, 3), (3, 5000)], ids=["tokens", "none", "beyond"])
@pytest.mark.parametrize("vocab", [33, 320])
def test_penalties_count_prompt_output_and_earlier_drafts(
    vocab: int, drafts: tuple[int, int]
) -> None:
    """Rows 1..3 are one window: row 3 must see the drafts of rows 1 and 2 as output.

    Slots without a draft hold -1: the soak with seed 3 ended the engine there.
    """
    generator = torch.Generator().manual_seed(vocab)
    counts = torch.randint(0, 3, (STATES, vocab), generator=generator, dtype=torch.int32)
    words = -(-vocab // 32)
    mask = torch.randint(-(2**31), 2**31 - 1, (STATES, words), generator=generator)
    arguments = {
        "logits_ptr": spoiled(logits_rows(6, vocab, torch.float32)),
        "logits_stride": vocab,
        "expanded_idx_mapping_ptr": ints(0, 3, 3, 3, 1, 4, dtype=torch.int64),
        "token_ids_ptr": ints(1, 2, *drafts, 5, 6),
        "expanded_local_pos_ptr": ints(0, 0, 1, 2, 0, 0),
        "repetition_penalty_ptr": torch.tensor([1.0, 1.3, 1.0, 0.8, 1.0]),
        "frequency_penalty_ptr": torch.tensor([0.0, 0.5, 0.0, -0.25, 0.0]),
        "presence_penalty_ptr": torch.tensor([0.0, 0.25, 0.0, 0.0, 0.75]),
        "prompt_bin_mask_ptr": mask.to(torch.int32),
        "prompt_bin_mask_stride": words,
        "output_bin_counts_ptr": counts,
        "output_bin_counts_stride": vocab,
        "vocab_size": vocab,
        "BLOCK_SIZE": 64,
    }
    compare("sample.penalties._penalties_kernel", (6, -(-vocab // 64)), arguments)


def test_new_requests_are_counted() -> None:
    """State 3 was preempted: tokens past its prompt are output; a word's bit 31 is the sign."""
    generator = torch.Generator().manual_seed(4)
    all_tokens = torch.randint(0, 70, (STATES, 20), generator=generator, dtype=torch.int32)
    all_tokens[3, :3] = ints(31, 31, 63)
    arguments = {
        "expanded_idx_mapping_ptr": ints(3, 0, dtype=torch.int64),
        "all_token_ids_ptr": all_tokens,
        "all_token_ids_stride": 20,
        "prompt_len_ptr": ints(7, 0, 0, 9, 0),
        "prefill_len_ptr": ints(7, 0, 0, 17, 0),
        "prompt_bin_mask_ptr": torch.zeros(STATES, 3, dtype=torch.int32),
        "prompt_bin_mask_stride": 3,
        "output_bin_counts_ptr": torch.zeros(STATES, 70, dtype=torch.int32),
        "output_bin_counts_stride": 70,
        "BLOCK_SIZE": 8,
    }
    compare("sample.penalties._bincount_kernel", (2, 3), arguments)


def test_bad_words_look_back_into_output_and_drafts() -> None:
    all_tokens = torch.zeros(STATES, 12, dtype=torch.int32)
    all_tokens[3, :7] = ints(9, 9, 9, 4, 5, 6, 7)  # prompt of 3, output 4 5 6 7
    words = torch.zeros(STATES, 16, dtype=torch.int32)
    words[3, :11] = ints(20, 6, 7, 21, 7, 30, 22, 4, 4, 5, 23)  # 20 | 6 7 21 | 7 30 22 | 4 4 5 23
    offsets = torch.zeros(STATES, 8, dtype=torch.int32)
    offsets[3, :5] = ints(0, 1, 4, 7, 11)
    arguments = {
        "logits_ptr": logits_rows(4, 40, torch.float32),
        "logits_stride": 40,
        "expanded_idx_mapping_ptr": ints(0, 3, 3, 3, dtype=torch.int64),
        "bad_word_token_ids_ptr": words,
        "bad_word_token_ids_stride": 16,
        "bad_word_offsets_ptr": offsets,
        "bad_word_offsets_stride": 8,
        "num_bad_words_ptr": ints(0, 0, 0, 4, 0),
        "all_token_ids_ptr": all_tokens,
        "all_token_ids_stride": 12,
        "prompt_len_ptr": ints(2, 0, 0, 3, 0),
        "total_len_ptr": ints(4, 0, 0, 7, 0),
        "input_ids_ptr": ints(1, 7, 30, 31),
        "expanded_local_pos_ptr": ints(0, 0, 1, 2),
    }
    ours = compare("sample.bad_words._bad_words_kernel", (4, 4), arguments)
    assert torch.isinf(ours["logits_ptr"]).sum() == 5  # 20 thrice, 21 once, 22 once


@pytest.mark.parametrize("check_rows", [False, True])
def test_allowed_tokens_biases_and_minimum_length(check_rows: bool) -> None:
    """State 2's stop tokens are all its grammar leaves: they come back if that is checked."""
    logits = logits_rows(5, 50, torch.float32)
    logits[2] = float("-inf")
    logits[2, [4, 6]] = torch.tensor([1.5, float("-inf")])
    arguments = {
        "logits_ptr": logits,
        "logits_stride": 50,
        "vocab_size": 50,
        "expanded_idx_mapping_ptr": ints(0, 1, 2, 3, 4, dtype=torch.int64),
        "num_allowed_token_ids_ptr": ints(3, 0, 0, 0, 0),
        "allowed_token_ids_ptr": ints(5, 9, 41, 0).repeat(STATES, 1),
        "allowed_token_ids_stride": 4,
        "num_logit_bias_ptr": ints(1, 2, 0, 0, 0),
        "bias_token_ids_ptr": ints(9, 3, 0, 0).repeat(STATES, 1),
        "bias_token_ids_stride": 4,
        "bias_ptr": torch.tensor([2.5, -50.0, 0.0, 0.0]).repeat(STATES, 1),
        "bias_stride": 4,
        "pos_ptr": ints(3, 8, 4, 9, 2, dtype=torch.int64),
        "min_lens_ptr": ints(9, 9, 9, 10, 9),
        "num_stop_token_ids_ptr": ints(0, 1, 2, 2, 2),
        "restore_when_all_masked_ptr": ints(0, 0, 1, 0, 1),
        "stop_token_ids_ptr": ints(4, 6, 0, 0).repeat(STATES, 1),
        "stop_token_ids_stride": 4,
        "BLOCK_SIZE": 4,
        "LOGITS_BLOCK_SIZE": 32,
        "CHECK_ALL_MASKED_ROWS": check_rows,
    }
    compare("sample.logit_bias._bias_kernel", (5,), arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [64, 150])
def test_grammar_bitmask_by_request_and_position(vocab: int, dtype: torch.dtype) -> None:
    """A position beyond the request's logits (trimmed window) must not touch the next one's."""
    generator = torch.Generator().manual_seed(vocab)
    words = -(-vocab // 32)
    mask = torch.randint(-(2**31), 2**31 - 1, (4, words), generator=generator).to(torch.int32)
    arguments = {
        "logits_ptr": logits_rows(5, vocab, dtype),
        "logits_stride": vocab,
        "logits_indices_ptr": ints(0, 1, 8, 10),  # stride 4: (0,0) (0,1) (2,0) (2,2)
        "cu_num_logits_ptr": ints(0, 1, 3, 5),
        "bitmask_ptr": mask,
        "bitmask_stride": words,
        "vocab_size": vocab,
        "MASK_STRIDE": 4,
        "BLOCK_SIZE": 64,
    }
    grid = (4, -(-vocab // 64))
    compare("structured_outputs._apply_grammar_bitmask_kernel", grid, arguments)
