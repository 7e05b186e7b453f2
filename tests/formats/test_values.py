"""Weights that hold numbers that are none, in every type that checkpoints are stored in."""

import os
from pathlib import Path

import pytest
import torch

from tests.proposer.checkpoints import (
    DEEPSPEC,
    TARGET,
    random_tensors,
    spec_of,
    write_checkpoint,
    write_safetensors,
)
from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.checkpoint import check_checkpoint
from vllm_dspark.proposer.inventory import TORCH_NAMES, StoredTensor
from vllm_dspark.proposer.values import _CHUNK_BYTES, _faults, check_finite

NAN, INFINITY = float("nan"), float("inf")


def test_weights_are_read_once(tmp_path: Path) -> None:
    """vLLM builds several configs in a start; a changed file is read again."""
    spec, tensors = spec_of(), random_tensors(spec_of())
    write_checkpoint(tmp_path, DEEPSPEC, tensors)
    check_checkpoint(tmp_path, spec, TARGET)
    before = _faults.cache_info().hits
    check_checkpoint(tmp_path, spec, TARGET)
    assert _faults.cache_info().hits == before + 1
    tensors["fc.weight"].view(-1)[5] = NAN
    write_safetensors(tmp_path / "model.safetensors", tensors)
    os.utime(tmp_path / "model.safetensors", ns=(1, 1))
    with pytest.raises(DrafterError, match=r"fc\.weight \(1 of 768\)"):
        check_checkpoint(tmp_path, spec, TARGET)


@pytest.mark.parametrize(
    ("dtype", "width"),
    [("F64", 8), ("F32", 4), ("F16", 2), ("BF16", 2), ("F8_E4M3", 1), ("F8_E5M2", 1)],
)
def test_numbers_of_every_type(tmp_path: Path, dtype: str, width: int) -> None:
    """NaN and infinity are found in each type, at each end and past a chunk; the largest is not."""
    kind = next(found for found, name in TORCH_NAMES.items() if name == dtype)
    size = _CHUNK_BYTES // width + 3
    values = torch.full((size,), torch.finfo(kind).max, dtype=torch.float64).to(kind)
    values[1::2] = torch.tensor(torch.finfo(kind).min, dtype=torch.float64).to(kind)

    def look(tensor: torch.Tensor, name: str) -> None:
        file = tmp_path / name
        file.write_bytes(b"head" + tensor.view(torch.uint8).numpy().tobytes())
        stop = 4 + size * width
        check_finite({"x": StoredTensor((size,), dtype, file, 4, stop)}, "file")

    look(values, "good")
    wrong = [NAN] if dtype == "F8_E4M3" else [NAN, INFINITY, -INFINITY]
    for value in wrong:
        for place in (0, size - 1):
            changed = values.clone()
            changed[place] = value
            with pytest.raises(DrafterError, match=rf"x \(1 of {size}\)"):
                look(changed, f"{value} at {place}")
