"""Worker of vLLM's CPU build: native kernels, and our model runner where DSpark is on."""

from typing import Any

from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_dspark.integration.carrier import options_of
from vllm_dspark.integration.remote import MeasuringWorker


class DSparkCPUWorker(MeasuringWorker, CPUWorker):
    """`CPUWorker` whose V2 runner launches no interpreted Triton kernel.

    The CPU worker builds its runner inside `init_device`, so ours replaces it right after.
    """

    def init_device(self) -> None:
        if self.use_v2_model_runner:
            from vllm_dspark.integration.cpu_kernels import register_native_kernels

            register_native_kernels()
        super().init_device()
        if self.use_v2_model_runner and options_of(self.vllm_config) is not None:
            from vllm_dspark.integration.runner import DSparkCPUModelRunner

            self.model_runner = DSparkCPUModelRunner(self.vllm_config, self.device)

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up, then our cost profile where no cached one fits this engine."""
        result = super().compile_or_warm_up_model()
        if hasattr(self.model_runner, "provide_cost_table"):
            self.model_runner.provide_cost_table()
        return result
