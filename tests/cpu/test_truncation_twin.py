"""Top-k and top-p: exact where vLLM's Triton kernel bisects.

The interpreter cannot run the kernel (Triton 3.9.0's ``tl.range`` yields plain integers), so
the comparison is with vLLM's sort-based ``apply_top_k_top_p_pytorch`` where it has no ties,
and with an oracle written from the definition everywhere.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_dspark.cpu.truncation import topk_topp, truncation_mask


def oracle(values: np.ndarray, k: int | None, p: float) -> set[int]:
    """Tokens kept, by sorting (largest first, then lowest index)."""
    finite = [i for i in range(len(values)) if values[i] > -np.inf]
    kept = sorted(finite, key=lambda i: (-values[i], i))
    if k is not None and k < len(values):
        kept = kept[:k]
    if p < 1.0 and kept:
        weights = np.exp((values[kept] - values[kept[0]]).astype(np.float64))
        mass = np.cumsum(weights) / weights.sum()
        kept = kept[: int(np.argmax(mass >= p - 1e-12)) + 1]
    return set(kept)


@pytest.mark.parametrize("vocab", [50, 1027])
@pytest.mark.parametrize(("use_k", "use_p"), [(True, False), (False, True), (True, True)])
def test_agrees_with_the_sort_based_reference(vocab: int, use_k: bool, use_p: bool) -> None:
    pytest.importorskip("vllm")
    from vllm.v1.sample.ops.topk_topp_sampler import apply_top_k_top_p_pytorch

    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(8, vocab, generator=generator) * 3
    k = torch.tensor([1, 3, vocab, 17, 5, 40, 2, vocab], dtype=torch.int32)
    p = torch.tensor([0.9, 0.5, 0.99, 1.0, 0.01, 0.7, 0.3, 0.1])
    expected = apply_top_k_top_p_pytorch(logits.clone(), k if use_k else None, p if use_p else None)
    topk_topp(logits, vocab, logits, logits, logits, k, p, 8, vocab, float("-inf"), use_k, use_p)
    assert torch.equal(logits, expected)


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(
        st.one_of(st.integers(-4, 4).map(float), st.just(float("-inf")), st.just(float("nan"))),
        min_size=1,
        max_size=12,
    ),
    k=st.one_of(st.none(), st.integers(1, 14)),
    p=st.sampled_from([0.05, 0.31, 0.62, 0.93, 1.0]),
)
def test_agrees_with_the_definition(values: list[float], k: int | None, p: float) -> None:
    row = np.array(values, dtype=np.float32)
    mask = truncation_mask(row, k, p)
    kept = set(np.flatnonzero(mask if mask is not None else row > -np.inf).tolist())
    assert kept == oracle(row, k, p)
