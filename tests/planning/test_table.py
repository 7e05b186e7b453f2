"""Per-request state: rows, owners, outcomes, and what is estimated from them."""

import re

import numpy as np
import pytest

from vllm_dspark.errors import PlanError
from vllm_dspark.planning.calibration import Calibration
from vllm_dspark.planning.plan import owner_id
from vllm_dspark.planning.posterior import INFLUENCE_BOUND, AcceptancePosterior
from vllm_dspark.planning.table import NO_LIMIT, RequestTable

K = 4


def table(host=False, slots=4, **changes):
    return RequestTable(
        K,
        slots,
        changes.pop("calibration", Calibration.identity(K)),
        rank_by_posterior=host,
        **changes,
    )


def stamps(n, value):
    return np.full(n, value, dtype=np.int32)


def drafts(n):
    return np.full(n, K, dtype=np.int32)


class TestRows:
    def filled(self, host=False, stamp=5, sampled=True):
        one = table(host)
        one.add("a", sampled=sampled)
        one.add("b", sampled=sampled)
        slots = one.slots(["a", "b"])
        rows = np.array([[0.9, 0.8, 0.7, 0.6], [0.5] * 4], dtype=np.float32)
        one.record_rows(slots, one.owners(slots), stamp, rows)
        return one, slots, rows

    def test_device_windows_rank_by_the_row(self):
        one, slots, rows = self.filled()
        seen = one.batch(slots[::-1], drafts(2), stamps(2, 6))
        np.testing.assert_allclose(seen.acceptance, rows[::-1].T)
        assert seen.known.all()
        assert list(seen.owner) == [owner_id("b"), owner_id("a")]

    def test_a_slot_given_to_another_request_forgets_the_row(self):
        one, slots, _ = self.filled()
        one.remove("a")
        one.add("c", sampled=True)
        again = one.slots(["c", "b"])
        assert again[0] == slots[0]
        seen = one.batch(again, drafts(2), stamps(2, 6))
        np.testing.assert_allclose(seen.acceptance[:, 0], 0.8)
        assert list(seen.known) == [False, True]
        assert seen.counts.stale == 1

    def test_a_late_row_of_the_former_owner_is_not_used(self):
        one, slots, rows = self.filled()
        former = one.owners(slots)
        one.remove("a")
        one.add("c", sampled=True)
        one.record_rows(slots, former, 6, rows)
        seen = one.batch(one.slots(["c", "b"]), drafts(2), stamps(2, 7))
        assert list(seen.known) == [False, True]

    def test_preemption_is_a_new_owner(self):
        one, _, _ = self.filled()
        one.add("a", sampled=True, generation=1)
        seen = one.batch(one.slots(["a"]), drafts(1), stamps(1, 6))
        assert not seen.known.any()
        assert seen.owner[0] == owner_id("a", 1) != owner_id("a")

    @pytest.mark.parametrize("host", [False, True])
    def test_current_rows_count_for_greedy_requests_only(self, host):
        for sampled in (False, True):
            one, slots, rows = self.filled(host, sampled=sampled)
            seen = one.batch(slots, drafts(2), stamps(2, 5))
            assert np.allclose(seen.acceptance, rows.T) is not sampled
            assert seen.counts.current == 2 * sampled

    def test_broken_entries_are_counted(self):
        one, slots, rows = self.filled()
        rows[0, 2] = np.nan
        one.record_rows(slots, one.owners(slots), 6, rows)
        seen = one.batch(slots, drafts(2), stamps(2, 7))
        assert seen.counts.invalid == 1
        assert np.isfinite(seen.acceptance).all()

    def test_host_windows_take_a_row_as_a_weak_opinion(self):
        one, slots, _ = self.filled(host=True)
        seen = one.batch(slots, drafts(2), stamps(2, 6)).acceptance
        assert (seen[:, 1] < 0.8).all()  # 0.5 pulls the prior of 0.8 down
        assert (seen[:, 1] > 0.7).all()

    def test_rows_of_the_wrong_shape_are_refused(self):
        one, slots, _ = self.filled()
        for shape in ((2, 5), (1, 4), (2, 0), (2,)):
            with pytest.raises(PlanError, match=re.escape(str(shape))):
                one.record_rows(slots, one.owners(slots), 6, np.zeros(shape))

    @pytest.mark.parametrize("host", [False, True])
    def test_columns_that_were_not_drafted_are_absent(self, host):
        """They are as good as no row: ranked by what the request accepts, and not invalid."""
        one, slots, rows = self.filled(host)
        one.record_rows(slots, one.owners(slots), 6, rows[:, :2])
        seen = one.batch(slots, drafts(2), stamps(2, 7))
        prior = one.posterior.prior(True)
        assert seen.counts.invalid == 0
        if not host:
            np.testing.assert_allclose(seen.acceptance[:2], rows[:, :2].T)
            np.testing.assert_allclose(seen.acceptance[2:], np.stack([prior[2:]] * 2, axis=1))
            return
        # two columns are two opinions, whatever K is
        opinion = rows[:, :2].sum(axis=1) - prior[:2].sum()
        shift = 0.15 * opinion / (8.0 + 0.15 * 2)
        np.testing.assert_allclose(seen.acceptance, prior[:, None] + shift, rtol=1e-5)

    def test_an_invalid_column_of_a_narrow_row_is_counted(self):
        one, slots, rows = self.filled()
        narrow = rows[:, :2].copy()
        narrow[0, 1] = np.nan
        one.record_rows(slots, one.owners(slots), 6, narrow)
        assert one.batch(slots, drafts(2), stamps(2, 7)).counts.invalid == 1


