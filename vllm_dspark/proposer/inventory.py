"""What a safetensors checkpoint holds, from the headers of its files; no weight is read.

Files come from others: every field is checked before it is used, and nothing in them is executed.
"""

import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.keys import (
    MAX_SHOWN,
    is_file,
    parse_json,
    read_json,
    shown,
    unreadable,
)

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
# Far above any real header; a corrupt length must not make us read gigabytes.
MAX_HEADER_BYTES = 100 * 1024 * 1024
# Names listed before an error is cut short.
MAX_NAMED = 12
# Bytes of a file's name, on every file system in use.
MAX_NAME_BYTES = 255

# Bytes of an element by safetensors' name of its type.
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip
FLOATS = ("F64", "F32", "F16", "BF16")
READABLE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
}
# safetensors' name of each torch type
TORCH_NAMES = {
    **{dtype: name for name, dtype in READABLE.items()},
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.int8: "I8",
    torch.uint8: "U8",
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor as its file's header describes it."""

    shape: tuple[int, ...]
    dtype: str
    file: Path
    # byte range in the file
    start: int
    stop: int


def read_inventory(folder: str | Path) -> dict[str, StoredTensor]:
    """Every tensor of a checkpoint folder, from the shards of an index or, without one, all files.

    Without an index vLLM's loader reads every .safetensors file there is, and of a tensor in two
    of them the last one: what somebody left beside `model.safetensors` counts.
    """
    folder = Path(folder)
    if is_file(folder / INDEX):
        return _read_shards(folder)
    if is_file(folder / SINGLE):
        found = sorted(path.name for path in folder.glob("*.safetensors"))
        return _merged(folder, found, f"{folder} has no {INDEX}, so every file in it counts")
    raise DrafterError(
        f"{folder} holds neither {SINGLE} nor {INDEX}: give a safetensors checkpoint "
        "(convert a pytorch_model.bin first)"
    )


def _read_shards(folder: Path) -> dict[str, StoredTensor]:
    index = folder / INDEX
    weight_map = read_json(index, "a checkpoint").get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(s, str) for s in weight_map.values()):
        raise DrafterError(f"{index}: 'weight_map' must map tensor names to files: fetch it again")
    shards = sorted(set(weight_map.values()))
    for shard in shards:
        beside = shard == Path(shard).name and shard.endswith(".safetensors")
        if not beside or not shard.isprintable() or len(shard.encode()) > MAX_NAME_BYTES:
            raise DrafterError(
                f"{index} names the shard {shown(shard)}: shards are .safetensors files beside "
                "the index; fetch it again"
            )
    inventory = _merged(folder, shards, str(index))
    absent = [name for name in weight_map if name not in inventory]
    if absent:
        raise DrafterError(
            f"{index} lists tensors that its shards lack: {listed(absent)}: "
            "fetch the checkpoint again"
        )
    return inventory


def _merged(folder: Path, files: list[str], where: str) -> dict[str, StoredTensor]:
    """The tensors of several files; one in two of them is an error."""
    inventory: dict[str, StoredTensor] = {}
    for file in files:
        for name, tensor in _read_header(folder / file).items():
            if name in inventory:
                raise DrafterError(
                    f"{where}: {plain(name)} is in {inventory[name].file.name} and in {file}: "
                    "delete the files that are left over from another export"
                )
            inventory[name] = tensor
    return inventory


def _read_header(file: Path) -> dict[str, StoredTensor]:
    if not is_file(file):
        raise DrafterError(f"{file} does not exist: fetch the checkpoint again")
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            prefix = stream.read(8)
            length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
            if not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
                raise DrafterError(
                    f"{file} is not a safetensors file (its header claims {length} of {size} "
                    "bytes): it is truncated or a Git LFS pointer; fetch it again"
                )
            encoded = stream.read(length)
    except OSError as error:
        raise unreadable(file, error) from error
    header = parse_json(encoded, f"{file}: the header")
    if not isinstance(header, dict):
        raise DrafterError(f"{file}: the header must be a JSON object: fetch the file again")
    tensors = {
        name: _entry(file, name, entry, 8 + length, size)
        for name, entry in header.items()
        if name != "__metadata__"
    }
    _check_by_library(file)
    return tensors


def _check_by_library(file: Path) -> None:
    """What safetensors' own reader refuses (gaps, overlaps, metadata) must not wait for vLLM."""
    try:
        with safe_open(str(file), framework="pt"):
            pass
    except (SafetensorError, OSError) as error:
        raise DrafterError(f"{file}: safetensors refuses it ({error}): fetch the file again") from (
            error
        )


def _entry(file: Path, name: str, entry: Any, data: int, size: int) -> StoredTensor:
    """One tensor's entry, every field of it checked; data: where the file's data begin."""
    fields: dict[str, Any] = entry if isinstance(entry, dict) else {}
    shape: Any = fields.get("shape")
    dtype: Any = fields.get("dtype")
    offsets: Any = fields.get("data_offsets")
    known = isinstance(dtype, str) and dtype in ELEMENT_BYTES
    if not known or not _naturals(shape) or not _naturals(offsets, 2):
        raise DrafterError(
            f"{file}: {plain(name)} is described as {shown(entry)}, which is no safetensors entry "
            f"(dtypes are {', '.join(ELEMENT_BYTES)}): fetch the file again"
        )
    start, stop = data + offsets[0], data + offsets[1]
    if stop > size:
        raise DrafterError(
            f"{file} ends at byte {size}, before the end of {plain(name)} at {stop}: "
            "the download is incomplete; fetch it again"
        )
    if stop - start != math.prod(shape) * ELEMENT_BYTES[dtype]:
        raise DrafterError(
            f"{file}: {plain(name)} has shape {shown(shape)} of {dtype} but {stop - start} bytes: "
            "the file is damaged; fetch it again"
        )
    return StoredTensor(tuple(shape), dtype, file, start, stop)


def _naturals(value: Any, count: int | None = None) -> bool:
    """Whether value is a list of integers >= 0 (that many, if `count` is given)."""
    return (
        isinstance(value, list)
        and (count is None or len(value) == count)
        and all(type(i) is int and i >= 0 for i in value)
    )


def read_tensor(stored: StoredTensor) -> torch.Tensor:
    """Load one tensor to the CPU, in its stored dtype."""
    if stored.dtype not in READABLE:
        raise DrafterError(
            f"{stored.file}: a tensor has dtype {stored.dtype}: this reader knows "
            f"{', '.join(READABLE)}; quantised head weights are not supported"
        )
    with stored.file.open("rb") as stream:
        stream.seek(stored.start)
        raw = bytearray(stream.read(stored.stop - stored.start))
    dtype = READABLE[stored.dtype]
    flat = torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)
    return flat.view(stored.shape)


def plain(name: str) -> str:
    """A name for an error message: what would move a terminal's cursor is escaped."""
    return name if name.isprintable() and len(name) <= MAX_SHOWN else shown(name)


def listed(names: list[str]) -> str:
    """Names for an error message, the first dozen and how many more."""
    more = len(names) - MAX_NAMED
    named = ", ".join(plain(name) for name in names[:MAX_NAMED])
    return named + (f" and {more} more" if more > 0 else "")


def parameter_count(tensors: dict[str, StoredTensor]) -> int:
    """Stored numbers, for logs."""
    return sum(math.prod(tensor.shape) for tensor in tensors.values())
