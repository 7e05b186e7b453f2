"""Pairs of confidence rows and what became of the drafts they were about, written as they occur.

Kept in the engine core (option `record_confidences`); no vLLM import, so it is tested on its own.
The file is what `vllm-dspark calibrate` fits from and what a simulation can replay:

    {"kind": "dspark_pairs", "version": 1, "num_positions": K}
    {"step": s, "t": seconds, "rows": [[request_id, sampled, untouched, stamp, verified, accepted,
                                        [c_1, ..., c_K]], ...]}

one line per step that completed pairs. `verified` leaves out drafts behind a stop, of which
nothing is known; `stamp` is the draft pass that made row and drafts; confidences are raw.
"""

import math
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

from vllm_dspark.artifacts.pairs import KIND, VERSION
from vllm_dspark.integration.line_file import LineFile
from vllm_dspark.integration.outcomes import StepOutcomes
from vllm_dspark.integration.report import StepReport

# Halves that wait for the other one. A row whose drafts were never verified (its request ended,
# was preempted, or the step was redrafted) would otherwise be kept for ever.
_MAX_WAITING = 4096

_Key = tuple[str, int]  # request id, stamp


class PairRecorder:
    """Joins rows and outcomes by (request, draft pass), whichever comes first."""

    def __init__(self, path: Path, num_positions: int) -> None:
        self._lines = LineFile(path, "record_confidences")
        self._started = time.monotonic()
        self._width = num_positions
        self._classes: dict[str, tuple[bool, bool]] = {}
        self._rows: OrderedDict[_Key, list[float]] = OrderedDict()
        self._outcomes: OrderedDict[_Key, tuple[int, int]] = OrderedDict()
        header = {"kind": KIND, "version": VERSION, "num_positions": num_positions}
        self._lines.write(header)

    def add_request(self, request_id: str, *, sampled: bool, untouched: bool) -> None:
        """Note a request's class before its first outcome."""
        self._classes[request_id] = (sampled, untouched)

    def remove_request(self, request_id: str) -> None:
        """Forget a request that has ended; unknown ids are ignored."""
        self._classes.pop(request_id, None)

    def record(self, step: int, report: StepReport | None, outcomes: StepOutcomes | None) -> None:
        """Take in what came back with a step, and write the pairs that it completed."""
        completed: list[list[Any]] = []
        if report is not None and report.stamp:
            # Columns that a narrow draft pass left out are written as null.
            absent = [math.nan] * (self._width - report.confidences.shape[1])
            full = [[*row, *absent] for row in report.confidences.tolist()]
            rows = zip(report.request_ids, full, strict=True)
            for name, row in rows:
                key = (name, report.stamp)
                outcome = self._outcomes.pop(key, None)
                if outcome is None:
                    self._rows[key] = row
                else:
                    self._complete(completed, key, row, outcome)
        if outcomes is not None:
            columns = (outcomes.stamps, outcomes.before_stop, outcomes.accepted)
            for name, stamp, verified, accepted in zip(
                outcomes.request_ids, *(column.tolist() for column in columns), strict=True
            ):
                if verified == 0:
                    continue
                key = (name, stamp)
                given = self._rows.pop(key, None)
                if given is None:
                    self._outcomes[key] = (verified, accepted)
                else:
                    self._complete(completed, key, given, (verified, accepted))
        for waiting in (self._rows, self._outcomes):
            while len(waiting) > _MAX_WAITING:
                waiting.popitem(last=False)
        if completed:
            t = round(time.monotonic() - self._started, 6)
            self._lines.write({"step": step, "t": t, "rows": completed})

    def _complete(
        self, completed: list[list[Any]], key: _Key, row: list[float], outcome: tuple[int, int]
    ) -> None:
        name, stamp = key
        classes = self._classes.get(name)
        if classes is None:  # its request has gone, and with it what class it was
            return
        # 7 digits tell any two float32 confidences of a calibration apart
        confidence = [None if math.isnan(value) else round(value, 7) for value in row]
        completed.append([name, *classes, stamp, *outcome, confidence])

    def close(self) -> None:
        """Close the file; further records are dropped."""
        self._lines.close()
