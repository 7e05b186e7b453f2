"""Which implementation of drafting and rejection runs where (option `kernels`)."""

import torch

from vllm_dspark.config import DSparkConfig
from vllm_dspark.kernels.protocols import DraftOps, RejectOps


def draft_ops(options: DSparkConfig, device: torch.device) -> DraftOps:
    """Sequential sampling for `device`: numba on a CPU, Triton on a GPU, or the reference."""
    if options.kernels != "reference" and device.type == "cpu":
        from vllm_dspark.cpu.draft_ops import CpuDraftOps

        return CpuDraftOps()
    from vllm_dspark.kernels.reference import ReferenceDraftOps

    return ReferenceDraftOps()


def reject_ops(options: DSparkConfig, device: torch.device) -> RejectOps:
    """Verification for `device`, as `draft_ops`."""
    if options.kernels != "reference" and device.type == "cpu":
        from vllm_dspark.cpu.reject_ops import CpuRejectOps

        return CpuRejectOps()
    from vllm_dspark.kernels.reference import ReferenceRejectOps

    return ReferenceRejectOps()
