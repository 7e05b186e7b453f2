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

    def repeated(self, steps: int) -> None:
        """So many steps without prefill rows went by unseen."""
        self._mixed_share *= (1.0 - 1.0 / _MEMORY) ** steps

    def note(self, facts: StepFacts) -> None:
        """Take in a step."""
        mixed = facts.mode is StepMode.MIXED
        self._mixed_share += (mixed - self._mixed_share) / _MEMORY
        if mixed:
            self._last_mixed = facts
        else:
            self._last_other = facts

    def facts_for(self, facts: StepFacts) -> StepFacts | None:
        """A step of the usual kind in the place of this one; None if it is of that kind."""
        usual = self._last_mixed if self.mixed else self._last_other
        if usual is None or self.mixed is (facts.mode is StepMode.MIXED):
            return None
        return replace(
            usual, step_id=facts.step_id, kv_tokens=facts.kv_tokens, num_waiting=facts.num_waiting
        )
