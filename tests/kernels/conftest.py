"""Kernel tests run in Triton's interpreter; on a GPU with ``DSPARK_TEST_DEVICE=cuda``."""

import os

DEVICE = os.environ.get("DSPARK_TEST_DEVICE", "cpu")
if DEVICE == "cpu":
    # Must be set before any kernel module is imported: triton.jit reads it when it decorates.
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch


def _teach_interpreter_bf16() -> None:
    # Triton's interpreter keeps bfloat16 as raw uint16 and multiplies those integers in `dot`
    # (seen in 3.9: a 16x16 product off by 1e10). Widen first; tensor cores are exact there too.
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    original = interpreter.InterpreterBuilder.create_dot

    def widen(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        data = (handle.data.astype(np.uint32) << 16).view(np.float32)
        return interpreter.TensorHandle(data, tl.float32)

    def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
        return original(self, widen(a), widen(b), d, input_precision, max_num_imprecise_acc)

    interpreter.InterpreterBuilder.create_dot = create_dot


def _interpret_standard_library() -> None:
    # tl.sum, tl.cdiv, ... are triton.jit functions too. Where an earlier test imported triton, they
    # were decorated for compilation, and an interpreted kernel cannot call them.
    # Gluon first: the first launch imports it, and it refuses a library already converted.
    import triton.experimental.gluon  # noqa: F401
    import triton.language as tl
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    for module in (tl, tl.core, tl.standard, tl.math):
        for name, value in vars(module).items():
            if isinstance(value, JITFunction):
                setattr(module, name, InterpretedFunction(value.fn))


if DEVICE == "cpu":
    torch.set_num_threads(1)
    _interpret_standard_library()
    _teach_interpreter_bf16()


@pytest.fixture
def device() -> torch.device:
    return torch.device(DEVICE)


def pytest_collection_modifyitems(items):
    skip = pytest.mark.skip(reason="needs a GPU: set DSPARK_TEST_DEVICE=cuda")
    for item in items:
        if "gpu" in item.keywords and DEVICE == "cpu":
            item.add_marker(skip)
