"""Contexts hardly longer than a block, or shorter: T=0 as without speculation, and nothing stuck.

With max_model_len = 2 no draft ever fits; with 8 = K + 1 a full window fits nowhere either, and
every step is cut. (1, 2, 3, 7, 8 and 10 were compared by hand, with K = 7.)
"""

from typing import Any

import pytest

from tests.support.engines import dspark, engine, scheduler_of
from tests.support.pairs import Pair, PairSpec, build_pair

pytestmark = pytest.mark.engine

SYMBOLS = 94
WIDTH = 7
LENGTHS = (2, 8)
ROOM = 32  # of the engine that says what is right
# Three of each length: they join, leave and wait, as two run at a time.
PROMPTS = {n: [[(11 * i + 5 * j + n) % SYMBOLS for j in range(n)] for i in range(3)]
           for n in range(1, max(LENGTHS))}  # fmt: skip


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), PairSpec(kind="markov", symbols=SYMBOLS))


def answers(llm: Any, longest: int) -> dict[tuple[int, ...], list[int]]:
    """Prompt -> tokens, of every prompt that leaves room for one."""
    from vllm import SamplingParams

    prompts = [p for n, some in PROMPTS.items() if n < longest for p in some]
    greedy = SamplingParams(temperature=0.0, max_tokens=ROOM, ignore_eos=True)
    given = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(given, greedy, use_tqdm=False)
    return {tuple(p): list(o.outputs[0].token_ids) for p, o in zip(prompts, outputs, strict=True)}


@pytest.fixture(scope="module")
def expected(pair: Pair) -> dict[tuple[int, ...], list[int]]:
    """What the target says with room, without speculation."""
    with engine(pair.target, max_model_len=ROOM) as llm:
        return answers(llm, max(LENGTHS))


@pytest.mark.parametrize("length", LENGTHS)
def test_contexts_as_short_as_a_block(
    pair: Pair, expected: dict[tuple[int, ...], list[int]], length: int
) -> None:
    """Catches look-ahead past max_model_len: hangs, wrong tokens, one token too many or too few."""
    options = {"test_windows": "random", "test_windows_seed": length}
    speculative = dspark(pair.drafter, options, num_speculative_tokens=WIDTH)
    # vLLM's own token budget follows max_model_len, and then has no room for drafts.
    limits = {"max_model_len": length, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    with engine(pair.target, speculative, **limits) as llm:
        found = answers(llm, length)
        accepted = int(scheduler_of(llm).dspark_totals.accepted.sum())
    assert found == {p: expected[p][: length - len(p)] for p in found}
    assert (accepted > 0) == (length > 2), accepted  # else nothing was speculated
