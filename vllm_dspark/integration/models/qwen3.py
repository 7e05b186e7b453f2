"""Qwen3-shaped DSpark drafter: vLLM's DFlash backbone with our heads. Checked on 0.32.0, 0.33.0."""

from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

from vllm_dspark.integration.models.standalone import StandaloneDrafter


class Qwen3Backbone(DFlashQwen3Model):
    """vLLM's backbone with the key norm of every layer applied to that layer's context keys.

    vLLM 0.32 stacks the weights as [layers, head_dim] and leaves the choice of row to its rms_norm
    kernel; the CPU build's kernel reads row 0 for all layers (outputs stay right, drafts suffer).
    """

    @property
    def quant_config(self) -> Any:
        """The drafter's quantisation, by what is stored (see quantised.py)."""
        return self._stored_quantization

    @quant_config.setter
    def quant_config(self, made_from_config: Any) -> None:
        # vLLM's constructor makes one of its own here, which looks for vLLM's names in the
        # checkpoint's lists.
        del made_from_config
        self._stored_quantization = get_current_vllm_config().quant_config

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """all_k: [L, n, kv_heads, head_dim]."""
        if all_k.device.type != "cpu":
            normed: torch.Tensor = super()._normalize_context_k(all_k)
            return normed
        size, eps = (all_k.shape[-1],), self._rms_norm_eps
        layers = zip(all_k, self._k_norm_weights, strict=True)
        return torch.stack([F.rms_norm(keys, size, weight, eps) for keys, weight in layers])


class Qwen3Drafter(StandaloneDrafter):
    """DeepSpec's Qwen3DSparkModel and every drafter of the speculators format."""

    model_cls = Qwen3Backbone
    architecture = "Qwen3DSparkModel"
