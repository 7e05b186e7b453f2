"""Notices that a machine has changed its speed as a whole, within a few steps.

Clocks throttle and neighbours come and go: from one step to the next everything takes, say, 1.9
times as long. Corrections in small steps (online_cost.py) take hundreds of steps to follow, and on
the way they blame the sizes that are being served, so that all others look cheap. Hence the median
of the last `WINDOW` log ratios of measured to predicted time: once it is further from zero than
the noise of a median can be, the factor that all sizes share moves by all of it.

A median, so that it takes five slow steps of eight to move a price, not one stalled step.
"""

from statistics import median

WINDOW = 8
# Steps scatter by up to 10 %, a median of eight of them by 4 %.
LEAST = 0.1


class ShiftWatch:
    """The last log ratios of one kind of passes, up to `WINDOW`."""

    def __init__(self) -> None:
        self._ratios: list[float] = []

    def observe(self, ratio: float) -> float:
        """Log factor by which the machine has slowed down, 0 if the last steps do not say so.

        ratio: log(measured / predicted) of one step, not clipped. What is returned is expected to
        go into the predictions at once; the window starts anew.
        """
        self._ratios.append(ratio)
        if len(self._ratios) < WINDOW:
            return 0.0
        found = median(self._ratios)
        if abs(found) <= LEAST:
            del self._ratios[0]
            return 0.0
        self._ratios.clear()
        return found
