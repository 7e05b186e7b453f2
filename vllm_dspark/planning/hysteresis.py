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

# Sums of the same survivals in another order differ by rounding; that is no gain.
_ROUNDING = 1e-6


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
        current = self.kind
        trim_worth = trim > native * (1.0 + self._margin(PlanKind.TRIM))
        skip_worth = skip > native * (1.0 + self._margin(PlanKind.SKIP_DRAFT))
        if not trim_worth and not skip_worth:
            self.reset()
            gained = max(trim, skip) > native * (1.0 + _ROUNDING)
            return self.kind, Reason.MIN_GAIN if gained else Reason.NATIVE_BEST
        if trim_worth and skip_worth:
            bar = 1.0 + self.min_gain / 2.0  # between the two, the current one is favoured
            if current is PlanKind.SKIP_DRAFT:
                skip *= bar
            elif current is PlanKind.TRIM:
                trim *= bar
            wanted = PlanKind.TRIM if trim >= skip else PlanKind.SKIP_DRAFT
        else:
            wanted = PlanKind.TRIM if trim_worth else PlanKind.SKIP_DRAFT
        self._streak = self._streak + 1 if wanted is self._wanted else 1
        self._wanted = wanted
        if self._streak >= self.steps or current is PlanKind.SKIP_DRAFT:
            self.kind = wanted
        elif current is PlanKind.NATIVE or not trim_worth:
            self.kind = PlanKind.NATIVE
            return self.kind, Reason.HYSTERESIS
        trimming = self.kind is PlanKind.TRIM
        return self.kind, Reason.TRIM_GAIN if trimming else Reason.SKIP_GAIN

    def _margin(self, kind: PlanKind) -> float:
        gain = self.min_gain / 2.0 if kind is self.kind else self.min_gain
        return gain + _ROUNDING
