"""The emitted tokens follow the target's law exactly: draft -> reject, over several steps.

Every test is a chi-square of R = 40,000 requests' first three tokens (125 sequences, whose law is
computed exactly) with a false-alarm rate of 1e-6. Each known bias below is injected into the real
operations and must be detected by the same statistic; its detection power is computed from its
exact first-token law where that can be written down.
"""

import dataclasses

import pytest
import torch

from tests.support import chance, toy
from vllm_dspark.cpu.draft_ops import CpuDraftOps
from vllm_dspark.cpu.reject_ops import CpuRejectOps
from vllm_dspark.kernels import noise
from vllm_dspark.kernels.protocols import RejectRule
from vllm_dspark.kernels.reference import ReferenceDraftOps, ReferenceRejectOps
from vllm_dspark.sampling import rejection
from vllm_dspark.sampling.rejection import TorchRejectOps

torch.set_num_threads(1)

REQUESTS = 40_000
NUMBA = (CpuDraftOps(), CpuRejectOps())
TORCH = (ReferenceDraftOps(), TorchRejectOps())
WINDOWS = {"full": toy.full_windows, "random": toy.random_windows}


def lossless(model, ops, method="standard", windows=toy.full_windows, requests=REQUESTS) -> bool:
    emitted, _ = toy.generate(model, ops, RejectRule(toy.WIDTH, method), windows, requests)
    return not chance.departs(toy.sequence_counts(emitted), toy.sequence_law(model))


@pytest.mark.parametrize("ops", [NUMBA, TORCH], ids=["numba", "torch"])
@pytest.mark.parametrize("cached", [True, False], ids=["probabilistic", "greedy"])
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS.keys())
def test_emitted_tokens_follow_the_target(ops, cached, method, windows):
    assert lossless(toy.make_toy(cached), ops, method, windows)


@pytest.mark.parametrize("cached", [True, False], ids=["probabilistic", "greedy"])
@pytest.mark.parametrize("method", ["standard", "block"])
def test_reference_follows_the_target(cached, method):
    """The specification itself, on few requests: it goes one by one, and tests/cpu shows that the
    fast operations emit its very tokens."""
    ops = (ReferenceDraftOps(), ReferenceRejectOps())
    assert lossless(toy.make_toy(cached), ops, method, toy.random_windows, 400)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
def test_other_temperatures(temperature):
    assert lossless(toy.make_toy(True, temperature), NUMBA, windows=toy.random_windows)


def test_drafts_follow_the_drafter():
    """The drafted block itself is distributed as the cached logits say, column after column."""
    model = toy.make_toy(True)
    state = rejection.SamplingState(
        torch.full((REQUESTS,), model.temperature), torch.arange(REQUESTS)
    )
    start = torch.full((REQUESTS,), toy.START)
    for ops in (CpuDraftOps(), ReferenceDraftOps()):
        drafted = toy.draft(model, ops, state, start, torch.full((REQUESTS,), 10))
        drafter = dataclasses.replace(model, target=model.draft_law().log() * model.temperature)
        counts = toy.sequence_counts(drafted.tokens)
        assert not chance.departs(counts, toy.sequence_law(drafter))


def test_acceptance_is_what_theory_says():
    """P(accept the first draft) = sum min(p, q); block verification accepts at least as many."""
    model = toy.make_toy(True)
    p, q = model.target_law()[toy.START], model.draft_law()[toy.START]
    expected = torch.minimum(p, q).sum()
    lengths = {}
    for method in ("standard", "block"):
        _, accepted = toy.generate(
            model, NUMBA, RejectRule(toy.WIDTH, method), toy.full_windows, REQUESTS, length=1
        )
        lengths[method] = accepted.double().mean()
        if method == "standard":
            hits = (accepted > 0).sum()
            counts = torch.stack([hits, REQUESTS - hits])
            assert not chance.departs(counts, torch.stack([expected, 1 - expected]))
    # standard error of a mean of lengths 0..3 over 40,000 requests is below 0.008
    assert lengths["block"] > lengths["standard"] - 0.03


# --- known biases: each patches the vectorised operations and must be detected -------------------


