"""Who may import whom, and who may read the environment (the table of DESIGN.md).

The rules are read from the syntax trees, so imports inside functions count too, and nothing of
the package is executed. The last tests run the same rules on a small tree that breaks each of
them: a rule that cannot fail protects nothing.
"""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

PACKAGE = "vllm_dspark"
ROOT = Path(__file__).parent.parent / PACKAGE

DATA_LIBRARIES = frozenset({"numpy", "pydantic"})
TORCH = frozenset({"numpy", "torch", "safetensors"})


@dataclass(frozen=True)
class Layer:
    """What a folder or module of the package may import.

    below: layers of the package; libraries: third-party roots; None allows any but vLLM.
    """

    below: frozenset[str]
    libraries: frozenset[str] | None


def _layer(below: str, libraries: frozenset[str] | None) -> Layer:
    return Layer(frozenset(below.split()), libraries)


# Imports go downward: a layer lists what lies below it.
BASE = "__init__ config errors"
LAYERS: dict[str, Layer] = {
    "__init__": _layer("", frozenset()),
    "errors": _layer("__init__", DATA_LIBRARIES),
    "config": _layer("__init__ errors", DATA_LIBRARIES),
    "planning": _layer(BASE, frozenset({"numpy"})),
    "artifacts": _layer(f"{BASE} planning", DATA_LIBRARIES),
    "kernels": _layer(f"{BASE} planning artifacts", TORCH | {"triton"}),
    "proposer": _layer(f"{BASE} planning artifacts kernels", TORCH),
    "sampling": _layer(f"{BASE} planning artifacts kernels", TORCH),
    "cpu": _layer(f"{BASE} planning artifacts kernels", TORCH | {"numba", "llvmlite", "triton"}),
    "simulation": _layer(f"{BASE} planning artifacts", DATA_LIBRARIES | {"numba"}),
    "demo": _layer(f"{BASE} planning artifacts kernels proposer sampling cpu", None),
    "integration": _layer(
        f"{BASE} planning artifacts kernels proposer sampling cpu",
        TORCH
        | DATA_LIBRARIES
        | {"vllm", "triton", "numba", "transformers", "prometheus_client", "pynvml"}
        | {"ray", "yaml"},  # ray_serving, engine_files
    ),
    "bench": _layer(
        f"{BASE} planning artifacts kernels proposer sampling cpu demo integration simulation",
        None,
    ),
    "cli": _layer(
        f"{BASE} planning artifacts kernels proposer sampling cpu demo integration simulation"
        " bench",
        None,
    ),
}

# Parts of a layer with a narrower rule of their own.
CPU_TRITON_FILES = ("cpu/triton_backend/", "cpu/interpreter_guard.py")

# Environment reads outside config.py, each with the reason why it cannot be an option.
ENVIRONMENT_READERS = {
    "config.py": "the one place for our own variables",
    "cpu/triton_backend/": "Triton's interpreter switch must be set while triton is imported",
    "cpu/jit.py": "numba's own cache variable must be set before numba is imported",
    "cli/serve.py": "hands its whole environment to the server that it becomes",
    "demo/server.py": "hands its whole environment to the engine processes that it starts",
    "integration/compat.py": "VLLM_USE_V2_MODEL_RUNNER is vLLM's own switch, kept as it was",
}


@dataclass(frozen=True)
class Import:
    line: int
    module: str


def violations(root: Path, package: str = PACKAGE) -> list[str]:
    """One line per broken rule in the package at `root`."""
    found: list[str] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"), filename=relative)
        found += _check_imports(relative, tree, package)
        found += _check_environment(relative, tree)
    return found


