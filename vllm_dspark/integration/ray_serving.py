"""DSpark engines behind Ray Serve's OpenAI endpoint, one engine per replica.

    serve run vllm_dspark.integration.ray_serving:app config=configs/demo.yaml replicas=2 kind=cpu

The engine is Ray Serve LLM's own (`ray.serve.llm`: vLLM's `AsyncLLM` in the replica, on the CPU
build as well), and our plugin gets into each process by its entry point, as everywhere. Added here:

- one YAML file serves `vllm-dspark serve --config` and Ray alike;
- each replica shows its own metrics. Ray's agent exports only what goes through
  `ray.util.metrics`, and vLLM's labels are the same in every replica; so each replica opens a
  /metrics port of its own and leaves its address as a target file for Prometheus
  (`file_sd_configs`);
- metrics arrive although, on GPUs, Ray builds vLLM's config in another process than the replica.
"""

import functools
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from prometheus_client import start_http_server
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from vllm_dspark.config import DSparkConfig, process_environment
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.integration.carrier import carried_by
from vllm_dspark.integration.engine_files import engine_arguments
from vllm_dspark.integration.metrics_collector import provide_place

try:
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, LLMServer, build_openai_app
except ImportError as error:
    raise ImportError(f"Ray Serve is missing ({error}); pip install 'vllm-dspark[ray]'") from error

logger = logging.getLogger("vllm.vllm_dspark")

_TARGETS = "dspark_metrics_targets"  # key in LLMConfig.experimental_configs
_NODE, _PID = "__dspark_node__", "__dspark_pid__"  # Prometheus drops labels that start like this

# What a replica must find although its Ray node was started in another environment. (vLLM carries
# its variables on to the processes below the replica.)
_CARRIED = (
    "VLLM_DSPARK_CACHE_DIR",
    "VLLM_NO_USAGE_STATS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
    "TRANSFORMERS_OFFLINE",
)


class RayArguments(BaseModel):
    """What `serve run ...:app NAME=VALUE` takes."""

    model_config = ConfigDict(extra="forbid")

    config: Path = Field(description="Engine settings, as for `vllm-dspark serve --config`.")
    replicas: int = Field(1, ge=1, description="Engines; each holds a copy of the model.")
    kind: Literal["gpu", "cpu"] = Field("gpu", description="What an engine runs on.")
    name: str | None = Field(None, description="Model name of the API; null: the file's.")
    targets: Path | None = Field(
        None,
        description="Folder for Prometheus targets; null: ray-metrics in the artifact cache.",
    )


def app(arguments: Mapping[str, Any]) -> Any:
    """The Ray Serve application; `arguments` as in `RayArguments`."""
    try:
        given = RayArguments.model_validate(dict(arguments))
    except ValidationError as error:
        raise DSparkConfigError(f"arguments of the Ray application: {error}") from None
    return build_openai_app({"llm_configs": [llm_config(given)]})


def llm_config(given: RayArguments) -> LLMConfig:
    """Ray's description of the engines that a config file asks for."""
    engine = engine_arguments(given.config)
    source = engine.pop("model")
    served = engine.pop("served_model_name", None) or source
    environment = process_environment()
    targets = given.targets or DSparkConfig().resolved_cache_dir() / "ray-metrics"
    name = given.name or (served if isinstance(served, str) else served[0])
    return LLMConfig.model_validate(
        {
            "model_loading_config": {"model_id": name, "model_source": source},
            "accelerator_config": {"kind": given.kind},
            "deployment_config": {"num_replicas": given.replicas},
            "engine_kwargs": engine,
            "server_cls": DSparkServer,
            # vLLM's metrics go to the replica's own port too, not to Ray's agent
            "log_engine_metrics": False,
            "runtime_env": {"env_vars": {k: environment[k] for k in _CARRIED if k in environment}},
            "experimental_configs": {_TARGETS: str(targets)},
        }
    )


class DSparkServer(LLMServer):
    """Ray's LLM replica, with a /metrics port of its own."""

    async def start(self) -> None:
        """Start the engine, then publish where its metrics are."""
        await super().start()
        address = ray.util.get_node_ip_address()
        server, _ = start_http_server(0, addr=address)
        self._metrics_address = f"{address}:{server.server_port}"
        folder = self._llm_config.experimental_configs.get(_TARGETS)
        if folder is not None:
            write_target(Path(folder), self._metrics_address, address, self._replica())

    async def dspark_replica(self) -> dict[str, Any]:
        """What runs in this replica; for checks by `DeploymentHandle.dspark_replica.remote()`."""
        engine: Any = self.engine  # an instance of `_engine_class`
        config = engine.vllm_config
        carried = carried_by(config)
        return {
            "replica": self._replica(),
            "pid": os.getpid(),
            "metrics": self._metrics_address,
            "worker_cls": config.parallel_config.worker_cls,
            "scheduler_cls": config.scheduler_config.scheduler_cls,
            "options": carried.config.to_mapping() if carried is not None else None,
        }

    def _replica(self) -> str:
        return str(serve.get_replica_context().replica_id.unique_id)

    def _get_default_engine_class(self) -> Any:
        return _engine_class(super()._get_default_engine_class())


class _OwnsMetrics:
    """Before Ray's engine class: keeps the config, and takes its metrics into this process."""

    vllm_config: Any

    def _prepare_engine_config(self, callback_ctx: Any) -> Any:
        prepared = super()._prepare_engine_config(callback_ctx)  # type: ignore[misc]
        self.vllm_config = prepared[-1]
        adopt_metrics(self.vllm_config)
        return prepared


@functools.cache
def _engine_class(base: type) -> type:
    return type("DSparkRayEngine", (_OwnsMetrics, base), {})


def adopt_metrics(vllm_config: Any) -> None:
    """Make this process the reader of an engine's metrics.

    The config names the folder of the process that built it; on GPUs that is a Ray task which is
    gone by the time the engine starts.
    """
    carried = carried_by(vllm_config)
    if carried is not None and carried.metrics_place is not None:
        carried.metrics_place = provide_place()


def write_target(folder: Path, address: str, node: str, replica: str) -> Path:
    """Leave a Prometheus target (`file_sd_configs`) in `folder`; clears those of dead replicas.

    address: "ip:port" of /metrics; node: IP address of the machine that this process runs on.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("dspark-*.json"):
        if _is_dead(path, node):
            path.unlink(missing_ok=True)
    labels = {"replica": replica, _NODE: node, _PID: str(os.getpid())}
    text = json.dumps([{"targets": [address], "labels": labels}])
    draft, final = folder / f".{replica}.new", folder / f"dspark-{replica}.json"
    draft.write_text(text)
    draft.rename(final)  # Prometheus never sees half a file
    return final


def _is_dead(path: Path, node: str) -> bool:
    """Whether a target belongs to a process of this machine that has ended."""
    try:
        labels = json.loads(path.read_text())[0]["labels"]
        return labels[_NODE] == node and not Path(f"/proc/{int(labels[_PID])}").exists()
    except FileNotFoundError:  # another replica was faster
        return False
    except (ValueError, LookupError, TypeError):
        logger.warning("vllm-dspark: %s is no target file of ours and is left alone", path)
        return False
