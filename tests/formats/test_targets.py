"""T=0 equality and accepted drafts on targets of many architectures, a tiny pair of each."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.scenarios import Answer, generate, make_prompts, params
from tests.integration.test_equality import expect_equal
from tests.support.engines import dspark, engine, scheduler_of
from tests.support.pairs import Pair, PairSpec, write_tokenizer
from tests.support.targets import FAMILIES, build_target_pair
from tests.support.torchvision import importable_torchvision
from vllm_dspark.errors import DrafterError

pytestmark = pytest.mark.engine

SPEC = PairSpec(kind="markov", symbols=94, seed=5)
WINDOWS = {"test_windows": "random", "test_windows_seed": 3}


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    return lambda family: build_target_pair(tmp_path_factory.mktemp(family), family, SPEC)


@pytest.fixture(scope="module", autouse=True)
def torchvision(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What importing vLLM's class of Llava asks for."""
    with importable_torchvision(tmp_path_factory.mktemp("torchvision")):
        yield


# Engine settings that a family needs.
EXTRA: dict[str, dict[str, Any]] = {"llava": {"language_model_only": True}}


def answers_of(llm: Any) -> list[Answer]:
    """More requests than slots, lengths from 1 to beyond two cache blocks, arriving at once."""
    return generate(llm, make_prompts(SPEC.symbols), params(48))


@pytest.mark.parametrize("family", [*(f for f in FAMILIES if f != "llama"), "llava"])
def test_target(family: str, pair_of: Callable) -> None:
    """Catches caches of a target that do not survive rejected drafts, and layers read wrongly.

    Random windows reject in every place of a block. (Llama targets are the subject of
    tests/integration/test_equality.py.)
    """
    pair: Pair = pair_of(family)
    extra = EXTRA.get(family, {})
    with engine(pair.target, **extra) as llm:
        wanted = answers_of(llm)
    assert len({a.tokens[-8:] for a in wanted}) > 3, "the target says the same to every prompt"
    speculative = dspark(pair.drafter, WINDOWS, num_speculative_tokens=7)
    with engine(pair.target, speculative, **extra) as llm:
        found = answers_of(llm)
        totals = scheduler_of(llm).dspark_totals
    expect_equal(found, wanted)
    assert (totals.accepted[:3] > 0).all() and totals.accepted[0] < totals.verified[0], totals


def test_a_target_without_hidden_states_is_refused(tmp_path: Path, build: Callable) -> None:
    """Catches a target class that cannot hand its layers' outputs to the drafter: the first step
    would fail, or the drafter see nothing.
    """
    from transformers import OPTConfig

    pair: Pair = build(SPEC)
    size = {"hidden_size": SPEC.hidden, "word_embed_proj_dim": SPEC.hidden, "ffn_dim": 64}
    config = OPTConfig(
        architectures=["OPTForCausalLM"], vocab_size=SPEC.vocab_size, num_attention_heads=2,
        num_hidden_layers=SPEC.layers, max_position_embeddings=SPEC.max_positions, **size,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    write_tokenizer(tmp_path, SPEC)
    speculative = dspark(pair.drafter, num_speculative_tokens=7)
    said = r"class OPTForCausalLM does not give its layers' outputs.*serve it without DSpark"
    with (
        pytest.raises(DrafterError, match=said),
        engine(tmp_path, speculative, load_format="dummy"),
    ):
        pass
