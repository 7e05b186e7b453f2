"""T=0 equality and accepted drafts on targets of many architectures, a tiny pair of each."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.scenarios import Answer, generate, make_prompts, params
from tests.integration.test_equality import expect_equal
from tests.support.engines import dspark, engine, scheduler_of
from tests.support.pairs import Pair, PairSpec
from tests.support.targets import FAMILIES, build_target_pair

pytestmark = pytest.mark.engine

SPEC = PairSpec(kind="markov", symbols=94, seed=5)
WINDOWS = {"test_windows": "random", "test_windows_seed": 3}


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    return lambda family: build_target_pair(tmp_path_factory.mktemp(family), family, SPEC)


def answers_of(llm: Any) -> list[Answer]:
    """More requests than slots, lengths from 1 to beyond two cache blocks, arriving at once."""
    return generate(llm, make_prompts(SPEC.symbols), params(48))


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "llama"])
def test_target(family: str, pair_of: Callable) -> None:
    """Catches caches of a target that do not survive rejected drafts, and layers read wrongly.

    Random windows reject in every place of a block. (Llama targets are the subject of
    tests/integration/test_equality.py.)
    """
    pair: Pair = pair_of(family)
    with engine(pair.target) as llm:
        wanted = answers_of(llm)
    assert len({a.tokens[-8:] for a in wanted}) > 3, "the target says the same to every prompt"
    speculative = dspark(pair.drafter, WINDOWS, num_speculative_tokens=7)
    with engine(pair.target, speculative) as llm:
        found = answers_of(llm)
        totals = scheduler_of(llm).dspark_totals
    expect_equal(found, wanted)
    assert (totals.accepted[:3] > 0).all() and totals.accepted[0] < totals.verified[0], totals
