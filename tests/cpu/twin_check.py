"""Runs a vLLM kernel in Triton's interpreter and its native twin on equal inputs."""

import importlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")
importlib.import_module("vllm.v1.worker.cpu.shm")

import triton.language as tl  # noqa: E402
from triton.language.extra import libdevice  # noqa: E402
from triton.runtime import interpreter  # noqa: E402

from vllm_dspark.cpu.twins import RUNNER, load_twins  # noqa: E402
from vllm_dspark.integration import cpu_kernels  # noqa: E402


def mend_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill gaps of Triton 3.9.0's interpreter for the time of one test.

    Masked accesses refuse masks that are not boolean; ``libdevice.log1p`` does nothing.
    """
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def boolean(mask: Any) -> Any:
        return interpreter.TensorHandle(mask.data.astype(np.bool_), tl.int1)

    def masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any) -> Any:
        return load(self, ptrs, boolean(mask), *rest)

    def masked_store(self: Any, ptrs: Any, value: Any, mask: Any, *rest: Any) -> Any:
        return store(self, ptrs, value, boolean(mask), *rest)

    def log1p(x: Any) -> Any:
        with np.errstate(all="ignore"):
            handle = interpreter.TensorHandle(np.log1p(x.handle.data), x.dtype.scalar)
        return tl.tensor(handle, x.type)

    monkeypatch.setattr(builder, "create_masked_load", masked_load)
    monkeypatch.setattr(builder, "create_masked_store", masked_store)
    monkeypatch.setattr(libdevice, "log1p", log1p)


def interpreted(name: str) -> Any:
    """The kernel itself, also where a twin has been registered in its place."""
    registry = importlib.import_module("vllm.triton_utils.dispatcher")._registry
    return registry[name][0] if name in registry else cpu_kernels._kernel(name)


def native(name: str) -> Any:
    """The twin, bound as ``register_native_kernels`` binds it."""
    constants = cpu_kernels._version_constants(name)
    return cpu_kernels._launcher(interpreted(name), load_twins()[name], constants)


def copied(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments with every tensor cloned, strides kept."""
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in arguments.items()
    }


def compare(
    name: str,
    grid: tuple[int, ...],
    arguments: Mapping[str, Any],
    close: Mapping[str, float] | None = None,
    unset: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Assert that both forms leave every tensor equal to the bit (``close``: rtol by name).

    ``unset`` names outputs that the kernel fills only in part; they are compared by the
    caller. Returns the twin's arguments after the run.
    """
    full = name if name.startswith("vllm.") else RUNNER + name
    theirs, ours = copied(arguments), copied(arguments)
    interpreted(full)[grid](**theirs)
    native(full)(**ours)
    for key, expected in theirs.items():
        if not isinstance(expected, torch.Tensor) or key in unset:
            continue
        tolerance = (close or {}).get(key, 0.0)
        torch.testing.assert_close(
            ours[key],
            expected,
            rtol=tolerance,
            atol=tolerance,
            equal_nan=True,
            msg=lambda text, key=key: f"{name}: {key}\n{text}",
        )
    return ours


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """A small integer tensor."""
    return torch.tensor(values, dtype=dtype)


def cumulative(lengths: list[int]) -> torch.Tensor:
    """int32 [0, l0, l0 + l1, ...]."""
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
