"""Counting what happened to drafts, without an engine: stops, ended requests, device windows."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.v1.metrics.stats import RequestSpecDecodeMetrics
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from vllm_dspark.integration.batches import WorkerOrder
from vllm_dspark.integration.metrics_correction import Corrections, emitting
from vllm_dspark.integration.outcomes import (
    OutcomeTotals,
    PendingOutcomes,
    token_counts,
)
from vllm_dspark.integration.report import AdmittedDrafts, StepOrder
from vllm_dspark.integration.rested_counts import RestedStep

K = 4


def pending(rows, invalid=None):
    """rows: name -> (drafted, scheduled, sampled tokens). Also returns the token lists."""
    lists = {name: list(range(sampled)) for name, (_, _, sampled) in rows.items()}
    scheduled = {name: [0] * n for name, (_, n, _) in rows.items() if n}
    output = SimpleNamespace(
        scheduled_spec_decode_tokens=scheduled, num_invalid_spec_tokens=invalid
    )
    ran = SimpleNamespace(sampled_token_ids=list(lists.values()), req_ids=list(lists))
    drafted = {name: n for name, (n, _, _) in rows.items()}
    order = StepOrder.of(7, None, drafted, 6)
    return taken(output, ran, order, list(lists)), lists


def taken(output, ran, order, batch):
    """batch: requests in the worker's order."""
    where = WorkerOrder()
    index = {name: i for i, name in enumerate(batch)}
    places = where.places(order.request_ids, batch, index)
    counts = token_counts(ran)
    return PendingOutcomes(output, ran, order, K, counts, places, where.complete)


def by_position(columns):
    """How many counts of each column reach each position."""
    return [[int((column > k).sum()) for k in range(K)] for column in columns]


def let_through(counts):
    """counts: drafts by request that the worker let through."""
    return AdmittedDrafts(list(counts), np.array(list(counts.values()), dtype=np.int32))


def cut(tokens, length):
    """What vLLM does at a stop, in place."""
    del tokens[length:]


def columns(outcomes):
    names = ("drafted", "admitted", "verified", "before_stop", "accepted")
    return [getattr(outcomes, name).tolist() for name in names]


def columns_of(outcomes):
    return [*columns(outcomes), outcomes.sampled.tolist(), outcomes.reached.tolist()]


