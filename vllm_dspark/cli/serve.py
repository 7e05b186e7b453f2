"""`vllm-dspark serve`: `vllm serve` with the plugin, also where the CPU build's command fails."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import NoReturn

from vllm_dspark.cli.preload import with_openmp
from vllm_dspark.config import process_environment
from vllm_dspark.cpu.build import is_cpu_build

INSTALL_HINT = (
    "vLLM is not installed: pip install 'vllm-dspark[cuda]' on a GPU machine, "
    "'vllm-dspark[cpu]' elsewhere"
)


def serve_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment for vLLM: on the CPU build with Intel OpenMP, else as it is."""
    return with_openmp(environment) if is_cpu_build() else dict(environment)


def has_vllm() -> bool:
    """Whether a vLLM of any build can be imported."""
    return find_spec("vllm") is not None


def replace_process(arguments: Sequence[str]) -> NoReturn:
    """Become the server: signals reach it directly and its exit code is ours."""
    command = [sys.executable, "-m", "vllm_dspark.integration.serving", *arguments]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, command, serve_environment(process_environment()))
