"""What is admitted must not depend on what it admits (DESIGN.md, "three traps").

Each trap is shown with the planner in the loop: a known-bad variant must be caught
and ours must pass, by the same statistic and the same threshold.

False alarms: |z| > 4.9 two-sided, 1e-6 per test; seeds are fixed, so a run that is
green stays green. Power is stated per test as the probability that the bad variant
is caught with another seed.
"""

import numpy as np
import pytest

from tests.planning.simulation import (
    ACCEPT_1,
    SENSITIVE,
    TARGET_0,
    World,
    noise_by_position,
    noise_by_position_and_column,
)
from vllm_dspark.planning.allocation import allocate
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.survival import acceptance, survival

Z_LIMIT = 4.9

# DESIGN.md, trap 2: steps per second at 1..4 tokens; drafts pay only if a whole
# block looks good.
TRAP_2 = {"steps_per_second": (1.0, 0.5, 0.38, 0.36), "later_confidence": 0.9}
# Appendix A: two drafts pay if the second looks good, one alone never does.
APPENDIX_A = {"steps_per_second": (1.0, 0.45, 0.44), "later_confidence": 1.0}


def z_score(tokens):
    """Standardised deviation of the frequency of token 0 from 0.7."""
    tokens = np.asarray(tokens)
    spread = np.sqrt(TARGET_0 * (1 - TARGET_0) / tokens.size)
    return (np.mean(tokens == 0) - TARGET_0) / spread


def all_tokens(passes):
    return [token for tokens in passes for token in tokens]


def first_tokens(passes):
    return [tokens[0] for tokens in passes]


class TestNoiseOfRedraftedPositions:
    """Trap 2. About 16,000 tokens: the bias of 0.028 is 7.7 sigma, power 0.997."""

    def test_noise_by_position_alone_is_caught(self):
        world = World(noise_by_position, **TRAP_2, seed=11)
        tokens = all_tokens(world.run(10_000))
        assert z_score(tokens) > Z_LIMIT
        assert np.mean(np.asarray(tokens) == 0) == pytest.approx(0.728, abs=0.011)

    def test_noise_by_position_and_column_is_lossless(self):
        world = World(noise_by_position_and_column, **TRAP_2, seed=11)
        tokens = all_tokens(world.run(10_000))
        assert abs(z_score(tokens)) < Z_LIMIT
        # The planner did both: verified whole blocks, and nothing.
        assert set(world.budgets) == {0, 3}


class TestAdmissionLooksAtItsToken:
    """Trap 1, paper appendix A. 1,500 passes: 0.15 is 13 sigma, power > 1 - 1e-12."""

    def test_row_of_the_verified_pass_under_an_old_stamp_is_caught(self):
        world = World(noise_by_position_and_column, **APPENDIX_A, seed=5, lag=0, stamp_offset=-1)
        tokens = first_tokens(world.run(1_500))
        assert z_score(tokens) > Z_LIMIT
        assert np.mean(np.asarray(tokens) == 0) == pytest.approx(0.85, abs=0.04)

    def test_row_of_the_verified_pass_is_refused(self):
        world = World(noise_by_position_and_column, **APPENDIX_A, seed=5, lag=0)
        tokens = first_tokens(world.run(1_500))
        assert abs(z_score(tokens)) < Z_LIMIT
        assert sum(counts.current for counts in world.counts) == 1_500

    @pytest.mark.parametrize("lag", [1, 2, 3])
    def test_lagged_rows_are_lossless(self, lag):
        world = World(noise_by_position_and_column, **APPENDIX_A, seed=6, lag=lag)
        tokens = first_tokens(world.run(1_500))
        assert abs(z_score(tokens)) < Z_LIMIT
        assert not any(counts.current for counts in world.counts)


class WidthWorld:
    """Verifies every draft there is; what varies is how many columns each pass drafts.

    width_of(leftover, drafts): columns of a pass, from the previous pass's drafts of the positions
    that are drafted again and from this pass's own (all K, as if they had been drawn).
    """

    K = 4

    def __init__(self, noise, width_of, seed):
        self.rng = np.random.default_rng(seed)
        self.draw = noise(np.random.default_rng(seed + 1), self.K)
        self.width_of = width_of
        self.widths = set()

    def run(self, num_passes):
        position, leftover, emitted = 0, [], []
        for _ in range(num_passes):
            drafts = [int(self.draw(position + 1 + j, j) >= 0.5) for j in range(self.K)]
            width = self.width_of(leftover, drafts)
            self.widths.add(width)
            drafts, tokens = drafts[:width], []
            for token in drafts:
                if token == 1 and self.rng.random() >= ACCEPT_1:
                    tokens.append(0)
                    break
                tokens.append(token)
            else:
                tokens.append(int(self.rng.random() >= TARGET_0))
            position, leftover = position + len(tokens), drafts[len(tokens) :]
            emitted += tokens
        return emitted


def by_leftover(leftover, drafts):
    """The worst width that looks at old drafts only: narrow where the second was token 1."""
    return 1 if len(leftover) >= 2 and leftover[1] == 1 else WidthWorld.K


