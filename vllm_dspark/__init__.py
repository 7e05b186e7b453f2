"""vllm-dspark: DSpark speculative decoding for vLLM that pays at every load.

This module stays empty of imports on purpose: vLLM loads it in every process,
also in those that never speculate.
"""

__version__ = "0.1.0"
