"""Twins of vLLM kernels against the kernels in the Triton interpreter."""
