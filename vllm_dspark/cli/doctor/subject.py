"""What is examined: arguments, the target's and drafter's files, and this machine."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_dspark.cli.doctor.arguments import ServeArguments
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.proposer.embedded import StageSpec, embeds_drafter
from vllm_dspark.proposer.spec import DrafterSpec

# vLLM's defaults on a server with a large GPU; a doctor without one says what it assumed.
DEFAULT_MAX_NUM_SEQS = 256
DEFAULT_BATCHED_TOKENS = 8192


@dataclass(frozen=True)
class Machine:
    """The machine to serve on; `probe_machine` fills it for this one."""

    device: str = ""  # name of the accelerator; empty on a CPU
    capability: int | None = None  # 90 for SM90
    device_count: int = 0
    cpu_build: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Subject:
    """Input of all checks."""

    arguments: ServeArguments
    machine: Machine

    @cached_property
    def options(self) -> DSparkConfig | None:
        """The plugin's options; None if they are wrong (check_options says so)."""
        try:
            return DSparkConfig.from_mapping(dict(self.arguments.options))
        except DSparkConfigError:
            return None

    @cached_property
    def target_folder(self) -> Path | None:
        """Folder with the target's config; None if it is not at hand."""
        return self._folder(self.arguments.target, self.arguments.get("revision"))

    @cached_property
    def target_config(self) -> dict[str, Any]:
        """The target's config.json; empty if it is not at hand or no JSON object."""
        return _config_of(self.target_folder)

    @property
    def text_config(self) -> dict[str, Any]:
        """The language model's part of it."""
        return self.target_config.get("text_config") or self.target_config

    @property
    def drafter_name(self) -> str | None:
        """The drafter as the user named it."""
        model = self.arguments.speculative.get("model")
        return None if model is None else str(model)

    @property
    def is_embedded(self) -> bool:
        """Whether the drafter is inside the target."""
        outside = self.drafter_name not in (None, self.arguments.target)
        return not outside and embeds_drafter(self.target_config)

    @property
    def target_is_nowhere(self) -> bool:
        """Whether the target is neither a folder nor anything that a hub could have."""
        name = self.arguments.target
        return missing_path(name) or (ownerless(name) and self.target_folder is None)

    @property
    def may_be_embedded(self) -> bool:
        """Whether the drafter is inside the target, or must be if there is one: no config says."""
        if self.drafter_name not in (None, self.arguments.target) or self.target_is_nowhere:
            return False
        unknown = not self.target_config and self.arguments.speculative.get("method") == "dspark"
        return self.is_embedded or unknown

    @cached_property
    def drafter_folder(self) -> Path | None:
        """Folder with the drafter's config; None if it is not at hand."""
        if self.is_embedded:
            return self.target_folder
        revision = self.arguments.speculative.get("revision")
        return None if self.drafter_name is None else self._folder(self.drafter_name, revision)

    @cached_property
    def drafter_config(self) -> dict[str, Any]:
        """The drafter's config.json; empty if it is not at hand or no JSON object."""
        return _config_of(self.drafter_folder)

    # what check_drafter has read; None until then, or if it could not be read
    spec: DrafterSpec | StageSpec | None = None

    @property
    def standalone(self) -> DrafterSpec | None:
        """The drafter's spec, if it is not embedded."""
        return self.spec if isinstance(self.spec, DrafterSpec) else None

    @property
    def width(self) -> int | None:
        """K: given, or the drafter's default; None if unknown, or below 1 (an error anyway)."""
        given = self.arguments.speculative.get("num_speculative_tokens")
        if isinstance(given, int):
            return given if given >= 1 else None
        return None if self.spec is None else self.spec.default_drafts

    @property
    def max_num_seqs(self) -> int:
        """Given, or vLLM's usual default."""
        return self.arguments.integer("max-num-seqs", DEFAULT_MAX_NUM_SEQS)

    @property
    def max_model_len(self) -> int | None:
        """Given, or the target's own length."""
        given = self.arguments.get("max-model-len")
        if given is not None:
            return int(given)
        own = self.text_config.get("max_position_embeddings")
        return own if isinstance(own, int) else None

    @property
    def quantization(self) -> str:
        """How the target's weights are stored; empty for plain weights."""
        given = self.arguments.get("quantization")
        if given:
            return str(given).lower()
        for config in (self.target_config, self.text_config):
            section = config.get("quantization_config") or config.get("compression_config")
            if isinstance(section, dict):
                method = str(section.get("quant_method", "compressed-tensors"))
                return " ".join([method, str(section.get("quant_algo", ""))]).strip().lower()
        return ""

    def _folder(self, model: str, revision: str | None) -> Path | None:
        if Path(model).is_dir():
            return Path(model)
        if missing_path(model):
            return None
        from vllm_dspark.integration.checkpoints import local_folder

        cache = self.arguments.get("download-dir")
        return local_folder(model, revision, cache, weights=False)


def missing_path(model: str) -> bool:
    """Whether a model is named by a path, not by a hub id, and there is no such folder or file."""
    # A hub id is a name, or owner/name; other schemes (s3://) are vLLM's business.
    is_path = model.startswith(("/", "./", "../", "~")) or model.count("/") > 1 or "\\" in model
    return is_path and "://" not in model and not Path(model).exists()


def ownerless(model: str) -> bool:
    """Whether a name is no folder, and no hub id OWNER/NAME either."""
    return "/" not in model and not Path(model).exists()


def _config_of(folder: Path | None) -> dict[str, Any]:
    file = None if folder is None else folder / "config.json"
    if file is None or not file.is_file():
        return {}
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return {}  # check_drafter and check_target say so
    return config if isinstance(config, dict) else {}


def probe_machine() -> Machine:
    """This machine, as torch sees it."""
    import torch

    from vllm_dspark.config import process_environment
    from vllm_dspark.cpu.build import is_cpu_build

    environment = process_environment()
    if not torch.cuda.is_available():
        return Machine(cpu_build=is_cpu_build(), environment=environment)
    major, minor = torch.cuda.get_device_capability()
    return Machine(
        device=torch.cuda.get_device_name(),
        capability=10 * major + minor,
        device_count=torch.cuda.device_count(),
        cpu_build=is_cpu_build(),
        environment=environment,
    )
