"""Gemma4-shaped DSpark drafter: vLLM's decoder layers, our context keys and heads.

vLLM 0.32's own class adds the Markov bias through the capped logits processor (training adds it
raw), refuses drafters whose values have a projection of their own, and loses unknown tensors.
Checked on vLLM 0.32.0, 0.33.0.
"""

from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkModel
from vllm.model_executor.models.utils import WeightsMapper

from vllm_dspark.integration.models.standalone import StandaloneDrafter


class Gemma4Backbone(Gemma4DSparkModel):
    """vLLM's backbone without its heads, under layer names of its own."""

    hf_to_vllm_mapper: ClassVar[Any] = WeightsMapper(
        orig_to_new_stacked={
            ".gate_proj": (".gate_up_proj", 0),
            ".up_proj": (".gate_up_proj", 1),
        }
    )

    def __init__(
        self, *, vllm_config: VllmConfig, prefix: str = "", start_layer_id: int = 0
    ) -> None:
        # vLLM finds a layer's kind by the number in its name, so the number stays local and the
        # name has to differ from the target's layers instead.
        del start_layer_id
        super().__init__(vllm_config=vllm_config, prefix=f"dspark_drafter.{prefix}")
        del self.markov_head, self.confidence_head  # `draft_head` of the drafter holds both

    def _build_fused_kv_buffers(self) -> None:
        """Facts that vLLM's context KV step reads; keys and values come from the layers."""
        attentions = [layer.self_attn for layer in self.layers]
        first = attentions[0]
        self._rope_head_size = first.rotary_emb.head_size
        self._rope_cos_sin_cache = first.rotary_emb.cos_sin_cache
        self._rope_is_neox = first.rotary_emb.is_neox_style
        self._num_attn_layers = len(attentions)
        self._kv_size = first.kv_size
        self._head_dim = first.head_dim
        self._num_kv_heads = first.num_kv_heads
        self._rms_norm_eps = first.q_norm.variance_epsilon
        self._attn_layers = [attention.attn for attention in attentions]

    def _project_context_kv(
        self,
        context_states: torch.Tensor,
        num_ctx: int,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[L, n, kv_heads, head_dim] keys and values, both already normed."""
        states = self.hidden_norm(context_states)
        pairs = [layer.self_attn._kv_proj(states) for layer in self.layers]
        shape = (num_layers, num_ctx, num_kv_heads, head_dim)
        keys = torch.stack([key for key, _ in pairs]).view(shape)
        values = torch.stack([value for _, value in pairs]).view(shape)
        return keys, values

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        return all_k


class Gemma4Drafter(StandaloneDrafter):
    """DeepSpec's Gemma4DSparkModel."""

    model_cls = Gemma4Backbone
    architecture = "Gemma4DSparkModel"
    numbered_after_target = False
    packed_modules_mapping: ClassVar[dict[str, list[str]]] = {
        "gate_up_proj": ["gate_proj", "up_proj"]
    }

    def _load_backbone(self, tensors: dict[str, torch.Tensor]) -> None:
        buffers = dict(self.named_buffers())  # vLLM's loader fills parameters only
        for name in [name for name in tensors if name.endswith(".layer_scalar")]:
            buffers[name].copy_(tensors.pop(name))
        super()._load_backbone(tensors)
