"""numba functions that compile, or load, at their first call.

Only vocabulary-wide loops that numpy cannot fuse are compiled, each for one explicit
signature and single-threaded, because vLLM binds the OpenMP threads of torch and a second
thread pool would compete with them. Compiled code is cached beside the sources, or, where
that folder is read-only, in the user's cache folder (numba decides; NUMBA_CACHE_DIR
overrides). Where neither can be written, every process compiles for itself.
"""

from collections.abc import Callable
from typing import Any

_OPTIONS = {"nogil": True, "error_model": "numpy"}


def lazy_njit(signature: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Like ``numba.njit(signature, cache=True)``, but importing the module costs nothing."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        compiled: list[Callable[..., Any]] = []

        def call(*args: Any) -> Any:
            if not compiled:
                compiled.append(_compile(signature, function))
            return compiled[0](*args)

        call.__doc__ = function.__doc__
        call.__name__ = function.__name__
        return call

    return decorate


def _compile(signature: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The compiled function, from numba's cache if it has one it can use."""
    import numba

    try:
        cached: Callable[..., Any] = numba.njit(signature, cache=True, **_OPTIONS)(function)
    except RuntimeError as reason:  # "cannot cache function ...: no locator available"
        if "cannot cache" not in str(reason):
            raise
        cached = numba.njit(signature, **_OPTIONS)(function)
    return cached
