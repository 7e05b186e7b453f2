"""vLLM's rejection sampler with our verification of ragged windows.

vLLM's class keeps gathering, chunking, sampling parameters and logprobs; the test that accepts or
rejects, and the draw after it, are `RejectOps` (kernels/protocols.py).
"""

import logging
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_dspark.kernels.protocols import RejectBatch, RejectOps, RejectRule, SamplingState

logger = logging.getLogger("vllm.vllm_dspark")

_OURS = ("standard", "block", "synthetic")


def replace_rejection_sampler(
    stock: RejectionSampler, speculative: Any, device: torch.device, ops: RejectOps
) -> RejectionSampler:
    """Ours with the sampler of `stock`, or `stock` itself for what we do not serve."""
    method = speculative.rejection_sample_method
    if method not in _OURS or stock.watermark_key is not None:
        reason = "watermarking" if stock.watermark_key is not None else f"method {method!r}"
        logger.warning("vllm-dspark: vLLM's own rejection sampler is kept for %s", reason)
        return stock
    return DSparkRejectionSampler(stock.sampler, speculative, device, ops)


class DSparkRejectionSampler(RejectionSampler):
    """Verifies windows of 1..K+1 rows with `ops`."""

    def __init__(self, sampler: Any, speculative: Any, device: torch.device, ops: RejectOps):
        super().__init__(sampler, speculative, device)
        self.ops = ops
        self.rule = RejectRule(
            num_drafts=self.num_speculative_steps,
            method="block" if self.use_block_verification else "standard",
            synthetic_rates=self.synthetic_conditional_rates,
        )

    def _verify(
        self,
        logits: torch.Tensor,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        cu_num_logits: torch.Tensor,
        idx_mapping: torch.Tensor,
        idx_mapping_np: np.ndarray,
        expanded_idx_mapping: torch.Tensor,
        expanded_local_pos: torch.Tensor,
        seq_lens_upper_bound_np: np.ndarray,
        verify_draft_sampled: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        processed = self.sampler.apply_sampling_params(
            logits,
            expanded_idx_mapping,
            idx_mapping,
            idx_mapping_np,
            pos,
            draft_sampled,
            expanded_local_pos,
            seq_lens_upper_bound_np,
        )
        states = self.sampler.sampling_states
        outcome = self.ops.reject(
            RejectBatch(
                # vLLM hands bf16 through when no request has parameters to apply
                target_logits=processed.float(),
                draft_logits=draft_logits,
                draft_tokens=verify_draft_sampled,
                cu_num_logits=cu_num_logits,
                pos=pos,
                idx_mapping=idx_mapping,
            ),
            SamplingState(states.temperature.gpu, states.seeds.gpu),
            self.rule,
        )
        # Kernels reuse their outcome buffers; these two are read later, by vLLM's copy stream and
        # by the chunks of this step that follow.
        return processed, outcome.sampled.clone(), outcome.num_sampled.clone()
