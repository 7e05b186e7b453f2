"""Quantised drafters and targets in a running engine: loaded, equal at T=0, drafts accepted."""

import shutil
from collections.abc import Callable

import pytest

from tests.integration.scenarios import generate, make_prompts, params
from tests.integration.test_equality import expect_equal
from tests.support import quantise
from tests.support.engines import dspark, engine, scheduler_of
from tests.support.pairs import Pair, PairSpec

pytestmark = pytest.mark.engine

# Sizes that the CPU build's packed kernels take.
SPEC = PairSpec(kind="markov", symbols=94, seed=3, hidden=128, markov_rank=128, heads=4, kv_heads=4)
SETTINGS = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def quantised(build: Callable, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """An int8 target."""
    pair, folder = build(SPEC), tmp_path_factory.mktemp("quantised")
    copied = Pair(folder / "target", folder / "drafter", SPEC)
    shutil.copytree(pair.target, copied.target)
    shutil.copytree(pair.drafter, copied.drafter)
    quantise.int8(copied.target)
    return copied


@pytest.fixture(scope="module")
def wanted(quantised: Pair) -> list:
    with engine(quantised.target, v2=True, **SETTINGS) as llm:
        return generate(llm, make_prompts(94), params(32))


def test_beside_an_int8_target(build: Callable, quantised: Pair, wanted: list) -> None:
    """Catches the target's quantisation applied to the drafter."""
    speculative = dspark(build(SPEC).drafter, {"test_windows": "full"}, num_speculative_tokens=7)
    with engine(quantised.target, speculative, **SETTINGS) as llm:
        found = generate(llm, make_prompts(94), params(32))
        totals = scheduler_of(llm).dspark_totals
    expect_equal(found, wanted)
    assert (totals.accepted[:3] > 0).all(), totals
