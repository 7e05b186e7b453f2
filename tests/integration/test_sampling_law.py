"""T>0: what DSpark engines emit has the target's law, exactly known for a tiny vocabulary.

Every check gives a p-value; one below ALPHA = 1e-6 / 75 (Bonferroni over the 75 checks of this
file) fails, so a correct engine fails the file with probability below 1e-6. Seeds are fixed: the
outcome of an unchanged engine is the same each time.

Power against mass moved to the token that the drafter likes best (the shape of an acceptance test
that is too lenient, of noise the budget has seen, of a resample from the wrong remainder): 38,400
tokens see 2 % total variation with probability 0.99 (2 % of mass are 8 standard deviations at
p = 0.4, 5.8 are needed). The chi-square tests of the first drafted tokens see 8 % (6,000 requests,
noncentrality 154 at 15 degrees of freedom, about 70 needed for detection with probability 0.99+).
`test_a_wrong_acceptance_test_is_seen` shows on a live engine that a failure is possible.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.support import statistics
from tests.support.engines import dspark, engine, runner_of, scheduler_of, token_lists
from tests.support.laws import TargetLaw, markov_draft_scores
from tests.support.pairs import Pair, PairSpec

pytestmark = pytest.mark.engine

# 12 symbols and 4 special tokens; sharpness and noise set for acceptance near one half
SPEC = PairSpec(kind="markov", symbols=12, sharpness=3.0, noise=0.6, seed=5)
PROMPT = [1, 7, 3, 3, 9]

LARGE = {
    "max_num_seqs": 96,
    "max_num_batched_tokens": 2048,
    "kv_cache_memory_bytes": 256 << 20,
}
NUM_SHORT = 6000
NUM_LONG, LONG_TOKENS = 96, 400

FULL = {"test_windows": "full"}

SAMPLINGS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 1.0},
    "seeded-cool-top-k": {"temperature": 0.7, "top_k": 6},
    "top-p": {"temperature": 1.0, "top_p": 0.85},
}


@dataclass(frozen=True)
class Variant:
    options: dict[str, Any] | None  # None: no speculation, the control
    drafts: str = "probabilistic"
    samplings: tuple[str, ...] = ("plain", "top-p")


VARIANTS = {
    "no-speculation": Variant(None, samplings=("plain", "seeded-cool-top-k")),
    "greedy-full": Variant(FULL, "greedy", ("plain", "seeded-cool-top-k")),
    "greedy-random": Variant({"test_windows": "random", "test_windows_seed": 21}, "greedy"),
    "probabilistic-full": Variant(FULL),
    "probabilistic-random": Variant(
        {"test_windows": "random", "test_windows_seed": 22}, samplings=tuple(SAMPLINGS)
    ),
    "probabilistic-random-widths": Variant(
        {"test_draft_width": "random", "test_windows": "random", "test_windows_seed": 23}
    ),
    "probabilistic-planned": Variant(
        {"scheduling": True}, samplings=("plain", "seeded-cool-top-k")
    ),
}
NUM_CHECKS = 5 * sum(len(v.samplings) for v in VARIANTS.values())
ALPHA = 1e-6 / NUM_CHECKS


@dataclass(frozen=True)
class Running:
    variant: Variant
    pair: Pair
    llm: Any


@pytest.fixture(scope="module", params=list(VARIANTS))
def running(request: pytest.FixtureRequest, build: Callable) -> Iterator[Running]:
    variant, pair = VARIANTS[request.param], build(SPEC)
    speculative = None
    if variant.options is not None:
        speculative = dspark(
            pair.drafter,
            variant.options,
            num_speculative_tokens=7,
            draft_sample_method=variant.drafts,
        )
    # without speculation V2 too: V1 cannot draw with seeds and top-k on a CPU
    with engine(pair.target, speculative, v2=speculative is None, **LARGE) as llm:
        yield Running(variant, pair, llm)


def _sample(llm: Any, prompts: list[list[int]], max_tokens: int, sampling: str) -> np.ndarray:
    """Tokens [N, max_tokens]."""
    from vllm import SamplingParams

    seeded = sampling.startswith("seeded")
    chosen = [
        SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            seed=1000 + i if seeded else None,
            **SAMPLINGS[sampling],
        )
        for i in range(len(prompts))
    ]
    requests = [{"prompt_token_ids": p} for p in prompts]
    return np.array(token_lists(llm.generate(requests, chosen, use_tqdm=False)))


def test_first_drafted_tokens_have_the_exact_joint_law(running: Running) -> None:
    """Catches a bias of the first block after a prompt: tokens 2 and 3 and their joint law.

    Token 1 comes from the prompt's own step and is summed over exactly.
    """
    for sampling in running.variant.samplings:
        tokens = _sample(running.llm, [PROMPT] * NUM_SHORT, 3, sampling)
        law = TargetLaw(running.pair.target, **SAMPLINGS[sampling]).joint(PROMPT, 3)
        vocab = law.shape[0]
        second = np.bincount(tokens[:, 1], minlength=vocab)
        p_second = statistics.chi_square(second, NUM_SHORT * law.sum(axis=(0, 2)))
        pairs = np.bincount(tokens[:, 1] * vocab + tokens[:, 2], minlength=vocab * vocab)
        p_pairs = statistics.chi_square(pairs, NUM_SHORT * law.sum(axis=0).ravel())
        assert min(p_second, p_pairs) > ALPHA, (sampling, p_second, p_pairs)


def test_long_runs_have_the_exact_conditional_laws(running: Running) -> None:
    """Catches a bias towards drafts, a wrong law in any context, dependence between tokens."""
    for sampling in running.variant.samplings:
        found = _long_run(running.llm, running.pair, sampling)
        assert min(found) > ALPHA, (sampling, found)


def test_both_outcomes_of_verification_occurred(running: Running) -> None:
    """Catches a vacuous pass: drafts must have been accepted and refused at many positions."""
    if running.variant.options is None:
        return
    _sample(running.llm, [PROMPT] * 96, 300, "plain")
    totals = scheduler_of(running.llm).dspark_totals
    assert (totals.accepted[:4] > 100).all(), totals
    refused = totals.verified[:4] - totals.accepted[:4]
    assert (refused > 100).all(), totals


def _long_run(llm: Any, pair: Pair, sampling: str) -> tuple[float, float, float]:
    """p-values of favoured tokens, of single draws and of pairs of successive draws."""
    generator = np.random.default_rng(7)
    prompts = generator.integers(0, SPEC.symbols, (NUM_LONG, 8))
    tokens = _sample(llm, prompts.tolist(), LONG_TOKENS, sampling)
    texts = np.concatenate([prompts, tokens], axis=1)
    law = TargetLaw(pair.target, **SAMPLINGS[sampling])
    start = prompts.shape[1] - 1
    laws = law.after_each(texts)[:, start:-1].reshape(tokens.size, -1)
    drawn = tokens.reshape(-1)
    draft_scores = markov_draft_scores(pair.drafter, texts[:, start:-1].reshape(-1))
    impossible = laws[np.arange(len(drawn)), drawn] == 0
    assert not impossible.any(), f"{impossible.sum()} tokens the target cannot emit"
    favoured = draft_scores.argmax(axis=1)
    z = statistics.favoured_token_z(drawn, laws, favoured)
    # what the drafter overrates first: moved mass gathers in the first cells
    overrated = draft_scores - np.log(np.maximum(laws, 1e-300))
    u = statistics.transform(drawn, laws, overrated, generator).reshape(tokens.shape)
    return (
        statistics.normal_tail(z),
        statistics.uniformity(u.reshape(-1), 20),
        statistics.pair_uniformity(u[:, 0::2].reshape(-1), u[:, 1::2].reshape(-1), 6),
    )


class _Lenient:
    """Rejection that believes drafts were drawn from a flatter law than they were."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def reject(self, batch: Any, state: Any, rule: Any) -> Any:
        from dataclasses import replace

        flatter = batch.draft_logits * 0.9
        return self._inner.reject(replace(batch, draft_logits=flatter), state, rule)


