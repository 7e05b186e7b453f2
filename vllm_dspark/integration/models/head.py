"""Build a `DraftHead` from checkpoint tensors (DeepSpec and speculators names)."""

from typing import Any

import torch

from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels.protocols import ConfidenceHead, DraftHead, MarkovHead

_PREFIXES = ("markov_head.", "confidence_head.", "d2t")


def is_head_tensor(name: str) -> bool:
    """Whether a checkpoint tensor belongs after the lm_head."""
    return name.startswith(_PREFIXES)


def build_head(
    config: Any, tensors: dict[str, torch.Tensor], dtype: torch.dtype, device: torch.device
) -> DraftHead:
    """Head of a drafter on `device`; a missing or left-over tensor is an error that names it.

    config: the drafter's Hugging Face config. Markov weights in `dtype`, confidence in float32.
    """
    left = dict(tensors)

    def take(name: str, kind: torch.dtype = dtype) -> torch.Tensor:
        if name not in left:
            raise DrafterError(
                f"drafter checkpoint lacks tensor {name!r}, which its config.json calls for; "
                f"it has {sorted(tensors)}. Re-export the drafter with this tensor"
            )
        return left.pop(name).to(device=device, dtype=kind).contiguous()

    markov = None
    if getattr(config, "markov_rank", 0):
        kind = getattr(config, "markov_head_type", "vanilla")
        projection = {"gated": "gate_proj", "rnn": "joint_proj"}.get(kind)
        markov = MarkovHead(
            kind=kind,
            w1=take("markov_head.markov_w1.weight"),
            w2=take("markov_head.markov_w2.weight"),
            proj_weight=take(f"markov_head.{projection}.weight") if projection else None,
            proj_bias=take(f"markov_head.{projection}.bias") if projection else None,
        )
    confidence = None
    if getattr(config, "enable_confidence_head", False):
        confidence = ConfidenceHead(
            weight=take("confidence_head.proj.weight", torch.float32).flatten(),
            bias=(
                take("confidence_head.proj.bias", torch.float32).flatten()[0]
                if "confidence_head.proj.bias" in left
                else None
            ),
            with_markov=bool(getattr(config, "confidence_head_with_markov", False)),
        )
    d2t = take("d2t", torch.int64) if "d2t" in left else None
    if left:
        raise DrafterError(
            f"drafter checkpoint has tensors that its config.json does not call for: "
            f"{sorted(left)}; nothing is dropped silently: correct config.json or the export"
        )
    return DraftHead(
        markov,
        confidence,
        d2t=d2t,
        soft_cap=getattr(config, "final_logit_softcapping", None),
        logit_scale=float(getattr(config, "logit_scale", 1.0)),
    )
