"""Files of (confidence, outcome) pairs, as integration/recording.py writes them.

The writer appends while an engine runs, so the last line of a file may be half written; that line
is left for the next read. Anything else that is not as it should be is an error that names file
and line.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.errors import InputError

KIND, VERSION = "dspark_pairs", 1


@dataclass(frozen=True)
class Pair:
    """One draft block: its raw confidences and what the target decided."""

    request_id: str
    sampled: bool
    untouched: bool
    stamp: int
    verified: int
    accepted: int
    confidence: tuple[float, ...]  # NaN where the head gave none


class PairReader:
    """Follows a file: each `read` returns what has been appended since the last one."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_positions = 0  # K, known after the header was read
        self._offset = 0
        self._line = 0

    def read(self) -> list[Pair]:
        """New pairs; raises InputError for a file that is none."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from error
        complete = data.rfind(b"\n") + 1
        self._offset += complete
        pairs: list[Pair] = []
        for line in data[:complete].splitlines():
            self._line += 1
            pairs += self._parse(line)
        return pairs

    def _parse(self, line: bytes) -> Iterable[Pair]:
        try:
            obj = json.loads(line)
        except ValueError as error:
            raise self._wrong(f"is not JSON ({error})") from error
        if not isinstance(obj, dict):
            raise self._wrong("is no JSON object")
        if "kind" in obj:
            self._header(obj)
            return ()
        if not self.num_positions:
            raise self._wrong(f'comes before a header {{"kind": "{KIND}", ...}}')
        try:
            return [self._pair(*row) for row in obj["rows"]]
        except (KeyError, TypeError, ValueError) as error:
            raise self._wrong(f"holds no rows of pairs ({error})") from error

    def _header(self, obj: dict[str, Any]) -> None:
        if obj["kind"] != KIND or obj.get("version") != VERSION:
            raise self._wrong(
                f"is of kind {obj['kind']!r}, version {obj.get('version')!r}; wanted {KIND!r}, "
                f"version {VERSION}"
            )
        width = obj.get("num_positions")
        if not isinstance(width, int) or width < 1 or self.num_positions not in (0, width):
            raise self._wrong(f"says num_positions = {width!r}")
        self.num_positions = width

    def _pair(
        self,
        request_id: str,
        sampled: bool,
        untouched: bool,
        stamp: int,
        verified: int,
        accepted: int,
        confidence: list[float | None],
    ) -> Pair:
        if len(confidence) != self.num_positions or not 0 <= accepted <= verified <= len(
            confidence
        ):
            raise ValueError(f"{accepted} of {verified} accepted, {len(confidence)} confidences")
        values = tuple(float("nan") if value is None else float(value) for value in confidence)
        return Pair(request_id, sampled, untouched, stamp, verified, accepted, values)

    def _wrong(self, what: str) -> InputError:
        return InputError(f"{self.path}, line {self._line}: {what}")


def read_pairs(path: Path) -> tuple[int, list[Pair]]:
    """K and all pairs of a finished file."""
    reader = PairReader(path)
    pairs = reader.read()
    if not reader.num_positions:
        raise InputError(f"{path} is empty: no pairs were recorded")
    return reader.num_positions, pairs