class TestPending:
    def test_no_stop(self):
        found, _ = pending({"a": (4, 4, 3), "b": (4, 2, 3), "c": (4, 0, 1)})
        outcomes = found.finish(None, None)
        assert outcomes.request_ids == ["a", "b", "c"]
        assert columns(outcomes) == [[4, 4, 4], [4, 2, 0], [4, 2, 0], [4, 2, 0], [2, 2, 0]]
        assert outcomes.emitted.tolist() == outcomes.sampled.tolist() == [3, 3, 1]
        assert outcomes.stamps.tolist() == [6, 6, 6]

    @pytest.mark.parametrize(
        ("emitted", "accepted", "before_stop"),
        [(1, 1, 1), (3, 3, 3), (4, 4, 4), (5, 4, 4)],
        ids=["first draft", "third draft", "last draft", "own token"],
    )
    def test_a_stop_cuts_accepted_drafts(self, emitted, accepted, before_stop):
        """Catches: tokens behind a stop counted as accepted, or as rejected by the learner."""
        found, lists = pending({"a": (4, 4, 5)})
        cut(lists["a"], emitted)
        outcomes = found.finish({"a"}, None)
        assert outcomes.accepted.tolist() == [accepted]
        assert outcomes.before_stop.tolist() == [before_stop]
        assert outcomes.verified.tolist() == [4]

    def test_a_stop_at_the_corrected_token_keeps_the_rejection(self):
        found, _ = pending({"a": (4, 4, 2)})  # one accepted, then the target's correction
        outcomes = found.finish({"a"}, None)
        assert outcomes.accepted.tolist() == [1]
        assert outcomes.before_stop.tolist() == [4]

    def test_results_of_ended_requests_are_dropped(self):
        """Catches: async scheduling's step in flight when a request stops, counted as output."""
        rows = {"ended": (4, 4, 5), "runs": (4, 4, 5), "narrow": (4, 0, 1)}
        found, _ = pending(rows)
        assert found.finish({"runs"}, None).request_ids == ["runs"]
        assert pending(rows)[0].finish(set(), None) is None

    def test_drafts_that_a_grammar_invalidated_were_not_scored(self):
        found, _ = pending({"a": (4, 4, 3)}, invalid={"a": 1})
        outcomes = found.finish({"a"}, None)
        assert outcomes.admitted.tolist() == [4]
        assert outcomes.verified.tolist() == [3]

    def test_device_windows_say_what_was_verified(self):
        found, _ = pending({"a": (4, 4, 3), "b": (4, 4, 1)})
        outcomes = found.finish(set("ab"), let_through({"a": 2, "b": 0}))
        assert outcomes.verified.tolist() == [2, 0]
        assert outcomes.accepted.tolist() == [2, 0]

    def test_nothing_was_sampled(self):
        order = StepOrder.of(1, None, {"a": 4}, 1)
        output = SimpleNamespace(scheduled_spec_decode_tokens={}, num_invalid_spec_tokens=None)
        ran = SimpleNamespace(sampled_token_ids=[])
        assert taken(output, ran, order, []).finish(set(), None) is None

    def test_the_worker_may_have_an_order_of_its_own(self):
        """Catches tokens counted for another request, and one that is not in the step at all."""
        order = StepOrder.of(7, None, dict.fromkeys("abc", 4), 6)
        output = SimpleNamespace(
            scheduled_spec_decode_tokens={"a": [0] * 4, "c": [0] * 4}, num_invalid_spec_tokens=None
        )
        ran = SimpleNamespace(sampled_token_ids=[[1, 1, 1], [2], [3, 3]])
        outcomes = taken(output, ran, order, ["c", "prefill", "a"]).finish(set("ac"), None)
        assert outcomes.request_ids == ["a", "c"]
        assert outcomes.sampled.tolist() == [2, 3]
        assert outcomes.accepted.tolist() == [1, 2]

    @pytest.mark.parametrize("reported", ["cxa", "acx", "xc"])
    def test_windows_of_the_device_go_to_their_requests(self, reported):
        """Catches windows taken in the order of the scheduler, or of a worker that names others."""
        order = StepOrder.of(7, None, dict.fromkeys("ac", 4), 6)
        output = SimpleNamespace(
            scheduled_spec_decode_tokens={"a": [0] * 4, "c": [0] * 4}, num_invalid_spec_tokens=None
        )
        ran = SimpleNamespace(sampled_token_ids=[[1, 1], [2], [3, 3, 3]], req_ids=list("cxa"))
        counts = {"a": 3, "c": 1, "x": 0}
        given = let_through({name: counts[name] for name in reported})
        outcomes = taken(output, ran, order, list("cxa")).finish(None, given)
        assert outcomes.admitted.tolist() == [3 if "a" in reported else 4, 1]
        assert outcomes.accepted.tolist() == [2, 1]

    def test_a_step_without_stops_counts_alike_either_way(self):
        """Catches a short cut (one histogram of pairs) that counts something else."""
        rng = np.random.default_rng(1)
        for _ in range(30):
            drafts = rng.integers(0, K + 1, 40)
            rows = {
                f"r{i}": (K, int(n), int(rng.integers(0, n + 1)) + 1) for i, n in enumerate(drafts)
            }
            on_device = {name: int(rng.integers(t - 1, n + 1)) for name, (_, n, t) in rows.items()}
            for given in (None, let_through(on_device)):
                short = pending(rows)[0].finish(None, given, stopped=False)
                judged = np.minimum(short.verified, short.accepted + 1)
                columns = (short.drafted, short.admitted, short.verified, judged, short.accepted)
                assert short.reached.tolist() == by_position(columns)
                full = pending(rows)[0].finish(None, given)
                assert columns_of(short) == columns_of(full)


class TestRestedStep:
    def test_counts_what_is_counted_of_other_steps(self):
        """Catches totals that depend on whether requests were looked at."""
        rng = np.random.default_rng(2)
        for _ in range(20):
            admitted = rng.integers(0, K + 1, 30)
            for verified in (admitted, np.full(30, K)):
                sampled = rng.integers(0, verified + 1) + 1
                columns = (verified, np.minimum(verified, sampled), sampled - 1)
                tokens = bytes(sampled.tolist())
                found = RestedStep.trimmed(tokens, verified, K)
                assert [found.verified, found.judged, found.accepted] == by_position(columns)
            assert found == RestedStep.native(tokens, K)

    def test_sums(self):
        totals, other = OutcomeTotals(K), OutcomeTotals(K)
        rows = {"a": (K, K, 2), "b": (K, K, K + 1), "c": (K, K, 1)}
        for _ in range(3):
            totals.add_rested(3, RestedStep.native(bytes([2, K + 1, 1]), K))
            other.add(pending(rows)[0].finish(None, None))
        for name in ("drafted", "admitted", "trimmed", "verified", "judged", "accepted", "windows"):
            assert getattr(totals, name).tolist() == getattr(other, name).tolist(), name
        assert (totals.steps, totals.request_steps) == (other.steps, other.request_steps) == (3, 9)
        assert totals.emitted.tolist() == other.emitted.tolist()


