"""What the measuring commands ask a running engine's workers for (through remote.py).

Every method takes the model runner and JSON values, and returns a JSON value. All ranks run it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.artifacts.store import ArtifactStore
from vllm_dspark.errors import CostTableError
from vllm_dspark.integration import profiling
from vllm_dspark.integration.startup import describe_config, settle_windows
from vllm_dspark.planning.allocation import allocate
from vllm_dspark.planning.measuring import Cell
from vllm_dspark.planning.survival import survival

_ALLOCATION_REPEATS = 50


def describe(runner: Any) -> dict[str, Any]:
    """Identity of the engine (startup.describe_config)."""
    return describe_config(runner.vllm_config, runner.dspark_options)


def profile_cells(runner: Any, full: bool) -> list[dict[str, int]]:
    """Kinds of step to time, ascending, after everything has been compiled and loaded once."""
    if runner.device.type != "cpu":
        raise CostTableError("incomplete", "profiling on a GPU comes with the GPU executor")
    return [asdict(cell) for cell in profiling.cells(runner, full=full)]


@torch.inference_mode()
def profile_measure(runner: Any, cells: list[dict[str, int]]) -> list[dict[str, Any]]:
    """One sample of each cell."""
    samples = []
    for item in cells:
        cell = Cell(**item)
        timing = profiling.measure_once(runner, cell.num_requests, cell.num_tokens, cell.kv_tokens)
        samples.append(
            {
                **asdict(cell),
                "mode": timing.mode.value,
                "shape": timing.shape.value,
                "forward_ms": timing.forward_ms,
                "draft_ms": timing.draft_ms,
            }
        )
    return samples


def profile_allocation(runner: Any) -> float:
    """ms that ranking and handing out a budget takes inside a step; 0 with host windows."""
    mode, _ = settle_windows(runner.vllm_config, runner.dspark_options)
    if mode != "device":
        return 0.0
    width, requests = runner.num_speculative_steps, runner.max_num_reqs
    confidence = np.random.default_rng(0).random((width, requests), dtype=np.float32)
    capacity = np.full(requests, width, dtype=np.int32)
    times = []
    for _ in range(_ALLOCATION_REPEATS):
        started = time.perf_counter()
        allocate(survival(confidence), capacity, np.zeros_like(capacity), requests * width // 2)
        times.append((time.perf_counter() - started) * 1e3)
    return float(np.median(times))


def profile_save(runner: Any, record: str) -> str:
    """Keep a cost table where a start of this engine on this machine finds it; returns the path."""
    store = ArtifactStore(runner.dspark_options.resolved_cache_dir())
    return str(store.save(CostTableRecord.model_validate_json(record)).absolute())


METHODS: Mapping[str, Callable[..., Any]] = {
    "describe": describe,
    "profile_cells": profile_cells,
    "profile_measure": profile_measure,
    "profile_allocation": profile_allocation,
    "profile_save": profile_save,
}
