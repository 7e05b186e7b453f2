"""Steps with prefill rows whose drafts must all be verified: whether, and how many, to draft.

Without evidence that trimming such steps pays, each keeps all the drafts there are. How many there
are is still a choice, made by the pass before: none, n < K columns, or K, by the prices that were
learned from such steps (mixed_cost.py). It follows what is known before the drafts are drawn.
"""

from vllm_dspark.planning.compose import DraftPass
from vllm_dspark.planning.draft_cost import ladder
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.hysteresis import KindSelector
from vllm_dspark.planning.plan import PlanKind, Reason
from vllm_dspark.planning.promises import Evaluation, Promises, any_of
from vllm_dspark.planning.table import RequestBatch
from vllm_dspark.planning.width import WidthSelector, selector_of


class NativeMixed:
    """Kind and width of these steps of one engine."""

    def __init__(self, options: PlannerOptions) -> None:
        self._options = options
        self._kinds = KindSelector(options.min_gain, options.hysteresis_steps)
        self._widths: WidthSelector | None = None  # made with the first batch, which has K

    @property
    def pauses(self) -> bool:
        """Whether nothing is drafted at present."""
        return self._kinds.kind is PlanKind.SKIP_DRAFT

    def reset(self) -> None:
        """Draft full passes until prices say something else."""
        self._kinds.reset()
        if self._widths is not None:
            self._widths.reset()

    def decide(
        self, promises: Promises, seen: Evaluation, batch: RequestBatch, *, narrow: bool
    ) -> Reason | None:
        """Take in one step; why nothing is to be drafted, or None; narrow: widths are priced."""
        if seen.native is None:
            self.reset()
            return None
        best, widths = seen.native.goodput, self._selector(batch.num_positions)
        if narrow and not any_of(batch.reserved):
            options = [promises.whole(seen, width) for width in widths.widths]
            goodput = [option.goodput if option is not None else 0.0 for option in options]
            best = goodput[widths.select(goodput)]
        else:
            widths.reset()
        paused = seen.skip.goodput if seen.skip is not None else 0.0
        kind, reason = self._kinds.select(best, 0.0, paused)
        return reason if kind is PlanKind.SKIP_DRAFT else None

    def next_pass(self, batch: RequestBatch) -> DraftPass:
        """The pass at the end of a step; None in a pause."""
        if self.pauses:
            return None
        selector = self._selector(batch.num_positions)
        return selector.full_pass() if any_of(batch.reserved) else selector.next_pass()

    def _selector(self, num_positions: int) -> WidthSelector:
        self._widths = selector_of(self._widths, ladder(num_positions), self._options)
        return self._widths