class TestSlots:
    def test_grows_without_losing_anything(self):
        one = table(slots=2)
        for i in range(9):
            one.add(f"r{i}", sampled=True, remaining=100 + i)
            slots = one.slots([f"r{i}"])
            one.record_rows(slots, one.owners(slots), 3, np.full((1, K), i / 10, dtype=np.float32))
        seen = one.batch(one.slots([f"r{i}" for i in range(9)]), drafts(9), stamps(9, 4))
        np.testing.assert_allclose(seen.acceptance[0], np.arange(9) / 10, atol=1e-6)
        assert list(seen.remaining) == list(range(100, 109))
        assert len(one) == 9

    def test_removing_twice_is_harmless(self):
        one = table(slots=1)
        one.add("a", sampled=True)
        one.remove("a")
        one.remove("a")
        one.remove("never seen")
        assert "a" not in one
        one.add("b", sampled=True)
        one.add("c", sampled=True)
        assert len(set(one.slots(["b", "c"]))) == 2

    def test_calibration_must_fit(self):
        with pytest.raises(PlanError, match="3 positions for 4"):
            table(calibration=Calibration.identity(3))

    def test_what_remains_limits_what_is_verified(self):
        one = table()
        one.add("a", sampled=True, remaining=6)
        one.add("b", sampled=True, remaining=NO_LIMIT + 5)
        slots = one.slots(["a", "b"])
        seen = one.batch(slots, drafts(2), stamps(2, 0))
        assert list(seen.capacity) == [4, 4]
        one.record_outcomes(slots, 1, drafts(2), np.array([2, 0]))
        seen = one.batch(slots, drafts(2), stamps(2, 0))
        assert list(seen.remaining) == [3, NO_LIMIT - 1]
        assert list(seen.capacity) == [2, 4]
        one.record_outcomes(slots, 2, drafts(2), np.array([4, 4]))
        assert list(one.batch(slots, drafts(2), stamps(2, 0)).capacity) == [0, 4]
        one.count_emitted(slots, one.remaining(slots) - 10)
        assert list(one.batch(slots, drafts(2), stamps(2, 0)).capacity) == [4, 4]