def _check_imports(relative: str, tree: ast.Module, package: str) -> Iterator[str]:
    name = relative.split("/", maxsplit=1)[0].removesuffix(".py")
    layer = LAYERS.get(name)
    if layer is None:
        yield f"{relative}: layer {name!r} is not in the table of tests/test_layers.py"
        return
    for item in imports_of(tree, relative, package):
        root, _, rest = item.module.partition(".")
        where = f"{relative}:{item.line}: imports {item.module}"
        if root == package:
            other = rest.split(".")[0]
            if other in ("", "__version__"):
                other = "__init__"
            if other != name and other not in layer.below:
                yield f"{where}, but {name} is not above {other}"
        elif root == "vllm":
            if name != "integration":
                yield f"{where}; only integration/ may import vllm"
        elif root not in sys.stdlib_module_names:
            if layer.libraries is not None and root not in layer.libraries:
                yield f"{where}; {name} may use {sorted(layer.libraries)}"
            elif root == "triton" and name == "cpu" and not relative.startswith(CPU_TRITON_FILES):
                yield f"{where}; in cpu/ only {CPU_TRITON_FILES} may"


def imports_of(tree: ast.Module, relative: str, package: str = PACKAGE) -> Iterator[Import]:
    """Every import of a module as an absolute dotted name, `import_module("...")` included."""
    folder = [package, *relative.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (Import(node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(folder[: len(folder) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            # `from package import x` names the layer x, not the package's own module
            exact = module == package
            names = [f"{module}.{a.name}" if exact else module for a in node.names]
            yield from (Import(node.lineno, name) for name in names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__"):
            first = node.args[0] if node.args else None
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                yield Import(node.lineno, first.value)


def _called(node: ast.Call) -> str:
    function = node.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _check_environment(relative: str, tree: ast.Module) -> Iterator[str]:
    if relative.startswith(tuple(ENVIRONMENT_READERS)):
        return
    for node in ast.walk(tree):
        name = ""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            name = f"{node.value.id}.{node.attr}"
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            taken = {alias.name for alias in node.names} & {"environ", "getenv", "environb"}
            name = f"os.{min(taken)}" if taken else ""
        if name in ("os.environ", "os.getenv", "os.environb"):
            yield f"{relative}:{node.lineno}: {name}; only {sorted(ENVIRONMENT_READERS)} may"


def import_cycles(root: Path, package: str = PACKAGE) -> list[list[str]]:
    """Cycles among the imports that run when a module is loaded (function bodies left out)."""
    graph: dict[str, set[str]] = {}
    files = {_dotted(p, root, package): p for p in root.rglob("*.py")}
    for module, path in files.items():
        relative = path.relative_to(root).as_posix()
        tree = ast.parse(path.read_text(encoding="utf-8"))
        at_load = ast.Module(body=[*_statements_at_load(tree.body)], type_ignores=[])
        targets: set[str] = set()
        for item in imports_of(at_load, relative, package):
            targets.add(item.module)
        for node in ast.walk(at_load):  # `from package.a import b` where b is a module
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                targets |= {f"{node.module}.{alias.name}" for alias in node.names}
        graph[module] = (targets & files.keys()) - {module}
    return _cycles(graph)


def _dotted(path: Path, root: Path, package: str) -> str:
    parts = [package, *path.relative_to(root).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _statements_at_load(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        elif isinstance(node, ast.If | ast.Try | ast.With | ast.ClassDef):
            yield from _statements_at_load(node.body)
            yield from _statements_at_load(getattr(node, "orelse", []))


def _cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    found: list[list[str]] = []
    done: set[str] = set()

    def visit(module: str, trail: list[str]) -> None:
        if module in trail:
            found.append([*trail[trail.index(module) :], module])
        elif module not in done:
            for target in sorted(graph[module]):
                visit(target, [*trail, module])
            done.add(module)

    for module in sorted(graph):
        visit(module, [])
    return found


def test_package_keeps_its_layers() -> None:
    """Catches an import that goes upward, or a library (vLLM above all) in the wrong layer."""
    broken = violations(ROOT)
    assert not broken, "\n".join(broken)


def test_package_loads_without_import_cycles() -> None:
    """Catches a cycle, which works or fails depending on which module is imported first."""
    cycles = import_cycles(ROOT)
    assert not cycles, "\n".join(" -> ".join(cycle) for cycle in cycles)


def test_every_layer_rule_names_existing_layers() -> None:
    """Catches a misspelt layer in the table, which would forbid (or allow) nothing."""
    for layer in LAYERS.values():
        assert layer.below <= LAYERS.keys()


BREAKING = {
    "planning/a.py": ("import torch\n", "imports torch; planning may use"),
    "planning/b.py": ("from vllm_dspark.kernels import noise\n", "planning is not above kernels"),
    "planning/c.py": ("def f():\n    import vllm.config\n", "only integration/ may import vllm"),
    "config.py": ("import rich\n", "imports rich; config may use"),
    "errors.py": ("from vllm_dspark.config import X\n", "errors is not above config"),
    "artifacts/a.py": ("from ..kernels.noise import x\n", "artifacts is not above kernels"),
    "kernels/a.py": ("import numba\n", "imports numba; kernels may use"),
    "proposer/a.py": (
        "import importlib\nimportlib.import_module('vllm.v1.request')\n",
        "only integration/ may import vllm",
    ),
    "sampling/a.py": ("from vllm_dspark import integration\n", "sampling is not above integration"),
    "cpu/a.py": ("import triton\n", "in cpu/ only"),
    "integration/a.py": ("from vllm_dspark.cli.main import app\n", "not above cli"),
    "cli/a.py": ("import vllm\n", "only integration/ may import vllm"),
    "demo/a.py": ("from vllm_dspark.integration import settle\n", "demo is not above integration"),
    "integration/b.py": ("import os\nos.environ['X'] = '1'\n", "os.environ; only"),
    "integration/c.py": ("import os\nx = os.getenv('X')\n", "os.getenv; only"),
    "integration/d.py": ("from os import environ\n", "os.environ; only"),
    "extra/a.py": ("", "layer 'extra' is not in the table"),
}

KEEPING = {
    "config.py": "import os\nimport numpy, pydantic\nos.environ.get('X')\n",
    "planning/a.py": "import numpy as np\nfrom vllm_dspark.errors import E\nfrom . import b\n",
    "cpu/interpreter_guard.py": "import triton\n",
    "cpu/triton_backend/__init__.py": "import os\nimport triton\nos.environ['X'] = '1'\n",
    "integration/a.py": "import vllm\nfrom vllm_dspark.cpu.build import f\n",
    "cli/main.py": "import typer\nfrom vllm_dspark.integration import compat\n",
}


def _write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize("name", BREAKING)
def test_rule_catches_its_violation(tmp_path: Path, name: str) -> None:
    """Catches a rule that cannot fail: one file that breaks it, among files that keep all."""
    text, reason = BREAKING[name]
    found = violations(_write(tmp_path, {**KEEPING, name: text}))
    assert len(found) == 1, found
    assert found[0].startswith(name), found
    assert reason in found[0], found


def test_rules_accept_a_tree_that_keeps_them(tmp_path: Path) -> None:
    """Catches a rule that forbids what DESIGN.md allows."""
    assert violations(_write(tmp_path, KEEPING)) == []


def test_cycle_search_finds_a_cycle(tmp_path: Path) -> None:
    """Catches a search that follows no edges; an import inside a function is no cycle."""
    files = {
        "planning/a.py": "from vllm_dspark.planning import b\n",
        "planning/b.py": "import vllm_dspark.planning.c\n",
        "planning/c.py": "from vllm_dspark.planning.a import x\n",
        "planning/d.py": "def f():\n    from vllm_dspark.planning import a\n",
    }
    (cycle,) = import_cycles(_write(tmp_path, files))
    assert sorted(cycle[:-1]) == [f"vllm_dspark.planning.{m}" for m in "abc"]
    files["planning/c.py"] = "def f():\n    from vllm_dspark.planning.a import x\n"
    assert import_cycles(_write(tmp_path, files)) == []
