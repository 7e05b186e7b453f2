r"""Trying another width for a few steps, where only a guess says that it is worse.

Sizes that are not served are not measured: a table of another machine state keeps the planner where
it is for ever. A width whose best step is priced by a guess (served.py: no step of that size
lately) is therefore tried if it would be better than the step at hand were its price
off by as much as such prices are:

    tokens / (ms exp(-doubt)) > (1 + _LEAST) goodput

A trial drafts that width `NEEDED` times and verifies what its promise says, so that the price of
that size is known afterwards; the rules for widths and kinds then decide as always. Which width is
tried follows prices and survivals, as the width itself does (docs/losslessness.md).

Trials cost what they promise less than the step at hand, in steps: 1 - goodput' / goodput each. A
trial is started only out of what was saved up: `_START` steps, and `SHARE` of a step for each one
planned. So by the planner's own prices all trials of n planned steps cost at most `_START` +
`SHARE` n steps, however much there would be to try.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vllm_dspark.planning.promises import Promise
from vllm_dspark.planning.served import NEEDED

START = 0.5  # steps
SHARE = 0.005
_MOST = 1.0  # steps saved up at most
_LEAST = 0.02
_PAUSE = 8  # steps from one trial to the next: lagged measurements arrive, the rules decide


@dataclass(frozen=True, slots=True)
class Trial:
    """A width that is being tried, and the drafts verified in each step of it."""

    width: int
    budget: int
    num_requests: int


class Explorer:
    """At most one trial, and what trials may yet cost."""

    def __init__(self) -> None:
        self.trial: Trial | None = None
        self.left = 0  # steps of the trial that verify its drafts
        self.saved = START
        self.spent = 0.0
        self._wait = _PAUSE

    def stop(self) -> None:
        """No trial now, and none for a while."""
        self.trial, self.left, self._wait = None, 0, _PAUSE

    def advance(self) -> None:
        """One step of the trial was planned."""
        self.left -= 1
        if self.left <= 0:
            self.stop()

    def due(self) -> bool:
        """Count a planned step; whether a trial may start."""
        self.saved = min(self.saved + SHARE, _MOST)
        self._wait -= 1
        return self._wait <= 0 and self.saved > 0.0

    def start(
        self,
        promised: Sequence[Promise],
        doubts: Sequence[float],
        goodput: float,
        num_requests: int,
    ) -> Trial | None:
        """Begin the trial that may be worth most, if any is and can be paid for.

        doubts: log factor by which the price of each promise may be too high; goodput: of the step
        at hand.
        """
        best, best_goodput, best_loss = None, goodput * (1.0 + _LEAST), 0.0
        for promise, doubt in zip(promised, doubts, strict=True):
            if doubt <= 0.0 or promise.option is None or promise.option.budget < 1:
                continue
            hoped = promise.goodput * float(np.exp(doubt))
            loss = NEEDED * max(1.0 - promise.goodput / goodput, 0.0)
            if hoped > best_goodput and loss <= self.saved:
                best, best_goodput, best_loss = promise, hoped, loss
        if best is None or best.option is None:
            self._wait = _PAUSE
            return None
        self.saved -= best_loss
        self.spent += best_loss
        self.trial = Trial(best.width, best.option.budget, num_requests)
        self.left = NEEDED
        return self.trial
