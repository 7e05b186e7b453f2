"""The noise: exact bits, and independent uniforms along every part of the key."""

import math

import pytest
import torch

from tests.support import chance
from vllm_dspark.cpu import numeric
from vllm_dspark.kernels import noise

torch.set_num_threads(1)

# seed, position, column, domain, token -> lo, hi, bits; from a plain-integer transcription of the
# module's docstring. Every implementation must reproduce them.
KNOWN = [
    (0, 0, 0, 0, 0, 0x19EA732F, 0x3B9BED14, 0x87574473),
    (1, 0, 0, 0, 0, 0x89D9B335, 0x216830B4, 0x802DD326),
    (0, 1, 0, 0, 0, 0x565FF3BE, 0x33BFAFDB, 0x8C738254),
    (0, 0, 1, 0, 0, 0xC1CB9F29, 0x2D82EDA2, 0xD80E2FBA),
    (0, 0, 0, 1, 0, 0x08EC4517, 0xB25E6914, 0x7F665DD9),
    (0, 0, 0, 2, 0, 0xB376F2EE, 0x50F4200D, 0x47539BE5),
    (0, 0, 0, 0, 1, 0x19EA732F, 0x3B9BED14, 0xE59BBC4A),
    (-1, 2**40 + 3, 6, 2, 151935, 0x76874A1E, 0x8075EC31, 0xE8586DB3),
    (-(2**63), 8191, 15, 1, 49151, 0xE5C31788, 0xEA95B634, 0x7F52247C),
    (1234567890123456789, 77, 3, 0, 31999, 0xFD2ECE10, 0xF4B20E7D, 0xFE118FD4),
]
DRAWS = 1 << 18


def bits(seed=0, position=0, column=0, domain=0, token=0):
    """Bits of keys whose parts are ints or tensors."""
    seed, position, token = (torch.as_tensor(x) for x in (seed, position, token))
    lo, hi = noise.key_words(seed, position, column, domain)
    return noise.token_bits(lo, hi, token)


@pytest.mark.parametrize("case", KNOWN)
def test_known_answers(case):
    seed, position, column, domain, token, lo, hi, expected = case
    words = noise.key_words(torch.tensor(seed), torch.tensor(position), column, domain)
    assert (words[0].item(), words[1].item()) == (lo, hi)
    assert bits(seed, position, column, domain, token).item() == expected
    words = numeric.key_words(seed, position, column, domain)
    assert (int(words[0]), int(words[1])) == (lo, hi)
    assert int(numeric.fewest_bits(*words, token, token + 1)) == expected


