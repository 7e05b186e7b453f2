"""Our heads on drafter classes that stay vLLM's: DeepSeek-V4's and V4.1's embedded stages.

vLLM's class runs the backbone; its Markov and confidence modules hold plain weights, which become
a `DraftHead`, so that sampling, confidences and scheduling are the same as with our own classes.
Checked on vLLM 0.32.0, 0.33.0 (source; the classes need a GPU).
"""

from typing import Any

import torch

from vllm_dspark.kernels.protocols import ConfidenceHead, DraftHead, MarkovHead


def head_of_model(model: Any, draft_vocab: int, target_vocab: int) -> tuple[DraftHead | None, str]:
    """The heads of a loaded vLLM drafter, or None and why they stay vLLM's.

    model: has `compute_draft_logits` and, inside `model`, `markov_head` and `confidence_head`.
    """
    processor, inner = model.logits_processor, model.model
    if processor.scale != 1.0 or processor.soft_cap is not None:
        return None, "its logits are scaled or capped where vLLM adds the Markov bias"
    markov = getattr(inner, "markov_head", None)
    if markov is None:
        return None, "it has no markov_head"
    first, second = markov.markov_w1.weight, markov.markov_w2.weight
    if not (first.is_floating_point() and second.is_floating_point()):
        return None, f"its Markov weights are stored as {second.dtype}"
    if first.element_size() < 2 or second.element_size() < 2:
        return None, f"its Markov weights are stored as {second.dtype}"
    d2t = getattr(model, "draft_id_to_target_id", None)
    if draft_vocab < target_vocab and d2t is None:
        return None, "its reduced vocabulary comes without a map"
    return (
        DraftHead(
            # vLLM pads the rows of the second factor to a multiple of 64
            markov=MarkovHead("vanilla", first.detach(), second.detach()[:draft_vocab]),
            confidence=_confidence(getattr(inner, "confidence_head", None)),
            d2t=d2t.detach() if d2t is not None and draft_vocab < target_vocab else None,
        ),
        "",
    )


def _confidence(module: Any) -> ConfidenceHead | None:
    if module is None:
        return None
    bias = getattr(module.proj, "bias", None)
    return ConfidenceHead(
        weight=module.proj.weight.detach().to(torch.float32).reshape(-1),
        bias=None if bias is None else bias.detach().to(torch.float32).reshape(()),
        with_markov=bool(module.with_markov),
    )
