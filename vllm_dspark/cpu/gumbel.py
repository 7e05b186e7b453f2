"""Twins of the kernels in vLLM's ``gpu/sample/gumbel.py``: temperature and Gumbel-max sampling.

``_gumbel_sample_kernel`` leaves, per row and per block of BLOCK_SIZE tokens, the largest
noised logit and its token; its caller takes the argmax over blocks. NaN logits never win:
the interpreter's ``tl.max`` skips them. Checked against vLLM 0.32.0; 0.33.0 mixes the
draft column into the seed where it caches draft logits (``STEP_SEEDS``).
"""

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array, float_rows
from vllm_dspark.cpu.noise import DRAFT_POSITION_SALT, gumbel_noise, gumbel_noise64
from vllm_dspark.cpu.twins import RUNNER, twin_of

GUMBEL = RUNNER + "sample.gumbel."
SIGN_BIT = 1 << 63


def step_seed(seed: int, step: int) -> int:
    """0.33's ``spec_step_seed``: a draft step mixed into the high bits of a request's seed."""
    mixed = (seed ^ step << 32) & (1 << 64) - 1
    return mixed - (1 << 64) if mixed & SIGN_BIT else mixed


def block_argmax(values: Array, block_size: int, tokens: Array, maxima: Array) -> None:
    """Per block of ``values``: its largest non-NaN value and the first token that has it."""
    num_values = values.shape[0]
    num_full = num_values // block_size
    body = values[: num_full * block_size].reshape(num_full, block_size)
    best = body.argmax(axis=1)
    tokens[:num_full] = np.arange(num_full) * block_size + best
    maxima[:num_full] = body[np.arange(num_full), best]
    if num_values > num_full * block_size:
        tail = values[num_full * block_size :]
        tokens[num_full] = num_full * block_size + tail.argmax()
        maxima[num_full] = values[tokens[num_full]]
    num_blocks = -(-num_values // block_size)
    if np.isnan(maxima[:num_blocks]).any():
        block_argmax(np.where(np.isnan(values), -np.inf, values), block_size, tokens, maxima)


def noised(values: Array, seed: int, position: int, is_drafting: bool, use_fp64: bool) -> Array:
    """``values`` plus the Gumbel noise of one position of a request's stream."""
    if is_drafting:
        position += DRAFT_POSITION_SALT
    if use_fp64:
        summed: Array = values.astype(np.float64) + gumbel_noise64(seed, position, values.shape[0])
        return summed
    noise = gumbel_noise(seed, position, values.shape[0])
    return np.add(values, noise, out=noise)


@twin_of(GUMBEL + "_temperature_kernel")
def temperature(
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    temperature_ptr: torch.Tensor,
    vocab_size: int,
) -> None:
    """Divide each row by its request's temperature, unless that is 0 (greedy) or 1."""
    temperatures = array(temperature_ptr)[array(expanded_idx_mapping_ptr)]
    for row in np.flatnonzero((temperatures != 0.0) & (temperatures != 1.0)).tolist():
        logits = logits_ptr[row, :vocab_size]
        logits.copy_(logits.float().div_(float(temperatures[row])))


@twin_of(GUMBEL + "_gumbel_sample_kernel")
def gumbel_sample(
    local_argmax_ptr: torch.Tensor,
    local_argmax_stride: int,
    local_max_ptr: torch.Tensor,
    local_max_stride: int,
    logits_cache_ptr: torch.Tensor | None,
    logits_cache_stride_0: int,
    logits_cache_stride_1: int,
    logits_cache_col_ptr: torch.Tensor | None,
    logits_cache_source_ptr: torch.Tensor | None,
    logits_cache_source_stride: int,
    logits_ptr: torch.Tensor,
    logits_stride: int,
    expanded_idx_mapping_ptr: torch.Tensor,
    seeds_ptr: torch.Tensor,
    pos_ptr: torch.Tensor,
    temp_ptr: torch.Tensor,
    vocab_size: int,
    BLOCK_SIZE: int,
    IS_DRAFTING: bool,
    APPLY_TEMPERATURE: bool,
    USE_FP64: bool,
    PER_TOKEN_COL: bool,
    STEP_SEEDS: bool = False,
) -> None:
    """Gumbel-max per row and block, plain argmax at temperature 0; caches draft logits if asked."""
    tokens, maxima = array(local_argmax_ptr), array(local_max_ptr)
    rows = float_rows(logits_ptr, vocab_size)
    temperatures, seeds = array(temp_ptr), array(seeds_ptr)
    positions = pos_ptr.tolist()
    columns = None if logits_cache_col_ptr is None else logits_cache_col_ptr.view(-1).tolist()
    for row, state in enumerate(expanded_idx_mapping_ptr.tolist()):
        temperature = temperatures[state] if state >= 0 else np.float32(0.0)
        seed = int(seeds[state]) if state >= 0 else 0
        if logits_cache_ptr is not None:
            assert columns is not None and logits_cache_source_ptr is not None
            column = columns[row if PER_TOKEN_COL else 0]
            if state >= 0:
                source = logits_cache_source_ptr[row, :vocab_size]
                logits_cache_ptr[state, column, :vocab_size].copy_(source)
            if STEP_SEEDS:
                seed = step_seed(seed, column)
        values = rows[row]
        if temperature != 0.0:
            if APPLY_TEMPERATURE:
                values = values / temperature
            values = noised(values, seed, positions[row], IS_DRAFTING, USE_FP64)
        block_argmax(values, BLOCK_SIZE, tokens[row], maxima[row])
