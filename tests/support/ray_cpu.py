"""vLLM's Ray executor on a CPU: what asks for GPU ids is replaced, nothing else.

vLLM's CPU platform has no Ray device key, so `RayExecutorV2` refuses it in three places: when the
placement group is made (a bundle of one "GPU" per rank), when an actor's resources are named, and
when an actor is asked for its GPUs. Here a bundle is one CPU, an actor needs nothing beside its
bundle, and a rank's "GPU" is its number. Everything else (actors, worker construction by
`worker_cls`, message queues, the busy loop, shutdown) is vLLM's code as it runs on GPUs.
"""

import os
from typing import Any
from unittest import mock

import ray
from vllm.platforms import current_platform
from vllm.v1.executor import ray_executor_v2
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2, RayWorkerProc

from tests.support.perturbed import PerturbedWorker
from vllm_dspark.integration.carrier import options_of


class CpuRayWorkerProc(RayWorkerProc):
    """A rank in a Ray actor."""

    def get_node_and_physical_gpu_ids(self) -> tuple[str, list[int]]:
        return ray.get_runtime_context().get_node_id(), [self._init_kwargs["rank"]]


class CpuRayExecutor(RayExecutorV2):
    """Give it as `distributed_executor_backend="tests.support.ray_cpu.CpuRayExecutor"`."""

    @staticmethod
    def _get_actor_resource_kwargs() -> dict[str, Any]:
        return {}

    def _init_executor(self) -> None:
        with (
            mock.patch.object(type(current_platform), "ray_device_key", "CPU"),
            mock.patch.object(ray_executor_v2, "RayWorkerProc", CpuRayWorkerProc),
        ):
            super()._init_executor()


class RankInActor(PerturbedWorker):
    """Our worker (with confidences that differ by rank) that tells where it is."""

    def actor_facts(self) -> dict[str, Any]:
        from vllm.engine.arg_utils import EngineArgs

        options = options_of(self.vllm_config)
        return {
            "rank": self.rank,
            "pid": os.getpid(),
            "actor": ray.get_runtime_context().get_actor_id(),
            "runner": type(self.model_runner).__name__,
            "options": options.to_mapping() if options is not None else None,
            # what `register` leaves where this module is imported in an actor
            "hooked": hasattr(EngineArgs.create_speculative_config, "_vllm_dspark_hook"),
        }
