"""The ways of serving that are compared, and what each means to vLLM.

| mode      | CUDA                                     | CPU build                                 |
|-----------|------------------------------------------|-------------------------------------------|
| off       | stock vLLM, no plugin                    | stock vLLM (V1 runner), no plugin         |
| off-v2    | the same                                 | V2 runner on the plugin's kernels         |
| fixedK    | stock DSpark, no plugin                  | as pluginK: stock has no DSpark on a CPU  |
| pluginK   | the plugin with `"scheduling": false`    | the same                                  |
| adaptive  | stock adaptive verification, no plugin   | not there: needs full CUDA graphs         |
| ours      | the plugin as it is                      | the same                                  |
| ours-full | with full draft width in every pass      | the same                                  |
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_dspark.errors import DSparkError

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
# No general plugins and none of our Triton backend: vLLM as if the plugin were not installed.
_WITHOUT_US = {"VLLM_PLUGINS": "", "TRITON_BACKENDS_IN_TREE": "1"}
_REPLAY_WORKER = "vllm_dspark.bench.replay_worker.ReplayWorker"
_NAME = re.compile(r"off|off-v2|adaptive|ours|ours-full|(?:fixed|plugin)([1-9][0-9]*)")


# Share of a GPU that vLLM wants to see free before it starts. With a KV cache of fixed size it has
# no other meaning, and vLLM's default would refuse every engine but the first.
_SIDE_BY_SIDE = 0.05


class BenchError(DSparkError):
    """The benchmark cannot do what was asked; the message gives cause and remedy."""


@dataclass(frozen=True)
class Mode:
    """One way of serving. width: drafts per step of a fixed setting, None otherwise."""

    name: str
    width: int | None = None

    @classmethod
    def parse(cls, name: str) -> Mode:
        """A mode from its name on the command line."""
        match = _NAME.fullmatch(name)
        if match is None:
            raise BenchError(
                f"mode {name!r}: choose from off, off-v2, fixedK, pluginK, adaptive, ours, "
                "ours-full, where K is a number of drafts (fixed3)"
            )
        return cls(name, int(match[1]) if match[1] else None)

    @property
    def is_fixed(self) -> bool:
        """Whether it is one of the settings that ours is compared with: fixed K, or off."""
        return self.name.startswith("off") or self.name.startswith("fixed")


@dataclass(frozen=True)
class PairSpec:
    """Target and drafter, as vLLM names models, and what all modes have in common.

    width: K of `ours`, `ours-full` and `adaptive`. plugin_options: the `"dspark"` object of `ours`.
    speculative: more keys of the speculative config, for all modes with one (synthetic acceptance,
    `draft_sample_method`). engine: more engine arguments, for all modes. replayed: acceptance comes
    from recordings (integration/replay.py), in all modes with drafts.
    """

    target: str
    drafter: str
    width: int = 7
    dtype: str = "bfloat16"
    max_model_len: int = 2048
    max_num_seqs: int = 32
    kv_cache_bytes: int | None = 256 << 20
    plugin_options: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    replayed: bool = False

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts can be texts; random-weight shapes come without a tokenizer."""
        folder = Path(self.target)
        return not folder.is_dir() or (folder / "tokenizer_config.json").is_file()


@dataclass(frozen=True)
class EngineLaunch:
    """How to start the engine of one mode: environment and arguments of vLLM."""

    mode: Mode
    environment: dict[str, str]
    arguments: dict[str, Any]  # of `LLM(...)`; `server_arguments` writes them as flags
    shared: tuple[Mode, ...] = ()  # further modes that the same engine runs by a switch

    @property
    def modes(self) -> tuple[Mode, ...]:
        """All modes that this engine runs."""
        return (self.mode, *self.shared)

    @property
    def times_steps(self) -> bool:
        """Whether the engine measures, while it starts, what its steps cost."""
        return self.mode.name in ("ours", "ours-full", "adaptive")


