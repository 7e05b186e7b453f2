"""How the simulator's functions are compiled, and when compiled code may be reused.

numba's cache looks at the file of the cached function alone, not at those of the functions it
calls. So only entry points are cached, and each closes over a stamp of all sources of this
folder: numba hashes closures, and an edit anywhere here compiles anew.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numba.extending

_OPTIONS = {"nogil": True, "error_model": "numpy"}

# As overloads, because a plain njit compiles once more for every constant among the arguments; and
# without wrappers for Python, which unpack the arrays of all tuples. Both halve the compile time.
inner = numba.extending.register_jitable(no_cpython_wrapper=True, no_cfunc_wrapper=True, **_OPTIONS)


def entry(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that Python calls; kept on disk where that is possible."""
    try:
        cached: Callable[..., Any] = numba.njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as reason:  # "cannot cache function ...: no locator available"
        if "cannot cache" not in str(reason):
            raise
        cached = numba.njit(**_OPTIONS)(function)
    return cached


def source_stamp() -> int:
    """Number that changes with any source file of this folder, or of planning/, whose constants
    are compiled in."""
    core = Path(__file__).parent
    digest = hashlib.sha256()
    for folder in (core, core.parents[1] / "planning"):
        for path in sorted(folder.glob("*.py")):
            digest.update(path.read_bytes())
    return int.from_bytes(digest.digest()[:7], "little")
