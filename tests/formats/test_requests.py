"""T=0 equality where a step's tokens must be judged one by one, and where room is scarce.

One engine without speculation and one with serve all scenarios of this file: thinking that ends
inside an accepted block, grammars that start there, thinking budgets, custom logits processors,
shared prefixes, and a token budget hardly larger than a window.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.scenarios import Answer, generate, params
from tests.integration.test_equality import expect_equal
from tests.support.engines import dspark, engine, scheduler_of
from tests.support.pairs import Pair, PairSpec, build_pair

pytestmark = pytest.mark.engine

SPEC = PairSpec(kind="markov", symbols=94, seed=9)
START, END = "<think>", "</think>"
PROMPTS = [[(5 * i + 3 * j) % 94 for j in range(n)] for i, n in enumerate((1, 4, 9, 20, 33))]


@dataclass
class Thinker:
    pair: Pair
    start: int
    end: int


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Thinker:
    """A pair whose target, left alone, ends its thinking inside most answers.

    Which token that is, is found by running the target; two ordinary tokens are renamed.
    """
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("thinker")
    pair = build_pair(folder, SPEC)
    model = AutoModelForCausalLM.from_pretrained(pair.target, dtype=torch.float32).eval()
    seen: dict[int, int] = {}
    for prompt in PROMPTS:
        with torch.no_grad():
            free = model.generate(
                torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None,
                pad_token_id=SPEC.special_ids["<pad>"],
            )[0, len(prompt) :].tolist()  # fmt: skip
        for token in set(free[4:25]) - set(free[:4]):
            seen[token] = seen.get(token, 0) + 1
    end = max((t for t in seen if t < SPEC.symbols), key=lambda t: seen[t])
    used = set(range(94)) - set(seen)
    start = min(used - {end}) if used - {end} else (end + 1) % 94
    _rename(pair.target, {start: START, end: END})
    return Thinker(pair, start, end)


def _rename(folder: Path, names: dict[int, str]) -> None:
    """Give ordinary tokens the names of thinking marks, as special tokens."""
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocab = tokenizer["model"]["vocab"]
    for old, token in list(vocab.items()):
        if token in names:
            del vocab[old]
            vocab[names[token]] = token
            tokenizer["added_tokens"].append(
                {
                    "id": token, "content": names[token], "single_word": False, "lstrip": False,
                    "rstrip": False, "normalized": False, "special": True,
                }
            )  # fmt: skip
    tokenizer["added_tokens"].sort(key=lambda entry: entry["id"])
    path.write_text(json.dumps(tokenizer))


LISTED = [93, 0, 41, 17, 3]
ENGINE: dict[str, Any] = {
    "reasoning_parser": "deepseek_r1",
    "max_num_batched_tokens": 48,
    "max_num_seqs": 3,
    "block_size": 32,
    "logits_processors": ["tests.support.processors:EvenForbidden"],
}


@pytest.fixture(scope="module", params=["plain", "dspark"])
def engines(request: pytest.FixtureRequest, thinker: Thinker) -> Iterator:
    """Name and engine, the one without speculation first."""
    speculative = None
    if request.param == "dspark":
        options = {"test_windows": "random", "test_windows_seed": 2}
        speculative = dspark(thinker.pair.drafter, options, num_speculative_tokens=7)
    with engine(thinker.pair.target, speculative, v2=speculative is None, **ENGINE) as llm:
        yield request.param, llm


@pytest.fixture(scope="module")
def known() -> dict[str, list[Answer]]:
    """Answers of the engine without speculation, by scenario."""
    return {}


def thinking(llm: Any, thinker: Thinker) -> list[Answer]:
    """A grammar that holds from the end of thinking on, wherever in a block that comes."""
    from vllm.sampling_params import StructuredOutputsParams

    rule = StructuredOutputsParams(choice=["abcdefgh", "abcdxyz", "q"])
    chosen = params(40, ignore_eos=False, structured_outputs=rule)
    prompts = [{"prompt_token_ids": [*p, thinker.start]} for p in PROMPTS]
    return generate(llm, prompts, chosen)


def budgets(llm: Any, thinker: Thinker) -> list[Answer]:
    """Thinking cut off after so many tokens: at every place of a block."""
    prompts = [{"prompt_token_ids": [*PROMPTS[2], thinker.start]}] * 12
    return generate(llm, prompts, [params(30, thinking_token_budget=n) for n in range(12)])


def processors(llm: Any, _: Thinker) -> list[Answer]:
    """A user's logits processor on some requests, beside others without."""
    prompts = [{"prompt_token_ids": p} for p in PROMPTS]
    chosen = [params(24, extra_args={"forbid_even": i % 2 == 0}) for i in range(len(prompts))]
    return generate(llm, prompts, chosen)


