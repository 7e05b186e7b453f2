"""T=0 equality where room runs out: preemption, small batches, the end of the context."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.scenarios import Answer, answers, drive, generate, make_prompts, params
from tests.integration.test_equality import MARKOV, SYMBOLS, expect_equal
from tests.support.engines import dspark, engine, scheduler_of

pytestmark = pytest.mark.engine

WINDOWS: dict[str, dict[str, Any]] = {
    "full": {"test_windows": "full"},
    "random": {"test_windows": "random", "test_windows_seed": 31},
}


# room for about half of what the six requests hold in the end
PRESSED = {"num_gpu_blocks_override": 20, "block_size": 32, "max_model_len": 256}


def _preemptions(llm: Any) -> int:
    return sum(m.value for m in llm.get_metrics() if m.name == "vllm:num_preemptions")


@pytest.fixture(scope="module")
def unpressed(build: Callable) -> list[Answer]:
    """Six requests of up to 200 tokens with room for all, without speculation."""
    with engine(build(MARKOV).target) as llm:
        return generate(llm, make_prompts(SYMBOLS)[:6], params(200))


@pytest.mark.parametrize("caching", [True, False], ids=["prefix-cache", "no-prefix-cache"])
@pytest.mark.parametrize("windows", WINDOWS)
def test_preemption(build: Callable, unpressed: list, windows: str, caching: bool) -> None:
    """Catches rows, drafts or context KV that survive a preemption, or are missing after it."""
    pair = build(MARKOV)
    speculative = dspark(pair.drafter, WINDOWS[windows], num_speculative_tokens=7)
    pressed: dict[str, Any] = dict(PRESSED)
    pressed["enable_prefix_caching"] = caching
    with engine(pair.target, speculative, **pressed) as llm:
        found = generate(llm, make_prompts(SYMBOLS)[:6], params(200))
        assert _preemptions(llm) > 0
        totals = scheduler_of(llm).dspark_totals
    expect_equal(found, unpressed)
    assert (totals.accepted > 0)[:3].all(), totals


@pytest.mark.parametrize("windows", WINDOWS)
def test_abort_while_another_is_preempted(build: Callable, unpressed: list, windows: str) -> None:
    """Catches freed blocks or rows given to the wrong request when an abort makes room."""
    pair = build(MARKOV)
    prompts = make_prompts(SYMBOLS)[:6]
    speculative = dspark(pair.drafter, WINDOWS[windows], num_speculative_tokens=7)
    with engine(pair.target, speculative, **PRESSED) as llm:
        arrivals = {f"p-{i}": (0, prompt, params(200)) for i, prompt in enumerate(prompts)}
        finished = drive(llm, arrivals, {"p-1": 40, "p-4": 50})
        assert _preemptions(llm) > 0
    left = [0, 2, 3, 5]
    found = [a for i in left for a in answers(finished[f"p-{i}"])]
    expect_equal(found, [unpressed[i] for i in left])


@pytest.mark.parametrize("width", [7, 3])
@pytest.mark.parametrize("windows", WINDOWS)
def test_context_ends_inside_a_block(build: Callable, windows: str, width: int) -> None:
    """Catches drafts, positions or KV slots beyond max_model_len, for every place in a block."""
    pair = build(MARKOV)
    lengths = [*range(40, 63), 63]
    prompts = [{"prompt_token_ids": [(3 * n + 5 * j) % SYMBOLS for j in range(n)]} for n in lengths]
    with engine(pair.target, max_model_len=64) as llm:
        wanted = generate(llm, prompts, params(64))
    assert {len(a.tokens) for a in wanted} == {64 - n for n in lengths}
    speculative = dspark(pair.drafter, WINDOWS[windows], num_speculative_tokens=width)
    with engine(pair.target, speculative, max_model_len=64) as llm:
        expect_equal(generate(llm, prompts, params(64)), wanted)
        totals = scheduler_of(llm).dspark_totals
    assert totals.accepted[0] > 0, totals
