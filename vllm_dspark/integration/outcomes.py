"""What happened to drafts: drafted, admitted, verified and accepted, per position and request.

Kept in the engine core by the scheduler; no vLLM import, so it is tested on its own. Columns
throughout: at 256 requests an object per request would cost more than planning.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from vllm_dspark.integration.report import StepOrder

Counts = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class StepOutcomes:
    """The requests of one verification step, [n] each. All but the last four count drafts.

    drafted: tokens the drafter had proposed; scheduled: those that vLLM scheduled; admitted: those
    that the plan let through (fewer than scheduled with device windows only); verified: those that
    the target scored (admitted, less what a grammar had invalidated); before_stop: verified,
    without those behind the token that ended the request, of which nothing is known; accepted:
    leading verified tokens that were emitted. sampled and emitted: tokens of the request, its
    target's own included, before and after a stop cut them. stamps: draft pass that had made the
    drafts. reached: [5, K] requests whose drafted, admitted, verified, judged and accepted drafts
    reach a position; a draft is judged if it was verified, is not behind a stop, and all drafts
    before it were accepted.
    """

    request_ids: list[str]
    drafted: Counts
    scheduled: Counts
    admitted: Counts
    verified: Counts
    before_stop: Counts
    accepted: Counts
    sampled: Counts
    emitted: Counts
    stamps: Counts
    reached: Counts

    def __len__(self) -> int:
        return len(self.request_ids)


def reach(columns: Sequence[Counts], width: int) -> Counts:
    """[columns, K] how many requests' counts reach each position."""
    bins = width + 1
    stacked = np.array(columns)
    stacked += np.arange(0, len(columns) * bins, bins)[:, None]
    by_count = np.bincount(stacked.ravel(), minlength=stacked.shape[0] * bins).reshape(-1, bins)
    reached: Counts = by_count[:, :0:-1].cumsum(axis=1)[:, ::-1]
    return reached


class PendingOutcomes:
    """One step's outcomes, taken before vLLM's update and finished after it.

    vLLM shortens the lists of sampled tokens in place where a request stops, so what was sampled
    is known before its update and what was emitted after it.
    """

    def __init__(
        self,
        scheduler_output: Any,
        model_runner_output: Any,
        order: StepOrder,
        width: int,
        is_alive: Callable[[str], bool],
    ) -> None:
        self._width = width
        self._order = order
        self._verified: Mapping[str, list[int]] = scheduler_output.scheduled_spec_decode_tokens
        self._invalid: Mapping[str, int] = scheduler_output.num_invalid_spec_tokens or {}
        self.request_ids: list[str] = []  # whose drafts may have an outcome
        self._rows: list[int] | None = None  # their places in the order; None: all of it
        self._tokens: list[list[int]] = []
        self._sampled: list[int] = []
        self._in_order = False
        sampled = model_runner_output.sampled_token_ids
        index_of = model_runner_output.req_id_to_index
        names = order.request_ids
        if not sampled or not names:
            return
        places = [index_of.get(name) for name in names]
        # As a rule every request verifies, in scheduler order: no need to look each of them up.
        self._in_order = None not in places and list(self._verified) == names
        if self._in_order:
            tokens = [sampled[place] for place in places]
            self.request_ids = names
        else:
            tokens = self._some(sampled, places, is_alive)
        if not all(tokens):  # only a chunk of a resumed prefill
            self._keep([i for i, given in enumerate(tokens) if given])
            tokens = [given for given in tokens if given]
        self._tokens = tokens
        self._sampled = list(map(len, tokens))

    def _some(
        self, sampled: list[list[int]], places: list[int | None], is_alive: Callable[[str], bool]
    ) -> list[list[int]]:
        """Tokens of those requests of the order that are in the step and still of interest."""
        verified, names = self._verified, self._order.request_ids
        rows, tokens = [], []
        for i, (name, place) in enumerate(zip(names, places, strict=True)):
            if place is not None and (name in verified or is_alive(name)):
                rows.append(i)
                tokens.append(sampled[place])
        self.request_ids = [names[i] for i in rows]
        self._rows = rows
        return tokens

    def _keep(self, kept: list[int]) -> None:
        rows = self._rows
        self._rows = kept if rows is None else [rows[i] for i in kept]
        self.request_ids = [self.request_ids[i] for i in kept]

    def finish(self, counted: set[str], on_device: Mapping[str, int] | None) -> StepOutcomes | None:
        """The outcomes; None if there are none.

        counted: requests whose verification vLLM took note of (it drops what comes in for requests
        that have ended meanwhile); on_device: drafts that the worker let through.
        """
        verified, order = self._verified, self._order
        if not counted.issuperset(self.request_ids):
            ids = self.request_ids
            keep = [i for i, n in enumerate(ids) if n in counted or n not in verified]
            self._tokens = [self._tokens[i] for i in keep]
            self._sampled = [self._sampled[i] for i in keep]
            self._keep(keep)
        names = self.request_ids
        if not names:
            return None
        drafted, stamps = order.num_drafts, order.draft_stamps
        if self._rows is not None:
            drafted, stamps = drafted[self._rows], stamps[self._rows]
        sampled = emitted = np.array(self._sampled)
        lengths = list(map(len, self._tokens))
        if lengths != self._sampled:
            emitted = np.array(lengths)
        scheduled = self._scheduled()
        admitted = scheduled
        if on_device is not None:
            limits = [on_device.get(n, k) for n, k in zip(names, scheduled.tolist(), strict=True)]
            admitted = np.minimum(scheduled, limits)
        scored = admitted
        if self._invalid:
            scored = admitted - np.array([self._invalid.get(name, 0) for name in names])
        accepted = np.minimum(sampled - 1, scored)
        before_stop = scored
        if emitted is not sampled:
            before_stop = np.where(emitted <= accepted, emitted, scored)
            accepted = np.minimum(accepted, emitted)
        judged = np.minimum(before_stop, accepted + 1)
        return StepOutcomes(
            names,
            drafted=drafted,
            scheduled=scheduled,
            admitted=admitted,
            verified=scored,
            before_stop=before_stop,
            accepted=accepted,
            sampled=sampled,
            emitted=emitted,
            stamps=stamps,
            reached=reach((drafted, admitted, scored, judged, accepted), self._width),
        )

    def _scheduled(self) -> Counts:
        """[n] drafts that vLLM scheduled."""
        verified = self._verified
        if self._in_order and self._rows is None:
            return np.fromiter(map(len, verified.values()), np.int64, len(verified))
        return np.array([len(verified.get(name, ())) for name in self.request_ids])


