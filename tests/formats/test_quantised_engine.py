"""Quantised drafters and targets in a running engine: loaded, equal at T=0, drafts accepted."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.scenarios import generate, make_prompts, params
from tests.integration.test_equality import expect_equal
from tests.support import quantise
from tests.support.engines import dspark, engine, scheduler_of
from tests.support.pairs import PairSpec

pytestmark = pytest.mark.engine

# Sizes that the CPU build's packed kernels take.
SPEC = PairSpec(kind="markov", symbols=94, seed=3, hidden=128, markov_rank=128, heads=4, kv_heads=4)
SETTINGS = {"dtype": "bfloat16"}


@pytest.fixture(scope="module")
def target(build: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An int8 target."""
    folder = tmp_path_factory.mktemp("int8") / "target"
    shutil.copytree(build(SPEC).target, folder)
    quantise.int8(folder)
    return folder


@pytest.fixture(scope="module")
def wanted(target: Path) -> list:
    with engine(target, v2=True, **SETTINGS) as llm:
        return generate(llm, make_prompts(94), params(32))


def stored_as(dtype: torch.dtype) -> Callable[[Path], None]:
    """Plain weights, in a type that need not be the engine's."""

    def change(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        save_file({n: t.to(dtype) for n, t in tensors.items()}, folder / "model.safetensors")

    return change


# What exporters do: `fc` stays plain in all; the ignore list names it, or says nothing of it.
DRAFTERS: dict[str, Callable[[Path], object]] = {
    "bf16 drafter": stored_as(torch.bfloat16),
    "fp16 drafter": stored_as(torch.float16),
    "4-bit drafter": lambda folder: quantise.int4(folder, ignore=("lm_head", "fc")),
    "4-bit drafter, lists incomplete": lambda folder: quantise.int4(
        folder, plain=("layers.1.mlp.down_proj",)
    ),
    "fp8 drafter": quantise.fp8,
}


@pytest.mark.parametrize("which", DRAFTERS)
def test_beside_an_int8_target(
    build: Callable, target: Path, wanted: list, which: str, tmp_path: Path
) -> None:
    """Catches the target's quantisation applied to the drafter, raw packed weights used, and
    layers that are stored plain built packed.
    """
    drafter = tmp_path / "drafter"
    shutil.copytree(build(SPEC).drafter, drafter)
    DRAFTERS[which](drafter)
    speculative = dspark(drafter, {"test_windows": "full"}, num_speculative_tokens=7)
    with engine(target, speculative, **SETTINGS) as llm:
        found = generate(llm, make_prompts(94), params(32))
        totals = scheduler_of(llm).dspark_totals
    expect_equal(found, wanted)
    assert (totals.accepted[:3] > 0).all(), totals
