"""One spelling of a command line: short flags, underscores, abbreviations and dotted keys.

What vLLM's own argument parser makes of these (0.32.0, 0.33.0), so that the same words mean the
same here.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from vllm_dspark.cli.doctor.vllm_flags import VllmFlags
from vllm_dspark.errors import DSparkConfigError

_SHORT = {
    "-tp": "--tensor-parallel-size",
    "-pp": "--pipeline-parallel-size",
    "-dp": "--data-parallel-size",
    "-q": "--quantization",
    "-cc": "--compilation-config",
    "-ac": "--attention-config",
    "-sc": "--speculative-config",
    "-O": "--optimization-level",
}
_LEVEL = re.compile(r"-O=?(\w+)$")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])$")
# vLLM: lower-case suffixes are decimal, upper-case ones binary.
_SUFFIX = {
    **{letter: 1000 ** (i + 1) for i, letter in enumerate("kmgt")},
    **{letter: 1024 ** (i + 1) for i, letter in enumerate("KMGT")},
}


def spelled(
    arguments: Sequence[str], flags: VllmFlags | None
) -> tuple[list[str], list[tuple[str, str]]]:
    """(arguments with full names of flags, [(abbreviation, full name)]).

    Dotted keys (`--speculative-config.method dspark`) are gathered into one JSON object behind
    everything else, as vLLM does: it takes the place of an object given in one piece. Raises
    DSparkConfigError for a dotted key without a value.
    """
    plain: list[str] = []
    completed: list[tuple[str, str]] = []
    objects: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or _is_number(argument):
            plain.append(argument)
            continue
        if level := _LEVEL.match(argument):
            plain += ["--optimization-level", level[1]]
            continue
        option, equals, value = argument.partition("=")
        name, dot, keys = option.partition(".")
        whole = full_name(name, flags)
        if whole != _SHORT.get(name, name.replace("_", "-")):
            completed.append((name, whole))
        if not dot:
            plain.append(whole + equals + value)
            continue
        given = value if equals else next(rest, None)
        if given is None:
            raise DSparkConfigError(f"{option} needs a value")
        nest(objects.setdefault(whole, {}), keys, given)
    for name, content in objects.items():
        plain += [name, json.dumps(content)]
    return plain, completed


def full_name(name: str, flags: VllmFlags | None) -> str:
    """A flag's full name, with dashes."""
    if name in _SHORT:
        return _SHORT[name]
    if not name.startswith("--"):
        return name
    name = name.replace("_", "-")
    return name if flags is None else flags.expanded(name)


def nest(content: dict[str, Any], keys: str, given: Any) -> None:
    """Put a value under dotted keys; `key+` appends to a list."""
    value = given
    if isinstance(given, str):
        value = given.split(",") if keys.endswith("+") else _value(given)
    *folders, last = keys.removesuffix("+").split(".")
    for key in folders:
        inner = content.get(key)
        if not isinstance(inner, dict):
            inner = content[key] = {}
        content = inner
    old = content.get(last)
    content[last] = [*old, *value] if isinstance(old, list) and isinstance(value, list) else value


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        size = _SIZE.match(text)
        return int(float(size[1]) * _SUFFIX[size[2]]) if size else text


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
