"""Slots of the same requests, step after step, without looking each of them up."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.table import RequestTable

SlotArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class FoundSlots:
    """Slots of those of some requests that are known."""

    slots: SlotArray  # [m]
    known: list[int] | None  # their places among the ids asked for; None: all of them


class SlotLookup:
    """Slots of the same ids over and over: looked up again only after something has changed."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._version = -1
        self._ids: Sequence[str] = ()
        self._found = FoundSlots(np.zeros(0, dtype=np.int64), None)

    def of(self, request_ids: Sequence[str]) -> FoundSlots:
        """Slots of the known among `request_ids` (not changed afterwards), in order."""
        if self._version != self._table.version or request_ids != self._ids:
            known = self._table.known(request_ids)
            ids = request_ids if known is None else [request_ids[i] for i in known]
            self._found = FoundSlots(self._table.slots(ids), known)
            self._version, self._ids = self._table.version, request_ids
        return self._found
