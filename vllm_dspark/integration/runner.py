"""Model runner of vLLM (V2) with our drafter, rejection sampler and step reports."""

import importlib
import logging
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.backends import reject_ops
from vllm_dspark.integration.carrier import options_of
from vllm_dspark.integration.rejection import replace_rejection_sampler
from vllm_dspark.integration.speculator import DSparkProposer

logger = logging.getLogger("vllm.vllm_dspark")


class DSparkRunnerMixin:
    """Replaces parts of vLLM's runner right after vLLM has built its own.

    `super()` builds the stock object first; that costs a moment at start-up and keeps every
    other part of the runner (sizes, capture, profiling) as vLLM made it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dspark_options = options_of(self.vllm_config) or DSparkConfig()
        if self.speculator is not None:  # last pipeline rank only
            self.speculator = None  # free the stock buffers before ours are allocated
            self.speculator = DSparkProposer(self.vllm_config, self.device, self.dspark_options)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's load, then our rejection sampler in place of its own."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.rejection_sampler is not None:
            self.rejection_sampler = replace_rejection_sampler(
                self.rejection_sampler,
                self.speculative_config,
                self.device,
                reject_ops(self.dspark_options, self.device),
            )


class DSparkGPUModelRunner(DSparkRunnerMixin, GPUModelRunner):
    """V2 runner on CUDA."""


if current_platform.is_cpu():
    # Imported by name: the module patches torch on import and exists for the CPU build only.
    _cpu = importlib.import_module("vllm.v1.worker.cpu.model_runner")

    class DSparkCPUModelRunner(DSparkRunnerMixin, _cpu.CPUModelRunner):
        """V2 runner on the CPU build."""
