"""Model runner of vLLM (V2) with our drafter, rejection sampler and step reports."""

import importlib
from typing import Any

from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dspark.integration.carrier import options_of


class DSparkRunnerMixin:
    """Replaces parts of vLLM's runner right after vLLM has built its own.

    `super()` builds the stock object first; that costs a moment at start-up and keeps every
    other part of the runner (sizes, capture, profiling) as vLLM made it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dspark_options = options_of(self.vllm_config)


class DSparkGPUModelRunner(DSparkRunnerMixin, GPUModelRunner):
    """V2 runner on CUDA."""


if current_platform.is_cpu():
    # Imported by name: the module patches torch on import and exists for the CPU build only.
    _cpu = importlib.import_module("vllm.v1.worker.cpu.model_runner")

    class DSparkCPUModelRunner(DSparkRunnerMixin, _cpu.CPUModelRunner):
        """V2 runner on the CPU build."""