@dataclass
class OutcomeTotals:
    """Running sums since the engine started; index k counts the draft at position k + 1."""

    num_speculative_tokens: int
    steps: int = 0
    drafted: Counts = field(init=False)
    admitted: Counts = field(init=False)
    trimmed: Counts = field(init=False)
    verified: Counts = field(init=False)
    judged: Counts = field(init=False)  # decided by the target and not behind a stop
    accepted: Counts = field(init=False)
    # windows[v - 1]: verification rows of width v (1..K+1), then none (+Inf), then their sum
    windows: Counts = field(init=False)
    rows: Counts = field(init=False)  # [1] requests, step by step
    emitted: Counts = field(init=False)  # [1] tokens
    discarded: Counts = field(init=False)  # [1] tokens sampled behind a stop

    def __post_init__(self) -> None:
        width = self.num_speculative_tokens
        # One block: row r of the position counts is the r-th name below.
        self._positions = np.zeros((6, width), dtype=np.int64)
        names = ("drafted", "admitted", "trimmed", "verified", "judged", "accepted")
        for name, row in zip(names, self._positions, strict=True):
            setattr(self, name, row)
        self.windows = np.zeros(width + 3, dtype=np.int64)
        for name in ("rows", "emitted", "discarded"):
            setattr(self, name, np.zeros(1, dtype=np.int64))

    def add(self, step: StepOutcomes | None) -> None:
        """Add the requests of one step."""
        if step is None:
            return
        num_rows, reached, windows = len(step), step.reached, self.windows
        positions = self._positions
        positions[:2] += reached[:2]
        positions[2] += reached[0] - reached[1]
        positions[3:] += reached[2:]
        verified = reached[2]
        windows[0] += num_rows
        windows[:-3] -= verified
        windows[1:-2] += verified
        windows[-1] += int(np.add.reduce(verified)) + num_rows
        self.rows[0] += num_rows
        emitted = int(np.add.reduce(step.emitted))
        self.emitted[0] += emitted
        self.discarded[0] += int(np.add.reduce(step.sampled)) - emitted
        self.steps += 1

    @property
    def request_steps(self) -> int:
        """Verification rows so far."""
        return int(self.rows[0])

    @property
    def accepted_length(self) -> float:
        """Mean tokens emitted per request and verification step, the target's own included."""
        return float(self.emitted[0] / self.rows[0]) if self.rows[0] else float("nan")


class OutcomeLog:
    """Appends one JSON line per step to a file (option `record_outcomes`)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        # line by line: an engine core that is ended by a signal never gets to close it
        self._file: TextIO = path.open("a", encoding="utf-8", buffering=1)
        self._started = time.monotonic()

    def write(self, step: int, outcomes: StepOutcomes) -> None:
        """One line: step number, seconds since start, one list per request."""
        columns = (outcomes.drafted, outcomes.admitted, outcomes.verified, outcomes.accepted)
        rows = list(zip(outcomes.request_ids, *(c.tolist() for c in columns), strict=True))
        line = {"step": step, "t": round(time.monotonic() - self._started, 6), "requests": rows}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Flush and close; further writes fail."""
        self._file.close()
