"""What the measuring commands ask a running engine's workers for (through remote.py).

Every method takes the model runner and JSON values, and returns a JSON value. All ranks run it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch

from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.artifacts.store import ArtifactStore
from vllm_dspark.integration.startup import describe_config
from vllm_dspark.planning.measuring import Cell


def describe(runner: Any) -> dict[str, Any]:
    """Identity of the engine (startup.describe_config)."""
    return describe_config(runner.vllm_config, runner.dspark_options)


def profile_cells(runner: Any, full: bool) -> list[dict[str, Any]]:
    """Kinds of step to time, ascending, after everything has been compiled and loaded once."""
    return [asdict(cell) for cell in runner.step_profiler().cells(full=full)]


@torch.inference_mode()
def profile_measure(runner: Any, cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One sample of each cell."""
    profiler = runner.step_profiler()
    samples = []
    for item in cells:
        timing = profiler.measure(Cell(**item))
        times = {"forward_ms": timing.forward_ms, "draft_ms": timing.draft_ms}
        samples.append({**asdict(Cell.of(timing)), **times})
    return samples


def profile_allocation(runner: Any) -> float:
    """ms that ranking and handing out a budget takes inside a step; 0 with host windows."""
    return float(runner.step_profiler().allocation_ms())


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
