"""Views of torch CPU tensors as numpy arrays, and of raw addresses as int32 tables."""

import ctypes
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[Any]


def array(tensor: torch.Tensor) -> Array:
    """Zero-copy view of a CPU tensor (bfloat16 has no numpy counterpart: see ``float_rows``)."""
    view: Array = tensor.numpy()
    return view


def flat(tensor: torch.Tensor) -> Array:
    """Zero-copy one-dimensional view of a contiguous CPU tensor."""
    return array(tensor.view(-1))


def float_rows(logits: torch.Tensor, vocab_size: int | None = None) -> Array:
    """``logits[:, :vocab_size]`` as float32: a view where it already is, else a copy."""
    rows = logits if vocab_size is None else logits[..., :vocab_size]
    return array(rows.float() if rows.dtype != torch.float32 else rows)


@lru_cache(maxsize=256)
def int32_table(address: int, num_rows: int, row_stride: int) -> Array:
    """View of ``num_rows * row_stride`` int32 values at ``address``.

    Block tables reach the kernels as addresses. The cache may keep a view of memory that
    has been freed since, which is harmless while nobody passes that address again.
    """
    count = num_rows * row_stride
    buffer: Any = (ctypes.c_int32 * count).from_address(address)
    table: Array = np.frombuffer(buffer, dtype=np.int32).reshape(num_rows, row_stride)
    return table


def segments(lengths: Array) -> tuple[Array, Array]:
    """For each element of consecutive segments: (its segment, its offset inside it)."""
    owner = np.repeat(np.arange(lengths.shape[0]), lengths)
    ends = np.cumsum(lengths)
    offset = np.arange(owner.shape[0]) - (ends - lengths)[owner]
    return owner, offset