class TestPairing:
    def run(self, row_first, steps=2400, stamp_shift=0):
        one, rng = table(), np.random.default_rng(0)
        ids = [f"r{i}" for i in range(16)]
        for i, request in enumerate(ids):
            one.add(request, sampled=True, tenant=i)
        slots = one.slots(ids)
        for stamp in range(1, steps):
            rows = np.full((16, K), 0.5, dtype=np.float32)
            rejected = rng.random((16, K)) >= 0.8
            accepted = np.where(rejected.any(1), rejected.argmax(1), K)
            row = (slots, one.owners(slots), stamp + stamp_shift, rows)
            if row_first:
                one.record_rows(*row)
            one.record_outcomes(slots, stamp, drafts(16), accepted)
            if not row_first:
                one.record_rows(*row)
        return one

    @pytest.mark.parametrize("row_first", [True, False])
    def test_calibration_learns_whichever_comes_first(self, row_first):
        """The head says 0.5, the truth is 0.8, which is past the bound of +1 in logits."""
        one = self.run(row_first)
        assert one.online.calibration.sampled_offset[0] == pytest.approx(1.0)
        assert one.unpaired == 0
        assert one.live.ece()[0] < 0.3

    def test_rows_of_another_pass_teach_nothing(self):
        one = self.run(row_first=True, steps=50, stamp_shift=3)
        assert one.online.version == 0
        assert one.unpaired == 5 * 16  # of one step in eight

    def test_switched_off(self):
        one = table(online_calibration=False)
        one.add("a", sampled=True)
        slots = one.slots(["a"])
        for stamp in range(1, 2000):
            one.record_rows(slots, one.owners(slots), stamp, np.full((1, K), 0.5))
            one.record_outcomes(slots, stamp, drafts(1), drafts(1))
        assert one.online.version == 0


