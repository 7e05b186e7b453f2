"""Verification: the same tokens accepted and resampled as by vLLM's kernels, step by step.

Each case runs vLLM's own ``rejection_sample`` twice, once on the interpreted kernels and
once on the twins, and compares every token it returns; the statistics kernels are compared
on their own as well.
"""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.cpu.twin_check import compare, cumulative, interpreted, ints, native
from vllm_dspark.cpu.window_stats import UTILS

VOCAB = 300
STEPS = 4
STATES = 6
KERNELS = (
    "_compute_local_logits_stats_kernel",
    "_compute_cumulative_log_p_kernel",
    "_compute_local_residual_mass_kernel",
    "_rejection_kernel",
    "_resample_kernel",
    "_insert_resampled_kernel",
)


class _Launchable:
    def __init__(self, form: Any) -> None:
        self.form = form

    def __getitem__(self, grid: Any) -> Any:
        return self.form


@contextmanager
def kernels(monkeypatch: pytest.MonkeyPatch, use_native: bool) -> Iterator[Any]:
    """vLLM's rejection module with one form of all its kernels."""
    module = importlib.import_module(UTILS[:-1])
    with monkeypatch.context() as patch:
        for kernel in KERNELS:
            name = UTILS + kernel
            form = _Launchable(native(name)) if use_native else interpreted(name)
            patch.setattr(module, kernel, form)
        yield module


def case(
    seed: int, drafts: list[int], temperatures: list[float], draft_dtype: torch.dtype | None
) -> dict[str, Any]:
    """A batch whose drafts mostly agree with the target; draft 7 of every vocabulary is odd."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [count + 1 for count in drafts]
    total = sum(lengths)
    states = [4, 0, 3, 1, 5][: len(drafts)]
    target = torch.randn(total, VOCAB, generator=generator) * 2
    owner = torch.repeat_interleave(torch.arange(len(drafts)), torch.tensor(lengths))
    local = torch.cat([torch.arange(n) for n in lengths])
    draft_sampled = target.argmax(1).roll(1)
    draft_sampled[torch.rand(total, generator=generator) < 0.3] = 7
    draft_logits = None
    if draft_dtype is not None:
        noise = torch.randn(STATES, STEPS, VOCAB, generator=generator)
        draft_logits = noise
        for row in range(total):
            if local[row] < STEPS:
                state = states[owner[row]]
                draft_logits[state, local[row]] = target[row] + noise[state, local[row]]
        draft_logits = draft_logits.to(draft_dtype)
    mapping = torch.tensor(states)
    full = torch.zeros(STATES)
    full[states] = torch.tensor(temperatures)
    return {
        "target_logits": target,
        "draft_logits": draft_logits,
        "draft_sampled": draft_sampled.to(torch.int32),
        "cu_num_logits": cumulative(lengths),
        "pos": torch.randint(0, 4000, (total,), generator=generator),
        "idx_mapping": mapping,
        "expanded_idx_mapping": mapping[owner],
        "expanded_local_pos": local.to(torch.int32),
        "temperature": full,
        "seed": torch.randint(-(2**62), 2**62, (STATES,), generator=generator),
        "num_speculative_steps": STEPS,
    }


def sampled_tokens(sampled: torch.Tensor, num_sampled: torch.Tensor) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(sampled, num_sampled.tolist(), strict=True)]


def assert_same_tokens(monkeypatch: pytest.MonkeyPatch, arguments: dict[str, Any]) -> list[int]:
    results = []
    for use_native in (False, True):
        with kernels(monkeypatch, use_native) as module:
            results.append(sampled_tokens(*module.rejection_sample(**arguments)))
    assert results[0] == results[1]
    return [len(tokens) for tokens in results[1]]


@pytest.mark.parametrize("draft_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("block", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_mixed_batches_of_ragged_windows(
    monkeypatch: pytest.MonkeyPatch, seed: int, block: bool, draft_dtype: torch.dtype | None
) -> None:
    """Greedy and sampled requests, windows of 0..K drafts, some placeholders."""
    arguments = case(seed, [4, 0, 2, 4, 1], [0.0, 0.8, 1.0, 0.6, 1.4], draft_dtype)
    if seed % 2:
        arguments["draft_sampled"][[3, 8, 10]] = -1
    lengths = assert_same_tokens(monkeypatch, arguments | {"use_block_verification": block})
    assert all(1 <= n <= STEPS + 1 for n in lengths)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_synthetic_acceptance(monkeypatch: pytest.MonkeyPatch, temperature: float) -> None:
    arguments = case(5, [4, 4], [temperature] * 2, torch.float32)
    arguments["synthetic_conditional_rates"] = torch.tensor([0.9, 0.8, 0.5, 0.5])
    assert_same_tokens(monkeypatch, arguments)


def test_fp64_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = case(6, [4, 3], [0.9, 1.0], torch.float32)
    assert_same_tokens(monkeypatch, arguments | {"use_fp64": True})


@pytest.mark.parametrize("block", [False, True])
def test_truncated_targets(monkeypatch: pytest.MonkeyPatch, block: bool) -> None:
    """Top-k leaves -inf almost everywhere, whole blocks included; a NaN logit never wins."""
    arguments = case(7, [4, 4, 2], [0.0, 0.7, 1.0], torch.float32)
    target = arguments["target_logits"]
    target[target < target.topk(3, dim=1).values[:, -1:]] = float("-inf")
    target[0, 5] = float("nan")
    assert_same_tokens(monkeypatch, arguments | {"use_block_verification": block})


def test_drafter_with_a_narrower_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = case(8, [3, 4], [1.0, 0.5], torch.float32)
    arguments["draft_logits"] = arguments["draft_logits"][..., :280].contiguous()
    arguments["draft_sampled"].clamp_(max=279)
    assert_same_tokens(monkeypatch, arguments)


def test_a_certain_draft_is_accepted_and_an_impossible_one_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Both directions, so that equality above cannot come from refusing everything."""
    arguments = case(9, [4, 4], [1.0, 1.0], torch.float32)
    target, draft_logits = arguments["target_logits"], arguments["draft_logits"]
    for row in range(4):
        draft_logits[4, row] = target[row]
    arguments["draft_sampled"][6:10] = 7
    target[5:9, 7] = float("-inf")
    assert assert_same_tokens(monkeypatch, arguments) == [5, 1]


