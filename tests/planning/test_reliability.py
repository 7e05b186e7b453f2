"""Fitting from pairs: what STS can and cannot mend, and when there is too little to go by."""

import numpy as np
import pytest

from vllm_dspark.planning.quality import equal_mass_ece
from vllm_dspark.planning.reliability import (
    Pairs,
    combine,
    ece_floor,
    fit_class,
    held_out_prompts,
    reliability,
    shortage,
)

K = 4
PROMPTS = 200


def sigmoid(z):
    return 1.0 / (1.0 + np.exp(-z))


def make_pairs(rows=12_000, temperature=1.0, offset=0.0, seed=0):
    """Rows whose true conditional acceptance is sigmoid(z / temperature + offset)."""
    rng = np.random.default_rng(seed)
    z = rng.normal(1.0, 1.5, (rows, K))
    hit = rng.random((rows, K)) < sigmoid(z / temperature + offset)
    accepted = np.cumprod(hit, axis=1).sum(axis=1)
    prompt = np.arange(rows) % PROMPTS
    return Pairs(sigmoid(z), np.full(rows, K), accepted, prompt)


@pytest.fixture(scope="module")
def held_out():
    return held_out_prompts(PROMPTS, 0.5, 0)


def test_split_is_by_prompt_and_reproducible():
    """Catches rows of one prompt on both sides, which makes any fit look good."""
    first, again = held_out_prompts(100, 0.3, 5), held_out_prompts(100, 0.3, 5)
    assert first.sum() == 30
    assert (first == again).all()
    assert (held_out_prompts(100, 0.3, 6) != first).any()
    assert held_out_prompts(2, 0.01, 0).sum() == 1
    assert held_out_prompts(2, 0.99, 0).sum() == 1


def test_temperature_is_enough_where_the_head_is_only_too_sure(held_out):
    """Catches offsets taken up where STS does the job: they would overrule the paper's method."""
    fit = fit_class(make_pairs(temperature=2.0), held_out)
    assert fit.method == "sts"
    assert fit.offsets == (0.0,) * K
    assert fit.temperatures == pytest.approx((2.0,) * K, rel=0.35)
    assert max(p.after.ece for p in fit.positions) < 0.03
    assert min(p.before.ece for p in fit.positions[:2]) > 0.04


def test_bias_needs_an_offset(held_out):
    """Catches a fit that leaves a biased head biased: no temperature moves 0.5 elsewhere."""
    pairs = make_pairs(offset=-1.3)
    sts = fit_class(pairs, held_out, "sts")
    fit = fit_class(pairs, held_out)
    assert sts.positions[0].after.ece > 0.1
    assert fit.method == "affine"
    assert fit.temperatures[:2] == pytest.approx((1.0,) * 2, abs=0.15)
    assert fit.offsets[:2] == pytest.approx((-1.3,) * 2, abs=0.15)
    assert max(p.after.ece for p in fit.positions) < 0.03
    assert fit.ece_sts == tuple(p.after.ece for p in sts.positions)
    for position in fit.positions:
        assert position.after.brier < position.after.brier_of_base_rate


def test_censored_rows_do_not_teach(held_out):
    """Catches drafts outside a window counted as rejected."""
    pairs = make_pairs(offset=-1.0)
    verified = np.where(np.arange(len(pairs)) % 2 == 0, 1, K)
    cut = Pairs(pairs.confidence, verified, np.minimum(pairs.accepted, verified), pairs.prompt)
    fit = fit_class(cut, held_out, "affine")
    assert fit.offsets[:3] == pytest.approx((-1.0,) * 3, abs=0.25)


def test_a_class_that_was_not_measured_is_left_alone(held_out):
    """Catches parameters of one class used for the other."""
    fit = fit_class(make_pairs(offset=-1.3), held_out)
    calibration = combine(None, fit, K)
    assert calibration.greedy == (1.0,) * K
    assert calibration.greedy_offset == (0.0,) * K
    assert calibration.sampled == fit.temperatures
    assert calibration.sampled_offset == fit.offsets


def test_floor_is_what_a_perfect_forecast_shows():
    """Catches a floor that is off: it says which ECE is still news."""
    rng = np.random.default_rng(3)
    measured, floors = [], []
    for _ in range(200):
        predicted = rng.random(600)
        outcome = rng.random(600) < predicted
        measured.append(equal_mass_ece(predicted, outcome))
        floors.append(ece_floor(reliability(predicted, outcome)))
    assert np.mean(measured) == pytest.approx(np.mean(floors), rel=0.1)


def test_bins_hold_all_rows_in_order():
    """Catches rows lost at an edge of a bin."""
    predicted = np.linspace(0.0, 1.0, 101)
    bins = reliability(predicted, predicted > 0.5)
    assert sum(item.count for item in bins) == 101
    assert [item.predicted for item in bins] == sorted(item.predicted for item in bins)
    assert bins[0].observed == 0.0
    assert bins[-1].observed == 1.0


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        (make_pairs(rows=400), "position 1 has 200 rows to fit it with"),
        (make_pairs(offset=-30.0), "0 accepted drafts among"),
        (make_pairs(offset=30.0), "0 rejected drafts among"),
        (make_pairs(), ""),
    ],
)
def test_too_little_data_is_named(pairs, why, held_out):
    """Catches a temperature fitted to a handful of outcomes."""
    found = shortage(pairs, held_out, min_outcomes=20)
    assert why in found
    assert bool(found) == bool(why)
