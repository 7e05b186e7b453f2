"""What vLLM's V2 model runner lacks on a CPU: a Triton backend and native twins of its kernels.

Layer rule: numpy, numba, torch and the standard library (and, in ``triton_backend``
and ``interpreter_guard``, Triton itself); never vLLM. ``vllm_dspark.integration.cpu_kernels``
binds the twins to vLLM's kernels. This module imports nothing, because Triton imports
``vllm_dspark.cpu.triton_backend`` in every process, on GPU hosts too.
"""
