"""Lets vLLM's multimodal classes be imported where torchvision is not installed.

PyPI's torchvision belongs to CUDA builds of torch and fails to import beside a CPU build, while
vLLM's image models import it whatever they are used for. With text alone nothing of it is called;
the package made here has every name and refuses every call.
"""

import importlib.util
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_MODULES = (
    "__init__",
    "io/__init__",
    "transforms/__init__",
    "transforms/functional",
    "transforms/v2/__init__",
    "transforms/v2/functional",
)
_BODY = """
class _Absent:
    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __call__(self, *args, **kwargs):
        raise RuntimeError(f"{self._name} was called, but torchvision is not installed")


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(f"{__name__}.{name}")
"""


@contextmanager
def importable_torchvision(folder: Path) -> Iterator[None]:
    """torchvision importable in this process and in those it starts; nothing if it is anyway."""
    if importlib.util.find_spec("torchvision") is not None:
        yield
        return
    for module in _MODULES:
        path = folder / "torchvision" / f"{module}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_BODY)
    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(folder), before)))
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        for name in [n for n in sys.modules if n.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before
