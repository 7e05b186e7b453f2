"""What happened to drafts: drafted, admitted, verified and accepted, per position and request.

Kept in the engine core by the scheduler; no vLLM import, so it is tested on its own.
"""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestOutcome:
    """One request in one verification step. All numbers count draft tokens.

    drafted: tokens the drafter had proposed (0 when drafting was skipped); admitted: tokens the
    plan let through; verified: tokens the target scored (admitted, less what the scheduler cut
    for max_model_len or the token budget); accepted: leading verified tokens that were emitted.
    """

    request_id: str
    drafted: int
    admitted: int
    verified: int
    accepted: int


@dataclass
class OutcomeTotals:
    """Running sums since the engine started; index k counts the draft at position k + 1."""

    num_speculative_tokens: int
    steps: int = 0
    request_steps: int = 0
    drafted: Counts = field(init=False)
    admitted: Counts = field(init=False)
    verified: Counts = field(init=False)
    accepted: Counts = field(init=False)
    # windows[v]: verification rows of width v (0..K+1); index 0 stays empty
    windows: Counts = field(init=False)

    def __post_init__(self) -> None:
        width = self.num_speculative_tokens
        for name in ("drafted", "admitted", "verified", "accepted"):
            setattr(self, name, np.zeros(width, dtype=np.int64))
        self.windows = np.zeros(width + 2, dtype=np.int64)

    def add(self, outcomes: Iterable[RequestOutcome]) -> None:
        """Add the requests of one step."""
        rows = [(o.drafted, o.admitted, o.verified, o.accepted) for o in outcomes]
        if not rows:
            return
        counts = np.asarray(rows, dtype=np.int64)
        reached = np.arange(self.num_speculative_tokens)[None, :, None] < counts[:, None, :]
        per_position = reached.sum(axis=0)  # [K, 4]
        self.drafted += per_position[:, 0]
        self.admitted += per_position[:, 1]
        self.verified += per_position[:, 2]
        self.accepted += per_position[:, 3]
        self.windows += np.bincount(counts[:, 2] + 1, minlength=self.windows.size)
        self.steps += 1
        self.request_steps += len(rows)

    @property
    def accepted_length(self) -> float:
        """Mean tokens emitted per request and verification step, the target's own included."""
        if self.request_steps == 0:
            return float("nan")
        return 1.0 + float(self.accepted.sum()) / self.request_steps


class OutcomeLog:
    """Appends one JSON line per step to a file (option `record_outcomes`)."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._started = time.monotonic()

    def write(self, step: int, outcomes: Iterable[RequestOutcome]) -> None:
        """One line: step number, seconds since start, one list per request."""
        rows = [[o.request_id, o.drafted, o.admitted, o.verified, o.accepted] for o in outcomes]
        line = {"step": step, "t": round(time.monotonic() - self._started, 6), "requests": rows}
        self._file.write(json.dumps(line, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Flush and close; further writes fail."""
        self._file.close()
