"""The carrier of metrics: small memory-mapped files that the engine core writes once per step.

vLLM's codec drops unknown stats fields, and /metrics is served by another process than the engine
core, so the record of values travels through a file. Layout of a record file, little endian:

    8 bytes   magic
    8 bytes   sequence number: odd while the writer is at work
    8 bytes   length of the header
    header    JSON: whose values these are, padded with blanks to a multiple of 8
    values    float64, in the order of the catalog

The writer holds a lock (flock) on its file as long as it lives, whatever ends it; a file whose
lock can be had belongs to nobody and is removed by whoever finds it.

Where vLLM serves several API servers from one PROMETHEUS_MULTIPROC_DIR, their /metrics read only
prometheus_client's own files in that folder: `PrometheusFiles` writes the same values there too.
"""

import fcntl
import itertools
import json
import mmap
import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
from prometheus_client.mmap_dict import MmapedDict, mmap_key
from prometheus_client.utils import floatToGoString

from vllm_dspark.integration.metrics_catalog import ENGINE_LABELS, Family

Values = npt.NDArray[np.float64]

SUFFIX = ".dspark"
_MAGIC = b"DSPARK01"
_FIXED = 24
_READ_TRIES = 50
_NUMBER = itertools.count()  # tells the engines of one process apart


class Sink(Protocol):
    """Where a record of values goes."""

    def publish(self, values: Values) -> None:
        """Replace all values."""

    def close(self) -> None:
        """Take them away."""


@dataclass(frozen=True)
class RecordHeader:
    """Whose values a record holds."""

    model_name: str
    engine: str
    width: int  # K
    off_reason: str
    pid: int
    started: float  # seconds since the epoch

    @property
    def labels(self) -> tuple[str, str]:
        """Values of ENGINE_LABELS."""
        return (self.model_name, self.engine)


@dataclass(frozen=True)
class Record:
    """One engine's values, as read."""

    header: RecordHeader
    values: Values


