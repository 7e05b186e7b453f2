"""What a running engine drafts, token for token, against the float64 drafter.

T=0 equality holds whatever the drafter says; here the drafts themselves are checked: layers read,
layouts, positions, masks, windows, vocabularies, caps, confidences. Steps with rejected, accepted
and (first) no drafts behind them are compared.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.formats.drafter_reference import ReferenceDrafter, ReferenceTarget
from tests.formats.drafters import DEEPSPEC, HEADS, LAYERS, SPEC, SPECULATORS, V, random_drafter
from tests.support import quantise
from tests.support.engines import dspark, engine, runner_of
from tests.support.targets import build_target

pytestmark = pytest.mark.engine

GEMMA4 = {
    **LAYERS,
    **HEADS,
    "architectures": ["Gemma4DSparkModel"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "block_size": 5,
    "target_layer_ids": [0, 2],
    "layer_types": ["full_attention"] * 2,
    "global_head_dim": 32,
    "num_global_key_value_heads": 2,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": V,
    "num_kv_shared_layers": 0,
    "sliding_window": 512,
    "tie_word_embeddings": False,
    "final_logit_softcapping": 1.5,  # low enough to bend every logit
    "rope_parameters": {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    },
}

# ids of a drafter that knows more tokens than its target, some past vLLM's padding too
BEYOND = 3 * V


@dataclass(frozen=True)
class Case:
    config: dict[str, Any] = field(hash=False)
    family: str = "llama"
    width: int = 5
    without: tuple[str, ...] = ()


def without_confidence(config: dict) -> dict:
    return {**config, "enable_confidence_head": False, "confidence_head_with_markov": False}


CASES = {
    "deepspec, embedding as a layer": Case(DEEPSPEC),
    "deepspec, gated, K below the block": Case({**DEEPSPEC, "markov_head_type": "gated"}, width=3),
    "deepspec, rnn, shared embedding and head": Case(
        {**DEEPSPEC, "markov_head_type": "rnn", "confidence_head_with_markov": False},
        without=("embed_tokens", "lm_head"),
    ),
    "deepspec, rank 0, tied": Case(
        {
            **DEEPSPEC,
            "markov_rank": 0,
            "confidence_head_with_markov": False,
            "tie_word_embeddings": True,
            "logit_scale": 0.5,
        },
        without=("lm_head",),
    ),
    # No sequence is longer than the table, so "dynamic" is the plain table (transformers).
    "deepspec, block of 16, tied to the target's embedding, dynamic positions": Case(
        {
            **DEEPSPEC,
            "block_size": 16,
            "tie_word_embeddings": True,
            "max_position_embeddings": 128,
            "rope_scaling": {"rope_type": "dynamic", "factor": 4.0},
        },
        without=("embed_tokens", "lm_head"),
        width=16,
    ),
    "speculators, reduced vocabulary, causal window": Case(SPECULATORS, width=4),
    "speculators, window both ways, anchor first": Case(
        {**SPECULATORS, "sliding_window_non_causal": True, "sample_from_anchor": True}
    ),
    "speculators, reduced vocabulary, rnn": Case(
        {**SPECULATORS, "markov_head_type": "rnn"}, width=4
    ),
    "deepspec, rank 0 and gated, attention bias, llama3 positions": Case(
        {
            **DEEPSPEC,
            "markov_rank": 0,
            "markov_head_type": "gated",
            "confidence_head_with_markov": False,
            "attention_bias": True,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        }
    ),
    "deepspec, more ids than the target has, YaRN positions": Case(
        {
            **DEEPSPEC,
            "vocab_size": BEYOND,
            "mask_token_id": BEYOND - 1,
            "max_position_embeddings": 128,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        }
    ),
    "gemma4, values are keys": Case({**GEMMA4, "attention_k_eq_v": True}, family="gemma4_text"),
    "gemma4, values of their own, no confidence": Case(
        without_confidence({**GEMMA4, "attention_k_eq_v": False}), family="gemma4_text"
    ),
}
PROMPT = [(7 * i + i * i) % 94 for i in range(70)]  # longer than the drafter's own table
STEPS = 5


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Callable:
    """`target(family)`: folder and float64 model, built once a family."""
    known: dict[str, tuple[Path, ReferenceTarget]] = {}

    def get(family: str) -> tuple[Path, ReferenceTarget]:
        if family not in known:
            folder = tmp_path_factory.mktemp(family)
            build_target(folder, family, SPEC)
            known[family] = (folder, ReferenceTarget(folder))
        return known[family]

    return get


def reference_of(case: Case, spec: Any, tensors: dict, model: ReferenceTarget) -> ReferenceDrafter:
    shared = {
        "embed_tokens.weight": model.embed.weight.detach(),
        "lm_head.weight": model.model.get_output_embeddings().weight.detach(),
    }
    if spec.tied:
        shared["lm_head.weight"] = {**shared, **tensors}["embed_tokens.weight"]
    filled = {**shared, **tensors}
    for name in ("lm_head.weight", "markov_head.markov_w2.weight"):
        if name in filled:
            filled[name] = filled[name][:V]
    gemma = case.family == "gemma4_text"
    frequency, scale = rotary(case.config)
    return ReferenceDrafter(
        spec, filled, theta=10000.0, eps=1e-5, gemma=gemma, frequency=frequency, rope_scale=scale
    )


def rotary(config: dict) -> tuple[Any, float]:
    """Radians a token and scale of a scaled rotary table, by transformers."""
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling = config.get("rope_scaling")
    if scaling is None:
        return None, 1.0
    layers = {**LAYERS, "max_position_embeddings": config["max_position_embeddings"]}
    made = Qwen3Config(**layers, rope_parameters={**scaling, "rope_theta": 10000.0})
    return ROPE_INIT_FUNCTIONS[scaling["rope_type"]](made, "cpu")


@pytest.mark.parametrize("name", CASES)
def test_drafts_are_those_of_the_reference(name: str, target: Callable, tmp_path: Path) -> None:
    """Twice the same prompt: the second time a block of it comes from the prefix cache."""
    case = CASES[name]
    folder, model = target(case.family)
    drafter = tmp_path / "drafter"
    spec, tensors = random_drafter(drafter, case.config, without=case.without)
    reference = reference_of(case, spec, tensors, model)
    speculative = dspark(drafter, num_speculative_tokens=case.width)
    with engine(folder, speculative, block_size=32) as llm:
        for turn in ("first", "cached"):
            for tokens, found, scores in drafted(llm, turn, case.width):
                aux = model.aux(tokens[:-1], spec.target_layer_ids)
                wanted, confidences = reference.draft(aux, tokens[-1], case.width)
                assert found == wanted, f"{turn} prompt, after {len(tokens)} tokens"
                if confidences:
                    np.testing.assert_allclose(scores, confidences, rtol=1e-3, atol=1e-3)
        hits = {m.name: m.value for m in llm.get_metrics() if "prefix_cache_hits" in m.name}
        assert hits["vllm:prefix_cache_hits"] >= 32


@pytest.mark.parametrize("name", ["deepspec, embedding as a layer", "gemma4, values are keys"])
def test_packed_layers_are_those_of_the_reference(
    name: str, target: Callable, tmp_path: Path
) -> None:
    """Catches 4-bit layers built plain, or loaded into the wrong ones, in either backbone.

    In bfloat16, which a CPU's 4-bit kernels need, near ties fall either way; confidences of the
    first draft depend on no draft.
    """
    case = CASES[name]
    folder, model = target(case.family)
    drafter = tmp_path / "drafter"
    spec, plain = random_drafter(drafter, case.config)
    packed = quantise.int4(drafter, ignore=("lm_head",))
    width, speculative = case.width, dspark(drafter, num_speculative_tokens=case.width)
    found, wanted, others = [], [], []
    with engine(folder, speculative, block_size=32, dtype="bfloat16") as llm:
        for tokens, _, scores in drafted(llm, "packed", width):
            aux = model.aux(tokens[:-1], spec.target_layer_ids)
            found.append(scores[0])
            for tensors, into in ((packed, wanted), (plain, others)):
                reference = reference_of(case, spec, tensors, model)
                into.append(reference.draft(aux, tokens[-1], width)[1][0])
    as_packed, as_plain = (np.abs(np.subtract(found, of)) for of in (wanted, others))
    assert as_packed.max() < 0.4, (found, wanted)  # bfloat16, of logits up to 4
    assert as_packed.sum() < as_plain.sum() / 2, (found, wanted, others)


def drafted(llm: Any, name: str, width: int) -> Iterator[tuple[list[int], list[int], list[float]]]:
    """Step a request by hand: tokens so far, drafts made after them, their confidence logits."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    speculator = runner_of(llm).speculator
    llm.llm_engine.add_request(name, {"prompt_token_ids": PROMPT}, sampling)
    for _ in range(STEPS):
        tokens = list(PROMPT)
        for output in llm.llm_engine.step():
            tokens += list(output.outputs[0].token_ids)
        found = speculator.draft_tokens[0, :width].tolist()
        yield tokens, found, speculator.confidence_logits[0, :width].tolist()
    llm.llm_engine.abort_request([name])
    llm.llm_engine.step()