# One part of the key runs, the others stand still; strides as they occur in an engine.
RUNS = {
    "token": {"token": torch.arange(DRAWS)},
    "position": {"position": torch.arange(DRAWS)},
    "seed": {"seed": torch.arange(DRAWS)},
    "seed_high": {"seed": torch.arange(DRAWS) << 40},
    "column": {"column": torch.arange(16)[None], "position": torch.arange(DRAWS // 16)[:, None]},
}


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("domain", [noise.DRAFT, noise.ACCEPT, noise.RESAMPLE])
def test_every_byte_is_uniform(run, domain):
    """256 bins a byte: an excess of 3 % in half the bins is seen with certainty (power below)."""
    drawn = bits(domain=domain, **RUNS[run]).flatten()
    flat = torch.full((256,), 1 / 256)
    for shift in (0, 8, 16, 24):
        counts = torch.bincount((drawn >> shift) & 0xFF, minlength=256)
        assert not chance.departs(counts, flat), f"byte at bit {shift}"
    tilted = flat * torch.tensor([1.03, 0.97]).repeat(128)
    assert chance.power(255, chance.noncentrality(tilted, flat, DRAWS)) > 0.99


NEIGHBOURS = {
    "column": ({"column": 3}, {"column": 4}),
    "first_columns": ({"column": 0}, {"column": 1}),
    "domain_accept": ({"domain": 0}, {"domain": 1}),
    "domain_resample": ({"domain": 0}, {"domain": 2}),
    "accept_resample": ({"domain": 1}, {"domain": 2}),
    "seed": ({"seed": 7}, {"seed": 8}),
    "seed_sign": ({"seed": 7}, {"seed": 7 - 2**63}),
    "token": ({"token": 0}, {"token": 1}),
}


@pytest.mark.parametrize("pair", NEIGHBOURS)
def test_neighbouring_keys_are_independent(pair):
    """Over positions, two keys that differ in one part: 16 x 16 cells of joint uniformity."""
    position = torch.arange(DRAWS)
    first, second = (bits(position=position, **part) for part in NEIGHBOURS[pair])
    assert chance.independent(first, second)


def test_a_redrafted_position_is_independent_of_its_first_draft():
    """Trap 2: the next pass draws position + 0 in column c - 1, for every token."""
    tokens = torch.arange(1 << 10)
    positions = torch.arange(1 << 8)[:, None]
    first = bits(position=positions, column=4, token=tokens).flatten()
    again = bits(position=positions, column=3, token=tokens).flatten()
    assert chance.independent(first, again)
    # the acceptance of the earlier pass and the next anchor's row
    assert chance.independent(
        bits(position=torch.arange(DRAWS), column=1, domain=noise.ACCEPT),
        bits(position=torch.arange(DRAWS) + 1, column=0, domain=noise.ACCEPT),
    )


def test_noise_keyed_by_position_alone_is_caught():
    """The known-bad variant: the same key twice, which is what a missing column amounts to."""
    drawn = bits(position=torch.arange(DRAWS))
    assert not chance.independent(drawn, drawn.clone())
    # and a leak of 1 draw in 20 already is
    leaky = bits(position=torch.arange(DRAWS), column=1)
    leaky[::20] = drawn[::20]
    assert not chance.independent(drawn, leaky)


def test_numbers_follow_their_bits():
    ends = torch.tensor([0, 1, 2**16, 2**28 - 1, 2**28, 2**31, 2**32 - 2**8, 2**32 - 1])
    grid = torch.cat([ends, torch.arange(0, 2**32, 2**20 + 7)]).sort().values
    v = noise.uniform(grid)
    assert v.dtype == torch.float32 and v[0] == 2.0**-33 and v[-1] == noise.MAX_UNIFORM
    exact = -torch.log1p(-v.double())
    assert ((noise.exponential(v).double() / exact - 1).abs() < 1e-6).all()
    g = noise.gumbel(grid)
    assert g.isfinite().all() and g.min() >= -2.82 and g.max() <= 22.88
    assert (g.diff() <= 1e-6).all(), "Gumbel noise must fall as the bits grow"


def test_split_conversion_rounds_as_specified():
    """The docstring's two-halves form, for devices without float64, gives the same uniforms."""
    grid = torch.cat([torch.arange(1 << 16), (1 << 32) - 1 - torch.arange(1 << 16),
                      bits(token=torch.arange(1 << 18))])  # fmt: skip
    high = (grid >> 16).float() * 2.0**-16
    low = ((grid & 0xFFFF).float() + 0.5) * 2.0**-32
    assert torch.equal((high + low).clamp_max(noise.MAX_UNIFORM), noise.uniform(grid))


def test_gumbel_argmax_draws_from_the_softmax():
    logits = torch.tensor([0.0, 1.0, -2.0, 2.5, 0.3, -8.0])
    positions = torch.arange(DRAWS)
    g = noise.gumbel_rows(torch.full((DRAWS,), 5), positions, 2, noise.DRAFT, torch.arange(6))
    counts = torch.bincount((logits + g).argmax(dim=-1), minlength=6)
    assert not chance.departs(counts, torch.softmax(logits, 0))


def test_bits_limit_never_excludes_a_reaching_token():
    """The pruning bound of the numba argmax is on the safe side."""
    grid = torch.cat([torch.arange(1 << 12), bits(token=torch.arange(1 << 14))])
    for needed in (-3.0, -2.0, -1.0, 0.0, 1.0, 3.0, 8.0, 15.0, 22.0, 30.0):
        limit = int(numeric.bits_limit.py_func(needed - 1e-4))
        reaching = grid[noise.gumbel(grid).double() >= needed]
        assert (reaching <= limit).all(), (needed, limit)
        assert math.isfinite(limit)
