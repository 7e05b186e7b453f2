"""Worker of vLLM's CUDA build: our model runner where DSpark is on."""

from typing import Any

from vllm.v1.worker.gpu_worker import Worker

from vllm_dspark.integration.carrier import options_of
from vllm_dspark.integration.remote import MeasuringWorker


class DSparkGPUWorker(MeasuringWorker, Worker):
    """`Worker` that builds our V2 runner."""

    def _make_model_runner(self) -> Any:
        if self.use_v2_model_runner and options_of(self.vllm_config) is not None:
            from vllm_dspark.integration.runner import DSparkGPUModelRunner

            return DSparkGPUModelRunner(self.vllm_config, self.device)
        return super()._make_model_runner()

    def compile_or_warm_up_model(self) -> Any:
        """vLLM's warm-up and capture, our kernels', then our cost profile unless one is cached."""
        result = super().compile_or_warm_up_model()
        if hasattr(self.model_runner, "check_device"):
            self.model_runner.check_device()
        if hasattr(self.model_runner, "provide_cost_table"):
            self.model_runner.provide_cost_table()
        return result
