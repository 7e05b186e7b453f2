"""How twins are bound: complete, once, and never on a guess."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.cpu.twin_check import interpreted
from vllm_dspark.cpu.twins import load_twins
from vllm_dspark.integration import cpu_kernels


class Kernel:
    """What the binder sees of a Triton kernel."""

    __name__ = "_kernel"

    def __init__(self, *arg_names: str) -> None:
        self.arg_names = list(arg_names)


def test_every_twin_fits_its_kernel() -> None:
    for name, twin in load_twins().items():
        assert cpu_kernels._launcher(interpreted(name), twin, {}), name


def test_keyword_launches_reach_the_twin_with_tuning_arguments() -> None:
    seen: dict[str, Any] = {}

    def twin(x_ptr: torch.Tensor, size: int, FLAG: bool = True) -> None:
        seen.update(size=size, FLAG=FLAG)

    launch = cpu_kernels._launcher(Kernel("x_ptr", "size", "BLOCK_SIZE"), twin, {})
    assert tuple(inspect.signature(launch).parameters) == ("x_ptr", "size", "BLOCK_SIZE")
    launch(x_ptr=torch.zeros(1), size=3, BLOCK_SIZE=64, num_warps=4)
    assert seen == {"size": 3, "FLAG": True}
    launch(torch.zeros(1), 4, BLOCK_SIZE=64, num_warps=1)
    assert seen["size"] == 4


@pytest.mark.parametrize(
    ("kernel", "complaint"),
    [
        (Kernel("x_ptr", "size", "surprise_ptr"), "surprise_ptr"),
        (Kernel("x_ptr"), "size"),
    ],
)
def test_a_kernel_that_changed_is_left_to_the_interpreter(kernel: Kernel, complaint: str) -> None:
    def twin(x_ptr: torch.Tensor, size: int) -> None:
        raise AssertionError("must not be bound")

    with pytest.raises(TypeError, match=complaint):
        cpu_kernels._launcher(kernel, twin, {})


def test_registration_survives_llvmlite() -> None:
    """vLLM's scan of all modules trips over llvmlite's library handle once numba is imported."""
    pytest.importorskip("numba")
    import llvmlite.binding
    from vllm.triton_utils import dispatcher

    kernel = Kernel("x_ptr")
    with pytest.raises(AttributeError):
        dispatcher._rebind_kernels([(kernel, dispatcher.KernelOverride(kernel, len))])
    with cpu_kernels._llvmlite_out_of_sight():
        dispatcher._rebind_kernels([(kernel, dispatcher.KernelOverride(kernel, len))])
    assert llvmlite.binding is importlib.import_module("llvmlite.binding")


def test_registration_is_idempotent(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.triton_utils import dispatcher

    cpu_kernels.register_native_kernels()
    calls: list[Any] = []

    def count(overrides: dict[str, Callable[..., Any]]) -> None:
        calls.append(overrides)

    monkeypatch.setattr(dispatcher, "register_kernels", count)
    cpu_kernels.register_native_kernels()
    assert calls == []
    assert load_twins().keys() <= dispatcher._registry.keys()


def test_the_platform_hook_is_installed_once() -> None:
    from vllm.platforms.cpu import CpuPlatform

    if not cpu_kernels.hook_cpu_platform():
        pytest.skip("not the CPU build")
    hooked = CpuPlatform.register_triton_kernel_overrides
    assert cpu_kernels.hook_cpu_platform()
    assert CpuPlatform.register_triton_kernel_overrides == hooked
