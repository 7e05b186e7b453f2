"""Blocked softmax statistics, summed in the order of vLLM's rejection kernels.

The kernels split a row into blocks of BLOCK_SIZE logits and keep each block's maximum and
sum of exponentials. Rows are padded with -inf to whole blocks here, and block statistics
to a power of two, so that numpy adds the same numbers in the same order as the Triton
interpreter and acceptance decisions agree to the bit.
"""

import numpy as np

from vllm_dspark.cpu.arrays import Array


def blocks_of(values: Array, block_size: int, fill: float = -np.inf) -> Array:
    """[num_blocks, block_size]: the row cut into blocks, the last one filled up."""
    num_values = values.shape[0]
    num_blocks = -(-num_values // block_size)
    if num_values == num_blocks * block_size and values.flags.c_contiguous:
        return values.reshape(num_blocks, block_size)
    padded = np.full(num_blocks * block_size, fill, dtype=values.dtype)
    padded[:num_values] = values
    return padded.reshape(num_blocks, block_size)


def max_and_sumexp(values: Array, block_size: int) -> tuple[Array, Array]:
    """Per block: maximum (NaN skipped) and sum of exp(value - maximum); 0 if all are -inf."""
    blocks = blocks_of(values, block_size)
    maxima = np.fmax.reduce(blocks, axis=1)
    with np.errstate(invalid="ignore"):
        sums = np.exp(blocks - maxima[:, None]).sum(axis=1)
    return maxima, np.where(maxima > -np.inf, sums, np.float32(0.0))


def _padded(stats: Array, width: int, fill: float) -> Array:
    """[rows, width]: block statistics filled up to ``width`` columns."""
    if stats.shape[1] == width:
        return np.ascontiguousarray(stats)
    padded = np.full((stats.shape[0], width), fill, dtype=stats.dtype)
    padded[:, : stats.shape[1]] = stats
    return padded


def logsumexp(maxima: Array, sumexps: Array, padded_width: int) -> Array:
    """[rows] float32 log-sum-exp from block statistics [rows, num_blocks]."""
    maxima = _padded(maxima, padded_width, -np.inf)
    sumexps = _padded(sumexps, padded_width, 0.0)
    largest = np.fmax.reduce(maxima, axis=1)
    with np.errstate(invalid="ignore", divide="ignore"):
        total = (sumexps * np.exp(maxima - largest[:, None])).sum(axis=1)
        result: Array = largest + np.log(total)
    return result


def padded_sum(stats: Array, padded_width: int) -> np.float32:
    """Sum of one row of block statistics."""
    return np.float32(_padded(stats[None], padded_width, 0.0).sum(axis=1)[0])
