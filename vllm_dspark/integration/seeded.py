"""Seeded requests draw from our noise in every step, so that their tokens repeat in any batch.

In a step in which no request has drafts, vLLM calls its plain sampler, whose noise is keyed in
another way than ours. A request's first token would then depend on whether a neighbour happened to
have drafts in that step. Steps that hold a seeded sampled request therefore go through the
rejection sampler always: a window without drafts is drawn from the target alone there.
"""

from dataclasses import replace
from typing import Any

import torch


class SeededSampling:
    """Mixin of the model runner (`sample`, checked on vLLM 0.32.0 and 0.33.0)."""

    sampler: Any
    rejection_sampler: Any

    def sample(self, hidden_states: torch.Tensor, input_batch: Any, grammar_output: Any) -> Any:
        """vLLM's sampling."""
        if (
            input_batch.num_draft_tokens == 0
            and self.rejection_sampler is not None
            and self._draws_by_seed(input_batch)
        ):
            # Only this number tells vLLM which sampler to call; windows are in other fields.
            input_batch = replace(input_batch, num_draft_tokens=input_batch.num_reqs)
        return super().sample(hidden_states, input_batch, grammar_output)  # type: ignore[misc]

    def _draws_by_seed(self, input_batch: Any) -> bool:
        """Whether a request of the step has a temperature and a seed that its user gave."""
        states, slots = self.sampler.sampling_states, input_batch.idx_mapping_np
        return bool((states.seeds_set[slots] & (states.temperature.np[slots] != 0.0)).any())
