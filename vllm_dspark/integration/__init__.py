"""The only package that imports vLLM: contract check, worker, runner, scheduler, adapters."""
