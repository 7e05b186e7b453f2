"""`vllm-dspark top`: a running server, as its /metrics tell it."""
