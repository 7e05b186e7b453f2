"""Numbers that no weight has: NaN and infinity, found before a drafter is loaded.

Such a drafter would load and serve: greedy output stays right, but every draft is refused, and
sampling compares with a distribution that is none. Reading the file costs next to nothing more,
since the loader reads it right afterwards, from the same page cache.
"""

import functools
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.inventory import StoredTensor, listed
from vllm_dspark.proposer.keys import unreadable

# Type of the bits, and the bits that are all set in NaN and infinity (in NaN, where a type has no
# infinity), by safetensors' name of the type.
_EXPONENTS: dict[str, tuple[Any, int]] = {
    "F64": (np.uint64, 0x7FF0_0000_0000_0000),
    "F32": (np.uint32, 0x7F80_0000),
    "F16": (np.uint16, 0x7C00),
    "BF16": (np.uint16, 0x7F80),
    "F8_E4M3": (np.uint8, 0x7F),
    "F8_E5M2": (np.uint8, 0x7C),
    "F8_E8M0": (np.uint8, 0xFF),
}
# Small enough for a core's cache, so that three passes over it cost one over memory.
_CHUNK_BYTES = 1 << 18

# Name, type, first and last byte of a tensor.
_Entry = tuple[str, str, int, int]


def check_finite(tensors: Mapping[str, StoredTensor], where: str) -> None:
    """Refuse tensors that hold NaN or infinity; integers and unknown types are passed over."""
    by_file: dict[Path, list[_Entry]] = {}
    for name, tensor in tensors.items():
        if tensor.dtype in _EXPONENTS:
            entry = (name, tensor.dtype, tensor.start, tensor.stop)
            by_file.setdefault(tensor.file, []).append(entry)
    found: list[str] = []
    for file, entries in by_file.items():
        try:
            stat = file.stat()
            found += _faults(file, stat.st_mtime_ns, stat.st_size, tuple(entries))
        except OSError as error:
            raise unreadable(file, error) from error
    if found:
        raise DrafterError(
            f"{where} holds numbers that are none (NaN or infinity): {listed(found)}: training "
            "diverged or the export failed; take another checkpoint"
        )


@functools.lru_cache(maxsize=64)  # vLLM builds several configs in a start
def _faults(file: Path, _mtime: int, _size: int, entries: tuple[_Entry, ...]) -> tuple[str, ...]:
    """Which of a file's tensors are not finite, and how many numbers of each."""
    with file.open("rb") as stream:
        counted = ((name, *_count(stream, entry)) for name, *entry in entries)
        return tuple(f"{name} ({bad} of {size})" for name, bad, size in counted if bad)


def _count(stream: BinaryIO, entry: Iterable[Any]) -> tuple[int, int]:
    """Numbers of a tensor that are not finite, and all of them."""
    dtype, start, stop = entry
    kind, mask = _EXPONENTS[dtype]
    bits = kind(mask)
    buffer = np.empty(min(_CHUNK_BYTES, stop - start), dtype=np.uint8)
    stream.seek(start)
    found = 0
    for place in range(start, stop, _CHUNK_BYTES):
        part = buffer[: min(_CHUNK_BYTES, stop - place)]
        if stream.readinto(part.data) < len(part):  # type: ignore[attr-defined]
            raise OSError("the file has become shorter")
        found += int(np.count_nonzero((part.view(kind) & bits) == bits))
    return found, (stop - start) // np.dtype(kind).itemsize
