"""The planner over several steps: pauses of drafting, drains, repeated and forced plans."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.planning.builders import batch, facts
from tests.planning.test_planner import AT_ONCE, K, flat_until, planner, uniform
from vllm_dspark.planning.cost import StepMode
from vllm_dspark.planning.facts import PlannerOptions
from vllm_dspark.planning.plan import PlanKind, Reason


class Episode:
    """A loop that, like the engine, has drafts only if the step before made some."""

    def __init__(self, one, rate=0.05):
        self.planner, self.rate, self.drafts, self.step = one, rate, K, 0

    def run(self, n, steps, **changes):
        plans = []
        for _ in range(steps):
            seen = uniform(n, self.rate, num_drafts=np.full(n, self.drafts))
            plans.append(self.planner.plan(facts(self.step, **changes), seen))
            assert plans[-1].budget <= n * self.drafts
            self.drafts = K if plans[-1].draft_next else 0
            self.step += 1
        return plans


class TestSkipDraft:
    def test_leftovers_then_single_steps_then_probes(self):
        plans = Episode(planner(replace(AT_ONCE, probe_interval=8))).run(128, 20)
        reasons = [plan.reason for plan in plans]
        assert plans[0].draft_next is False
        assert reasons[1:8] == [Reason.SKIP_GAIN] * 6 + [Reason.PROBE_DRAFT]
        assert reasons[8] is Reason.PROBE_VERIFY
        assert reasons[9:16] == [Reason.SKIP_GAIN] * 6 + [Reason.PROBE_DRAFT]
        probe = plans[8]
        assert probe.kind is PlanKind.TRIM
        assert not probe.draft_next
        assert K <= probe.budget <= 16  # the next size that has room for K, not a full step
        assert all(plan.windows == (1,) * 128 for plan in plans[1:8])

    def test_resumes_within_two_steps_after_load_falls(self):
        episode = Episode(planner(PlannerOptions(lazy=False)), rate=0.5)
        loaded = episode.run(256, 20)
        assert loaded[-1].kind is PlanKind.SKIP_DRAFT
        after = episode.run(2, 2)
        assert after[0].reason is Reason.NO_DRAFTS
        assert after[0].draft_next
        assert after[1].kind is PlanKind.NATIVE
        assert after[1].budget == 2 * K

    def test_prefill_steps_do_not_end_a_pause(self):
        episode = Episode(planner())
        episode.run(128, 5)
        mixed = episode.run(128, 3, reserved_rows=50)
        assert [plan.reason for plan in mixed] == [Reason.MIXED] * 3
        assert not any(plan.draft_next for plan in mixed)
        assert episode.run(128, 1)[0].reason is Reason.SKIP_GAIN

    def test_a_pause_cannot_last_for_want_of_a_decision(self):
        """Endless prefill, or a request that excludes planning, must not stop drafting for good."""
        episode = Episode(planner(replace(AT_ONCE, probe_interval=8)))
        episode.run(128, 5)
        mixed = episode.run(128, 9, reserved_rows=50)
        assert [plan.draft_next for plan in mixed] == [False] * 7 + [True] * 2
        episode = Episode(planner())
        episode.run(128, 5)
        excluded = uniform(128, 0.05, excluded=np.arange(128) == 0)
        assert episode.planner.plan(facts(6), excluded).draft_next

    def test_a_pause_does_not_end_because_nothing_is_known(self):
        """Catches flapping: in a pause rows go stale, and only probes bring outcomes."""
        one = planner(replace(AT_ONCE, probe_interval=8))
        Episode(one).run(128, 2)
        for step in range(2, 6):
            nothing = np.zeros(128, dtype=bool)
            seen = uniform(128, 0.05, num_drafts=np.zeros(128, dtype=np.int32), known=nothing)
            plan = one.plan(facts(step), seen)
            assert (plan.kind, plan.draft_next) == (PlanKind.SKIP_DRAFT, False), plan.reason

    def test_can_be_switched_off(self):
        plans = Episode(planner(replace(AT_ONCE, skip_draft=False))).run(128, 5)
        assert all(plan.draft_next for plan in plans)

    def test_a_request_without_drafts_among_others(self):
        num_drafts = np.full(64, K)
        num_drafts[5] = 0
        plan = planner().plan(facts(), uniform(64, 0.8, num_drafts=num_drafts))
        assert plan.kind is PlanKind.TRIM
        assert plan.windows[5] == 1
        assert sum(plan.windows) == 64 + plan.budget


class TestDrain:
    def decide(self, one, sizes, remaining_of):
        """A batch that arrives at once and then shrinks."""
        for step, n in enumerate(sizes):
            rates = np.full((K, n), 0.95)
            rates[:, :4] = 0.35  # the slow ones, starved by the ranking
            plan = one.plan(
                facts(step, num_arrived=n if step == 0 else 0),
                batch(rates, remaining=remaining_of(n)),
            )
        return plan

    def trimming(self, guard, remaining_of):
        step_ms = flat_until(1, slope=0.01)
        one = planner(replace(AT_ONCE, drain_guard=guard), step_ms)
        return self.decide(one, (64, 32), remaining_of)

    def test_guard_charges_the_slow_requests_that_are_last(self):
        def slow_are_last(n):
            return np.where(np.arange(n) < 4, 1000, 10)

        assert self.trimming(False, slow_are_last).kind is PlanKind.TRIM
        guarded = self.trimming(True, slow_are_last)
        assert (guarded.kind, guarded.reason) == (PlanKind.NATIVE, Reason.DRAIN_GUARD)

    def test_others_may_be_trimmed(self):
        def slow_are_first(n):
            return np.where(np.arange(n) < 4, 2, 1000)

        assert self.trimming(True, slow_are_first).kind is PlanKind.TRIM

    def test_a_batch_that_is_refilled_is_not_draining(self):
        one = planner(AT_ONCE, flat_until(1, slope=0.01))
        one.options = replace(AT_ONCE, drain_guard=True)
        rates = np.full((K, 32), 0.95)
        rates[:, :4] = 0.35
        remaining = np.where(np.arange(32) < 4, 1000, 10)
        for changes in ({"num_arrived": 1}, {"num_waiting": 3}):
            one.plan(facts(0, num_arrived=64), uniform(64, 0.9))
            plan = one.plan(facts(1, **changes), batch(rates, remaining=remaining))
            assert plan.kind is PlanKind.TRIM


class TestForced:
    @pytest.mark.parametrize("spec", ["full", "random", 3, (1, 4, 8)])
    def test_windows_are_prescribed(self, spec):
        options = replace(AT_ONCE, test_windows=spec, test_windows_seed=4, device_windows=True)
        seen = uniform(5, 0.5, num_drafts=np.array([7, 7, 7, 2, 0]))
        plans = [planner(options).plan(facts(s), seen) for s in (3, 3, 4)]
        assert plans[0] == plans[1]
        assert all(plan.reason is Reason.FORCED for plan in plans)
        assert (np.array(plans[0].windows) <= [8, 8, 8, 3, 1]).all()
        assert plans[0].budget == sum(plans[0].windows) - 5
        expected = {"full": (8, 8, 8, 3, 1), 3: (3, 3, 3, 3, 1), (1, 4, 8): (1, 4, 8, 1, 1)}
        if spec in expected:
            assert plans[0].windows == expected[spec]
        else:
            assert plans[2].windows != plans[0].windows
        excluded = replace(seen, excluded=np.ones(5, dtype=bool))
        assert planner(options).plan(facts(3), excluded).reason is Reason.EXCLUDED


def repeat_unseen(one, other, seen, step):
    """Steps that `one` lets pass unseen and `other` repeats one by one; their number."""
    ahead = one.rest_ahead
    one.repeated(ahead)
    for later in range(step, step + ahead):
        plan = other.shortcut(facts(later), seen.owner, seen.num_drafts)
        assert plan is not None
        assert other.rest > 1 or plan.sets_windows  # whose outcomes are learned later
    assert one.rest == other.rest
    return ahead


class TestLazy:
    def test_settled_native_steps_are_repeated_without_planning(self):
        one = planner(PlannerOptions())
        seen = uniform(2, 0.9)
        for step in range(16):
            assert one.shortcut(facts(step), seen.owner, seen.num_drafts) is None
            last = one.plan(facts(step), seen)
        worked_out = []
        for step in range(16, 48):
            plan = one.shortcut(facts(step), seen.owner, seen.num_drafts)
            worked_out.append(plan is None)
            if plan is None:
                plan = one.plan(facts(step), seen)
            assert plan == replace(last, step_id=step)
        assert sum(worked_out) == 4

    def test_the_longer_full_windows_are_best_the_less_is_planned(self):
        """Catches planning that never ends, and a decision that is never looked at again."""
        one = planner(PlannerOptions())
        seen = uniform(2, 0.9)
        planned = []
        for step in range(641):
            if one.shortcut(facts(step), seen.owner, seen.num_drafts) is None:
                planned.append(step)
                one.plan(facts(step), seen)
        gaps = np.diff([step for step in planned if step >= 16]).tolist()
        assert gaps == [8] * 6 + [32] * 6 + [64] * 6

    def test_nothing_is_needed_of_most_steps_in_between(self):
        """Catches rest up to the next planned step, which would then know of old outcomes only."""
        one = planner(PlannerOptions())
        seen = uniform(2, 0.9)
        needed = []
        for step in range(320):
            if one.shortcut(facts(step), seen.owner, seen.num_drafts) is None:
                one.plan(facts(step), seen)
            needed.append(one.rest == 0)
        assert sum(needed[64:256]) == 6 * 8 and all(needed[248:256])
        assert not any(needed[256 : 320 - 8])

    def test_steps_may_be_repeated_unseen(self):
        """Catches a planner that loses count of steps it was not asked about."""
        one, other = planner(PlannerOptions()), planner(PlannerOptions())
        seen = uniform(2, 0.9)
        step, skipped = 0, 0
        while step < 300:
            for each in (one, other):
                if each.shortcut(facts(step), seen.owner, seen.num_drafts) is None:
                    each.plan(facts(step), seen)
            step += 1
            ahead = repeat_unseen(one, other, seen, step)
            step, skipped = step + ahead, skipped + ahead
        assert skipped > 150
        assert planner(PlannerOptions()).rest_ahead == 0

    @pytest.mark.parametrize(
        "changes", [{"num_arrived": 1}, {"reserved_rows": 9}, {"mode": StepMode.MIXED}]
    )
    def test_whatever_changes_ends_it(self, changes):
        one = planner(PlannerOptions())
        seen = uniform(2, 0.9)
        for step in range(17):
            one.plan(facts(step), seen)
        assert one.shortcut(facts(17, **changes), seen.owner, seen.num_drafts) is None
        assert one.shortcut(facts(17), seen.owner[:1], seen.num_drafts[:1]) is None
        assert one.shortcut(facts(17), seen.owner, seen.num_drafts) is not None

    @pytest.mark.parametrize("device", [False, True])
    @pytest.mark.parametrize(("requests", "more"), [(64, 1), (128, 2), (192, 3)])
    def test_a_trimmed_step_of_a_large_batch_serves_some_more(self, device, requests, more):
        """Catches a decision repeated for ever, or for other requests than it was about."""
        one = planner(replace(AT_ONCE, lazy=True, device_windows=device))
        seen = uniform(requests, 0.6)
        plan = one.plan(facts(1), seen)
        assert plan.kind is PlanKind.TRIM
        assert one.shortcut(facts(2), seen.owner[::-1], seen.num_drafts) is None
        assert one.shortcut(facts(2), seen.owner, seen.num_drafts - 1) is None
        for step in range(2, 2 + more):
            assert one.rest == more - (step - 1)
            again = one.shortcut(facts(step), seen.owner, seen.num_drafts)
            assert again == replace(plan, step_id=step)
        assert one.rest == 0
        assert one.shortcut(facts(9), seen.owner, seen.num_drafts) is None

    def served(self, one, rates, requests=128):
        """Steps that each decision serves, where requests are accepted at `rates` in turn."""
        lengths, step = [], 0
        for rate in rates:
            seen = uniform(requests, rate)
            assert one.shortcut(facts(step), seen.owner, seen.num_drafts) is None
            one.plan(facts(step), seen)
            lengths.append(1)
            step += 1
            while one.shortcut(facts(step), seen.owner, seen.num_drafts) is not None:
                lengths[-1] += 1
                step += 1
        return lengths

    def test_on_the_device_a_confirmed_budget_serves_longer(self):
        """Catches planning what is known, and a budget kept although it has moved since."""
        options = replace(AT_ONCE, lazy=True, device_windows=True)
        assert self.served(planner(options), [0.6] * 5) == [3, 6, 12, 24, 24]
        assert self.served(planner(options), [0.6, 0.6, 0.8, 0.8, 0.6]) == [3, 6, 3, 6, 3]
        # full windows in between, which are planned anew until they have been best for long
        assert self.served(planner(options), [0.6, 0.6, 1.0, 0.6, 0.6]) == [3, 6, 1, 3, 6]

    @pytest.mark.parametrize(
        ("requests", "steps"),
        [(64, [2, 2, 2]), (128, [3, 6, 6]), (192, [4, 8, 16, 32])],
    )
    def test_on_the_host_windows_of_large_batches_serve_longer(self, requests, steps):
        """Catches windows kept so long that tokens per second fall by more than planning costs."""
        options = replace(AT_ONCE, lazy=True)
        rates = [0.6] * (len(steps) + 1)
        assert self.served(planner(options), rates, requests) == [*steps, steps[-1]]
        assert self.served(planner(options), [0.6, 0.6, 0.8], requests) == [*steps[:2], steps[0]]

    def test_other_requests_confirm_nothing(self):
        one = planner(replace(AT_ONCE, lazy=True, device_windows=True))
        self.served(one, [0.6] * 2)
        others = replace(uniform(128, 0.6), owner=uniform(128, 0.6).owner + 1, digest=None)
        one.plan(facts(99), others)
        assert one.rest == 2 - 1

    @pytest.mark.parametrize("device", [False, True])
    def test_trimmed_steps_may_be_repeated_unseen(self, device):
        """Catches a planner that loses count of trimmed steps that it was not asked about."""
        options = replace(AT_ONCE, lazy=True, device_windows=device)
        one, other = planner(options), planner(options)
        seen = uniform(192, 0.6)
        step = skipped = 0
        while step < 100:
            found = []
            for each in (one, other):
                plan = each.shortcut(facts(step), seen.owner, seen.num_drafts)
                found.append(plan or each.plan(facts(step), seen))
            assert found[0] == found[1]
            step += 1
            ahead = repeat_unseen(one, other, seen, step)
            step, skipped = step + ahead, skipped + ahead
        assert skipped > 50

    def test_a_shrunken_batch_is_not_repeated_unseen(self):
        """Catches trimming that goes on in a batch which begins to drain as soon as none wait."""
        one = planner(replace(AT_ONCE, lazy=True, device_windows=True))
        more, fewer = uniform(192, 0.6), uniform(128, 0.6)
        one.plan(facts(0, num_arrived=192, num_waiting=1), more)
        for step in range(1, 30):
            waiting = facts(step, num_waiting=1)
            if one.shortcut(waiting, fewer.owner, fewer.num_drafts) is None:
                assert one.plan(waiting, fewer).kind is PlanKind.TRIM
            assert one.rest_ahead == 0
        assert one.rest > 1
        assert one.shortcut(facts(30), fewer.owner, fewer.num_drafts) is None

    @pytest.mark.parametrize(("requests", "rate", "fresh"), [(32, 0.4, False), (128, 0.6, True)])
    def test_small_batches_and_fresh_rows_are_planned_anew(self, requests, rate, fresh):
        one = planner(replace(AT_ONCE, lazy=True))
        seen = replace(uniform(requests, rate), fresh=fresh)
        assert one.plan(facts(1), seen).kind is PlanKind.TRIM
        assert one.shortcut(facts(2), seen.owner, seen.num_drafts) is None

    def test_on_the_device_fresh_rows_are_used_in_any_case(self):
        one = planner(replace(AT_ONCE, lazy=True, device_windows=True))
        seen = replace(uniform(128, 0.6), fresh=True)
        assert one.plan(facts(1), seen).kind is PlanKind.TRIM
        assert one.shortcut(facts(2), seen.owner, seen.num_drafts) is not None


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_equal_histories_give_equal_plans(seed):
    """Ties, NaN-free but saturated rows, changing sizes: two planners never disagree."""
    rng = np.random.default_rng(seed)
    first, second = planner(PlannerOptions()), planner(PlannerOptions())
    for step in range(12):
        n = int(rng.integers(1, 80))
        rates = rng.choice([0.0, 0.5, 0.9, 1.0], (K, n))
        seen = batch(rates, num_drafts=rng.integers(0, K + 1, n))
        changes = {"num_arrived": int(rng.integers(0, 3)), "kv_tokens": int(rng.integers(0, 9999))}
        plans = [one.plan(facts(step, **changes), seen) for one in (first, second)]
        assert plans[0] == plans[1]
        windows = np.array(plans[0].windows)
        assert (windows >= 1).all()
        assert (windows <= seen.num_drafts + 1).all()
        assert windows.sum() == n + plans[0].budget
