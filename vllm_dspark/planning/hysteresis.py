r"""Which kind of step to be in, given what each kind promises, without flapping.

With goodputs theta_native, theta_trim, theta_skip, gain margin g and current kind:

    a kind is worth having   if theta > (1 + m) theta_native,
                                m = g to enter it, g / 2 to stay in it
    it replaces the current  if theta > (1 + g / 2) theta_current, or the current one
                                is no longer worth having
    and only after `steps` consecutive decisions for it, except that a step towards
    more speculation (to native, or out of skip-draft) is taken at once: being wrong
    there costs one drafted step, being late costs every request.
"""

from dataclasses import dataclass

from vllm_dspark.planning.plan import PlanKind, Reason

_GAIN_REASON = {PlanKind.TRIM: Reason.TRIM_GAIN, PlanKind.SKIP_DRAFT: Reason.SKIP_GAIN}


@dataclass
class KindSelector:
    """Current kind and how long another one has been wanted."""

    min_gain: float
    steps: int
    kind: PlanKind = PlanKind.NATIVE
    _wanted: PlanKind = PlanKind.NATIVE
    _streak: int = 0

    def reset(self) -> None:
        """Back to native at once."""
        self.kind = self._wanted = PlanKind.NATIVE
        self._streak = 0

    def select(self, native: float, trim: float, skip: float) -> tuple[PlanKind, Reason]:
        """Kind for this step from goodputs (0 where not on offer), and why."""
        goodput = {PlanKind.TRIM: trim, PlanKind.SKIP_DRAFT: skip}
        worth = {kind: value for kind, value in goodput.items() if self._worth(kind, value, native)}
        if not worth:
            self.reset()
            better = max(trim, skip) > native
            return self.kind, Reason.MIN_GAIN if better else Reason.NATIVE_BEST
        wanted = max(worth, key=lambda kind: worth[kind])
        current = worth.get(self.kind)
        if current is not None and worth[wanted] <= current * (1.0 + self.min_gain / 2.0):
            wanted = self.kind
        self._streak = self._streak + 1 if wanted is self._wanted else 1
        self._wanted = wanted
        if self._streak >= self.steps or self.kind is PlanKind.SKIP_DRAFT:
            self.kind = wanted
        elif current is None:
            self.kind = PlanKind.NATIVE
            return self.kind, Reason.HYSTERESIS
        return self.kind, _GAIN_REASON[self.kind]

    def _worth(self, kind: PlanKind, goodput: float, native: float) -> bool:
        margin = self.min_gain / 2.0 if kind is self.kind else self.min_gain
        return goodput > native * (1.0 + margin)
