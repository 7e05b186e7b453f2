"""Compiler half of the ``cpu`` backend: refuses to compile, saying what to do instead.

Written against Triton 3.9.0 (torch 2.13.0+cpu).
"""

from types import ModuleType
from typing import Any

from triton.backends.compiler import BaseBackend, GPUTarget

from vllm_dspark.cpu.triton_backend.driver import TARGET_NAME, make_concrete


@make_concrete
class CPUBackend(BaseBackend):
    """Known to Triton by name only."""

    @staticmethod
    def supports_target(target: GPUTarget) -> bool:
        """Whether ``target`` is the host."""
        return bool(target.backend == TARGET_NAME)

    def hash(self) -> str:
        """Identifier of this backend in Triton's caches."""
        return "vllm-dspark-cpu-never-compiles"

    def parse_options(self, options: dict[str, Any]) -> Any:
        """First thing Triton asks for when it wants to compile a kernel."""
        raise NotImplementedError(
            "vllm-dspark's cpu backend for Triton cannot compile kernels: this kernel has no "
            "native implementation and the interpreter is off. Start the process with "
            "TRITON_INTERPRET=1 (vllm-dspark's default on the CPU build) to interpret it."
        )

    def add_stages(self, stages: dict[str, Any], options: object, language: Any = None) -> None:
        """No compilation stages."""

    def load_dialects(self, context: Any) -> None:
        """No MLIR dialects."""

    def get_codegen_implementation(self, options: Any) -> dict[str, Any]:
        """No target-specific code generation."""
        return {}

    def get_module_map(self) -> dict[str, ModuleType]:
        """No device libraries."""
        return {}
