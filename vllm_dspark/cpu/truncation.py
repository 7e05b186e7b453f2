"""Twin of ``_topk_topp_kernel`` in vLLM's ``v1/sample/ops/topk_topp_triton.py``.

The kernel searches its two cut-offs by bisection, at most 18 rounds of it; this twin finds
them exactly: the k largest logits (of equal ones at the cut the first), then of those the
fewest whose renormalised probabilities reach p, never none. A row with no more than k
finite logits (a grammar mask) is left to top-p alone. Everything else, NaN included,
becomes MASK_VALUE. Checked against vLLM 0.32.0, same signature in 0.33.0.
"""

import numpy as np
import torch

from vllm_dspark.cpu.arrays import Array, array
from vllm_dspark.cpu.twins import twin_of


def _largest(values: Array, count: int) -> Array:
    """Boolean mask of the ``count`` largest values, the first of equal ones at the cut."""
    num_values = values.shape[0]
    cut = np.partition(values, num_values - count)[num_values - count]
    keep: Array = values > cut
    ties = np.flatnonzero(values == cut)
    keep[ties[: count - np.count_nonzero(keep)]] = True
    return keep


def _nucleus_size(kept: Array, p: float) -> int:
    """How many of the ``kept`` logits, largest first, it takes to hold mass ``p``."""
    ordered = np.sort(kept)[::-1]
    mass = np.cumsum(np.exp(ordered - ordered[0]), dtype=np.float64)
    return min(int(np.searchsorted(mass, p * mass[-1])) + 1, int(ordered.shape[0]))


def truncation_mask(values: Array, k: int | None, p: float) -> Array | None:
    """Boolean mask of what top-k then top-p keep of a row; None if they keep all of it."""
    finite = values > -np.inf  # NaN compares false
    num_finite = int(np.count_nonzero(finite))
    top_k = k is not None and k < min(values.shape[0], num_finite)
    if num_finite == 0 or not (top_k or p < 1.0):
        return None
    clean = np.where(finite, values, -np.inf)
    keep = finite
    if top_k:
        assert k is not None
        keep = _largest(clean, max(k, 1))
    if p < 1.0:
        keep = _largest(np.where(keep, clean, -np.inf), _nucleus_size(clean[keep], p))
    return keep


@twin_of("vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel")
def topk_topp(
    LOGITS: torch.Tensor,
    LOGITS_STRIDE_0: int,
    BUFFER: torch.Tensor,
    PERCENTILE_TO_STD_TABLE: torch.Tensor,
    NORMAL_CDF_TO_SIGMA_TABLE: torch.Tensor,
    K: torch.Tensor,
    P: torch.Tensor,
    BATCH_SIZE: int,
    VOCAB_SIZE: int,
    MASK_VALUE: float,
    TOPK_ENABLED: bool,
    TOPP_ENABLED: bool,
    SPLIT_COVERS_PONLY: bool = False,
) -> None:
    """Top-k and top-p of float32 logits, in place."""
    rows = array(LOGITS)[:, :VOCAB_SIZE]
    limits = K.tolist() if TOPK_ENABLED else [None] * BATCH_SIZE
    masses = P.tolist() if TOPP_ENABLED else [1.0] * BATCH_SIZE
    for row, k, p in zip(rows[:BATCH_SIZE], limits, masses, strict=True):
        if SPLIT_COVERS_PONLY and (k is None or k >= VOCAB_SIZE):
            continue
        keep = truncation_mask(row, k, p)
        if keep is not None:
            row[~keep] = MASK_VALUE
