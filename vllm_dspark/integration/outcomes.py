"""What happened to drafts: drafted, admitted, verified and accepted, per position and request.

Kept in the engine core by the scheduler; no vLLM import, so it is tested on its own. Columns
throughout: at 256 requests an object per request would cost more than planning.
"""

import time
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import groupby
from operator import add
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_dspark.integration.line_file import LineFile
from vllm_dspark.integration.report import AdmittedDrafts, StepOrder
from vllm_dspark.integration.rested_counts import RestedStep, VerifiedDrafts, more_than

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
    """[columns, K] how many requests' counts, [n] each, reach each position."""
    rows: dict[int, list[int]] = {}  # several columns may be one and the same array
    for column in columns:
        if id(column) not in rows:
            rows[id(column)] = more_than(column.astype(np.uint8).tobytes(), width - 1)
    return np.array([rows[id(column)] for column in columns])


def token_counts(model_runner_output: Any) -> Counts:
    """[m] sampled tokens of each request, at most 255, in the order of the worker's batch."""
    lengths = bytes(map(len, model_runner_output.sampled_token_ids))
    return np.frombuffer(lengths, dtype=np.uint8).astype(np.int64)


class PendingOutcomes:
    """One step's outcomes, finished after vLLM's update.

    vLLM shortens the lists of sampled tokens in place where a request stops, so what was sampled
    is known before its update (`token_counts`) and what was emitted after it.
    """

    def __init__(
        self,
        scheduler_output: Any,
        model_runner_output: Any,
        order: StepOrder,
        width: int,
        counts: Counts,
        places: Counts | None,
        complete: bool = False,
    ) -> None:
        """width: K; counts: before vLLM's update; places: of the order's requests in it, -1 where
        they are not, complete: all are there (batches.WorkerOrder)."""
        self._width = width
        self._order = order
        self._verified: Mapping[str, list[int]] = scheduler_output.scheduled_spec_decode_tokens
        self._invalid: Mapping[str, int] = scheduler_output.num_invalid_spec_tokens or {}
        self._output = model_runner_output
        self.request_ids: list[str] = []  # whose drafts may have an outcome
        self._rows: Counts | None = None  # their places in the order; None: all of it
        self._places = places
        self._sampled = counts
        if not counts.size or not order.request_ids:
            return
        self.request_ids = order.request_ids
        if places is not None:
            self._sampled = counts[places]
            if not complete:
                self._sampled[places < 0] = 0
        if np.count_nonzero(self._sampled) < self._sampled.size:
            # A request that was left out, or a chunk of a resumed prefill.
            self._keep(self._sampled.nonzero()[0])

    def _keep(self, kept: Counts) -> None:
        """Go on with some of the rows."""
        rows, names = self._rows, self.request_ids
        self._rows = kept if rows is None else rows[kept]
        self._places = kept if self._places is None else self._places[kept]
        self._sampled = self._sampled[kept]
        self.request_ids = [names[i] for i in kept.tolist()]

    def finish(
        self,
        emitting: AbstractSet[str] | None,
        on_device: AdmittedDrafts | None,
        *,
        stopped: bool = True,
    ) -> StepOutcomes | None:
        """The outcomes; None if there are none.

        emitting: requests that vLLM has added tokens to, None for all (it drops what comes in for
        requests that have ended meanwhile); on_device: drafts that the worker let through;
        stopped: some request may have stopped in vLLM's update.
        """
        if emitting is not None:
            kept = [i for i, name in enumerate(self.request_ids) if name in emitting]
            if len(kept) < len(self.request_ids):
                self._keep(np.array(kept, dtype=np.int64))
        names, order = self.request_ids, self._order
        if not names:
            return None
        drafted, stamps = order.num_drafts, order.draft_stamps
        if self._rows is not None:
            drafted, stamps = drafted[self._rows], stamps[self._rows]
        sampled = self._sampled
        emitted = self._emitted() if stopped else sampled
        scheduled = self._scheduled()
        admitted = scheduled
        if on_device is not None:
            admitted = np.minimum(scheduled, self._admitted(on_device, scheduled))
        scored = admitted
        if self._invalid:
            scored = admitted - np.array([self._invalid.get(name, 0) for name in names])
        accepted = sampled - 1
        before_stop = scored
        if on_device is not None or self._invalid:
            np.minimum(accepted, scored, out=accepted)
        if emitted is not sampled:
            before_stop = np.where(emitted <= accepted, emitted, scored)
            accepted = np.minimum(accepted, emitted)
        judged = np.minimum(before_stop, accepted + 1)
        reached = reach((drafted, admitted, scored, judged, accepted), self._width)
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
            reached=reached,
        )

    def _admitted(self, on_device: AdmittedDrafts, scheduled: Counts) -> Counts:
        """[n] drafts that the worker let through; all `scheduled` ones where it says nothing."""
        if on_device.request_ids == self._output.req_ids:
            counts = on_device.counts
            return counts if self._places is None else counts[self._places]
        found = on_device.by_name()
        defaults = zip(self.request_ids, scheduled.tolist(), strict=True)
        return np.array([found.get(name, count) for name, count in defaults])

    def _emitted(self) -> Counts:
        """[n] tokens that are left of the sampled ones; the same array if all are."""
        counts = token_counts(self._output)
        if self._places is not None:
            counts = counts[self._places]
        return self._sampled if np.array_equal(counts, self._sampled) else counts

    def _scheduled(self) -> Counts:
        """[n] drafts that vLLM scheduled."""
        known = self._order.num_scheduled
        if known is not None:
            return known if self._rows is None else known[self._rows]
        verified = self._verified
        return np.array([len(verified.get(name, ())) for name in self.request_ids])