def by_own_tokens(leftover, drafts):
    """KNOWN BAD: stop drafting at the first token that is unlikely to be accepted."""
    return 1 + next((k for k, token in enumerate(drafts[1:]) if token == 1), WidthWorld.K - 1)


class TestWidthOfDraftPasses:
    """The columns of a pass are a matter of what came before it. At least 100,000 tokens.

    The weaker of the bad variants is off by 0.011, 8.8 sigma: power > 0.9999.
    """

    PASSES = 40_000

    def run(self, noise, width_of):
        world = WidthWorld(noise, width_of, seed=31)
        score = z_score(world.run(self.PASSES))
        assert len(world.widths) > 1
        return score

    def test_width_by_old_drafts_is_lossless(self):
        assert abs(self.run(noise_by_position_and_column, by_leftover)) < Z_LIMIT

    def test_width_by_old_drafts_is_caught_where_noise_repeats(self):
        assert self.run(noise_by_position, by_leftover) > Z_LIMIT

    def test_width_by_the_tokens_it_admits_is_caught(self):
        assert self.run(noise_by_position_and_column, by_own_tokens) > Z_LIMIT


def test_everything_learned_online_stays_lossless():
    """Posterior, online calibration, default options, longer lags, all in the loop.

    About 16,000 tokens pooled over eight set-ups; a bias of 0.028 has power 0.997.
    """
    tokens = []
    for options in (SENSITIVE, PlannerOptions(probe_interval=4)):
        for rank_by_posterior in (False, True):
            for lag in (1, 2):
                world = World(
                    noise_by_position_and_column,
                    **TRAP_2,
                    seed=21 + lag,
                    options=options,
                    rank_by_posterior=rank_by_posterior,
                    online_calibration=True,
                    lag=lag,
                )
                tokens += all_tokens(world.run(1_250))
    assert abs(z_score(tokens)) < Z_LIMIT


def by_count_of_sorted(order):
    """KNOWN BAD allocations: windows count the first `budget` slots of some order."""

    def variant(alive, capacity, floor, budget):
        positions, requests = np.indices(alive.shape)
        chosen = order(alive, positions, requests)[:budget]
        return np.bincount(requests.ravel()[chosen], minlength=alive.shape[1])

    return variant


nan_first = by_count_of_sorted(
    # What np.sort(x)[::-1] and torch.topk do with NaN.
    lambda alive, positions, requests: np.argsort(alive, axis=None, kind="stable")[::-1]
)
deepest_first = by_count_of_sorted(
    lambda alive, positions, requests: np.lexsort(
        (-requests.ravel(), -positions.ravel(), -alive.ravel())
    )
)


def emit_first(rng, admitted, token):
    """First emitted token of a request whose first draft is `token`."""
    if admitted == 0:
        return int(rng.random() >= TARGET_0)
    if token == 1 and rng.random() >= ACCEPT_1:
        return 0
    return token


class TestOrderOfTiesAndNaN:
    """Trap 3: two requests, K = 2, budget 1; request 0 is looked at.

    20,000 steps: the bias of 0.15 is 46 sigma, power > 1 - 1e-100.
    """

    def tokens(self, allocator, conditional_of):
        rng = np.random.default_rng(9)
        full, none = np.full(2, 2, dtype=np.int32), np.zeros(2, dtype=np.int32)
        out = []
        for _ in range(20_000):
            token = int(rng.random() >= 0.5)
            alive = survival(conditional_of(token))
            out.append(emit_first(rng, allocator(alive, full, none, 1)[0], token))
        return out

    @staticmethod
    def saturated(token):
        """Second confidence of request 0 saturates at 1 after token 0: a tie with its first."""
        return np.array([[0.5, 0.5], [1.0 if token == 0 else 0.0, 0.25]], dtype=np.float32)

    @staticmethod
    def broken(token):
        """Second confidence of request 0 is NaN after token 0."""
        return np.array([[0.8, 0.9], [np.nan if token == 0 else 0.0, 0.5]], dtype=np.float32)

    @staticmethod
    def repaired(token):
        """`broken` on its way through our survival module."""
        prior = np.full((2, 2), 0.7, dtype=np.float32)
        anybody = np.ones(2, dtype=bool)
        rows = TestOrderOfTiesAndNaN.broken(token)
        calibrated, num_invalid = acceptance(rows, anybody, prior, Calibration.identity(2), anybody)
        assert num_invalid == int(token == 0)
        return calibrated

    def test_ties_for_the_deeper_draft_are_caught(self):
        tokens = self.tokens(deepest_first, self.saturated)
        assert np.mean(np.asarray(tokens) == 0) == pytest.approx(0.85, abs=0.015)
        assert z_score(tokens) > Z_LIMIT

    def test_our_tie_order_is_lossless(self):
        assert abs(z_score(self.tokens(allocate, self.saturated))) < Z_LIMIT

    def test_nan_first_is_caught(self):
        tokens = self.tokens(nan_first, self.broken)
        assert np.mean(np.asarray(tokens) == 0) == pytest.approx(0.85, abs=0.015)
        assert z_score(tokens) > Z_LIMIT

    def test_neutral_nan_is_lossless(self):
        assert abs(z_score(self.tokens(allocate, self.repaired))) < Z_LIMIT