def launch(mode: Mode, pair: PairSpec, *, is_cpu: bool) -> EngineLaunch:
    """Environment and arguments of one mode; raises BenchError where the platform lacks it."""
    environment, speculative = _speculation(mode, pair, is_cpu=is_cpu)
    arguments: dict[str, Any] = {
        "model": pair.target,
        "dtype": pair.dtype,
        "max_model_len": pair.max_model_len,
        "max_num_seqs": pair.max_num_seqs,
        # Every repeat asks the same prompts of every mode: a cache would skip their prefill.
        "enable_prefix_caching": False,
        "disable_log_stats": False,
        **pair.engine,
    }
    if pair.kv_cache_bytes is not None:
        arguments["kv_cache_memory_bytes"] = pair.kv_cache_bytes
        if not is_cpu:
            arguments.setdefault("gpu_memory_utilization", _SIDE_BY_SIDE)
    if not pair.has_tokenizer:
        arguments["skip_tokenizer_init"] = True
    if speculative is not None:
        arguments["speculative_config"] = speculative
        if pair.replayed:
            arguments["worker_extension_cls"] = _REPLAY_WORKER
    return EngineLaunch(mode, {**OFFLINE, **environment}, arguments)


def _speculation(
    mode: Mode, pair: PairSpec, *, is_cpu: bool
) -> tuple[dict[str, str], dict[str, Any] | None]:
    """What the mode adds to the environment, and its speculative config."""
    width = mode.width or pair.width
    base = {"method": "dspark", "model": pair.drafter, **pair.speculative}
    if pair.replayed:  # vLLM accepts all valid drafts; the replay says which are
        base.pop("synthetic_acceptance_length", None)
        base["rejection_sample_method"] = "synthetic"
        base["synthetic_acceptance_rates"] = [1.0] * width
    if "synthetic_acceptance_rates" in base:  # one per draft
        base["synthetic_acceptance_rates"] = base["synthetic_acceptance_rates"][:width]
    if mode.name == "off":
        runner = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if is_cpu else {}
        return {**_WITHOUT_US, **runner}, None
    if mode.name == "off-v2":
        return {"VLLM_USE_V2_MODEL_RUNNER": "1", **({} if is_cpu else _WITHOUT_US)}, None
    if mode.name.startswith("ours"):
        options = dict(pair.plugin_options)
        if mode.name == "ours-full":
            options["draft_width"] = "full"
        return {}, {**base, "num_speculative_tokens": width, "dspark": options}
    if mode.name.startswith("plugin") or (mode.is_fixed and is_cpu):
        options = {**_unscheduled(pair.plugin_options), "scheduling": False}
        return {}, {**base, "num_speculative_tokens": width, "dspark": options}
    if is_cpu:
        raise BenchError(
            "mode adaptive: stock adaptive verification needs full CUDA graphs, and this is the "
            "CPU build; leave the mode out"
        )
    adaptive = {"enable_adaptive_verification": True} if mode.name == "adaptive" else {}
    return dict(_WITHOUT_US), {**base, "num_speculative_tokens": width, **adaptive}


# Options that say how to schedule; an engine that does not schedule must not depend on them.
_SCHEDULING_OPTIONS = ("calibration", "cost_table", "admission_evidence", "record_outcomes")


def _unscheduled(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in _SCHEDULING_OPTIONS}


def server_arguments(arguments: dict[str, Any]) -> list[str]:
    """Arguments of `LLM(...)` as flags of `vllm serve`; the model comes first."""
    import json

    flags = [str(arguments["model"])]
    for name, value in arguments.items():
        flag = f"--{name.replace('_', '-')}"
        if name in ("model", "disable_log_stats"):
            continue
        if isinstance(value, bool):
            flags.append(flag if value else f"--no-{name.replace('_', '-')}")
        elif isinstance(value, dict):
            flags += [flag, json.dumps(value)]
        else:
            flags += [flag, str(value)]
    return flags


def plan_engines(
    modes: list[Mode], pair: PairSpec, *, is_cpu: bool, share: bool
) -> list[EngineLaunch]:
    """One engine per mode; with `share`, `pluginK` of the same K runs in the engine of `ours`.

    Sharing is honest because an engine with scheduling off runs what `ours` runs while its planner
    is absent: the same K, kernels and graphs. Fixed settings of another K draft fewer tokens, and
    stock modes have no plugin, so those keep engines of their own.
    """
    names = {mode.name for mode in modes}
    twins = {f"plugin{pair.width}"} | ({f"fixed{pair.width}"} if is_cpu else set())
    shared = [m for m in modes if m.name in twins] if share and "ours" in names else []
    engines = []
    for mode in modes:
        if mode in shared:
            continue
        engine = launch(mode, pair, is_cpu=is_cpu)
        if mode.name == "ours":
            engine = replace(engine, shared=tuple(shared))
        engines.append(engine)
    return engines
