"""The DSpark losses, per block slot, on the target's text (teacher forcing).

For slot k with draft distribution p_d and target distribution p_t (both at temperature 1):

    cross-entropy     -log p_d(x)                   x: the token that the target's text has there
    total variation   0.5 * sum |p_d - p_t|         1 - TV is the chance that a draft is accepted
    confidence        BCE(conf, c*),  c* = 1 - TV   c* is a label: no gradient through it

The first two are averaged with weights exp(-k / decay); slots past the end of the text count 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from examples.train_drafter.config import TrainConfig


@dataclass
class Losses:
    """Scalars; `total` has the gradient, `acceptance` is 1 - TV by slot, [K].

    `expected_length` is 1 + sum over k of the product of the first k acceptances: the accepted
    length at temperature 1, up to the correlation of the text with the drafts.
    """

    total: Tensor
    cross_entropy: Tensor
    total_variation: Tensor
    confidence: Tensor
    acceptance: Tensor
    expected_length: Tensor


def slot_losses(draft: Tensor, target: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy and total variation per row: draft, target [N, V], labels [N] -> [N], [N].

    Meant to be compiled: in one pass over the vocabulary nothing [N, V] in float32 is stored.
    """
    log_draft = torch.log_softmax(draft.float(), dim=-1)
    cross_entropy = -log_draft.gather(1, labels[:, None])[:, 0]
    gap = log_draft.exp() - torch.softmax(target.float(), dim=-1)
    return cross_entropy, 0.5 * gap.abs().sum(-1)


def combine(
    cross_entropy: Tensor, tv: Tensor, confidence: Tensor, valid: Tensor, config: TrainConfig
) -> Losses:
    """Weigh and average: everything [B, K], `confidence` as logits, `valid` bool."""
    slots = torch.arange(tv.shape[1], device=tv.device)
    mask = valid.float()
    weight = torch.exp(-slots / config.position_decay) * mask
    norm = weight.sum().clamp_min(1e-6)
    ce = (cross_entropy * weight).sum() / norm
    variation = (tv * weight).sum() / norm
    label = (1 - tv.detach()).clamp(0, 1)
    bce = F.binary_cross_entropy_with_logits(confidence, label, reduction="none")
    count = mask.sum().clamp_min(1)
    conf = (bce * mask).sum() / count
    total = config.ce_weight * ce + config.tv_weight * variation + config.confidence_weight * conf
    acceptance = (label * mask).sum(0) / mask.sum(0).clamp_min(1)
    length = 1 + (label * mask).cumprod(dim=1).sum(1).mean()
    return Losses(total, ce.detach(), variation.detach(), conf.detach(), acceptance, length)
