"""Which implementation of drafting and rejection runs where (option `kernels`).

| device | "auto", "triton"          | "reference"                                         |
|--------|---------------------------|-----------------------------------------------------|
| CPU    | numba (cpu/)              | kernels/reference.py                                |
| CUDA   | Triton, inside the graphs | drafting: kernels/reference.py, without graphs;     |
|        |                           | rejection: sampling/rejection.py, waits for nothing |
"""

import torch

from vllm_dspark.config import DSparkConfig
from vllm_dspark.kernels.protocols import DraftHead, DraftOps, RejectOps


def draft_ops(
    options: DSparkConfig,
    head: DraftHead,
    *,
    max_requests: int,
    width: int,
    draft_vocab: int,
    device: torch.device,
) -> DraftOps:
    """Sequential sampling of one loaded head for up to `max_requests` rows of K = `width`."""
    if options.kernels == "reference":
        from vllm_dspark.kernels.reference import ReferenceDraftOps

        return ReferenceDraftOps()
    if device.type == "cpu":
        from vllm_dspark.cpu.draft_ops import CpuDraftOps

        return CpuDraftOps()
    from vllm_dspark.kernels.markov import TritonDraftOps

    return TritonDraftOps(head, max_requests, width, draft_vocab, device)


def reject_ops(
    options: DSparkConfig, *, max_requests: int, width: int, vocab: int, device: torch.device
) -> RejectOps:
    """Verification of up to `max_requests` windows of K = `width` drafts."""
    if options.kernels == "reference" and device.type == "cpu":
        from vllm_dspark.kernels.reference import ReferenceRejectOps

        return ReferenceRejectOps()
    if options.kernels == "reference":
        from vllm_dspark.sampling.rejection import TorchRejectOps

        return TorchRejectOps()
    if device.type == "cpu":
        from vllm_dspark.cpu.reject_ops import CpuRejectOps

        return CpuRejectOps()
    from vllm_dspark.kernels.rejection import TritonRejectOps

    return TritonRejectOps(max_requests, width, vocab, device)