@pytest.mark.parametrize("width", [40, 128, 300])
def test_block_statistics(width: int) -> None:
    arguments = case(3, [4, 2], [0.0, 0.8], torch.bfloat16)
    target = arguments["target_logits"]
    target[1, :width] = float("-inf")
    num_blocks = -(-VOCAB // 128)
    blocked = torch.zeros(target.shape[0], num_blocks)
    compare(
        UTILS + "_compute_local_logits_stats_kernel",
        (target.shape[0], num_blocks),
        {
            "target_local_argmax_ptr": blocked.long(),
            "target_local_argmax_stride": num_blocks,
            "target_local_max_ptr": blocked,
            "target_local_max_stride": num_blocks,
            "target_local_sumexp_ptr": blocked,
            "target_local_sumexp_stride": num_blocks,
            "draft_local_max_ptr": blocked,
            "draft_local_max_stride": num_blocks,
            "draft_local_sumexp_ptr": blocked,
            "draft_local_sumexp_stride": num_blocks,
            "target_logits_ptr": target,
            "target_logits_stride": VOCAB,
            "draft_logits_ptr": arguments["draft_logits"],
            "draft_logits_stride_0": STEPS * VOCAB,
            "draft_logits_stride_1": VOCAB,
            "expanded_idx_mapping_ptr": arguments["expanded_idx_mapping"],
            "expanded_local_pos_ptr": arguments["expanded_local_pos"],
            "temp_ptr": arguments["temperature"],
            "vocab_size": VOCAB,
            "num_speculative_steps": STEPS,
            "BLOCK_SIZE": 128,
            "HAS_DRAFT_LOGITS": True,
        },
    )


def test_drafts_inside_the_prefill_become_placeholders() -> None:
    compare(
        "spec_decode.rejection_sampler._gather_draft_sampled_kernel",
        (2,),
        {
            "draft_sampled_ptr": torch.zeros(5, dtype=torch.int32),
            "pos_ptr": torch.zeros(5, dtype=torch.int64),
            "input_ids_ptr": torch.arange(100, 110, dtype=torch.int32),
            "positions_ptr": torch.arange(10),
            "logits_indices_ptr": ints(1, 2, 6, 7, 8, dtype=torch.int64),
            "expanded_idx_mapping_ptr": ints(4, 4, 0, 0, 0, dtype=torch.int64),
            "expanded_local_pos_ptr": ints(0, 1, 0, 1, 2),
            "prefill_len_ptr": ints(3, 0, 0, 0, 9, 0),
            "num_logits": 5,
            "BLOCK_SIZE": 4,
        },
    )


def test_watermarks_are_refused_with_a_reason() -> None:
    from vllm_dspark.cpu import resampling

    nothing: Any = None
    with pytest.raises(NotImplementedError, match="watermarking"):
        resampling.resample(*[nothing] * 24, WATERMARK=True)