class TestEmitting:
    """Which requests vLLM has added tokens to, from what its update returns."""

    def of(self, names, expected, as_ordered=True):
        entries = [
            SimpleNamespace(request_id=name.strip("!"), new_token_ids=[] if "!" in name else [1])
            for name in names
        ]
        order = StepOrder.of(1, None, dict.fromkeys(expected, K), 1)
        if as_ordered:
            order.num_scheduled = order.num_drafts
        return emitting({0: SimpleNamespace(outputs=entries)}, order)

    def test_all_of_them(self):
        assert self.of(["a", "b"], ["a", "b"]) is None

    @pytest.mark.parametrize("names", [["a"], ["a", "b!"], []])
    def test_one_has_ended_meanwhile(self, names):
        """Catches an aborted request's tokens counted as output; b!: it failed, without tokens."""
        assert self.of(names, ["a", "b"]) == {name for name in names if "!" not in name}

    def test_a_prompt_that_ends_makes_up_for_one_that_ended(self):
        """Catches counting entries where others than the order's requests were in the step."""
        assert self.of(["a", "prompt"], ["a", "b"], as_ordered=False) == {"a", "prompt"}

    def test_clients_have_outputs_of_their_own(self):
        order = StepOrder.of(1, None, {"a": K, "b": K}, 1)
        order.num_scheduled = order.num_drafts
        parts = {
            i: SimpleNamespace(outputs=[SimpleNamespace(request_id=name, new_token_ids=[1])])
            for i, name in enumerate("ab")
        }
        assert emitting(parts, order) == {"a", "b"}


class TestTotals:
    def test_every_position_by_hand(self):
        totals = OutcomeTotals(K)
        found, lists = pending(
            {"full": (4, 4, 5), "trim": (4, 2, 1), "none": (4, 0, 1), "stop": (4, 3, 4)}
        )
        cut(lists["stop"], 2)
        totals.add(found.finish(None, None))
        totals.add(None)
        assert totals.drafted.tolist() == [4, 4, 4, 4]
        assert totals.admitted.tolist() == [3, 3, 2, 1]
        assert totals.trimmed.tolist() == [1, 1, 2, 3]
        assert totals.verified.tolist() == [3, 3, 2, 1]
        # trim: its first draft was rejected; stop: two accepted, the third is unknown
        assert totals.judged.tolist() == [3, 2, 1, 1]
        assert totals.accepted.tolist() == [2, 2, 1, 1]
        # windows 1..5, beyond, and their sum
        assert totals.windows.tolist() == [1, 0, 1, 1, 1, 0, 1 + 3 + 4 + 5]
        assert totals.request_steps == 4
        assert totals.emitted.tolist() == [5 + 1 + 1 + 2]
        assert totals.discarded.tolist() == [2]
        assert totals.accepted_length == 9 / 4

    def test_sums_agree_with_a_slow_count(self):
        rng = np.random.default_rng(0)
        totals = OutcomeTotals(K)
        wanted = np.zeros((3, K), dtype=int)
        for _ in range(50):
            scheduled = rng.integers(0, K + 1, size=9)
            passed = [int(rng.integers(0, n + 1)) for n in scheduled]
            rows = {
                f"r{i}": (K, int(n), p + 1)
                for i, (n, p) in enumerate(zip(scheduled, passed, strict=True))
            }
            found, _ = pending(rows)
            totals.add(found.finish(set(rows), None))
            for n, p in zip(scheduled, passed, strict=True):
                for k in range(K):
                    wanted[:, k] += [n > k, k < min(n, p + 1), p > k]
        assert totals.verified.tolist() == wanted[0].tolist()
        assert totals.judged.tolist() == wanted[1].tolist()
        assert totals.accepted.tolist() == wanted[2].tolist()


