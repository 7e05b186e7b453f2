"""Traces for `--replay`: a file that an engine recorded, as what a replayed engine needs of it."""

from __future__ import annotations

from pathlib import Path

from vllm_dspark.integration.replay import RecordedSteps
from vllm_dspark.simulation.trace import read_trace


def recorded_steps(path: Path) -> RecordedSteps:
    """Steps of a trace (compact, or pairs as an engine records them); raises TraceError."""
    trace = read_trace(path)
    return RecordedSteps(trace.first, trace.confidence, trace.accepted, trace.sampled)
