"""Flags that the installed vLLM's `serve` knows, read from its source without importing it.

Building vLLM's own parser takes seconds (it imports torch and every config class); its flags are
literals of `add_argument` calls, and fields of the dataclasses that the frontend's are made from.
"""

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points

from vllm_dspark.errors import ContractError
from vllm_dspark.integration.contract import ReadSource, installed_source

_ENGINE = "engine/arg_utils.py"
# vLLM 0.32.0, then 0.33.0
_FRONTEND = ("entrypoints/launchers/cli_args.py", "entrypoints/common/cli_args.py")
_CLASSES = ("EngineArgs", "AsyncEngineArgs", "BaseFrontendArgs", "FrontendArgs")
_HELP = ("--help", "-h")


@dataclass(frozen=True)
class VllmFlags:
    """Options with their dashes, `--no-` forms of switches among them."""

    options: frozenset[str]
    # False where a platform plugin is installed, which may add flags of its own
    complete: bool = True

    def matches(self, option: str) -> list[str]:
        """The options that vLLM's parser would take this one for: itself, or what it begins."""
        if option in self.options:
            return [option]
        return sorted(known for known in self.options if known.startswith(option))

    def expanded(self, option: str) -> str:
        """The full name of an unambiguous abbreviation; anything else as it is."""
        found = self.matches(option) if len(option) > len("--") else []
        return found[0] if len(found) == 1 else option

    def nearest(self, option: str) -> str:
        """The option most like a misspelt one; empty if none is."""
        names = sorted(known[2:] for known in self.options if known.startswith("--"))
        found = difflib.get_close_matches(option[2:], names, n=1, cutoff=0.7)
        return f"--{found[0]}" if found else ""


@cache
def vllm_flags(read: ReadSource = installed_source) -> VllmFlags | None:
    """Flags of `vllm serve`; None where they cannot be told (no vLLM, or another layout of it)."""
    options: set[str] = set(_HELP)
    files = 0
    for path in (_ENGINE, *_FRONTEND):
        try:
            module = ast.parse(read(path))
        except (FileNotFoundError, SyntaxError):
            continue
        except ContractError:
            return None
        files += 1
        options.update(_of_calls(module))
        options.update(_of_classes(module, with_values=path != _ENGINE))
    if files < 2:  # the engine's and the frontend's
        return None
    return VllmFlags(frozenset(options), not entry_points(group="vllm.platform_plugins"))


def _of_calls(module: ast.Module) -> Iterator[str]:
    """Literal option strings of `add_argument`."""
    for node in ast.walk(module):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != "add_argument":
            continue
        actions = [ast.unparse(k.value) for k in node.keywords if k.arg == "action"]
        switch = any(action.endswith("BooleanOptionalAction") for action in actions)
        for argument in node.args:
            value = getattr(argument, "value", None)
            if isinstance(value, str) and value.startswith("-"):
                yield value
                if switch and value.startswith("--"):
                    yield f"--no-{value[2:]}"


def _of_classes(module: ast.Module, with_values: bool) -> Iterator[str]:
    """Options made from fields: those of the frontend, and `--no-` forms of boolean ones."""
    for node in module.body:
        if not isinstance(node, ast.ClassDef) or node.name not in _CLASSES:
            continue
        for child in node.body:
            if not isinstance(child, ast.AnnAssign) or not isinstance(child.target, ast.Name):
                continue
            name = child.target.id.replace("_", "-")
            if with_values:
                yield f"--{name}"
            kind = {part.strip() for part in ast.unparse(child.annotation).split("|")}
            if "bool" in kind and "str" not in kind:
                yield f"--no-{name}"