class TestCorrections:
    @staticmethod
    def requests(metrics):
        return {
            name: SimpleNamespace(spec_decode_metrics=value, num_in_flight_tokens=1)
            for name, value in metrics.items()
        }

    def run(self, rows, cuts, on_device=None, metrics=None):
        found, lists = pending(rows)
        corrections = Corrections()
        level = "detailed" if metrics else "none"
        requests = self.requests(metrics or {})
        scheduler = SimpleNamespace(spec_decode_metrics_level=level, requests=requests)
        corrections.begin(scheduler, found.request_ids)
        stats = corrections.stats = SpecDecodingStats.new(K)
        stats.observe_draft(4, 4)  # vLLM's own, of the first request
        for name, (_, scheduled, sampled) in rows.items():
            if metrics:
                metrics[name].observe(scheduled, sampled - 1, detailed=True)
        for name, length in cuts.items():
            cut(lists[name], length)
        corrections.apply(found.finish(None, let_through(on_device) if on_device else None))
        return stats

    def test_tokens_behind_a_stop_are_not_accepted(self):
        stats = self.run({"a": (4, 4, 5), "b": (4, 4, 3)}, {"a": 2})
        assert stats.num_drafts == 2
        assert stats.num_draft_tokens == 8
        assert stats.num_accepted_tokens == 2 + 2
        assert stats.num_accepted_tokens_per_pos == [2, 2, 0, 0]
        assert stats.num_draft_tokens_per_pos == [2, 2, 2, 2]

    def test_drafts_trimmed_on_the_device_are_not_rejected(self):
        stats = self.run({"a": (4, 4, 3), "b": (4, 4, 1)}, {}, on_device={"a": 2, "b": 0})
        assert (stats.num_drafts, stats.num_draft_tokens) == (1, 2)
        assert stats.num_accepted_tokens == 2

    def test_padding_without_any_draft_is_nothing(self):
        """Catches the slots of a one-token prompt counted as so many rejected drafts."""
        corrections = Corrections()
        corrections.begin(SimpleNamespace(), [])
        stats = corrections.stats = SpecDecodingStats.new(K)
        stats.observe_draft(4, 0)
        corrections.apply(None)
        assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (0, 0, 0)
        assert stats.num_draft_tokens_per_pos == stats.num_accepted_tokens_per_pos == [0] * K

    def test_metrics_of_single_requests_too(self):
        metrics = {"a": RequestSpecDecodeMetrics.new(K), "b": RequestSpecDecodeMetrics.new(K)}
        self.run({"a": (4, 4, 5), "b": (4, 4, 3)}, {"a": 2}, {"a": 4, "b": 2}, metrics)
        assert metrics["a"].histogram == [0, 0, 1, 0, 0]
        assert metrics["a"].per_step_accepted == [2]
        assert metrics["b"].per_step_drafted == [2]
        assert metrics["b"].num_draft_tokens == 2

    def test_padding_of_single_requests_is_nothing_either(self):
        """Catches the slots of a one-token prompt counted as its own rejected drafts."""
        metrics = {name: RequestSpecDecodeMetrics.new(K) for name in ("old", "new", "resumed")}
        metrics["resumed"].observe(3, 2, detailed=True)
        found, _ = pending({"old": (4, 4, 3)})
        corrections = Corrections()
        requests = self.requests(metrics)
        scheduler = SimpleNamespace(spec_decode_metrics_level="detailed", requests=requests)
        corrections.begin(scheduler, ["old"])
        metrics["old"].observe(4, 2, detailed=True)
        metrics["new"].observe(K, 0, detailed=True)
        metrics["resumed"].observe(K, 0, detailed=True)
        corrections.apply(found.finish(None, None))
        assert metrics["new"] == RequestSpecDecodeMetrics.new(K)
        assert (metrics["old"].histogram, metrics["old"].num_draft_tokens) == ([0, 0, 1, 0, 0], 4)
        assert metrics["resumed"].per_step_drafted == [3] and metrics["resumed"].histogram[0] == 0
        assert metrics["resumed"].per_step_accepted == [2]
        assert metrics["resumed"].num_draft_tokens == 3

    def test_vllm_without_stats_stays_without(self):
        corrections = Corrections()
        corrections.begin(SimpleNamespace(), [])
        corrections.apply(None)
        corrections.apply(pending({"a": (4, 4, 5)})[0].finish(None, None))
        corrections.fill(1, [1] * K, [1] * K)
        assert corrections.stats is None
