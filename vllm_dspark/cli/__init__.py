"""The `vllm-dspark` command."""