class TestPosterior:
    def feed(self, posterior, rates, steps, *, sampled=False, tenants=None, window=K, seed=0):
        """Requests in slots 0.. with their own acceptance rates."""
        rng, n = np.random.default_rng(seed), len(rates)
        for _ in range(steps):
            rejected = rng.random((n, K)) >= np.asarray(rates)[:, None]
            accepted = np.where(rejected.any(1), rejected.argmax(1), K)
            posterior.observe(
                np.arange(n),
                np.full(n, window),
                np.minimum(accepted, window),
                np.full(n, sampled),
                np.ones(n, dtype=bool),
                np.arange(n) if tenants is None else tenants,
            )

    def test_requests_are_told_apart(self):
        posterior = AcceptancePosterior(K, 2)
        self.feed(posterior, [0.9, 0.4], 200)
        estimate = posterior.estimate(np.arange(2), np.zeros(2, bool))
        assert estimate[0, 0] > estimate[0, 1] + 0.15

    def test_steps_are_followed_at_once_as_one_by_one(self):
        """Catches windows that depend on when the outcomes of repeated steps are learned."""
        rng, window, sampled = np.random.default_rng(3), np.arange(8) % (K + 1), np.arange(8) > 3
        one, other, observing = (AcceptancePosterior(K, 8) for _ in range(3))
        accepted = rng.integers(0, window + 1, (9, 8))
        one.follow(np.arange(8), window, accepted, sampled)
        for step in accepted:
            other.follow(np.arange(8), window, step[None], sampled)
            nobody = np.zeros(8, bool)
            observing.observe(np.arange(8), window, step, sampled, nobody, np.arange(8))
        estimates = [each.estimate(np.arange(8), sampled) for each in (one, other, observing)]
        assert (estimates[0] == estimates[1]).all() and (estimates[0] == estimates[2]).all()
        assert len(np.unique(estimates[0][0])) > 4

    @pytest.mark.parametrize(("followed", "taught"), [(0, 1), (2, 3), (9, 9)])
    def test_followed_steps_count_towards_the_turn_of_shared_priors(self, followed, taught):
        """Catches priors of large batches that stand still while windows are repeated."""
        posterior, n = AcceptancePosterior(K, 256), 256  # one step in nine teaches
        slots, window, nobody = np.arange(n), np.full(n, 2), np.zeros(n, bool)
        turns = 0
        for _ in range(9):
            posterior.follow(slots, window, np.ones((followed, n), dtype=np.int64), nobody)
            before = posterior.num_observed
            posterior.observe(slots, window, np.ones(n, dtype=np.int64), nobody, ~nobody, slots)
            turns += posterior.num_observed > before
        assert turns == taught

    def test_position_priors_are_conditional_rates(self):
        posterior = AcceptancePosterior(K, 8)
        self.feed(posterior, [0.7] * 8, 1500)
        np.testing.assert_allclose(posterior.prior(False), 0.7, atol=0.05)
        np.testing.assert_allclose(posterior.prior(True), 0.8)  # another class, untouched

    def test_censored_positions_keep_their_prior(self):
        posterior = AcceptancePosterior(K, 8)
        self.feed(posterior, [0.95] * 8, 800, window=1)
        assert posterior.prior(False)[0] == pytest.approx(0.95, abs=0.03)
        np.testing.assert_allclose(posterior.prior(False)[1:], 0.8)

    def test_trimming_does_not_look_like_rejection(self):
        posterior = AcceptancePosterior(K, 8)
        self.feed(posterior, [0.9] * 8, 800, window=2)
        assert posterior.estimate(np.arange(8), np.zeros(8, bool)).min() > 0.75

    def test_one_tenant_cannot_move_everybodys_prior(self):
        posterior = AcceptancePosterior(K, 100)
        rates = [0.85] * 10 + [0.0] * 90
        tenants = np.array([*range(10), *[50] * 90])
        self.feed(posterior, rates, 400, tenants=tenants)
        assert posterior.prior(False)[0] > 0.73
        uncapped = AcceptancePosterior(K, 100)  # KNOWN BAD: an identity per row
        self.feed(uncapped, rates, 400)
        assert uncapped.prior(False)[0] < 0.5

    def test_estimates_are_probabilities_whatever_happens(self):
        posterior = AcceptancePosterior(K, 2)
        for rate in (0.0, 1.0):
            self.feed(posterior, [rate, 1 - rate], 300)
            estimate = posterior.estimate(np.arange(2), np.array([True, False]))
            assert ((estimate > 0) & (estimate < 1)).all()

    def test_alike_requests_are_ranked_alike_and_unlike_ones_are_not(self):
        alike, unlike = AcceptancePosterior(K, 40), AcceptancePosterior(K, 40)
        self.feed(alike, [0.8] * 40, 400)
        self.feed(unlike, [0.95, 0.5] * 20, 400)
        none = np.zeros(40, dtype=bool)
        spread = [one.estimate(np.arange(40), none)[0].std() for one in (alike, unlike)]
        assert spread[0] < 0.02  # sampling noise of 40 trials alone is 0.06
        assert spread[1] > 0.12

    def test_requests_without_trials_do_not_break_the_shrinkage(self):
        posterior = AcceptancePosterior(K, 40)
        for _ in range(100):
            admitted = np.where(np.arange(40) < 20, 0, K)
            posterior.observe(
                np.arange(40),
                admitted,
                admitted,
                np.zeros(40, dtype=bool),
                np.ones(40, dtype=bool),
                np.arange(40),
            )
        assert np.isfinite(posterior.estimate(np.arange(40), np.zeros(40, dtype=bool))).all()

    def test_newcomers_are_known_once_others_have_been_watched(self):
        posterior = AcceptancePosterior(K, 3)
        assert not posterior.known(np.array([2])).any()
        self.feed(posterior, [0.9, 0.9], 3)
        assert list(posterior.known(np.arange(3))) == [True, True, False]
        self.feed(posterior, [0.9, 0.9], 100)
        assert posterior.known(np.arange(3)) is None


