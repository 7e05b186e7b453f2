"""T=0: every DSpark engine answers as the same target without speculation (float32).

Baselines come from vLLM's V1 runner, which the plugin does not touch. A last "variant" without
speculation on other batch shapes shows that the target itself is stable there, so that a
difference on a DSpark engine is DSpark's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.integration.scenarios import (
    SCENARIOS,
    Answer,
    Stage,
    generate,
    make_prompts,
    params,
)
from tests.support.costs import write_cost_table
from tests.support.engines import dspark, engine, scheduler_of
from tests.support.pairs import PairSpec

pytestmark = pytest.mark.engine

SYMBOLS = 94  # one printable ASCII character per token: text can be cut where we like
MARKOV = PairSpec(kind="markov", symbols=SYMBOLS)
RANDOM = PairSpec(kind="random", symbols=SYMBOLS)
LOGPROB_TOLERANCE = 1e-4  # float32 sums in another order move log-probabilities by about 1e-6

# Scenarios in which a target that says the same twice would hide a mistake of the drafter.
MIN_ACCEPTED_POSITIONS = 3


@dataclass(frozen=True)
class Variant:
    """A DSpark engine; width None means no speculation.

    prices: of the cost table that the planner decides by.
    """

    spec: PairSpec = MARKOV
    width: int | None = 7
    options: dict[str, Any] = field(default_factory=dict)
    speculative: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)
    prices: dict[str, float] = field(default_factory=dict)


def _random(seed: int) -> dict[str, Any]:
    return {"test_windows": "random", "test_windows_seed": seed}


FULL = {"test_windows": "full"}

VARIANTS = {
    # The planner decides; every row costs a tenth of an empty step. (By a table that was measured
    # at start: test_sampling_law.py. What it trims then depends on the machine.)
    "K7-planned": Variant(
        options={"scheduling": True, "online_cost": False},
        prices={"base_ms": 10.0, "per_token_ms": 1.0},
    ),
    "K7-full": Variant(options=FULL),
    "K7-random": Variant(options=_random(1)),
    "K7-one": Variant(options={"test_windows": 1}),
    "K7-four": Variant(options={"test_windows": 4}),
    "K7-list": Variant(options={"test_windows": [1, 8, 3, 2, 5]}),
    "K7-random-sampled-drafts": Variant(
        options=_random(2), speculative={"draft_sample_method": "probabilistic"}
    ),
    "K7-reference-kernels": Variant(options={"kernels": "reference", **_random(3)}),
    "K7-random-widths": Variant(options={"test_draft_width": "random", **_random(13)}),
    "K7-random-widths-sampled-drafts-on-device": Variant(
        options={"test_draft_width": "random", "windows": "device", **_random(14)},
        speculative={"draft_sample_method": "probabilistic"},
    ),
    "K3-random": Variant(width=3, options=_random(4)),
    "K1-full": Variant(width=1, options=FULL),
    "K1-random": Variant(width=1, options=_random(5)),
    "no-confidence-full": Variant(spec=MARKOV.with_(confidence=False), options=FULL),
    "no-confidence-random": Variant(spec=MARKOV.with_(confidence=False), options=_random(6)),
    "confidence-without-markov-random": Variant(
        spec=MARKOV.with_(confidence_with_markov=False), options=_random(7)
    ),
    "gated-random": Variant(spec=MARKOV.with_(head_type="gated"), options=_random(8)),
    "rnn-random": Variant(spec=MARKOV.with_(head_type="rnn"), options=_random(9)),
    "random-pair-full": Variant(spec=RANDOM, options=FULL),
    "random-pair-random": Variant(spec=RANDOM, options=_random(10)),
    "chunked-prefill-random": Variant(
        options=_random(11), engine={"max_num_batched_tokens": 96, "max_num_seqs": 5}
    ),
    "no-prefix-cache-random": Variant(options=_random(12), engine={"enable_prefix_caching": False}),
    "no-speculation-other-shapes": Variant(
        width=None, engine={"v2": True, "max_num_seqs": 3, "max_num_batched_tokens": 48}
    ),
}


@dataclass(frozen=True)
class Baseline:
    prompts: list[dict[str, list[int]]]
    free: list[Answer]
    answers: dict[str, list[Answer]]

    def stage(self, llm: Any) -> Stage:
        return Stage(llm, self.prompts, [a.tokens for a in self.free], [a.text for a in self.free])


@pytest.fixture(scope="module")
def baseline(build: Callable) -> Callable:
    """`baseline(kind)`: answers of the target without speculation, computed once a target."""
    known: dict[str, Baseline] = {}

    def get(spec: PairSpec) -> Baseline:
        if spec.kind not in known:  # drafters of one kind share their target
            prompts = make_prompts(SYMBOLS)
            with engine(build(spec).target) as llm:
                free = generate(llm, prompts, params(60))
                stage = Baseline(prompts, free, {}).stage(llm)
                answers = {name: run(stage) for name, run in SCENARIOS.items()}
            known[spec.kind] = Baseline(prompts, free, answers)
        return known[spec.kind]

    return get


@dataclass
class Running:
    variant: Variant
    baseline: Baseline
    stage: Stage


@pytest.fixture(scope="module", params=list(VARIANTS))
def running(
    request: pytest.FixtureRequest,
    build: Callable,
    baseline: Callable,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator:
    """A live engine of each variant in turn, beside the answers expected of it."""
    variant = VARIANTS[request.param]
    expected = baseline(variant.spec)  # before the engine: one is alive at a time
    pair = build(variant.spec)
    speculative, options = None, dict(variant.options)
    if variant.prices:
        path = tmp_path_factory.mktemp("prices") / "table.json"
        options["cost_table"] = str(write_cost_table(path, **variant.prices))
    if variant.width is not None:
        speculative = dspark(
            pair.drafter,
            options,
            num_speculative_tokens=variant.width,
            **variant.speculative,
        )
    with engine(pair.target, speculative, **variant.engine) as llm:
        yield Running(variant, expected, expected.stage(llm))


@pytest.mark.parametrize("name", SCENARIOS)
def test_answers_as_without_speculation(running: Running, name: str) -> None:
    """Catches what the scenario's own docstring says, on each kind of engine."""
    expect_equal(SCENARIOS[name](running.stage), running.baseline.answers[name])