def resample_from_target(monkeypatch):
    """After a rejection, draw from p instead of max(p - q, 0)."""
    draw = rejection._draw

    def biased(batch, rows, final, logits, p, q, ratio, judgeable):
        return draw(batch, rows, final, logits, p, q, ratio, torch.zeros_like(judgeable))

    monkeypatch.setattr(rejection, "_draw", biased)


def accept_without_q(monkeypatch):
    """Accept with probability p(x), as for greedy drafts, though the draft was drawn from q."""
    test = rejection._standard_test

    def biased(batch, rows, rule, p, q, argmax, judgeable):
        return test(batch, rows, rule, p, torch.ones_like(q), argmax, judgeable)

    monkeypatch.setattr(rejection, "_standard_test", biased)


def forget_draft_temperature(monkeypatch):
    """Divide the target's logits by the temperature but not the cached draft logits."""
    probabilities = rejection._draft_probabilities

    def biased(batch, rows):
        heat = torch.where(rows.temperature > 0, 1.0, 0.0)
        return probabilities(batch, dataclasses.replace(rows, temperature=heat))

    monkeypatch.setattr(rejection, "_draft_probabilities", biased)


def resample_with_draft_noise(monkeypatch):
    """The residual draw reuses the Gumbel vector that drew the rejected draft."""
    gumbel_rows = noise.gumbel_rows

    def biased(seed, position, column, domain, tokens):
        if domain == noise.RESAMPLE:
            return gumbel_rows(seed, position + 1, column, noise.DRAFT, tokens)
        return gumbel_rows(seed, position, column, domain, tokens)

    monkeypatch.setattr(noise, "gumbel_rows", biased)


def accept_with_residual_noise(monkeypatch):
    """The acceptance draw is token 0's resampling noise: the two streams are not disjoint."""

    def biased(seed, position, column):
        lo, hi = noise.key_words(seed, position, column, noise.RESAMPLE)
        return noise.uniform(noise.token_bits(lo, hi, torch.zeros_like(lo)))

    monkeypatch.setattr(noise, "accept_uniform", biased)


def block_residual_without_ratio(monkeypatch):
    """Block verification that draws from max(p - q, 0), not max(ratio * p - q, 0)."""
    test = rejection._block_test

    def biased(*args):
        accepted, ratio = test(*args)
        return accepted, torch.ones_like(ratio)

    monkeypatch.setattr(rejection, "_block_test", biased)


def block_mass_miscounted(monkeypatch):
    """Block verification whose ratios and masses take q for half of what it is."""
    test = rejection._block_test

    def biased(batch, rows, rule, p, q, judgeable, bounds):
        return test(batch, rows, rule, p, q * 0.5, judgeable, bounds)

    monkeypatch.setattr(rejection, "_block_test", biased)


BIASES = [
    (resample_from_target, "standard", True),
    (resample_from_target, "standard", False),
    (resample_from_target, "block", True),
    (resample_from_target, "block", False),
    (accept_without_q, "standard", True),
    (forget_draft_temperature, "standard", True),
    (forget_draft_temperature, "block", True),
    (resample_with_draft_noise, "standard", True),
    (accept_with_residual_noise, "standard", True),
    (block_residual_without_ratio, "block", True),
    (block_mass_miscounted, "block", True),
]


@pytest.mark.parametrize(
    ("bias", "method", "cached"), BIASES,
    ids=[f"{b.__name__}-{m}-{'prob' if c else 'greedy'}" for b, m, c in BIASES],
)  # fmt: skip
def test_known_bias_is_detected(monkeypatch, bias, method, cached):
    bias(monkeypatch)
    assert not lossless(toy.make_toy(cached), TORCH, method)


@pytest.mark.parametrize("cached", [True, False], ids=["probabilistic", "greedy"])
def test_power_against_resampling_from_p(cached):
    """Exact first-token law of the commonest mistake: it is seen with near certainty."""
    model = toy.make_toy(cached)
    p, q = model.target_law()[toy.START], model.draft_law()[toy.START]
    kept = torch.minimum(p, q)
    biased = kept + (1 - kept.sum()) * p
    strength = chance.noncentrality(biased, p, REQUESTS)
    assert chance.power(toy.VOCAB - 1, strength) > 1 - 1e-6
    # the test looks at 125 sequences, whose dof dilute but cannot lose that much
    assert chance.power(toy.VOCAB**3 - 1, strength) > 1 - 1e-6
