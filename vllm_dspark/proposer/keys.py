"""Typed access to a config.json whose errors name file, key, value and remedy."""

import itertools
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from vllm_dspark.errors import DrafterError

# No real config.json comes near this; a wrong file must not fill the memory.
MAX_CONFIG_BYTES = 16 * 1024 * 1024
# Beyond any real size or id, and small enough that products of three stay within 64 bits.
MAX_INTEGER = 2**31 - 1
MAX_NUMBER = 1e30
# Deeper than any config, and shallow enough for everything that walks one by recursion.
MAX_DEPTH = 64
# Characters of a value, and of a name, in an error message.
MAX_SHOWN = 200


def read_json(file: Path, what: str) -> dict[str, Any]:
    """The JSON object in `file`; nothing in it is ever executed."""
    if not is_file(file):
        raise DrafterError(f"{file} does not exist: give the folder of {what}")
    try:
        size = file.stat().st_size
        if size > MAX_CONFIG_BYTES:
            raise DrafterError(
                f"{file} has {size} bytes, more than the {MAX_CONFIG_BYTES} that a config may "
                "have: it is not a config"
            )
        text = file.read_bytes()
    except OSError as error:
        raise unreadable(file, error) from error
    value = parse_json(text, str(file))
    if not isinstance(value, dict):
        raise DrafterError(
            f"{file} holds a JSON {type(value).__name__}, not an object: fetch the file again"
        )
    return value


def parse_json(text: bytes, where: str) -> Any:
    """The JSON value in `text`, UTF-8; `where` names its place in errors.

    A key that is there twice is refused: readers differ in which of the two they take.
    """
    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise DrafterError(f"{where} is not valid JSON ({error}): fetch the file again") from error
    if _is_deep(value):
        raise DrafterError(
            f"{where} nests more than {MAX_DEPTH} objects and lists in each other: it does not "
            "belong to a checkpoint; fetch the file again"
        )
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"the key {shown(name)} is there more than once")
        found[name] = value
    return found


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
    return bool(level)


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def is_file(file: Path) -> bool:
    """Whether there is such a file; a name or folder that cannot be looked up is an error."""
    try:
        return file.is_file()
    except OSError as error:
        raise unreadable(file, error) from error


def unreadable(file: Path, error: OSError) -> DrafterError:
    """What a failing file system call means to the user."""
    reason = error.strerror or str(error)
    return DrafterError(f"{shown(str(file))} cannot be read ({reason}): check name and permissions")


def shown(value: object) -> str:
    """A value as error messages show it: escaped, and no longer than a line or two."""
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[:MAX_SHOWN]}... ({len(text)} characters)"


class Keys:
    """Typed access to a config whose errors name file, key, value and remedy."""

    def __init__(self, file: str, config: Any) -> None:
        if not isinstance(config, Mapping):
            raise DrafterError(f"{file}: must be a JSON object, not {shown(config)}")
        self.file = file
        self.config = config

    def bad(self, key: str, value: object, why: str) -> DrafterError:
        return DrafterError(f"{self.file}: {key} = {shown(value)}: {why}")

    def get(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise DrafterError(
                f"{self.file}: required key {key!r} is missing: this is not a complete DSpark "
                "drafter config, or it was exported by a tool that drops it"
            )
        return self.config[key]

    def integer(
        self, key: str, low: int, default: int | None = None, high: int = MAX_INTEGER
    ) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        value = self.get(key) if value is None else value
        if type(value) is not int or not low <= value <= high:
            raise self.bad(key, value, f"must be an integer >= {low} and <= {high}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, value, "must be true or false")
        return value

    def number(self, key: str, within: tuple[float, float] | None = None) -> float | None:
        """A positive number; None where it is missing."""
        value = self.config.get(key)
        if value is None:
            return None
        if type(value) not in (int, float) or not 0 < value <= MAX_NUMBER:
            raise self.bad(key, value, "must be a positive number")
        if within is not None and not within[0] <= value <= within[1]:
            raise self.bad(key, value, f"must be a number from {within[0]:g} to {within[1]:g}")
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
