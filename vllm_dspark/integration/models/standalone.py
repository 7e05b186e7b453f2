"""What our classes of standalone drafters share: strict loading, and our heads after the lm_head.

Checked on vLLM 0.32.0, 0.33.0.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM
from vllm.model_executor.models.utils import AutoWeightsLoader, WeightsMapper

from vllm_dspark.errors import DrafterError
from vllm_dspark.integration.checkpoints import local_folder
from vllm_dspark.integration.models.quantised import StoredQuantization, plain_layers
from vllm_dspark.kernels.protocols import DraftHead
from vllm_dspark.proposer.checkpoint import check_tensors
from vllm_dspark.proposer.heads import HEAD_PREFIXES, head_from_tensors
from vllm_dspark.proposer.inventory import TORCH_NAMES, StoredTensor, read_inventory
from vllm_dspark.proposer.spec import DrafterSpec, TargetShape, parse_spec, read_spec
from vllm_dspark.proposer.tensors import IGNORED


class StandaloneDrafter(DFlashQwen3ForCausalLM):
    """Backbone, context KV and lm_head are vLLM's; everything after the lm_head is `draft_head`.

    Subclasses set `model_cls` and `architecture`, the checkpoint's name for them.
    """

    architecture: str
    # whether vLLM's names of the drafter's layers count on from the target's last
    numbered_after_target: ClassVar[bool] = True
    draft_head: DraftHead

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        draft = vllm_config.speculative_config.draft_model_config
        spec = spec_of(draft, self.architecture)
        if vllm_config.quant_config is not None:
            # vLLM made this VllmConfig, and the quantisation in it, for the drafter alone.
            vllm_config.quant_config = self._stored_quantization(vllm_config, spec)
        target = target_shape(vllm_config.model_config)
        limited = spec.limited_to(target.vocab_size)
        if limited is not spec:  # vLLM sizes its lm_head by this
            draft.hf_config.draft_vocab_size = limited.draft_vocab_size
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.spec = spec
        self._limited = limited
        self.target_shape = target
        # `draft_head` scales base logits and bias together and caps the base logits alone.
        self.logits_processor.scale = 1.0
        self.logits_processor.soft_cap = None

    def _stored_quantization(self, vllm_config: VllmConfig, spec: DrafterSpec) -> Any:
        draft = vllm_config.speculative_config.draft_model_config
        cache = vllm_config.load_config.download_dir
        folder = local_folder(draft.model, draft.revision, cache)
        plain = None if folder is None else plain_layers(spec, read_inventory(folder))
        first = vllm_config.model_config.get_total_num_hidden_layers()
        first_layer = first if self.numbered_after_target else 0
        return StoredQuantization(vllm_config.quant_config, first_layer, spec.file, plain)

    def compute_draft_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, H] -> [n, V_d] base logits, neither scaled, capped nor biased."""
        logits: torch.Tensor = self.logits_processor(self.lm_head, hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Split the checkpoint into backbone and head; every odd or absent tensor is an error.

        Checked here once more because not every checkpoint is at hand when the config is built,
        and because what counts is what the loader hands over.
        """
        tensors: dict[str, torch.Tensor] = {}
        for name, tensor in weights:
            if name in tensors:
                raise DrafterError(
                    f"{self.spec.file}: the loader found {name} in two files: delete the one that "
                    "is left over from another export"
                )
            if name not in IGNORED:
                tensors[name] = tensor
        check_tensors(_inventory(tensors), self.spec, self.target_shape, self.spec.file)
        self._limit_vocabulary(tensors)
        backbone: dict[str, torch.Tensor] = {}
        head: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if name.startswith(HEAD_PREFIXES):
                head[name] = tensor
            elif name.startswith("lm_head."):
                backbone[name] = tensor
            else:
                backbone[f"model.{name}"] = tensor
        embedding = backbone.get("model.embed_tokens.weight")
        own_head = any(name.startswith("lm_head.") for name in backbone)
        if self.spec.tied and not own_head and embedding is not None:
            backbone["lm_head.weight"] = embedding[: self._limited.draft_vocab_size]
            own_head = True
        self.has_own_lm_head = own_head
        self.has_own_embed_tokens = embedding is not None
        self._load_backbone(backbone)
        norm = self.model.norm.weight
        self.draft_head = head_from_tensors(
            self._limited, head, norm.device, norm.dtype, self.target_shape.vocab_size
        )
        self.model._build_fused_kv_buffers()

    def tie_head(self) -> None:
        """Make the target's embedding the head of a tied drafter that has neither of its own.

        Called once vLLM has shared what is absent: for it that is the target's lm_head, which is
        another matrix unless the target is tied too.
        """
        if self.spec.tied and not self.has_own_lm_head and not self.has_own_embed_tokens:
            self.add_module("lm_head", self.model.embed_tokens)

    def _limit_vocabulary(self, tensors: dict[str, torch.Tensor]) -> None:
        """Leave out the rows of ids that the target does not know."""
        for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
            if name in tensors:
                tensors[name] = tensors[name][: self._limited.draft_vocab_size]

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


def target_shape(model_config: Any) -> TargetShape:
    """The target's dimensions as vLLM runs them."""
    return TargetShape(
        vocab_size=model_config.get_vocab_size(),
        hidden_size=model_config.get_hidden_size(),
        num_layers=model_config.get_total_num_hidden_layers(),
    )


def spec_of(draft_model_config: Any, architecture: str) -> DrafterSpec:
    """The checkpoint's own config where it is at hand, else what vLLM made of it."""
    model = draft_model_config.model
    folder = local_folder(model, draft_model_config.revision, None, weights=False)
    if folder is not None:
        return read_spec(folder)
    # The architecture has been replaced by ours for loading; the tensors are those of the original.
    config = {**draft_model_config.hf_config.to_dict(), "architectures": [architecture]}
    return parse_spec(config, f"{model}/config.json")


def _inventory(tensors: dict[str, torch.Tensor]) -> dict[str, StoredTensor]:
    """The tensors as a file's header would describe them."""
    return {
        name: StoredTensor(tuple(t.shape), TORCH_NAMES.get(t.dtype, str(t.dtype)), Path(), 0, 0)
        for name, t in tensors.items()
    }
