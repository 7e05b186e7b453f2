"""What a process holds, and of which kind, without the cost of tracing every allocation.

Resident size alone cannot tell a leak from an allocator that keeps what was freed. So four numbers
are read side by side: pages in memory, bytes that C code holds (malloc), bytes that malloc keeps
free, and blocks of CPython's own allocator (objects up to 512 bytes, which malloc never sees).
"""

import ctypes
import gc
import resource
import sys
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

MIB = 2**20


class _MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2 (malloc.h), all size_t."""

    _fields_: ClassVar = [
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd",
            "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Sample:
    """Memory of this process at one moment, MiB unless said otherwise."""

    resident: float
    # in use by callers of malloc, mapped chunks included
    malloc_used: float
    # freed, but kept by malloc
    malloc_free: float
    # blocks of CPython's allocator, a count
    python_blocks: int

    def shown(self) -> dict[str, float]:
        return asdict(self)


def sample() -> Sample:
    """Read the numbers; collects garbage first, so that cycles do not count."""
    gc.collect()
    info = _mallinfo()
    used = (info.uordblks + info.hblkhd) / MIB
    return Sample(
        resident_mb(), round(used, 1), round(info.fordblks / MIB, 1), sys.getallocatedblocks()
    )


def resident_mb() -> float:
    """Resident size of this process now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return round(pages * resource.getpagesize() / MIB, 1)


def trim() -> float:
    """Have malloc give back every page it keeps free; resident MiB afterwards."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return resident_mb()


def objects_by_type() -> Counter[str]:
    """How many objects of each type the garbage collector tracks."""
    return Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.get_objects())


def grown(before: Counter[str], after: Counter[str], most: int = 12) -> dict[str, int]:
    """Types with more objects than before, those that grew most first."""
    return dict((after - before).most_common(most))


def _mallinfo() -> Any:
    function = ctypes.CDLL(None).mallinfo2
    function.restype = _MallInfo
    return function()
