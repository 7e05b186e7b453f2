"""Qwen3-shaped DSpark drafter: vLLM's DFlash backbone with our heads. Checked on 0.32.0, 0.33.0."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM, DFlashQwen3Model
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels.protocols import DraftHead
from vllm_dspark.proposer.checkpoint import IGNORED, expected_shapes
from vllm_dspark.proposer.heads import head_from_tensors
from vllm_dspark.proposer.spec import DrafterSpec, parse_spec, read_spec

_HEAD_PREFIXES = ("markov_head.", "confidence_head.", "d2t")


class Qwen3Backbone(DFlashQwen3Model):
    """vLLM's backbone with the key norm of every layer applied to that layer's context keys.

    vLLM 0.32 stacks the weights as [layers, head_dim] and leaves the choice of row to its rms_norm
    kernel; the CPU build's kernel reads row 0 for all layers (outputs stay right, drafts suffer).
    """

    def _normalize_context_k(self, all_k: torch.Tensor) -> torch.Tensor:
        """all_k: [L, n, kv_heads, head_dim]."""
        if all_k.device.type != "cpu":
            normed: torch.Tensor = super()._normalize_context_k(all_k)
            return normed
        size, eps = (all_k.shape[-1],), self._rms_norm_eps
        layers = zip(all_k, self._k_norm_weights, strict=True)
        return torch.stack([F.rms_norm(keys, size, weight, eps) for keys, weight in layers])


class Qwen3Drafter(DFlashQwen3ForCausalLM):
    """Backbone, context KV and lm_head are vLLM's; everything after the lm_head is `draft_head`."""

    model_cls = Qwen3Backbone
    draft_head: DraftHead

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.spec = _spec(self.draft_model_config)
        # `draft_head` scales base logits and bias together, so the processor must not.
        self.logits_processor.scale = 1.0
        self.target_vocab_size = vllm_config.model_config.get_vocab_size()

    def compute_draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V_d] base logits, neither scaled nor biased."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Split the checkpoint into backbone and head; a name that neither knows is an error."""
        backbone: dict[str, torch.Tensor] = {}
        head: dict[str, torch.Tensor] = {}
        known = expected_shapes(self.spec)
        for name, tensor in weights:
            if name in IGNORED:
                continue
            if name not in known:
                raise DrafterError(
                    f"{self.spec.file}: the checkpoint holds {name!r}, which this config does not "
                    "call for; nothing is dropped silently: correct config.json or the export"
                )
            if name.startswith(_HEAD_PREFIXES):
                head[name] = tensor
            elif name.startswith("lm_head."):
                backbone[name] = tensor
            else:
                backbone[f"model.{name}"] = tensor
        self.has_own_lm_head = "lm_head.weight" in backbone
        self.has_own_embed_tokens = "model.embed_tokens.weight" in backbone
        self._load_backbone(backbone)
        norm = self.model.norm.weight
        self.draft_head = head_from_tensors(
            self.spec, head, norm.device, norm.dtype, self.target_vocab_size
        )
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


def _spec(draft_model_config: Any) -> DrafterSpec:
    """The checkpoint's own config where it is at hand, else what vLLM made of it."""
    model = draft_model_config.model
    if Path(model).is_dir():
        return read_spec(model)
    # The architecture has been replaced by ours for loading; the tensors are those of Qwen3.
    config = {**draft_model_config.hf_config.to_dict(), "architectures": ["Qwen3DSparkModel"]}
    return parse_spec(config, f"{model}/config.json")