def test_drafts_were_accepted(running: Running) -> None:
    """Catches a vacuous pass: equality proves nothing where the drafter is never believed."""
    variant = running.variant
    if variant.width is None:
        assert not hasattr(scheduler_of(running.stage.llm), "dspark_totals")
        return
    generate(running.stage.llm, running.stage.prompts, params(60))
    totals = scheduler_of(running.stage.llm).dspark_totals
    if variant.prices:
        assert totals.trimmed.sum() > 0, totals
    if variant.options.get("test_windows") == 1:
        assert totals.verified.sum() == 0, totals
        return
    assert totals.verified[0] > 0, totals
    if variant.spec.kind != "markov":
        return
    accepted = totals.accepted > 0
    assert accepted[: min(variant.width, MIN_ACCEPTED_POSITIONS)].all(), totals
    assert (totals.accepted < totals.verified)[0], "every draft was accepted: nothing was rejected"
    if "random" in str(variant.options) or "list" in str(variant.options):
        used = totals.windows[: variant.width + 1] > 0
        assert used.all(), f"windows of some sizes never ran: {totals.windows}"


def expect_equal(found: list[Answer], wanted: list[Answer]) -> None:
    """Compare answers one by one; a difference says where it starts and what stood there."""
    assert len(found) == len(wanted)
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        if a.tokens != b.tokens:
            pairs = zip((*a.tokens, None), (*b.tokens, None), strict=False)
            at = next(n for n, (x, y) in enumerate(pairs) if x != y)
            pytest.fail(
                f"answer {i} parts at token {at}: got {a.tokens[at : at + 8]} "
                f"({a.finish_reason}), expected {b.tokens[at : at + 8]} ({b.finish_reason})"
            )
        assert (a.text, a.finish_reason, a.stop_reason) == (
            b.text,
            b.finish_reason,
            b.stop_reason,
        ), f"answer {i}"
        _expect_logprobs(a.logprobs, b.logprobs, f"answer {i}, token")
        _expect_logprobs(a.prompt_logprobs, b.prompt_logprobs, f"answer {i}, prompt token")


def _expect_logprobs(found: tuple, wanted: tuple, where: str) -> None:
    assert len(found) == len(wanted), where
    for k, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.keys() == b.keys(), f"{where} {k}: {a} != {b}"
        for token in a:
            assert a[token] == pytest.approx(b[token], abs=LOGPROB_TOLERANCE), f"{where} {k}"