class TestHostileStream:
    """Unsalted requests, so each is a tenant of its own: a client looks like many users."""

    HONEST, BAD = 0.85, 0.0

    def serve(self, rates, steps, *, lives=0, posterior=None, seed=0):
        """Requests with these acceptance rates; every `lives` steps the bad ones are new ones."""
        rng, n = np.random.default_rng(seed), len(rates)
        posterior = posterior or AcceptancePosterior(K, n)
        rates, tenants = np.asarray(rates), np.arange(n)
        for step in range(steps):
            if lives and step % lives == 0:
                for slot in np.flatnonzero(rates == self.BAD):
                    posterior.reset(slot)
                tenants = np.where(rates == self.BAD, 1000 + n * step + np.arange(n), tenants)
            rejected = rng.random((n, K)) >= rates[:, None]
            accepted = np.where(rejected.any(1), rejected.argmax(1), K)
            posterior.observe(
                np.arange(n),
                np.full(n, K),
                accepted,
                np.zeros(n, dtype=bool),
                np.ones(n, dtype=bool),
                tenants,
            )
        return posterior

    @pytest.mark.parametrize("lives", [0, 5, 50], ids=["long", "short", "medium"])
    @pytest.mark.parametrize("honest", [4, 16, 64])
    def test_as_many_bad_as_honest_requests_move_estimates_by_the_bound(self, honest, lives):
        """Catches a mean, which one client takes half of the way to wherever it likes."""
        none = np.zeros(honest, dtype=bool)
        alone = self.serve([self.HONEST] * honest, 2000)
        among = self.serve([self.HONEST] * honest + [self.BAD] * honest, 2000, lives=lives)
        moved = np.abs(alone.prior(False) - among.prior(False))
        noise = 0.1 / np.sqrt(honest)  # of where honest requests alone would take it
        assert moved.max() <= INFLUENCE_BOUND + noise
        assert moved[1:].max() < 0.08, "positions that the stream never reaches"
        estimates = [one.estimate(np.arange(honest), none) for one in (alone, among)]
        assert np.abs(estimates[0] - estimates[1]).max() <= INFLUENCE_BOUND + noise
        assert moved.max() < (self.HONEST - self.BAD) / 4, "half of what a mean would do"

    @pytest.mark.parametrize("distance", [0.1, 0.2, 0.3, 0.45, 0.6])
    def test_wherever_the_stream_pulls_to_it_gets_no_further(self, distance):
        """Catches a pull that is strongest where it is least suspicious."""
        bad = self.HONEST - distance
        alone = self.serve([self.HONEST] * 32, 2000)
        among = self.serve([self.HONEST] * 32 + [bad] * 32, 2000)
        moved = np.abs(alone.prior(False) - among.prior(False))
        assert moved.max() <= min(INFLUENCE_BOUND, distance) + 0.02

    def test_from_a_stream_of_rejections_to_one_of_acceptances(self):
        """Catches a bound on one side only."""
        rates = np.where(np.arange(32) < 16, 0.4, 1.0)
        alone, among = (
            self.serve(rates[:16], 1500, posterior=AcceptancePosterior(K, 32)) for _ in range(2)
        )
        self.serve(rates, 2000, posterior=among, seed=1)
        assert abs(alone.prior(False)[0] - among.prior(False)[0]) <= INFLUENCE_BOUND + 0.02

    @pytest.mark.parametrize("after", [0.3, 0.97])
    def test_a_shift_of_all_traffic_is_followed(self, after):
        """Catches a bound that holds on to what once was."""
        n = 16
        posterior = self.serve([0.7] * n, 2000)
        assert posterior.prior(False)[0] == pytest.approx(0.7, abs=0.05)
        self.serve([after] * n, 2000, posterior=posterior, seed=1)
        assert posterior.prior(False)[0] == pytest.approx(after, abs=0.06)

    def test_requests_that_differ_honestly_teach_their_middle(self):
        posterior = self.serve(np.linspace(0.6, 0.9, 16), 2000)
        assert posterior.prior(False)[0] == pytest.approx(0.75, abs=0.05)
