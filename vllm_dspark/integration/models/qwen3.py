"""Qwen3-shaped DSpark drafter: vLLM's DFlash backbone with our heads. Checked on 0.32.0, 0.33.0."""

from collections.abc import Iterable
from typing import Any

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_dspark.integration.models.head import build_head, is_head_tensor
from vllm_dspark.kernels.protocols import DraftHead

# In checkpoints for training only, or placeholders that every format of ours ignores.
_IGNORED = ("t2d", "mask_embedding")


class Qwen3Drafter(DFlashQwen3ForCausalLM):
    """Backbone, context KV and lm_head are vLLM's; everything after the lm_head is `draft_head`."""

    draft_head: DraftHead

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        # `draft_head` scales base logits and bias together, so the processor must not.
        self.logits_processor.scale = 1.0

    def compute_draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V_d] base logits, neither scaled nor biased."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Split the checkpoint into backbone and head; a name that neither knows is an error."""
        backbone: dict[str, torch.Tensor] = {}
        head: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in _IGNORED:
                continue
            if is_head_tensor(name):
                head[name] = tensor
            elif name.startswith("lm_head."):
                backbone[name] = tensor
            else:
                backbone[f"model.{name}"] = tensor
        self.has_own_lm_head = "lm_head.weight" in backbone
        self.has_own_embed_tokens = "model.embed_tokens.weight" in backbone
        self._load_backbone(backbone)
        device = self.model.norm.weight.device
        self.draft_head = build_head(self.config, head, self.model.norm.weight.dtype, device)
        self.model._build_fused_kv_buffers()

    def _load_backbone(self, tensors: dict[str, torch.Tensor]) -> None:
        # Absent embeddings and lm_head are shared from the target after loading; the other two
        # parameters exist in vLLM's module only.
        unloaded: dict[str, Any] = {"mask_embedding": None, "draft_id_to_target_id": None}
        if not self.has_own_embed_tokens:
            unloaded["embed_tokens"] = None
        if not self.has_own_lm_head:
            unloaded["lm_head"] = None
        AutoWeightsLoader(self).load_weights(
            tensors.items(), mapper=WeightsMapper(orig_to_new_substr=unloaded)
        )