def test_a_wrong_acceptance_test_is_seen(build: Callable) -> None:
    """Catches a test that cannot fail: draft logits 10 % too flat in the acceptance test alone."""
    pair = build(SPEC)
    speculative = dspark(
        pair.drafter,
        {"test_windows": "full"},
        num_speculative_tokens=7,
        draft_sample_method="probabilistic",
    )
    with engine(pair.target, speculative, **LARGE) as llm:
        sampler = runner_of(llm).rejection_sampler
        sampler.ops = _Lenient(sampler.ops)
        assert min(_long_run(llm, pair, "plain")) < ALPHA


@pytest.mark.parametrize("windows", ["full", 3])
@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_seeded_requests_do_not_depend_on_their_batch(
    build: Callable, drafts: str, windows: str | int
) -> None:
    """Catches noise keyed by row, step or neighbour: alone, in company, and in another order.

    Windows are equal for all here; where they differ with the load, a seeded request's law stays
    but its tokens may not, as in any scheduled speculation.
    """
    from vllm import SamplingParams

    pair = build(SPEC)
    speculative = dspark(
        pair.drafter,
        {"test_windows": windows},
        num_speculative_tokens=7,
        draft_sample_method=drafts,
    )
    prompts = [{"prompt_token_ids": [i, 2, 5, 7 - i]} for i in range(8)]
    chosen = [
        SamplingParams(temperature=1.0, seed=i, max_tokens=40, ignore_eos=True) for i in range(8)
    ]
    with engine(pair.target, speculative) as llm:
        company = token_lists(llm.generate(prompts, chosen, use_tqdm=False))
        turned = token_lists(llm.generate(prompts[::-1], chosen[::-1], use_tqdm=False))[::-1]
        alone = [
            token_lists(llm.generate([prompts[i]], [chosen[i]], use_tqdm=False))[0]
            for i in range(0, 8, 3)
        ]
        other = SamplingParams(temperature=1.0, seed=99, max_tokens=40, ignore_eos=True)
        reseeded = token_lists(llm.generate([prompts[0]], [other], use_tqdm=False))[0]
    assert turned == company
    assert alone == company[::3]
    assert reseeded != company[0]
