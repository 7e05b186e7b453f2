"""The drafter's heads as plain tensors, from the named tensors of a checkpoint.

`DraftHead` (kernels/protocols.py) owns the parameters and holds no code; the equations live in
kernels/reference.py, which in float64 is the reference of every implementation. vLLM's modules know
the vanilla head only, so gated and rnn heads always come from the checkpoint.
"""

from collections.abc import Mapping

import torch

from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels.protocols import ConfidenceHead, DraftHead, MarkovHead
from vllm_dspark.proposer.spec import DrafterSpec

PROJECTIONS = {"gated": "markov_head.gate_proj", "rnn": "markov_head.joint_proj"}
HEAD_PREFIXES = ("markov_head.", "confidence_head.", "d2t")


def head_from_tensors(
    spec: DrafterSpec,
    tensors: Mapping[str, torch.Tensor],
    device: torch.device | str,
    dtype: torch.dtype,
    target_vocab: int,
) -> DraftHead:
    """The head whose tensors `tensors` holds under their checkpoint names.

    Markov weights in `dtype` (the drafter's), the confidence head in float32. A tensor that
    already is on `device` in its dtype is not copied, so weights shared with a loaded model stay
    shared. Without a confidence weight there is no confidence head, whatever the config promises.
    """

    def take(name: str, to: torch.dtype) -> torch.Tensor:
        tensor = tensors.get(name)
        if tensor is None:
            raise DrafterError(
                f"{spec.file}: tensor {name} is missing, but the config has "
                f"markov_head_type = {spec.markov_kind!r}, markov_rank = {spec.markov_rank} and "
                f"draft_vocab_size = {spec.draft_vocab_size}: the checkpoint and its config.json "
                "do not belong together"
            )
        return tensor.detach().to(device=device, dtype=to).contiguous()

    markov = None
    if spec.markov_kind is not None:
        projection = PROJECTIONS.get(spec.markov_kind)
        markov = MarkovHead(
            kind=spec.markov_kind,
            w1=take("markov_head.markov_w1.weight", dtype),
            w2=take("markov_head.markov_w2.weight", dtype),
            proj_weight=take(f"{projection}.weight", dtype) if projection else None,
            proj_bias=take(f"{projection}.bias", dtype) if projection else None,
        )
    confidence = None
    if spec.has_confidence and "confidence_head.proj.weight" in tensors:
        has_bias = "confidence_head.proj.bias" in tensors
        confidence = ConfidenceHead(
            weight=take("confidence_head.proj.weight", torch.float32).view(-1),
            bias=take("confidence_head.proj.bias", torch.float32).view(()) if has_bias else None,
            with_markov=spec.confidence_with_markov,
        )
    d2t = take("d2t", torch.int64) if spec.draft_vocab_size < target_vocab else None
    head = DraftHead(markov, confidence, d2t, spec.soft_cap, spec.logit_scale)
    _check_shapes(spec, head)
    if "d2t" in tensors:
        check_map(spec, tensors["d2t"], target_vocab)
    return head


def check_map(spec: DrafterSpec, offsets: torch.Tensor, target_vocab: int) -> None:
    """Refuse a d2t ([V_d] integer offsets) that does not lead to ids of the target, one each."""
    if spec.draft_vocab_size >= target_vocab:
        if bool(offsets.any()):
            raise DrafterError(
                f"{spec.file}: d2t moves draft ids although the drafter predicts as many as the "
                f"target has ({target_vocab}): only a reduced draft vocabulary is mapped"
            )
        return
    vocabulary = min(spec.vocab_size, target_vocab)
    ids = torch.arange(spec.draft_vocab_size, device=offsets.device) + offsets.to(torch.int64)
    if bool((ids < 0).any()) or bool((ids >= vocabulary).any()):
        raise DrafterError(
            f"{spec.file}: d2t maps draft ids to {int(ids.min())}..{int(ids.max())}, outside "
            f"the vocabulary of {vocabulary}: d2t must hold offsets, target = id + d2t[id]"
        )
    if len(torch.unique(ids)) != len(ids):
        raise DrafterError(
            f"{spec.file}: d2t maps two draft ids to one target id: the drafter's "
            "distribution over target tokens would be undefined; export the drafter's map again"
        )


def _check_shapes(spec: DrafterSpec, head: DraftHead) -> None:
    """A module may have padded its weights; the operations index them unpadded."""
    r, h = spec.markov_rank, spec.hidden_size
    expected: list[tuple[str, torch.Tensor | None, tuple[int, ...]]] = []
    if head.markov is not None:
        expected += [
            ("markov_w1", head.markov.w1, (spec.vocab_size, r)),
            ("markov_w2", head.markov.w2, (spec.draft_vocab_size, r)),
        ]
        if spec.markov_kind in PROJECTIONS:
            size = (r, h + r) if spec.markov_kind == "gated" else (3 * r, 2 * r + h)
            expected += [
                ("projection weight", head.markov.proj_weight, size),
                ("projection bias", head.markov.proj_bias, size[:1]),
            ]
    if head.confidence is not None:
        expected.append(("confidence weight", head.confidence.weight, (spec.confidence_width,)))
    if head.d2t is not None:
        expected.append(("d2t", head.d2t, (spec.draft_vocab_size,)))
    for name, tensor, shape in expected:
        if tensor is None or tuple(tensor.shape) != shape:
            seen = None if tensor is None else list(tensor.shape)
            raise DrafterError(
                f"{spec.file}: {name} has shape {seen}, expected {list(shape)}: slice off the "
                "rows that a loader padded, or fetch the checkpoint again"
            )
