"""The same requests step after step, looked at again only where something has changed.

Passes over 256 requests are left to C (map, list comparison, numpy); results are kept and handed
out as the very same objects while they hold, so that others can keep theirs by identity. None of
them is changed by anybody.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
PlaceArray = npt.NDArray[np.int64]

# Requests whose drafts are to be cut, and to what.
Cuts = list[tuple[Any, slice]]

_DRAFTS = attrgetter("spec_token_ids")
_COMPUTED = attrgetter("num_computed_tokens")


@dataclass(frozen=True, slots=True)
class Drafting:
    """Running requests that may have drafts, in scheduler order."""

    requests: list[Any]
    ids: list[str]
    num_drafts: IntArray  # [n]

    def kv_tokens(self) -> int:
        """Computed tokens of all of them."""
        return sum(map(_COMPUTED, self.requests))


def cuts_to(requests: Sequence[Any], kept: Sequence[int], width: int) -> Cuts:
    """Cuts that leave requests so many of their drafts; `width` of them are all there can be."""
    pieces = [slice(count) for count in range(width)]
    pairs = zip(requests, kept, strict=True)
    return [(request, pieces[count]) for request, count in pairs if count < width]


def cut_drafts(cuts: Cuts) -> None:
    """The one statement a request that tells vLLM's scheduler."""
    for request, piece in cuts:
        request.spec_token_ids = request.spec_token_ids[piece]


class DraftingLookup:
    """Of the scheduler's running requests."""

    def __init__(self) -> None:
        self._running: list[Any] = []
        self._counts = b""
        self._found = Drafting([], [], np.zeros(0, dtype=np.int32))

    def of(self, running: Sequence[Any]) -> Drafting:
        """Those of `running` that have drafts now."""
        counts = bytes(map(len, map(_DRAFTS, running)))
        same = running == self._running
        if same and counts == self._counts:
            return self._found
        requests = [request for request, count in zip(running, counts, strict=True) if count]
        ids = [request.request_id for request in requests]
        if ids == self._found.ids:
            ids = self._found.ids
        drafts = np.frombuffer(counts.replace(b"\0", b""), dtype=np.uint8).astype(np.int32)
        self._found = Drafting(requests, ids, drafts)
        self._running, self._counts = list(running), counts
        return self._found


class WorkerOrder:
    """Where requests stand in the worker's batch, which has an order of its own."""

    def __init__(self) -> None:
        self._names: Sequence[str] = ()
        self._batch: Sequence[str] = ()
        self._places: PlaceArray | None = None
        self.complete = True  # all names asked for last are in the batch

    def places(
        self, names: Sequence[str], batch: Sequence[str], index_of: Mapping[str, int]
    ) -> PlaceArray | None:
        """[n] place of each name in the batch, -1 if it is not there; None: the orders agree."""
        if names != self._names or batch != self._batch:
            self._names, self._batch = names, list(batch)
            self._places, self.complete = None, True
            if names != self._batch:
                places = [index_of.get(name, -1) for name in names]
                self._places, self.complete = np.array(places, dtype=np.int64), -1 not in places
        return self._places
