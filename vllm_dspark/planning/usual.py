"""Whether steps mostly have prefill rows, and what such steps, and others, are like.

Drafts made now are verified in the next step. Where most steps have prefill rows, one that happens
to have none says little about that one, and the other way round; following the prices of both kinds
in turn would start and end pauses of drafting all the time.
"""

from dataclasses import dataclass, replace

from vllm_dspark.planning.cost import StepMode
from vllm_dspark.planning.facts import StepFacts

_MEMORY = 16  # steps


@dataclass(slots=True)
class UsualSteps:
    """Follows the steps of one engine."""

    _mixed_share: float = 0.0
    _last_mixed: StepFacts | None = None
    _last_other: StepFacts | None = None

    @property
    def mixed(self) -> bool:
        """Whether most of the last steps had prefill rows."""
        return self._mixed_share > 0.5

    def instead_of(self, facts: StepFacts) -> StepFacts | None:
        """Take in a step; one of the usual kind in its place, None if it is of that kind."""
        mixed = facts.mode is StepMode.MIXED
        self._mixed_share += (mixed - self._mixed_share) / _MEMORY
        if mixed:
            self._last_mixed = facts
        else:
            self._last_other = facts
        usual = self._last_mixed if self.mixed else self._last_other
        if usual is None or self.mixed is mixed:
            return None
        return replace(
            usual, step_id=facts.step_id, kv_tokens=facts.kv_tokens, num_waiting=facts.num_waiting
        )
