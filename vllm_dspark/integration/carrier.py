"""How our options travel from the config to the engine core and the workers."""

from typing import Any

from vllm_dspark.config import DSparkConfig

KEY = "dspark"


class CarriedOptions(dict):  # type: ignore[type-arg]
    """`additional_config["dspark"]`: an empty dict that carries a `DSparkConfig`.

    vLLM hashes the additional config, as JSON, into the key of its compile cache. Our options
    change no compiled graph, so they must hash alike whatever they are: JSON sees `{}`, pickle
    and deepcopy keep the attribute.
    """

    config: DSparkConfig

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config

    def __reduce__(self) -> tuple[type["CarriedOptions"], tuple[DSparkConfig]]:
        return CarriedOptions, (self.config,)

    def __repr__(self) -> str:
        return f"CarriedOptions({self.config.to_mapping()})"


def options_of(vllm_config: Any) -> DSparkConfig | None:
    """Our options in a `VllmConfig`, or None when the plugin is not active in it."""
    additional = vllm_config.additional_config
    carried = additional.get(KEY) if isinstance(additional, dict) else None
    return carried.config if isinstance(carried, CarriedOptions) else None
