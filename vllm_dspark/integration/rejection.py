"""vLLM's rejection sampler with our verification of ragged windows.

vLLM's class keeps gathering, chunking, sampling parameters and logprobs; the test that accepts or
rejects, and the draw after it, are `RejectOps` (kernels/protocols.py). `logprob_token_ids`, which
vLLM's class leaves out (0.32.0, 0.33.0), is honoured here for every row.
"""

import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from vllm.v1.outputs import LogprobsTensors
from vllm.v1.worker.gpu.sample.logprob import compute_topk_scores
from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

from vllm_dspark.kernels.protocols import RejectBatch, RejectOps, RejectRule, SamplingState

logger = logging.getLogger("vllm.vllm_dspark")

_OURS = ("standard", "block", "synthetic")
# vLLM's mark for "no request wants logprobs" (sample/states.py, NO_LOGPROBS)
_NO_LOGPROBS = -1
# SamplingParams' logprobs are plain logits in these modes
_LOGITS_MODES = ("raw_logits", "processed_logits")


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
    """Verifies windows of 1..K+1 rows with `ops`.

    device_offsets: whether the step's windows are known on the device only; set by the runner for
    each step. vLLM's `enable_adaptive_verification`, which says the same of an engine, follows it.
    """

    def __init__(self, sampler: Any, speculative: Any, device: torch.device, ops: RejectOps):
        super().__init__(sampler, speculative, device)
        self.ops = ops
        self.rule = RejectRule(
            num_drafts=self.num_speculative_steps,
            method="block" if self.use_block_verification else "standard",
            synthetic_rates=self.synthetic_conditional_rates,
        )
        self.device_offsets = False
        self._listed = 0  # longest logprob_token_ids of the step under way
        self._row_states: torch.Tensor | None = None  # of the chunk under way: [N] request states

    def _verify_in_chunks(
        self,
        logits: torch.Tensor,
        input_batch: Any,
        draft_logits: torch.Tensor | None,
        draft_sampled: torch.Tensor,
        pos: torch.Tensor,
        max_chunk_logits: int,
        max_num_logprobs: int,
        verify_draft_sampled: torch.Tensor | None = None,
    ) -> Any:
        """vLLM's chunking, which needs boundaries on the host, or ours, which does not."""
        self.enable_adaptive_verification = self.device_offsets
        lists = self.sampler.logprob_token_ids_state
        # Of all requests of the step, so that the logprobs of its chunks have one width.
        self._listed = lists.max_num_token_ids(input_batch.idx_mapping_np)
        if self.device_offsets and logits.shape[0] > max_chunk_logits:
            wants_logprobs = max_num_logprobs != _NO_LOGPROBS or self._listed > 0
            wants_more = wants_logprobs or self.sampler.return_sampling_mask
            if not wants_more:
                judged = draft_sampled if verify_draft_sampled is None else verify_draft_sampled
                rows = (logits, draft_sampled, pos, judged)
                sampled, counts = self._verify_gathered(
                    rows, input_batch, draft_logits, max_chunk_logits
                )
                return sampled, counts, None, None
            # Logprobs are laid out by vLLM over one chunk: that takes the memory it takes.
            max_chunk_logits = logits.shape[0]
        return super()._verify_in_chunks(
            logits,
            input_batch,
            draft_logits,
            draft_sampled,
            pos,
            max_chunk_logits,
            max_num_logprobs,
            verify_draft_sampled,
        )

    def _verify_gathered(
        self,
        rows: tuple[torch.Tensor, ...],  # logits, drafts, positions, drafts to judge: [N, ...]
        input_batch: Any,
        draft_logits: torch.Tensor | None,
        max_chunk_logits: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Chunks of requests that fit however their windows turn out, gathered on the device."""
        bounds = input_batch.cu_num_logits
        # The host's offsets are those before trimming, so no chunk is longer than they say.
        upper = input_batch.cu_num_logits_np
        last = rows[0].shape[0] - 1
        sampled, counts = [], []
        for start, end in request_chunks(upper, max_chunk_logits):
            size = min(int(upper[end] - upper[start]), last + 1)
            own = bounds[start : end + 1]
            # Rows behind the chunk's last window are other requests' and are not looked at.
            index = torch.arange(size, device=own.device) + own[0]
            index = index.clamp_max(last)
            logits, drafts, pos, judged = (part[index] for part in rows)
            _, tokens, number = self._verify(
                logits,
                draft_logits,
                drafts,
                pos,
                own - own[0],
                input_batch.idx_mapping[start:end],
                input_batch.idx_mapping_np[start:end],
                input_batch.expanded_idx_mapping[index],
                input_batch.expanded_local_pos[index],
                input_batch.seq_lens_cpu_upper_bound.numpy()[start:end],
                judged,
            )
            sampled.append(tokens)
            counts.append(number)
        return torch.cat(sampled), torch.cat(counts)

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
        self._row_states = expanded_idx_mapping
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
                target_logits=processed,
                draft_logits=draft_logits,
                draft_tokens=verify_draft_sampled,
                cu_num_logits=cu_num_logits,
                pos=pos,
                idx_mapping=idx_mapping,
            ),
            SamplingState(states.temperature.gpu, states.seeds.gpu),
            self.rule,
        )
        return processed, outcome.sampled, outcome.num_sampled

    def _get_logprobs_tensors(
        self,
        sampled: torch.Tensor,
        num_sampled: torch.Tensor,
        logits: torch.Tensor,
        cu_num_logits: torch.Tensor,
        cu_num_logits_np: np.ndarray,
        max_num_logprobs: int,
    ) -> LogprobsTensors | None:
        """vLLM's, or with the tokens listed by requests in place of their rows' most probable.

        vLLM calls it for each chunk right after `_verify`, which notes whose rows these are.
        """
        own = self._listed > 0
        stock: LogprobsTensors | None = super()._get_logprobs_tensors(
            sampled,
            num_sampled,
            logits,
            cu_num_logits,
            cu_num_logits_np,
            0 if own else max_num_logprobs,
        )
        if not own or stock is None:
            return stock
        on_device = stock.cu_num_generated_tokens_tensor
        offsets = stock.cu_num_generated_tokens if on_device is None else on_device
        return compute_topk_scores(
            logits,
            max(max_num_logprobs, 0),
            stock.logprob_token_ids[:, 0].contiguous(),  # what was sampled in each row
            offsets,
            logprob_token_ids_state=self.sampler.logprob_token_ids_state,
            expanded_idx_mapping=self._row_states,
            max_per_req_token_ids=self._listed,
            logits_mode=self.sampler.logprobs_mode in _LOGITS_MODES,
        )


def request_chunks(offsets: npt.NDArray[np.integer], most: int) -> Iterator[tuple[int, int]]:
    """Ranges of requests whose rows, by `offsets` [n + 1], are at most `most`, or one request."""
    start, num_requests = 0, offsets.size - 1
    while start < num_requests:
        end = int(np.searchsorted(offsets, offsets[start] + most, side="right")) - 1
        end = min(max(end, start + 1), num_requests)
        yield start, end
        start = end
