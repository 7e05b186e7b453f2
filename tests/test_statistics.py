"""The statistical tests themselves: they stay quiet on the exact law and see a 2 % bias."""

import numpy as np
import pytest

from tests.support import statistics

VOCAB = 12


def _draws(bias: float, size: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens [N], exact laws [N, V], favoured tokens [N]; `bias` of the mass moved to those."""
    generator = np.random.default_rng(seed)
    laws = generator.dirichlet(np.full(VOCAB, 0.7), size)
    # as a drafter would: mostly the likeliest token, sometimes another
    favoured = np.where(generator.random(size) < 0.8, laws.argmax(1), generator.integers(VOCAB))
    actual = laws * (1.0 - bias)
    actual[np.arange(size), favoured] += bias
    tokens = (actual.cumsum(1) < generator.random((size, 1))).sum(1).clip(max=VOCAB - 1)
    return tokens, laws, favoured


@pytest.mark.parametrize("degrees, statistic, tail", [(1, 3.8415, 0.05), (10, 63.94, 6.5e-10)])
def test_chi_square_tail_has_known_values(degrees: int, statistic: float, tail: float) -> None:
    """Catches a wrong tail, which would make every p-value wrong."""
    assert statistics.chi_square_tail(statistic, degrees) == pytest.approx(tail, rel=0.02)


def test_p_values_are_uniform_on_the_exact_law() -> None:
    """Catches tests that raise false alarms, or never any: p-values of 200 exact samples."""
    found: dict[str, list[float]] = {"favoured": [], "cells": [], "pairs": []}
    for seed in range(200):
        tokens, laws, favoured = _draws(0.0, 2000, seed)
        z = statistics.favoured_token_z(tokens, laws, favoured)
        found["favoured"].append(statistics.normal_tail(z))
        u = statistics.transform(tokens, laws, -np.log(laws), np.random.default_rng(seed))
        found["cells"].append(statistics.uniformity(u, 20))
        found["pairs"].append(statistics.pair_uniformity(u[::2], u[1::2], 6))
    for name, values in found.items():
        # the distance of 200 uniform variables from their law exceeds 0.16 once in 14,000 times
        distance = np.abs(np.sort(values) - (np.arange(200) + 0.5) / 200).max()
        assert distance < 0.16, (name, distance)


def test_two_percent_bias_is_seen() -> None:
    """Catches a test without power: 2 % of the mass on the favoured token, 38,400 tokens."""
    for seed in range(5):
        tokens, laws, favoured = _draws(0.02, 38_400, seed)
        assert statistics.normal_tail(statistics.favoured_token_z(tokens, laws, favoured)) < 1e-8


def test_reused_noise_is_seen() -> None:
    """Catches blindness to dependence: every second draw repeats the noise of the one before."""
    generator = np.random.default_rng(0)
    laws = generator.dirichlet(np.full(VOCAB, 0.7), 8000)
    noise = np.repeat(generator.random(4000), 2)
    tokens = (laws.cumsum(1) < noise[:, None]).sum(1).clip(max=VOCAB - 1)
    scores = np.tile(-np.arange(VOCAB, dtype=float), (8000, 1))
    u = statistics.transform(tokens, laws, scores, generator)
    assert statistics.uniformity(u, 20) > 1e-4  # each token alone is right
    assert statistics.pair_uniformity(u[::2], u[1::2], 6) < 1e-20
