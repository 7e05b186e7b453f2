"""numba, with a cache folder that is writable and signatures that compile once.

Only vocabulary-wide loops that numpy cannot fuse are compiled. Each is compiled for one
explicit signature on its first call (``lazy_njit``), so importing this package costs
nothing, and single-threaded, because vLLM binds the OpenMP threads of torch and a second
thread pool would compete with them.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

CACHE_VARIABLE = "NUMBA_CACHE_DIR"


def _choose_cache_folder() -> None:
    """Point numba at the user's cache where it could not write beside our sources."""
    if CACHE_VARIABLE in os.environ or os.access(Path(__file__).parent, os.W_OK):
        return
    base = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    folder = base / "vllm-dspark" / "numba"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        folder = Path(tempfile.gettempdir()) / f"vllm-dspark-numba-{os.getuid()}"
    os.environ[CACHE_VARIABLE] = str(folder)


def lazy_njit(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like ``numba.njit(signature, cache=True)``, compiled (or loaded) at the first call."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: list[Callable[..., Any]] = []

        def call(*args: Any) -> Any:
            if not compiled:
                _choose_cache_folder()
                import numba

                options = {"cache": True, "nogil": True, "error_model": "numpy"}
                compiled.append(numba.njit(signature, **options)(function))
            return compiled[0](*args)

        call.__doc__ = function.__doc__
        call.__name__ = function.__name__
        return call

    return decorate
