"""Temperatures, their fit, and the online correction."""

import numpy as np
import pytest

from vllm_dspark.errors import CalibrationError
from vllm_dspark.planning.calibration import Calibration, fit_temperatures, logit
from vllm_dspark.planning.influence import InfluenceCap
from vllm_dspark.planning.online import BOUND, OnlineCalibration
from vllm_dspark.planning.quality import (
    LiveQuality,
    auc,
    brier,
    equal_mass_ece,
    quality_by_position,
)

K = 5


def drafts(rng, count, temperature=1.0, bias=0.0, width=K):
    """Heads whose logits are `temperature` times too large and off by `bias`."""
    z = rng.normal(1.2, 1.5, (count, width))
    truth = 1.0 / (1.0 + np.exp(-z))
    confidence = 1.0 / (1.0 + np.exp(-(temperature * z - bias)))
    rejected = rng.random((count, width)) >= truth
    accepted = np.where(rejected.any(axis=1), rejected.argmax(axis=1), width)
    return confidence.astype(np.float32), accepted.astype(np.int64), truth


class TestApply:
    def test_identity_changes_nothing(self):
        rows = np.random.default_rng(0).random((K, 9), dtype=np.float32)
        out = Calibration.identity(K).apply(rows, np.zeros(9, bool))
        np.testing.assert_array_equal(out, rows)
        assert out is not rows

    def test_classes_have_their_own_parameters(self):
        calibration = Calibration((1.0, 2.0), (4.0, 1.0), (0.0, 0.5), (0.0, -0.5))
        rows = np.full((2, 3), 0.9, dtype=np.float32)
        z = np.log(9.0)
        greedy = 1 / (1 + np.exp(-np.array([z, z / 2 + 0.5])))
        sampled = 1 / (1 + np.exp(-np.array([z / 4, z - 0.5])))
        mixed = calibration.apply(rows, np.array([False, True, False]))
        np.testing.assert_allclose(mixed, np.stack([greedy, sampled, greedy], 1), rtol=1e-5)
        for flag, expected in ((False, greedy), (True, sampled)):
            uniform = calibration.apply(rows, np.full(3, flag))
            np.testing.assert_allclose(uniform[:, 0], expected, rtol=1e-5)

    def test_saturated_confidences_stay_finite_and_tied(self):
        rows = np.array([[0.0, 1.0, 1.0]], dtype=np.float32)
        out = Calibration((3.0,), (3.0,)).apply(rows, np.zeros(3, bool))
        assert np.isfinite(out).all()
        assert out[0, 1] == out[0, 2] < 1.0
        assert np.isfinite(logit(rows)).all()

    @pytest.mark.parametrize("value", [0.0, -1.0, np.nan, np.inf, 1e3])
    def test_illegal_temperatures_are_refused(self, value):
        with pytest.raises(CalibrationError, match="position 2"):
            Calibration((1.0, value), (1.0, 1.0))

    def test_widths_must_agree(self):
        with pytest.raises(CalibrationError, match="2 draft positions"):
            Calibration((1.0, 1.0), (1.0,))


class TestFit:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_recovers_the_temperature(self, temperature):
        rng = np.random.default_rng(3)
        confidence, accepted, _ = drafts(rng, 12_000, temperature)
        fitted = fit_temperatures(confidence, accepted, np.full(len(accepted), K))
        np.testing.assert_allclose(fitted[:3], temperature, rtol=0.2)

    def test_calibrated_survival_is_within_the_goal(self):
        """ECE of a_k in 15 equal-mass bins <= 0.03 on held-out rows, and Brier below base rate."""
        rng = np.random.default_rng(4)
        confidence, accepted, _ = drafts(rng, 12_000, 2.0)
        admitted = np.full(len(accepted), K)
        fitted = fit_temperatures(confidence, accepted, admitted)
        held_out, outcome, _ = drafts(rng, 12_000, 2.0)
        none = np.zeros(len(held_out), dtype=bool)
        calibrated = Calibration(fitted, fitted).apply(held_out.T, none).T
        raw = quality_by_position(np.cumprod(held_out, axis=1), outcome, admitted)
        good = quality_by_position(np.cumprod(calibrated, axis=1), outcome, admitted)
        for before, after in zip(raw, good, strict=True):
            assert after.ece <= 0.03
            assert after.brier < after.brier_of_base_rate
            assert after.brier <= before.brier
        assert max(row.ece for row in raw) > 0.05  # there was something to fix

    def test_outcomes_behind_the_window_do_not_count(self):
        """Neither as rejections, nor only where they are known to be rejected."""
        rng = np.random.default_rng(5)
        confidence, accepted, _ = drafts(rng, 12_000)
        admitted = rng.integers(1, K + 1, len(accepted))
        seen = np.minimum(accepted, admitted)
        fitted = fit_temperatures(confidence, seen, admitted)
        wrong = fit_temperatures(confidence, seen, np.full(len(accepted), K))
        np.testing.assert_allclose(fitted[:3], 1.0, rtol=0.25)
        assert wrong[2] > 1.5 * fitted[2]

    def test_no_data_means_no_change(self):
        empty = np.zeros(0, dtype=int)
        assert fit_temperatures(np.zeros((0, K)), empty, empty) == (1.0,) * K


