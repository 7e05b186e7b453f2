r"""How many columns the next draft pass drafts: the width with the best goodput, without flapping.

For every width n of the ladder (draft_cost.py)

    theta(n) = max over budgets of (requests + sum of admitted survivals at positions <= n)
                                   / (T(budget) + D(requests, n) + overhead)

as if such drafts were to be verified now: the survivals of the batch at hand stand for those of
the next one, whose drafts do not exist yet. The width follows what is known before the drafts are
drawn and nothing else (docs/losslessness.md).

A wider block than the current one is taken at once if it promises more than the margin g (half of
`confidence_min_predicted_gain`, which is for changes of kind): being
wrong there costs a few columns of one pass, being late costs every request, and load falls in one
step. A narrower one must promise more than g / 2, and the promised gains of consecutive decisions
must add up to `steps` g / 2, no decision counting for more than half of that: `steps` decisions for
a gain of g / 2, two for a large one. The same holds for a wider one that promises between g / 2 and
g. Of what promises the same, the wider one is kept.

Positions beyond the current width are not observed any more. Therefore every `probe_interval`-th
pass in a row that is narrower than K is drafted at full width, and the survivals there are known
again.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_dspark.planning.facts import PlannerOptions

_ROUNDING = 1e-6


class WidthReason(Enum):
    """Why a draft pass has the width it has; the value is the metric label."""

    FULL = "full"  # nothing narrower is on offer: off, no prices, or the step is native
    BEST = "best"  # the highest goodput, as far as the margin tells
    HELD = "held"  # another width promises more, not yet for long enough
    PROBE = "probe"  # full width, to see what the positions beyond are worth
    EXPLORE = "explore"  # a width whose steps were not measured lately is tried (explore.py)
    FORCED = "forced"  # `test_draft_width`


@dataclass
class WidthSelector:
    """Current width and how long another one has been wanted; widths ascend and end with K."""

    widths: tuple[int, ...]
    min_gain: float
    steps: int
    probe_interval: int

    def __post_init__(self) -> None:
        self._index = len(self.widths) - 1
        self._held = False
        self._direction = 0  # of the width that is wanted instead: -1 narrower, 1 wider
        self._evidence = 0.0  # gains that it promised in decisions in a row
        self._narrow_passes = 0  # since the last one of full width

    @property
    def width(self) -> int:
        """Columns that narrow passes have at present."""
        return self.widths[self._index]

    def reset(self) -> None:
        """Back to full width at once."""
        self._index = len(self.widths) - 1
        self._direction, self._evidence, self._narrow_passes = 0, 0.0, 0
        self._held = False

    def select(self, goodput: Sequence[float]) -> int:
        """Index of the width to draft with, from what each width promises (0: not on offer)."""
        current, half = goodput[self._index], self.min_gain / 2.0
        best = max(range(len(goodput)), key=lambda i: (goodput[i], i))
        gain = goodput[best] / current - 1.0 if current > 0.0 else float("inf")
        self._held = False
        if best == self._index or gain <= half + _ROUNDING:
            self._direction, self._evidence = 0, 0.0
            return self._index
        # Wanting one narrower width and then another is the same wish.
        direction = 1 if best > self._index else -1
        needed = self.steps * half
        before = self._evidence if direction == self._direction else 0.0
        self._evidence = before + min(gain, needed / min(max(self.steps, 1), 2))
        self._direction = direction
        at_once = direction > 0 and gain > self.min_gain + _ROUNDING
        if at_once or self._evidence >= needed - _ROUNDING:
            self._index = best
            self._direction, self._evidence = 0, 0.0
        else:
            self._held = True
        return self._index

    def next_pass(self) -> tuple[int, WidthReason]:
        """Columns of a pass that may be narrow, and why; counts it."""
        reason = WidthReason.HELD if self._held else WidthReason.BEST
        if self.width == self.widths[-1]:
            self._narrow_passes = 0
            return self.width, reason
        self._narrow_passes += 1
        if self._narrow_passes >= self.probe_interval:
            self._narrow_passes = 0
            return self.widths[-1], WidthReason.PROBE
        return self.width, reason

    def full_pass(self) -> tuple[int, WidthReason]:
        """The same for a pass that has full width whatever is best."""
        self._narrow_passes = 0
        return self.widths[-1], WidthReason.FULL


def selector_of(
    found: WidthSelector | None, widths: tuple[int, ...], options: "PlannerOptions"
) -> WidthSelector:
    """`found` if it is about these widths, else a new one."""
    if found is not None and found.widths == widths:
        return found
    return WidthSelector(
        widths,
        # Another width asks for no other graph: half the margin that kinds need will do.
        options.min_gain / 2.0,
        options.hysteresis_steps,
        options.probe_interval,
    )
