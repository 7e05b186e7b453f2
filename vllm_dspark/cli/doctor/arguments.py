"""The part of `vllm serve`'s command line that decides whether DSpark will work.

The same words as for `serve`, read without importing vLLM: on a machine without a GPU, or with
another vLLM than the one to be used, the question can be asked too. Flags that have no bearing are
kept by name: check_flags says which of them vLLM does not know.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from vllm_dspark.cli.doctor.spelling import full_name, nest, spelled
from vllm_dspark.cli.doctor.vllm_flags import VllmFlags
from vllm_dspark.errors import DSparkConfigError

# flag -> (destination, kind)
_VALUES: dict[str, type] = {
    "--max-model-len": str,
    "--max-num-seqs": int,
    "--max-num-batched-tokens": str,
    "--tensor-parallel-size": int,
    "--pipeline-parallel-size": int,
    "--data-parallel-size": int,
    "--nnodes": int,
    "--attention-backend": str,
    "--attention-config": str,
    "--kv-cache-dtype": str,
    "--quantization": str,
    "--dtype": str,
    "--compilation-config": str,
    "--distributed-executor-backend": str,
    "--reasoning-parser": str,
    "--reasoning-config": str,
    "--tool-call-parser": str,
    "--kv-transfer-config": str,
    "--kv-offloading-size": str,
    "--speculative-config": str,
    "--spec-method": str,
    "--spec-model": str,
    "--spec-tokens": int,
    "--download-dir": str,
    "--revision": str,
    "--worker-cls": str,
    "--scheduler-cls": str,
    "--config": str,
    "--model": str,
}
_LISTS = ("--cudagraph-capture-sizes", "--logits-processors")
_SWITCHES = (
    "--enforce-eager",
    "--enable-prefix-caching",
    "--enable-lora",
    "--enable-auto-tool-choice",
    "--enable-chunked-prefill",
)
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)$")
# vLLM: lower-case suffixes are decimal, upper-case ones binary.
_SUFFIX = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


@dataclass(frozen=True)
class ServeArguments:
    """What was asked for; None where the user left it to vLLM."""

    target: str
    speculative: Mapping[str, Any] = field(default_factory=dict)  # without "dspark"
    options: Mapping[str, Any] = field(default_factory=dict)  # the "dspark" object
    values: Mapping[str, Any] = field(default_factory=dict)  # flag without dashes -> value
    unread: tuple[str, ...] = ()  # flags that have no bearing here, and their values
    config_keys: tuple[str, ...] = ()  # keys of the --config file, with dashes
    completed: tuple[tuple[str, str], ...] = ()  # (abbreviation, the flag vLLM takes it for)

    def get(self, name: str, default: Any = None) -> Any:
        """Value of a flag, `max-num-seqs` or `max_num_seqs`."""
        value = self.values.get(name.replace("-", "_"))
        return default if value is None else value

    def integer(self, name: str, default: int) -> int:
        """Integer value of a flag."""
        return int(self.get(name, default))

    def mapping(self, name: str) -> dict[str, Any]:
        """JSON object of a flag; empty if it was not given."""
        value = self.get(name)
        if value is None:
            return {}
        return value if isinstance(value, dict) else _json(f"--{name}", str(value))

    def on(self, name: str) -> bool:
        """Whether a switch was given."""
        return self.get(name) is True


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise DSparkConfigError(message)


def parse_serve(arguments: Sequence[str], flags: VllmFlags | None = None) -> ServeArguments:
    """Read a command line of `vllm serve`; raises DSparkConfigError for values that are none.

    flags: those of the installed vLLM, by which abbreviations are read; None: there are none.
    """
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("target", nargs="?")
    for flag, kind in _VALUES.items():
        parser.add_argument(flag, type=kind)
    for flag in _LISTS:
        parser.add_argument(flag, nargs="+")
    for flag in _SWITCHES:
        parser.add_argument(flag, action=argparse.BooleanOptionalAction)
    words, completed = spelled(arguments, flags)
    found, unread = parser.parse_known_args(words)
    values = {k: v for k, v in vars(found).items() if v is not None}
    keys: tuple[str, ...] = ()
    if "config" in values:
        content, keys = _config_file(Path(values["config"]), flags)
        values = {**content, **values}
    target = values.pop("target", None) or values.get("model")
    if not target:
        raise DSparkConfigError("name the target model, as for `vllm-dspark serve TARGET ...`")
    for name in ("max_model_len", "max_num_batched_tokens"):
        if name in values and values[name] not in ("auto", "-1", -1):
            values[name] = _size(name, str(values[name]))
        else:
            values.pop(name, None)
    seqs = values.get("max_num_seqs")
    if isinstance(seqs, int) and seqs < 1:
        raise DSparkConfigError(f"--max-num-seqs {seqs} must be at least 1")
    speculative = _speculative(values)
    options = speculative.pop("dspark", {})
    if not isinstance(options, Mapping):
        raise DSparkConfigError(
            f'"dspark" = {options!r} in --speculative-config must be a JSON object, such as '
            '{"scheduling": true}'
        )
    return ServeArguments(
        str(target), speculative, options, values, tuple(unread), keys, tuple(completed)
    )


def _config_file(path: Path, flags: VllmFlags | None) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values of vLLM's own `--config` file (YAML) by destination, and the keys as they stand."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise DSparkConfigError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise DSparkConfigError(f"--config {path} must hold a mapping of flags to values")
    values: dict[str, Any] = {}
    keys = []
    for key, value in content.items():
        name, dot, inner = str(key).partition(".")
        keys.append(name.replace("_", "-"))
        place = full_name(f"--{name}", flags)[2:].replace("-", "_")
        if dot:
            old = values.get(place)
            values[place] = dict(old) if isinstance(old, dict) else {}
            nest(values[place], inner, value)
        else:
            values[place] = value
    return values, tuple(keys)


def _speculative(values: dict[str, Any]) -> dict[str, Any]:
    """The speculative config, both spellings of keys read, `--spec-*` flags put in."""
    given = values.pop("speculative_config", None)
    config = given if isinstance(given, dict) else _json("--speculative-config", given or "{}")
    config = {key.replace("-", "_"): value for key, value in config.items()}
    for flag, key in (
        ("spec_method", "method"),
        ("spec_model", "model"),
        ("spec_tokens", "num_speculative_tokens"),
    ):
        if flag in values:
            config[key] = values.pop(flag)
    width, model = config.get("num_speculative_tokens"), config.get("model")
    if width is not None and type(width) is not int:  # a bool is none either
        raise DSparkConfigError(
            f'"num_speculative_tokens" = {width!r} in --speculative-config must be a whole number'
        )
    if model is not None and not isinstance(model, str):
        raise DSparkConfigError(
            f'"model" = {model!r} in --speculative-config must be a folder or a hub id, as text'
        )
    return config


def _json(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise DSparkConfigError(f"{flag} {text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise DSparkConfigError(f"{flag} {text!r} must be a JSON object")
    return value


def _size(name: str, text: str) -> int:
    match = _SIZE.match(text)
    if match is None:
        raise DSparkConfigError(f"--{name.replace('_', '-')} {text!r} is no number of tokens")
    return int(float(match[1]) * _SUFFIX[match[2]])
