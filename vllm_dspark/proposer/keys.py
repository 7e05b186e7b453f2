"""Typed access to a config.json whose errors name file, key, value and remedy."""

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vllm_dspark.errors import DrafterError

# No real config.json comes near this; a wrong file must not fill the memory.
MAX_CONFIG_BYTES = 16 * 1024 * 1024
# Beyond any real size or id, and small enough that products of three stay within 64 bits.
MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e30


def read_json(file: Path, what: str) -> dict[str, Any]:
    """The JSON object in `file`; nothing in it is ever executed."""
    if not file.is_file():
        raise DrafterError(f"{file} does not exist: give the folder of {what}")
    size = file.stat().st_size
    if size > MAX_CONFIG_BYTES:
        raise DrafterError(
            f"{file} has {size} bytes, more than the {MAX_CONFIG_BYTES} that a config may have: "
            "it is not a config"
        )
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise DrafterError(f"{file} is not valid JSON ({error}): fetch the file again") from error
    if not isinstance(value, dict):
        raise DrafterError(
            f"{file} holds a JSON {type(value).__name__}, not an object: fetch the file again"
        )
    return value


class Keys:
    """Typed access to a config whose errors name file, key, value and remedy."""

    def __init__(self, file: str, config: Any) -> None:
        if not isinstance(config, Mapping):
            raise DrafterError(f"{file}: must be a JSON object, not {config!r}")
        self.file = file
        self.config = config

    def bad(self, key: str, value: object, why: str) -> DrafterError:
        return DrafterError(f"{self.file}: {key} = {value!r}: {why}")

    def get(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise DrafterError(
                f"{self.file}: required key {key!r} is missing: this is not a complete DSpark "
                "drafter config, or it was exported by a tool that drops it"
            )
        return self.config[key]

    def integer(self, key: str, low: int, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        value = self.get(key) if value is None else value
        if type(value) is not int or not low <= value <= MAX_INTEGER:
            raise self.bad(key, value, f"must be an integer >= {low} and <= {MAX_INTEGER}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, value, "must be true or false")
        return value

    def number(self, key: str) -> float | None:
        value = self.config.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value <= MAX_NUMBER:
            raise self.bad(key, value, "must be a positive number")
        return float(value)

    def text(self, key: str, default: str) -> str:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.bad(key, value, "must be a string")
        return value

    def names(self, key: str, default: list[str]) -> list[str]:
        """A list of strings; `default` where it is missing or empty."""
        value = self.config.get(key)
        if value is None or value == []:
            return default
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise self.bad(key, value, "must be a list of strings")
        return value

    def section(self, key: str) -> "Keys":
        """The object under `key`; empty where it is missing."""
        value = self.config.get(key)
        return Keys(f"{self.file} ({key})", {} if value is None else value)

    def layer_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if (
            not isinstance(value, list)
            or not value
            or not all(type(i) is int and abs(i) <= MAX_INTEGER for i in value)
        ):
            raise self.bad(key, value, "must be a non-empty list of integers")
        if any(b <= a for a, b in itertools.pairwise(value)):
            raise self.bad(key, value, "must be strictly increasing, the order of the fc input")
        return tuple(value)
