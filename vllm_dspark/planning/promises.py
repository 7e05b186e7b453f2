"""What the kinds of a step, and the widths of the draft pass before it, promise.

All promises are about a step whose requests have all their drafts, K or as many as the width has:
right after a pause there are none, and after a narrow pass few. Whether to draft, and how many
columns, is a matter of what drafts would give, not of what happens to be there. `best_here` and
`probe` are about the drafts that really are.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.allocation import Ranking, rank
from vllm_dspark.planning.budget import Option, StepRows, best_ragged, uniform
from vllm_dspark.planning.cost import StepMode, StepShape
from vllm_dspark.planning.drain import delay_ms
from vllm_dspark.planning.facts import PlannerOptions, StepFacts
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.survival import survival
from vllm_dspark.planning.table import RequestBatch

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]

_MODES = (StepMode.FULL, StepMode.PIECEWISE, StepMode.EAGER)


@dataclass(slots=True)
class Promise:
    """The best ragged step after draft passes of one width."""

    width: int
    option: Option | None  # None: cannot be priced
    ranking: Ranking

    @property
    def goodput(self) -> float:
        """Tokens per ms, 0 if it cannot be priced."""
        return self.option.goodput if self.option is not None else 0.0


@dataclass(slots=True)
class Evaluation:
    """What the kinds promise in one step; None where a kind is not on offer."""

    native: Option | None
    trim: Promise
    skip: Option | None
    survival: FloatArray  # [K, n]
    full: Ranking  # of all K drafts of each request
    incomplete: bool  # some drafts are missing, so the promises are about later steps
    about: StepFacts  # the step that the promises are about
    promised: list[Promise] = field(default_factory=list)  # of all widths, if that is a choice


class Promises:
    """Prices the alternatives of one step; made anew for each, since prices move."""

    def __init__(
        self, prices: CostModel, options: PlannerOptions, facts: StepFacts, batch: RequestBatch
    ) -> None:
        self._prices = prices
        self._options = options
        self._facts = facts
        self._batch = batch
        num_requests = batch.owner.size
        self._rows = StepRows(
            base=facts.reserved_rows + num_requests,
            num_sampling=facts.reserved_sampling + num_requests,
            kv_tokens=facts.kv_tokens,
            prompts_ms=prices.prompts_ms(facts.mode),
        )
        self._overhead = prices.table.overhead_ms
        self._allocation = prices.table.allocation_ms if options.device_windows else 0.0

    def evaluate(self) -> Evaluation:
        """Goodput of the three kinds at full draft width."""
        batch, facts = self._batch, self._facts
        alive = survival(batch.acceptance)
        num_requests, width = batch.owner.size, batch.num_positions
        ranking = self._rank(alive, batch.capacity)
        drafted = self._overhead + self._prices.draft_ms(num_requests, mode=facts.mode)
        trim = best_ragged(
            self._prices, facts.mode, self._rows, ranking, drafted + self._allocation
        )
        native = self._native(num_requests * width, ranking.total_gain(), self._draft_ms(None))
        skip = None
        if self._options.skip_draft and not any_of(batch.reserved):
            skip = uniform(
                self._prices, facts.mode, StepShape.SINGLE, self._rows, 0, 0.0, self._overhead
            )
        incomplete = int(np.add.reduce(batch.num_drafts)) < num_requests * width
        return Evaluation(
            native, Promise(width, trim, ranking), skip, alive, ranking, incomplete, facts
        )

    def narrower(self, alive: FloatArray, widths: Sequence[int]) -> list[Promise]:
        """Promises of draft passes of these widths, each < K; alive: survival [K, n]."""
        batch, found = self._batch, []
        for width in widths:
            capacity = np.minimum(batch.capacity, np.int32(width))
            ranking = self._rank(alive[:width], capacity)
            fixed_ms = self._overhead + self._draft_ms(width)
            option = best_ragged(
                self._prices, self._facts.mode, self._rows, ranking, fixed_ms + self._allocation
            )
            found.append(Promise(width, option, ranking))
        return found

    def whole(self, seen: Evaluation, width: int) -> Option | None:
        """A native step after passes of this width, all of whose drafts are verified."""
        batch = self._batch
        capacity = np.minimum(batch.capacity, np.int32(width))
        ranking = seen.full
        if width < batch.num_positions:
            ranking = self._rank(seen.survival[:width], capacity)
        return self._native(batch.owner.size * width, ranking.total_gain(), self._draft_ms(width))

    def native_here(self, seen: Evaluation, columns: int) -> Option | None:
        """The native step with the drafts at hand; columns: of the pass behind it, 0: none."""
        drafts = int(np.add.reduce(self._batch.num_drafts))
        gain = self.rank_here(seen).total_gain()
        return self._native(drafts, gain, self._draft_ms(columns) if columns else 0.0)

    def _native(self, budget: int, gain: float, draft_ms: float) -> Option | None:
        fixed_ms = self._overhead + draft_ms
        mode = self._facts.native_mode
        return uniform(self._prices, mode, StepShape.NATIVE, self._rows, budget, gain, fixed_ms)

    def _draft_ms(self, columns: int | None) -> float:
        return self._prices.draft_ms(self._batch.owner.size, columns, self._facts.mode)

    def _rank(self, alive: FloatArray, capacity: IntArray) -> Ranking:
        reserved, floor = self._batch.reserved, None
        if reserved is not None or self._options.request_floor:
            floor = np.minimum(capacity, np.int32(self._options.request_floor))
            if reserved is not None:
                np.copyto(floor, capacity, where=reserved)
        return rank(alive, capacity, floor)

    def rank_here(self, seen: Evaluation) -> Ranking:
        """Ranking of the drafts that really are there."""
        if not seen.incomplete:
            return seen.full
        batch = self._batch
        return self._rank(seen.survival, np.minimum(batch.capacity, batch.num_drafts))

    def best_here(self, ranking: Ranking, columns: int | None) -> Option | None:
        """Best budget for the drafts at hand; columns: of the draft pass behind it, 0: none."""
        fixed_ms = self._overhead + self._allocation
        if columns != 0:
            fixed_ms += self._draft_ms(columns)
        return best_ragged(self._prices, self._facts.mode, self._rows, ranking, fixed_ms)

    def doubts(self, promised: Sequence[Promise]) -> list[float]:
        """By what each promise's price of the verification may be off, as a share of the step.

        A logarithm; 0: measured lately, or cannot be priced.
        """
        found = []
        for promise in promised:
            option, doubt = promise.option, 0.0
            if option is not None:
                doubt = self._prices.doubt(self._facts.mode, option.padded_tokens)
            if option is not None and doubt > 0.0:
                draft = self._prices.draft_ms(self._batch.owner.size, promise.width)
                doubt *= max(1.0 - draft / option.ms, 0.0)
            found.append(doubt)
        return found

    def at(self, ranking: Ranking, budget: int, columns: int) -> Option | None:
        """A step of so many drafts of those at hand; columns: of the pass behind it, 0: none."""
        rows, facts = self._rows, self._facts
        budget = min(max(budget, ranking.least), ranking.most)
        priced = self._prices.step_ms(
            facts.mode, StepShape.RAGGED, facts.kv_tokens, rows.base + budget
        )
        if priced is None:
            return None
        padded, ms = priced
        ms += self._overhead + self._allocation
        if columns:
            ms += self._draft_ms(columns)
        gain = float(ranking.gains(np.array([budget]))[0])
        return Option(budget, padded, ms, rows.num_sampling + gain, rows.prompts_ms)

    def probe(self, ranking: Ranking) -> Option | None:
        """As many drafts as fill the first padded size with room for K of them."""
        rows, facts = self._rows, self._facts
        wanted = rows.base + max(ranking.least, min(self._batch.num_positions, ranking.most))
        priced = self._prices.step_ms(facts.mode, StepShape.RAGGED, facts.kv_tokens, wanted)
        if priced is None:
            return None
        return self.at(ranking, priced[0] - rows.base, 0)

    def delays(self, seen: Evaluation, full: Ranking, trim: Option, ranking: Ranking) -> bool:
        """Whether a trimmed step loses more in the tail of the batch than it saves now.

        full: ranking of what the native step verifies; ranking: of what `trim` chooses from.
        """
        if seen.native is None:
            return False
        tail_ms = self._overhead + self._prices.draft_ms(1)
        for mode in _MODES:
            priced = self._prices.step_ms(mode, StepShape.NATIVE, 0, self._batch.num_positions + 1)
            if priced is not None:
                tail_ms += priced[1]
                break
        everything, kept = full.admit(full.most), ranking.admit(trim.budget)
        later = delay_ms(seen.survival, everything, kept, self._batch.remaining, tail_ms)
        return seen.native.ms - trim.ms <= later


def any_of(flags: BoolArray | None) -> bool:
    """Whether any request of the batch has the flag."""
    return flags is not None and bool(np.count_nonzero(flags))
