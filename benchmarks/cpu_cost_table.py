"""Cost table of the demo pair on a CPU that is not quiet: all sizes in turn, again and again.

    python -m benchmarks.cpu_cost_table --out cost-table.json [--max-num-seqs 32] [--seconds 60]

A virtual machine's speed changes for seconds at a stretch. Measured size by size, as at an engine's
start, such a stretch falls on a few neighbouring sizes and makes a kink that plans then follow.
Here each pass visits every size once, and of the samples of a cell the faster half counts.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.artifacts.store import write_record
from vllm_dspark.bench.modes import Mode, PairSpec, launch
from vllm_dspark.demo.target import drafter_path, ensure_target
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape, StepTiming, build_cost_table

Cells = dict[tuple[int, int, int], list[tuple[float, float]]]  # (requests, tokens, kv) -> times
Narrow = dict[tuple[int, int], list[float]]  # (requests, columns) -> draft ms


def measure(runner: Any, width: int, seconds: float) -> tuple[Cells, Narrow]:
    """(forward ms, draft ms) of every size, one sample a pass, until the time is over."""
    import torch

    from vllm_dspark.integration import profiling

    profiling._REPEATS, profiling._WARMUP = 1, 0
    sizes = list(shapes(runner.max_num_reqs, width))
    nodes = profiling._kv_nodes(runner.max_model_len, width)
    few = profiling.narrow_shapes(runner, {requests for requests, _ in sizes})
    cells: Cells = defaultdict(list)
    narrow: Narrow = defaultdict(list)
    with torch.inference_mode():
        for requests, tokens in sizes:  # compile and load what runs for the first time
            profiling._measure(runner, requests, tokens, nodes[0])
        for requests, tokens, columns in few:
            profiling._measure(runner, requests, tokens, nodes[0], columns)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            for requests, tokens in sizes:
                for kv in nodes:
                    [sample] = profiling._measure(runner, requests, tokens, kv)
                    times = (sample.forward_ms, sample.draft_ms or 0.0)
                    cells[requests, tokens, kv].append(times)
            for requests, tokens, columns in few * 2:
                [sample] = profiling._measure(runner, requests, tokens, nodes[0], columns)
                narrow[requests, columns].append(sample.draft_ms or 0.0)
    return cells, narrow


def shapes(max_requests: int, width: int) -> Iterator[tuple[int, int]]:
    """(requests, tokens): one request's windows, full windows, and one token a request."""
    yield from ((1, tokens) for tokens in range(1, width + 2))
    requests = 2
    while requests <= max_requests:
        yield requests, requests * (width + 1)
        if requests * 3 // 2 < max_requests:
            yield requests * 3 // 2, requests * 3 // 2 * (width + 1)
        yield requests, requests
        requests *= 2


def table_of(cells: Cells, narrow: Narrow) -> CostTable:
    """The table of the faster half of each cell; more tokens never cost less."""
    kept = min(len(times) for times in cells.values()) // 2
    drafts: dict[int, list[float]] = defaultdict(list)
    for (requests, _, _), times in cells.items():
        drafts[requests] += [draft for _, draft in times]
    draft = _rising({requests: sorted(times)[:kept] for requests, times in drafts.items()})
    samples = []
    for kv in sorted({kv for _, _, kv in cells}):
        for shape in (StepShape.RAGGED, StepShape.SINGLE):
            part = {
                (tokens, requests): sorted(forward for forward, _ in times)[:kept]
                for (requests, tokens, node), times in cells.items()
                if node == kv and _is_of(shape, requests, tokens)
            }
            for (tokens, requests), times in _rising(part).items():
                for index, forward in enumerate(times):
                    drafted = draft[requests][index] if shape is StepShape.RAGGED else None
                    samples.append(
                        StepTiming(StepMode.EAGER, shape, requests, tokens, kv, forward, drafted)
                    )
    for (requests, columns), values in narrow.items():
        for value in sorted(values)[: max(len(values) // 2, 1)]:
            samples.append(
                StepTiming(StepMode.EAGER, StepShape.RAGGED, requests, 0, 0, 0.0, value, columns)
            )
    return build_cost_table(samples)


def _is_of(shape: StepShape, requests: int, tokens: int) -> bool:
    if shape is StepShape.SINGLE:
        return requests == tokens
    return requests < tokens or tokens == 1


def _rising(rows: dict[Any, list[float]]) -> dict[Any, list[float]]:
    """Rows by ascending size, each sample at least that of the smaller size."""
    found: dict[Any, list[float]] = {}
    before: list[float] = []
    for key in sorted(rows):
        before = [max(pair) for pair in zip(rows[key], before or rows[key], strict=True)]
        found[key] = before
    return found


def main() -> int:
    """Start the engine in this process, measure, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--max-num-seqs", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=60.0)
    args = parser.parse_args()
    pair = PairSpec(
        str(ensure_target()),
        str(drafter_path()),
        max_num_seqs=args.max_num_seqs,
        engine={"enforce_eager": True},
        plugin_options={"scheduling": False},
    )
    start = launch(Mode.parse("ours"), pair, is_cpu=True)
    os.environ.update({**start.environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
    from vllm_dspark.integration.bench_engine import DrivenEngine
    from vllm_dspark.integration.startup import live_fingerprint

    engine = DrivenEngine(start.arguments)
    table = table_of(*measure(engine.runner, pair.width, args.seconds))
    write_record(args.out, CostTableRecord.from_table(table, live_fingerprint(engine.config)))
    for (mode, shape), grid in table.grids.items():
        print(mode.value, shape.value, grid.sizes, grid.median_ms[0].round(1))
    print("draft", table.draft.sizes, table.draft.median_ms[0].round(1))
    for columns, grid in table.narrow.items():
        print(f"draft of {columns} columns", grid.sizes, grid.median_ms[0].round(1))
    engine.shutdown()
    return 0


if __name__ == "__main__":
    sys.exit(main())
