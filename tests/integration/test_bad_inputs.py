"""Drafters and requests that cannot be served end early, with cause, value and remedy."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integration.conftest import engine_args
from tests.support.engines import dspark, engine, scheduler_of, token_lists
from tests.support.pairs import Pair, PairSpec
from vllm_dspark.errors import DrafterError

pytestmark = pytest.mark.usefixtures("runner_choice")

Change = Callable[[Path], None]


def config_with(**changes: Any) -> Change:
    """Edit config.json; None takes a key out."""

    def change(folder: Path) -> None:
        path = folder / "config.json"
        config = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return change


def tensors_with(**changes: Any) -> Change:
    """Edit the weights ("__" for "."): a function of the old tensor, None takes one out."""

    def change(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        path = folder / "model.safetensors"
        tensors = load_file(path)
        for key, function in changes.items():
            name = key.replace("__", ".")
            if function is None:
                del tensors[name]
            else:
                tensors[name] = function(tensors.get(name)).contiguous()
        save_file(tensors, path)

    return change


def broken_json(folder: Path) -> None:
    (folder / "config.json").write_text('{"architectures": ["Qwen3DSparkModel"],')


def no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def no_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])


def _narrow(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:, :-1]


# change, draft width, words that the message must hold: cause, value seen, remedy
BAD_DRAFTERS: dict[str, tuple[Change, int, list[str]]] = {
    "head tensor missing": (
        tensors_with(markov_head__markov_w2__weight=None),
        7,
        ["markov_head.markov_w2.weight", "missing"],
    ),
    "fc missing": (tensors_with(fc__weight=None), 7, ["fc.weight", "missing"]),
    "head tensor of another shape": (
        tensors_with(markov_head__markov_w1__weight=_narrow),
        7,
        ["markov_head.markov_w1.weight", "63", "64"],
    ),
    "confidence head of another width": (
        tensors_with(confidence_head__proj__weight=_narrow),
        7,
        ["confidence_head.proj.weight", "127", "128"],
    ),
    "gate tensors for a vanilla head": (
        config_with(markov_head_type="gated"),
        7,
        ["markov_head.gate_proj.weight"],
    ),
    "mask id outside the vocabulary": (
        config_with(mask_token_id=4096),
        7,
        ["mask_token_id", "4096", "98", "use the id"],
    ),
    "mask id missing": (config_with(mask_token_id=None), 7, ["mask_token_id", "missing"]),
    "mask id of another type": (
        config_with(mask_token_id="<mask>"),
        7,
        ["mask_token_id", "'<mask>'", "must be an integer"],
    ),
    "K beyond the block": (
        config_with(),
        8,
        ["num_speculative_tokens = 8", "block_size = 7", "set num_speculative_tokens to 1..7"],
    ),
    "block size missing": (config_with(block_size=None), 7, ["block_size", "missing"]),
    "unknown head type": (
        config_with(markov_head_type="transformer"),
        7,
        ["markov_head_type", "'transformer'", "vanilla, gated, rnn"],
    ),
    "target layers that do not exist": (
        config_with(target_layer_ids=[0, 1, 9]),
        7,
        ["target_layer_ids", "9", "3 layers"],
    ),
    "another number of target layers": (
        config_with(target_layer_ids=[0, 1]),
        7,
        ["fc.weight", "192", "128"],
    ),
    "broken JSON": (broken_json, 7, ["config.json", "not valid JSON"]),
    "no config": (no_config, 7, ["config.json", "does not exist", "folder"]),
    "no weights": (no_weights, 7, ["safetensors"]),
    "truncated weights": (cut_weights, 7, ["model.safetensors"]),
}


def _start(target: Path, drafter: Path, width: int = 7) -> None:
    engine_args(target, dspark(drafter, num_speculative_tokens=width)).create_engine_config()


@pytest.mark.parametrize("name", BAD_DRAFTERS)
def test_bad_drafter_is_refused_before_an_engine_exists(
    pair: Pair, tmp_path: Path, name: str
) -> None:
    """Catches a drafter that loads wrongly, crashes at start without a reason, or in a step."""
    change, width, words = BAD_DRAFTERS[name]
    drafter = tmp_path / "drafter"
    shutil.copytree(pair.drafter, drafter)
    change(drafter)
    with pytest.raises(DrafterError) as caught:
        _start(pair.target, drafter, width)
    message = str(caught.value)
    print(message)
    missing = [word for word in words if word not in message]
    assert not missing, f"{missing} not in: {message}"


@pytest.mark.parametrize(
    "spec, words",
    [
        (PairSpec(symbols=94, hidden=32, markov_rank=32), ["hidden", "32", "64"]),
        (PairSpec(symbols=50), ["vocab_size", "54", "98"]),
        (PairSpec(symbols=94, layers=5), ["target_layer_ids", "3 layers"]),
    ],
    ids=["hidden size", "vocabulary", "layers"],
)
def test_drafter_of_another_target_is_refused(
    pair: Pair, build: Callable, spec: PairSpec, words: list[str]
) -> None:
    """Catches drafter and target that do not belong together, where shapes would even load."""
    with pytest.raises(DrafterError) as caught:
        _start(pair.target, build(spec).drafter)
    print(caught.value)
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"


def test_missing_folder_is_refused(pair: Pair, tmp_path: Path) -> None:
    """Catches a misspelt path that ends in a hub download or a stack trace without the path."""
    with pytest.raises((ValueError, OSError)) as caught:
        _start(pair.target, tmp_path / "nowhere")
    assert "nowhere" in str(caught.value)


@pytest.mark.engine
@pytest.mark.parametrize("left_out", [("weight", "bias"), ("weight",)], ids=["whole", "half"])
def test_confidence_head_left_out_of_the_weights_still_serves(
    pair: Pair, tmp_path: Path, plugin_warnings: Callable, left_out: tuple[str, ...]
) -> None:
    """Catches a crash (or silent sampler probabilities) where config and weights disagree.

    Drafting does not need the head: the drafter serves with full windows, and says so once.
    """
    from vllm import SamplingParams

    drafter = tmp_path / "drafter"
    shutil.copytree(pair.drafter, drafter)
    tensors_with(**{f"confidence_head__proj__{name}": None for name in left_out})(drafter)
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    speculative = dspark(drafter, {"scheduling": "auto"}, num_speculative_tokens=7)
    with engine(pair.target, speculative) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, 3]}], sampling, use_tqdm=False)
        totals = scheduler_of(llm).dspark_totals
        assert (totals.verified == totals.drafted).all(), totals
    assert [line for line in plugin_warnings() if "confidence" in line]


@pytest.mark.engine
def test_refused_requests_do_not_disturb_others(pair: Pair) -> None:
    """Catches a request that speculation cannot serve and that ends the engine, not itself."""
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    prompt = [{"prompt_token_ids": [1, 2, 3]}]
    good = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    with engine(pair.target, dspark(pair.drafter, num_speculative_tokens=7)) as llm:
        wanted = token_lists(llm.generate(prompt, good, use_tqdm=False))
        for refused in ({"min_p": 0.2}, {"logit_bias": {5: 1.0}}):
            with pytest.raises(VLLMValidationError, match="not yet supported with speculative"):
                llm.generate(prompt, SamplingParams(max_tokens=4, **refused), use_tqdm=False)
        assert token_lists(llm.generate(prompt, good, use_tqdm=False)) == wanted