class RecordFile:
    """Writer of one engine's record; the file goes with it."""

    def __init__(self, folder: Path, header: RecordHeader, size: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        text = json.dumps(asdict(header)).encode()
        text += b" " * (-len(text) % 8)
        name = f"engine{header.engine}-{os.getpid()}-{next(_NUMBER)}"
        self.path = folder / (name + SUFFIX)
        draft = folder / (name + ".new")
        self._file = draft.open("x+b")
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._file.write(_MAGIC + (0).to_bytes(8, "little"))
        self._file.write(len(text).to_bytes(8, "little") + text + bytes(8 * size))
        self._file.flush()
        memory = mmap.mmap(self._file.fileno(), 0)
        self._sequence = np.frombuffer(memory, dtype=np.uint64, count=1, offset=8)
        self._values = np.frombuffer(memory, dtype=np.float64, offset=_FIXED + len(text))
        draft.rename(self.path)  # readers never see a file half made
        self._close = weakref.finalize(self, _remove, self.path, self._file, os.getpid())

    def publish(self, values: Values) -> None:
        """Replace all values; a reader sees all of the old or all of the new ones."""
        sequence = self._sequence
        sequence += 1
        self._values[:] = values
        sequence += 1

    def close(self) -> None:
        """Remove the file, and its folder when that was the last one."""
        self._close()


def _remove(path: Path, file: object, writer_pid: int) -> None:
    if os.getpid() != writer_pid:
        return  # a fork of the writer ends
    path.unlink(missing_ok=True)
    file.close()  # type: ignore[attr-defined]
    with suppress(OSError):  # another engine's file is still there
        path.parent.rmdir()


def read_records(folder: Path) -> list[Record]:
    """Records of all living engines that write to `folder`, oldest engine first."""
    found = [record for path in folder.glob(f"*{SUFFIX}") if (record := _read(path))]
    return sorted(found, key=lambda record: record.header.started)


def _read(path: Path) -> Record | None:
    try:
        with path.open("rb") as file:
            if _is_orphan(file.fileno()):
                path.unlink(missing_ok=True)
                return None
            return _parse(file.fileno())
    except FileNotFoundError:  # its engine ended between the listing and now
        return None


def _is_orphan(descriptor: int) -> bool:
    """Whether no writer holds the file's lock."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _parse(descriptor: int) -> Record | None:
    size = os.fstat(descriptor).st_size
    for attempt in range(_READ_TRIES):
        data = os.pread(descriptor, size, 0)
        if len(data) < _FIXED or data[:8] != _MAGIC:
            return None  # not ours
        before, after = data[8:16], os.pread(descriptor, 8, 8)
        if before == after and int.from_bytes(before, "little") % 2 == 0:
            end = _FIXED + int.from_bytes(data[16:24], "little")
            header = RecordHeader(**json.loads(data[_FIXED:end]))
            return Record(header, np.frombuffer(data, dtype=np.float64, offset=end))
        time.sleep(0.0001 * (attempt + 1))  # a publication takes about a microsecond
    return None


def sweep(base: Path, pattern: str) -> None:
    """Remove what crashed servers left behind in folders `base/pattern`."""
    for folder in base.glob(pattern):
        with suppress(OSError):  # another user's, or in use
            for path in folder.glob(f"*{SUFFIX}"):
                _read(path)
            folder.rmdir()


class PrometheusFiles:
    """The same values in prometheus_client's own files, for its MultiProcessCollector.

    The files are made with prometheus_client (`MmapedDict`, the documented format of its
    multiprocess mode); only the 8 bytes of each value are written here, all at once.
    """

    def __init__(self, folder: Path, families: Sequence[Family], labels: tuple[str, str]) -> None:
        name = f"{os.getpid()}-dspark{labels[1]}-{next(_NUMBER)}"
        # livesum, not mostrecent: that one ignores values without a time of their own.
        prefixes = {"counter": "counter", "gauge": "gauge_livesum", "histogram": "histogram"}
        self.paths = {kind: folder / f"{start}_{name}.db" for kind, start in prefixes.items()}
        offsets = np.cumsum([0, *(family.size for family in families)])
        self._targets: list[tuple[Values, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
        for kind, path in self.paths.items():
            keys: dict[str, int] = {}
            for family, start in zip(families, offsets.tolist(), strict=False):
                if family.kind == kind:
                    keys |= {key: start + i for i, key in enumerate(_keys(family, labels))}
            self._targets.append(_create(path, keys))
        self._close = weakref.finalize(self, _remove_all, list(self.paths.values()), os.getpid())

    def publish(self, values: Values) -> None:
        """Replace all values, each by itself."""
        for memory, positions, sources in self._targets:
            memory[positions] = values[sources]

    def close(self) -> None:
        """Remove the files."""
        self._close()


def _create(
    path: Path, keys: dict[str, int]
) -> tuple[Values, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Make a file with `keys`; returns (its memory, where values go, which values)."""
    made = MmapedDict(str(path))
    for key in keys:
        made.write_value(key, 0.0, 0.0)
    made.close()
    places = {key: position for key, _, _, position in MmapedDict.read_all_values_from_file(path)}
    with path.open("r+b") as file:
        memory = np.frombuffer(mmap.mmap(file.fileno(), 0), dtype=np.float64)
    positions = np.array([places[key] // 8 for key in keys], dtype=np.int64)
    return memory, positions, np.array(list(keys.values()), dtype=np.int64)


def _keys(family: Family, labels: Sequence[str]) -> Iterator[str]:
    """prometheus_client's key of each cell, in record order."""
    name, text = family.full_name, family.help
    if family.kind == "histogram":
        for bound in family.bounds:
            names = [*ENGINE_LABELS, "le"]
            values = [*labels, floatToGoString(bound)]
            yield mmap_key(name, f"{name}_bucket", names, values, text)
        yield mmap_key(name, f"{name}_sum", list(ENGINE_LABELS), list(labels), text)
        return
    names = [*ENGINE_LABELS, *family.labels]
    for cell in family.cells:
        yield mmap_key(name, family.sample_names[0], names, [*labels, *cell], text)


def _remove_all(paths: Sequence[Path], writer_pid: int) -> None:
    if os.getpid() == writer_pid:
        for path in paths:
            path.unlink(missing_ok=True)
