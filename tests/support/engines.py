"""Real vLLM engines inside the test process."""

import gc
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

# In-process engine: 7-10 s a start instead of 25-30 s, and tests can look inside.
ENGINE_ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    # Tiny models gain nothing from a second thread, and OpenMP's spinning barriers cost a
    # hundredfold where the cores are taken.
    "OMP_NUM_THREADS": "1",
    "NUMBA_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}

DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "enforce_eager": True,
    "max_model_len": 512,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "disable_log_stats": False,
    "seed": 0,
}


@contextmanager
def _imports_out_of_gc() -> Iterator[None]:
    """vLLM collects garbage fourteen times between start and end of an engine.

    Each time 0.4 s go by over what imports have made, which is 5 of the 6 s of a start: so that is
    frozen meanwhile. vLLM's own freezing, and above all thawing, is left out.
    """
    if isinstance(gc.freeze, mock.NonCallableMock):  # an engine beside another one
        yield
        return
    gc.collect()  # an engine that has ended but is still referred to must not be frozen too
    gc.freeze()
    thaw = gc.unfreeze
    try:
        with mock.patch.object(gc, "freeze"), mock.patch.object(gc, "unfreeze"):
            yield
    finally:
        thaw()


@contextmanager
def engine(target: Path, speculative: dict[str, Any] | None = None, **overrides: Any) -> Iterator:
    """An `LLM` on `target`; shut down, with its process groups, on exit."""
    os.environ.update(ENGINE_ENVIRONMENT)
    # Without DSpark the plugin pins the V1 runner for that start; each engine decides anew.
    runner = os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
    if overrides.pop("v2", False):
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    from vllm import LLM
    from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

    with _imports_out_of_gc():
        llm = None
        try:
            settings = {**DEFAULTS, **overrides}
            llm = LLM(str(target), speculative_config=speculative, **settings)
            yield llm
        finally:
            if llm is not None:
                llm.llm_engine.engine_core.shutdown()
            del llm
            gc.collect()
            cleanup_dist_env_and_memory()
            os.environ.pop("VLLM_USE_V2_MODEL_RUNNER", None)
            if runner is not None:
                os.environ["VLLM_USE_V2_MODEL_RUNNER"] = runner


def dspark(drafter: Path, options: Any = None, **changes: Any) -> dict[str, Any]:
    """A speculative config for `drafter`.

    Scheduling is off unless `options` names it: at start-up it would measure a cost table
    (seconds, and noise that decides windows) which most tests are not about.
    """
    config = {"method": "dspark", "model": str(drafter), **changes}
    if options is None:
        options = {}
    config["dspark"] = {"scheduling": False, **options} if isinstance(options, dict) else options
    return config


def scheduler_of(llm: Any) -> Any:
    """The scheduler of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.scheduler


def runner_of(llm: Any) -> Any:
    """The model runner of an in-process engine."""
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    return executor.driver_worker.worker.model_runner


def token_lists(outputs: Sequence[Any]) -> list[list[int]]:
    """Generated token ids of each request."""
    return [list(o.outputs[0].token_ids) for o in outputs]