def prefixes(llm: Any, _: Thinker) -> list[Answer]:
    """Prefix-cache hits of whole blocks, whose drafter keys were written by others."""
    base = [(3 * j) % 94 for j in range(96)]
    prompts = [{"prompt_token_ids": [*base, i]} for i in range(3)]
    return generate(llm, prompts, params(16)) + generate(llm, prompts[::-1], params(16))


def listed(llm: Any, _: Thinker) -> list[Answer]:
    """Log-probabilities of listed tokens, beside top ones and none, for every emitted token."""
    wanted = [LISTED, None, LISTED[:1], None, LISTED]
    top = [None, 2, None, None, len(LISTED)]
    chosen = [params(24, logprob_token_ids=w, logprobs=n) for w, n in zip(wanted, top, strict=True)]
    return generate(llm, [{"prompt_token_ids": p} for p in PROMPTS], chosen)


SCENARIOS: dict[str, Callable] = {
    "listed log-probabilities": listed,
    "thinking that ends inside a block": thinking,
    "thinking budgets": budgets,
    "custom logits processors": processors,
    "prefix hits": prefixes,
}


@pytest.mark.parametrize("name", SCENARIOS)
def test_answers_as_without_speculation(
    engines: tuple[str, Any], thinker: Thinker, known: dict, name: str
) -> None:
    """Catches a step whose later tokens are judged by rules that only hold for its first."""
    which, llm = engines
    found = SCENARIOS[name](llm, thinker)
    if which == "plain":
        known[name] = found
        assert len({a.tokens for a in found}) > 1
        return
    expect_equal(found, known[name])
    assert scheduler_of(llm).dspark_totals.accepted[0] > 0


def test_scenarios_are_what_they_say(engines: tuple[str, Any], thinker: Thinker) -> None:
    """Catches a vacuous pass: thinking must really end, budgets and rules must really bite."""
    which, llm = engines
    if which == "dspark":
        return
    thought = thinking(llm, thinker)
    ended = [a for a in thought if thinker.end in a.tokens]
    assert ended and any(a.finish_reason == "stop" for a in ended)
    cut = budgets(llm, thinker)
    assert len({a.tokens for a in cut}) > 4
    even = [t for a in processors(llm, thinker)[::2] for t in a.tokens]
    assert not [t for t in even if t % 2 == 0]


def test_listed_log_probabilities_of_sampled_answers(
    engines: tuple[str, Any], thinker: Thinker
) -> None:
    """Catches scores of another row where drafts are accepted and rejected at random."""
    from transformers import AutoModelForCausalLM

    which, llm = engines
    before = scheduler_of(llm).dspark_totals.accepted[0] if which == "dspark" else -1
    chosen = params(16, temperature=0.7, seed=5, logprob_token_ids=LISTED)
    found = generate(llm, [{"prompt_token_ids": p} for p in PROMPTS], chosen)
    if which == "dspark":
        assert scheduler_of(llm).dspark_totals.accepted[0] > before
    model = AutoModelForCausalLM.from_pretrained(thinker.pair.target, dtype=torch.float32).eval()
    for prompt, answer in zip(PROMPTS, found, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer.tokens]])).logits[0]
        scores = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert len(answer.logprobs) == len(answer.tokens) == 16
        for token, row, entry in zip(answer.tokens, scores, answer.logprobs, strict=True):
            wanted = {t: float(row[t]) for t in {token, *LISTED}}
            assert entry == pytest.approx(wanted, abs=1e-3)
