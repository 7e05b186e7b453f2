"""A user's logits processor, in the interface of vLLM's V2 runner."""

from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor


class EvenForbidden(LogitsProcessor):
    """Even tokens are never sampled for requests with `extra_args={"forbid_even": True}`."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        super().__init__(vllm_config, req_states)
        self.asked = np.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=bool)

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        self.asked[req_idx] = bool((sampling_params.extra_args or {}).get("forbid_even"))
        return bool(self.asked[req_idx])

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """logits: [rows, V]; a request has as many rows as tokens of it are judged."""
        rows = torch.from_numpy(self.asked)[ctx.expanded_idx_mapping.cpu().long()]
        logits[rows.nonzero().flatten()[:, None], torch.arange(0, logits.shape[1], 2)] = -torch.inf
        return logits
