"""Dummy verifications on CUDA: they compile what a first real step would, and are timed."""

from typing import Any

import torch

from vllm_dspark.kernels.launch import describe_device, rejection_parts
from vllm_dspark.kernels.protocols import RejectBatch, RejectOps, SamplingState


def verify(runner: Any, hidden: torch.Tensor, num_reqs: int, *, widen: bool = False) -> None:
    """Logits of rows [N, H] and a greedy verification of them as `num_reqs` even windows.

    widen: hand float32 logits over, as vLLM does once a request has parameters to apply.
    """
    sampler = runner.rejection_sampler
    ops: RejectOps = sampler.ops
    logits = runner.model.compute_logits(hidden)
    num_rows, device = hidden.shape[0], hidden.device
    bounds = torch.arange(num_reqs + 1, device=device) * num_rows // num_reqs
    ops.reject(
        RejectBatch(
            target_logits=logits.float() if widen else logits,
            draft_logits=runner.speculator.draft_logits,
            draft_tokens=torch.zeros(num_rows, dtype=torch.int32, device=device),
            cu_num_logits=bounds.to(torch.int32),
            pos=torch.zeros(num_rows, dtype=torch.int64, device=device),
            idx_mapping=torch.arange(num_reqs, dtype=torch.int64, device=device),
        ),
        SamplingState(
            torch.zeros(runner.max_num_reqs, device=device),
            torch.zeros(runner.max_num_reqs, dtype=torch.int64, device=device),
        ),
        sampler.rule,
    )


@torch.inference_mode()
def warm_up_rejection(runner: Any) -> None:
    """Compile the verification kernels for every split of a row that some request count takes."""
    columns, vocab = runner.num_speculative_steps + 1, runner.vocab_size
    device = describe_device(runner.device)
    first_of_split: dict[int, int] = {}
    for num_reqs in range(1, runner.max_num_reqs + 1):
        first_of_split.setdefault(rejection_parts(device, num_reqs, columns, vocab), num_reqs)
    width = runner.model_config.get_hidden_size()
    for num_reqs in first_of_split.values():
        hidden = torch.zeros(num_reqs * columns, width, dtype=runner.dtype, device=runner.device)
        for widen in (False, True):
            verify(runner, hidden, num_reqs, widen=widen)
