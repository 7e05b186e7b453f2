"""`vllm-dspark doctor`: what can be known to go wrong, before serving."""
