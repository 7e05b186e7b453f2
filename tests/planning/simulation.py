"""A two-token world with the real planner in the loop, for losslessness tests.

Target (0.7, 0.3), draft (0.5, 0.5), both independent of context, one request. Token 0
is always accepted (0.7 / 0.5 > 1), token 1 with probability 0.6, and a rejection
yields token 0. A lossless scheduler emits token 0 with frequency 0.7, whatever it
admits. Confidences say 0.8 for the first draft, and for a later one what the test
asks for after token 0, and nothing after token 1.
"""

import numpy as np

from tests.planning.builders import facts, grid
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.online_cost import CostModel
from vllm_dspark.planning.planner import Planner
from vllm_dspark.planning.table import RequestTable

TARGET_0 = 0.7
ACCEPT_1 = 0.3 / 0.5

# Every advantage counts and at once: the planner as sensitive as it can be made.
SENSITIVE = PlannerOptions(
    min_gain=0.0, hysteresis_steps=0, drain_guard=False, skip_draft=False, lazy=False
)


def noise_by_position(rng, num_positions):
    """KNOWN BAD: a redrafted position meets the noise it met before."""
    seen = {}

    def draw(position, column):
        if position not in seen:
            seen[position] = rng.random()
        return seen[position]

    return draw


def noise_by_position_and_column(rng, num_positions):
    """Ours: keyed by (position, column in the block); a redraft has moved column."""
    seen = {}

    def draw(position, column):
        key = position * num_positions + column
        if key not in seen:
            seen[key] = rng.random()
        return seen[key]

    return draw


def cost_of(steps_per_second):
    """Full-graph table of a machine with these speeds at 1, 2, ... tokens."""
    ms = [1000.0 / speed for speed in steps_per_second]
    sizes = list(range(1, len(ms) + 1))
    full, last = StepMode.FULL, len(ms)
    return CostTable(
        {
            (full, StepShape.RAGGED): grid(sizes, ms),
            (full, StepShape.NATIVE): grid((last, 2 * last), (ms[-1], 2 * ms[-1])),
            (full, StepShape.SINGLE): grid((1, 2), ms[:2]),
        },
        grid((1, 2), (1e-9, 1e-9)),
    )


class World:
    """Decodes one endless request; `run` yields the tokens of each pass."""

    def __init__(
        self,
        noise,
        steps_per_second,
        later_confidence,
        *,
        seed,
        options=SENSITIVE,
        rank_by_posterior=False,
        online_calibration=False,
        lag=1,
        stamp_offset=0,
    ):
        self.k = len(steps_per_second) - 1
        self.rng = np.random.default_rng(seed)
        self.draw = noise(np.random.default_rng(seed + 1), self.k)
        self.later = later_confidence
        self.lag = lag  # passes between a row being written and being seen; 0: current
        self.stamp_offset = stamp_offset  # lie about the age of rows
        self.table = RequestTable(
            self.k,
            1,
            Calibration.identity(self.k),
            rank_by_posterior=rank_by_posterior,
            online_calibration=online_calibration,
        )
        self.table.add("r", sampled=True)
        self.slots = self.table.slots(["r"])
        self.planner = Planner(CostModel(cost_of(steps_per_second)), options)
        self.counts, self.budgets = [], []

    def _draft(self, anchor):
        tokens = [int(self.draw(anchor + 1 + j, j) >= 0.5) for j in range(self.k)]
        row = [0.8] + [self.later if token == 0 else 0.0 for token in tokens[:-1]]
        return tokens, row

    def _verify(self, drafts):
        """Standard rejection sampling: emitted tokens and accepted drafts."""
        out = []
        for token in drafts:
            if token == 1 and self.rng.random() >= ACCEPT_1:
                return [*out, 0], len(out)
            out.append(token)
        return [*out, int(self.rng.random() >= TARGET_0)], len(out)

    def run(self, num_passes):
        """Token lists of `num_passes` consecutive passes."""
        position, rows, emitted = 0, [], []
        drafts_there = np.array([self.k], dtype=np.int32)
        for stamp in range(self.lag + 1, num_passes + self.lag + 1):
            drafts, row = self._draft(position)
            rows.append((stamp, row))
            self._show_row(rows)
            seen = self.table.batch(self.slots, drafts_there, np.array([stamp], dtype=np.int32))
            plan = self.planner.plan(facts(stamp), seen)
            self.counts.append(seen.counts)
            self.budgets.append(plan.budget)
            tokens, accepted = self._verify(drafts[: plan.windows[0] - 1])
            admitted = np.array([plan.budget], dtype=np.int32)
            self.table.record_outcomes(
                self.slots, stamp, admitted, np.array([accepted], dtype=np.int32)
            )
            position += len(tokens)
            emitted.append(tokens)
        return emitted

    def _show_row(self, rows):
        """Deliver the row that is `lag` passes old."""
        if len(rows) > self.lag:
            stamp, row = rows[-1 - self.lag]
            owners = self.table.owners(self.slots)
            self.table.record_rows(
                self.slots, owners, stamp + self.stamp_offset, np.array([row], dtype=np.float32)
            )