class OutcomeTotals:
    """Running sums since the engine started; index k counts the draft at position k + 1.

    What is read is brought up to date by then (`derive`); arrays are changed in place.

    steps: with outcomes; rows: [1] requests, step by step; emitted: [1] tokens; discarded: [1]
    tokens sampled behind a stop.
    """

    def __init__(self, num_speculative_tokens: int) -> None:
        self.num_speculative_tokens = width = num_speculative_tokens
        self.steps = 0
        # One block: drafted, admitted, trimmed, verified, judged, accepted.
        self._positions = np.zeros((6, width), dtype=np.int64)
        self._windows = np.zeros(width + 3, dtype=np.int64)
        self.rows: Counts = np.zeros(1, dtype=np.int64)
        self.emitted: Counts = np.zeros(1, dtype=np.int64)
        self.discarded: Counts = np.zeros(1, dtype=np.int64)
        # Of steps at rest: requests, then verified, judged and accepted ones by position.
        self._rested = [0] * (1 + 3 * width)
        self._windowed: list[
            tuple[bytes, VerifiedDrafts]
        ] = []  # those with host windows, uncounted

    def add(self, step: StepOutcomes | None) -> None:
        """Add the requests of one step."""
        if step is None:
            return
        self._add(len(step), step.reached)
        emitted = int(np.add.reduce(step.emitted))
        self.emitted[0] += emitted
        if step.sampled is not step.emitted:
            self.discarded[0] += int(np.add.reduce(step.sampled)) - emitted
        self.steps += 1

    def add_rested(self, num_rows: int, rested: RestedStep) -> None:
        """Add a step of requests that had all K drafts and did not stop."""
        self._add_rested(num_rows, rested)
        self.steps += 1

    def add_windowed(self, sampled: bytes, drafts: VerifiedDrafts) -> None:
        """The same with windows set by the scheduler; sampled: tokens of each request."""
        self._windowed.append((sampled, drafts))
        self.steps += 1

    def _add_rested(self, num_rows: int, rested: RestedStep) -> None:
        step = [num_rows, *rested.verified, *rested.judged, *rested.accepted]
        self._rested = list(map(add, self._rested, step))

    def _add(self, num_rows: int, reached: Counts) -> None:
        positions = self._positions
        positions[:2] += reached[:2]
        positions[3:] += reached[2:]
        self.rows[0] += num_rows

    def derive(self) -> None:
        """Bring all sums up to date."""
        for _, steps in groupby(self._windowed, lambda step: id(step[1])):
            sampled, drafts = zip(*steps, strict=True)
            rested = RestedStep.windowed(sampled, drafts[0], self.num_speculative_tokens)
            self._add_rested(sum(map(len, sampled)), rested)
        self._windowed.clear()
        num_rows, *reached = self._rested
        if num_rows:
            width = self.num_speculative_tokens
            verified, judged, accepted = np.array(reached, dtype=np.int64).reshape(3, width)
            drafted = np.full(width, num_rows)
            self._add(num_rows, np.array([drafted, verified, verified, judged, accepted]))
            self.emitted[0] += num_rows + int(accepted.sum())
            self._rested = [0] * len(self._rested)
        positions, windows, rows = self._positions, self._windows, int(self.rows[0])
        np.subtract(positions[0], positions[1], out=positions[2])
        verified = positions[3]
        windows[0] = rows
        windows[1:-2] = verified
        windows[:-3] -= verified
        windows[-1] = int(verified.sum()) + rows

    def _position(self, row: int) -> Counts:
        self.derive()
        counts: Counts = self._positions[row]
        return counts

    @property
    def drafted(self) -> Counts:
        """[K] drafts that were proposed."""
        return self._position(0)

    @property
    def admitted(self) -> Counts:
        """[K] drafts that plans let through."""
        return self._position(1)

    @property
    def trimmed(self) -> Counts:
        """[K] drafts that were kept from verification."""
        return self._position(2)

    @property
    def verified(self) -> Counts:
        """[K] drafts that the target scored."""
        return self._position(3)

    @property
    def judged(self) -> Counts:
        """[K] drafts decided by the target and not behind a stop."""
        return self._position(4)

    @property
    def accepted(self) -> Counts:
        """[K] drafts that were emitted."""
        return self._position(5)

    @property
    def windows(self) -> Counts:
        """[K + 3] verification rows of width 1..K+1, then none (+Inf), then the widths' sum."""
        self.derive()
        return self._windows

    @property
    def request_steps(self) -> int:
        """Verification rows so far."""
        self.derive()
        return int(self.rows[0])

    @property
    def accepted_length(self) -> float:
        """Mean tokens emitted per request and verification step, the target's own included."""
        self.derive()
        return float(self.emitted[0] / self.rows[0]) if self.rows[0] else float("nan")


class OutcomeLog:
    """Appends one JSON line per step to a file (option `record_outcomes`)."""

    def __init__(self, path: Path) -> None:
        self._lines = LineFile(path, "record_outcomes")
        self._started = time.monotonic()

    def write(self, step: int, outcomes: StepOutcomes) -> None:
        """One line: step number, seconds since start, one list per request."""
        columns = (outcomes.drafted, outcomes.admitted, outcomes.verified, outcomes.accepted)
        rows = list(zip(outcomes.request_ids, *(c.tolist() for c in columns), strict=True))
        seconds = round(time.monotonic() - self._started, 6)
        self._lines.write({"step": step, "t": seconds, "requests": rows})

    def close(self) -> None:
        """Flush and close; further lines are dropped."""
        self._lines.close()
