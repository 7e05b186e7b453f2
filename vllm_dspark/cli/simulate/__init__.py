"""`vllm-dspark simulate`: what another setting, load or machine would do, without a GPU."""
