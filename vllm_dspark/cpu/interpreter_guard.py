"""Counts launches that fall through to Triton's interpreter.

    with count_interpreted() as launches:
        llm.generate(...)
    assert not launches

Every launch of an interpreted kernel goes through ``GridExecutor.__call__`` (Triton 3.9.0),
so that one method is wrapped while a count is open. Launches in other processes are not
seen: run the engine with VLLM_ENABLE_V1_MULTIPROCESSING=0.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def count_interpreted() -> Iterator[Counter[str]]:
    """Yield a counter of interpreted launches by kernel name, live while the block runs."""
    from triton.runtime.interpreter import GridExecutor

    launches: Counter[str] = Counter()
    original = GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[f"{self.fn.__module__}.{self.fn.__name__}"] += 1
        return original(self, *args, **kwargs)

    GridExecutor.__call__ = counted
    try:
        yield launches
    finally:
        GridExecutor.__call__ = original
