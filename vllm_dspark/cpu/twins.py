"""The table of native twins: which function stands in for which vLLM kernel.

A twin takes the kernel's parameters by the kernel's names (pointers arrive as tensors)
and gets no launch grid, so the number of rows to work on is read from tensor shapes.
Names that only some vLLM versions pass have defaults. ``integration.cpu_kernels`` does
the binding and passes arguments by name, which is what keeps one twin valid for several
versions of a kernel.
"""

from collections.abc import Callable
from typing import Any, TypeVar

Twin = TypeVar("Twin", bound=Callable[..., None])

RUNNER = "vllm.v1.worker.gpu."
TWINS: dict[str, Callable[..., Any]] = {}
# Kernel parameters that no twin needs: tile sizes, and features that twins refuse by a flag.
UNUSED_PARAMETERS = frozenset(
    {
        "BLOCK_SIZE",
        "BLOCK_SIZE_TRUNC",
        "CONTEXT_WIDTH",
        "DEDUPLICATE_CONTEXTS",
        "LOGITS_BLOCK_SIZE",
        "LOOKAHEAD_BLOCK",
        "PADDED_COLS",
        "PADDED_RESAMPLE_NUM_BLOCKS",
        "TOPK_BLOCK_SIZE",
        "TRITON_BLOCK_SIZE",
        "contexts_ptr",
        "contexts_stride",
        "fly_entropy_ptr",
        "fly_entropy_threshold",
        "vocab_num_blocks",
        "watermark_key_0",
        "watermark_key_1",
        "watermarking_ptr",
        "watermarking_skip_mask_ptr",
    }
)


def twin_of(kernel: str) -> Callable[[Twin], Twin]:
    """Class the decorated function as the native twin of ``kernel`` (module path and name)."""

    def enter(function: Twin) -> Twin:
        if kernel in TWINS:
            raise ValueError(f"{kernel} has two native twins: {TWINS[kernel]} and {function}")
        TWINS[kernel] = function
        return function

    return enter


def load_twins() -> dict[str, Callable[..., Any]]:
    """Import every module that defines twins and return the full table."""
    from vllm_dspark.cpu import (  # noqa: F401
        batch,
        block_tables,
        constraints,
        drafting,
        gumbel,
        logprobs,
        penalties,
        rejection,
        resampling,
        truncation,
        window_stats,
    )

    return TWINS
