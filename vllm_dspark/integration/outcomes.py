"""What happened to drafts: drafted, admitted, verified and accepted, per position and request.

Kept in the engine core by the scheduler; no vLLM import, so it is tested on its own. Columns
throughout: at 256 requests an object per request would cost more than planning.
"""

import json
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt

from vllm_dspark.integration.report import StepOrder

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class StepOutcomes:
    """The requests of one verification step, [n] each. All but the last three count drafts.

    drafted: tokens the drafter had proposed; scheduled: those that vLLM scheduled; admitted: those
    that the plan let through (fewer than scheduled with device windows only); verified: those that
    the target scored (admitted, less what a grammar had invalidated); before_stop: verified,
    without those behind the token that ended the request, of which nothing is known; accepted:
    leading verified tokens that were emitted. sampled and emitted: tokens of the request, its
    target's own included, before and after a stop cut them. stamps: draft pass that had made the
    drafts.
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

    def __len__(self) -> int:
        return len(self.request_ids)


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
        is_alive: Callable[[str], bool],
    ) -> None:
        self._verified: Mapping[str, list[int]] = scheduler_output.scheduled_spec_decode_tokens
        self._invalid: Mapping[str, int] = scheduler_output.num_invalid_spec_tokens or {}
        self._rows: list[tuple[str, int, int, list[int], int]] = []
        sampled = model_runner_output.sampled_token_ids
        if not sampled:
            return
        # Not scheduled after all, or only a chunk of a resumed prefill: no tokens, no outcome.
        index_of, verified = model_runner_output.req_id_to_index, self._verified
        for (name, drafted), stamp in zip(
            order.drafted.items(), order.stamps.values(), strict=True
        ):
            index = index_of.get(name)
            if index is None or not (tokens := sampled[index]):
                continue
            if name in verified or is_alive(name):
                self._rows.append((name, drafted, stamp, tokens, len(tokens)))

    @property
    def request_ids(self) -> list[str]:
        """Requests whose drafts may have an outcome."""
        return [row[0] for row in self._rows]

    def finish(
        self, counted: Collection[str], on_device: Mapping[str, int] | None
    ) -> StepOutcomes | None:
        """The outcomes; None if there are none.

        counted: requests whose verification vLLM took note of (it drops what comes in for requests
        that have ended meanwhile); on_device: drafts that the worker let through.
        """
        verified = self._verified
        rows = [row for row in self._rows if row[0] in counted or row[0] not in verified]
        if not rows:
            return None
        names, drafted, stamps, lists, lengths = zip(*rows, strict=True)
        scheduled = [len(verified.get(name, ())) for name in names]
        columns = np.array((drafted, stamps, lengths, tuple(map(len, lists)), scheduled))
        drafted_n, stamps_n, sampled, emitted, scheduled_n = columns
        admitted = scheduled_n
        if on_device is not None:
            limits = [on_device.get(name, n) for name, n in zip(names, scheduled, strict=True)]
            admitted = np.minimum(admitted, limits)
        scored = admitted
        if self._invalid:
            scored = admitted - np.array([self._invalid.get(name, 0) for name in names])
        passed = np.minimum(sampled - 1, scored)
        accepted = np.minimum(passed, emitted)
        before_stop = np.where(emitted <= passed, emitted, scored)
        return StepOutcomes(
            list(names),
            drafted_n,
            scheduled_n,
            admitted,
            scored,
            before_stop,
            accepted,
            sampled,
            emitted,
            stamps_n,
        )


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
        self._bins = width + 1
        self._offsets = np.arange(5)[:, None] * self._bins
        self.windows = np.zeros(width + 3, dtype=np.int64)
        for name in ("rows", "emitted", "discarded"):
            setattr(self, name, np.zeros(1, dtype=np.int64))

    def add(self, step: StepOutcomes | None) -> None:
        """Add the requests of one step."""
        if step is None:
            return
        judged = np.minimum(step.before_stop, step.accepted + 1)
        counts = np.stack((step.drafted, step.admitted, step.verified, judged, step.accepted))
        # Requests by count, summed from the far end: how many reach each position.
        size = 5 * self._bins
        reached = np.bincount((counts + self._offsets).ravel(), minlength=size)
        by_count = reached.reshape(5, self._bins)
        per_position = by_count[:, :0:-1].cumsum(axis=1)[:, ::-1]
        positions = self._positions
        positions[[0, 1, 3, 4, 5]] += per_position
        positions[2] += per_position[0] - per_position[1]
        num_rows = len(step)
        self.windows[: self._bins] += by_count[2]
        self.windows[-1] += int(per_position[2].sum()) + num_rows
        self.rows += num_rows
        emitted = int(step.emitted.sum())
        self.emitted += emitted
        self.discarded += int(step.sampled.sum()) - emitted
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
        self._file: TextIO = path.open("a", encoding="utf-8")
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
