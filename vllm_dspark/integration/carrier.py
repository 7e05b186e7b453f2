"""How our options travel from the config to the engine core and the workers."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.config import DSparkConfig

KEY = "dspark"


@dataclass(frozen=True)
class MetricsPlace:
    """Where an engine core publishes its metrics. Made by the front end, carried to the core.

    multiprocess_folder: PROMETHEUS_MULTIPROC_DIR of the front end, or None.
    """

    folder: Path
    multiprocess_folder: Path | None = None


class CarriedOptions(dict):  # type: ignore[type-arg]
    """`additional_config["dspark"]`: an empty dict that carries a `DSparkConfig`.

    vLLM hashes the additional config, as JSON, into the key of its compile cache. Our options
    change no compiled graph, so they must hash alike whatever they are: JSON sees `{}`, pickle
    and deepcopy keep the attributes.

    metrics_place: where the engine core publishes its metrics; None without metrics.
    declined: what was given up when the config was built (keys of metrics_catalog.FALLBACKS).
    """

    config: DSparkConfig
    metrics_place: MetricsPlace | None
    declined: tuple[str, ...]

    def __init__(
        self,
        config: DSparkConfig,
        metrics_place: MetricsPlace | None = None,
        declined: tuple[str, ...] = (),
    ) -> None:
        super().__init__()
        self.config = config
        self.metrics_place = metrics_place
        self.declined = declined

    def __reduce__(self) -> tuple[type["CarriedOptions"], tuple[Any, ...]]:
        return CarriedOptions, (self.config, self.metrics_place, self.declined)

    def __repr__(self) -> str:
        return f"CarriedOptions({self.config.to_mapping()})"


def carried_by(vllm_config: Any) -> CarriedOptions | None:
    """What a `VllmConfig` carries for us, or None when the plugin is not active in it."""
    additional = vllm_config.additional_config
    carried = additional.get(KEY) if isinstance(additional, dict) else None
    return carried if isinstance(carried, CarriedOptions) else None


def options_of(vllm_config: Any) -> DSparkConfig | None:
    """Our options in a `VllmConfig`, or None when the plugin is not active in it."""
    carried = carried_by(vllm_config)
    return carried.config if carried is not None else None