class TestQuality:
    def test_ece_of_known_bins(self):
        predicted = np.repeat([0.2, 0.8], 10)
        outcome = np.array([True] * 4 + [False] * 6 + [True] * 8 + [False] * 2)
        assert equal_mass_ece(predicted, outcome, 2) == pytest.approx(0.1)
        assert equal_mass_ece(predicted[:0], outcome[:0]) == 0.0

    def test_auc_counts_ties_half(self):
        assert auc(np.array([0.1, 0.9]), np.array([False, True])) == 1.0
        assert auc(np.array([0.9, 0.1]), np.array([False, True])) == 0.0
        assert auc(np.array([0.5, 0.5, 0.5]), np.array([False, True, True])) == 0.5
        assert auc(np.array([0.5]), np.array([True])) == 0.5

    def test_only_positions_inside_the_window_are_judged(self):
        """A perfect forecaster stays perfect when windows depend on its own forecasts."""
        rng = np.random.default_rng(12)
        _, accepted, truth = drafts(rng, 20_000)
        alive = np.cumprod(truth, axis=1)
        admitted = (alive > 0.4).sum(axis=1)
        seen = np.minimum(accepted, admitted)
        live = LiveQuality(K)
        live.observe(alive.T.astype(np.float32), seen, admitted)
        rows = quality_by_position(alive, seen, admitted)
        assert [row.count for row in rows] == [(admitted > k).sum() for k in range(K)]
        assert max(row.ece for row in rows) < 0.03
        assert live.ece().max() < 0.03

    def test_brier(self):
        assert brier(np.array([1.0, 0.5]), np.array([True, True])) == pytest.approx(0.125)

    def test_live_ece_follows_the_offline_one(self):
        rng = np.random.default_rng(6)
        confidence, accepted, _ = drafts(rng, 8_000, 2.0)
        admitted = np.full(len(accepted), K)
        alive = np.cumprod(confidence, axis=1)
        live = LiveQuality(K)
        for chunk in np.array_split(np.arange(len(accepted)), 80):
            live.observe(alive[chunk].T, accepted[chunk], admitted[chunk])
        offline = [row.ece for row in quality_by_position(alive, accepted, admitted)]
        np.testing.assert_allclose(live.ece(), offline, atol=0.02)


def serve(online, rng, steps, rows=32, *, bias=0.0, tenants=None, window=K, untouched=True):
    """Feed served outcomes; returns nothing, the calibration has learned."""
    for step in range(steps):
        confidence, accepted, _ = drafts(rng, rows, bias=bias)
        admitted = np.full(rows, window)
        online.observe(
            confidence.T,
            admitted,
            np.minimum(accepted, window),
            np.ones(rows, dtype=bool),
            np.full(rows, untouched),
            np.arange(rows) + 1000 * step if tenants is None else tenants,
        )


class TestOnline:
    def test_learns_a_bias_of_the_head_in_one_class_only(self):
        online = OnlineCalibration(Calibration.identity(K))
        serve(online, np.random.default_rng(7), 400, bias=0.6)
        learned = np.array(online.calibration.sampled_offset)
        np.testing.assert_allclose(learned, 0.6, atol=0.2)
        assert online.calibration.greedy_offset == (0.0,) * K
        assert online.version > 0

    def test_never_leaves_its_bounds(self):
        online = OnlineCalibration(Calibration.identity(K))
        serve(online, np.random.default_rng(8), 400, bias=5.0)
        assert max(np.abs(online.calibration.sampled_offset)) <= BOUND
        assert online.calibration.sampled_offset[0] == pytest.approx(BOUND)

    def test_censored_drafts_teach_nothing(self):
        """Windows of 2: positions 3.. are never reached and must stay as they are."""
        online = OnlineCalibration(Calibration.identity(K))
        serve(online, np.random.default_rng(9), 300, window=2)
        assert online.calibration.sampled_offset[2:] == (0.0,) * (K - 2)
        np.testing.assert_allclose(online.calibration.sampled_offset[:2], 0.0, atol=0.2)

    def test_altered_distributions_teach_nothing(self):
        online = OnlineCalibration(Calibration.identity(K))
        serve(online, np.random.default_rng(10), 50, bias=3.0, untouched=False)
        assert online.version == 0

    def test_a_hostile_tenant_cannot_poison_the_others(self):
        """One tenant sends 90 % of the rows, all rejected although the head is sure."""

        def poisoned(tenant_of_hostile):
            rng = np.random.default_rng(11)
            online = OnlineCalibration(Calibration.identity(K))
            for step in range(600):
                confidence, accepted, _ = drafts(rng, 40)
                accepted[4:] = 0
                tenants = np.arange(40) % 4 + 10 * (step % 5)
                tenants[4:] = tenant_of_hostile(step)
                online.observe(
                    confidence.T,
                    np.full(40, K),
                    accepted,
                    np.ones(40, dtype=bool),
                    np.ones(40, dtype=bool),
                    tenants,
                )
            honest, outcome, _ = drafts(rng, 8_000)
            everyone = np.ones(len(honest), dtype=bool)
            alive = np.cumprod(online.calibration.apply(honest.T, everyone).T, axis=1)
            return quality_by_position(alive, outcome, np.full(len(honest), K))[0].ece

        capped = poisoned(lambda step: 999)
        # KNOWN BAD: no cap, which is what one identity per row amounts to.
        uncapped = poisoned(lambda step: 1000 + 40 * step + np.arange(36))
        assert capped < 0.06
        assert uncapped > 2.0 * capped


def test_influence_is_capped_by_the_lower_median():
    cap = InfluenceCap()
    tenants = np.array([0] * 91 + list(range(1, 10)))
    for _ in range(200):
        weights = cap.weights(tenants, np.ones(100, dtype=bool))
    assert weights[:91].sum() == pytest.approx(1.0)
    np.testing.assert_allclose(weights[91:], 1.0)
    alone, none = InfluenceCap(), np.zeros(3, dtype=bool)
    for _ in range(50):
        weights = alone.weights(np.full(3, 7), ~none)
    assert weights[0] == 1.0
    assert not alone.weights(np.full(3, 7), none).any()
