"""`vllm-dspark profile`: what steps cost on this machine, measured until it can be trusted."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, TaskID
from rich.table import Table

from vllm_dspark.artifacts.fingerprint import Fingerprint
from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.artifacts.store import write_record
from vllm_dspark.cli.figures import cost_figures
from vllm_dspark.cli.output import progress, require_writable
from vllm_dspark.cli.replicas import ProfileReplica
from vllm_dspark.cli.spread import RayPlace, Replicas, make_replicas, one_identity, require_cache
from vllm_dspark.errors import CostTableError, UntrustedError
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape, StepTiming
from vllm_dspark.planning.measuring import Cell, CellSamples, rounds_of

# Cells of one call to a replica: small enough for progress and a time limit to mean something.
_PORTION = 4


@dataclass(frozen=True)
class ProfileOptions:
    """What the command line says."""

    arguments: tuple[str, ...]  # of `vllm serve`
    full: bool = False
    repeats: int = 5
    max_spread: float = 0.15
    time_limit_s: float = 180.0
    output: Path | None = None
    ray: RayPlace | None = None


@dataclass(frozen=True)
class ProfileReport:
    """What was measured; `to_json` is what `--json` writes and `plot` draws."""

    record: CostTableRecord
    model: str
    drafter: str
    paths: tuple[str, ...]
    num_cells: int
    num_samples: int
    seconds: float
    median_spread: float
    unused_because: str
    restarts: int
    replica_cost: dict[str, float]  # median of a replica's times over the table's

    def to_json(self) -> str:
        """One JSON object."""
        table = self.record.model_dump(mode="json")
        return json.dumps(
            {
                "command": "profile",
                "version": 1,
                "model": self.model,
                "drafter": self.drafter,
                "artifacts": list(self.paths),
                "cells": self.num_cells,
                "samples": self.num_samples,
                "seconds": round(self.seconds, 1),
                "median_spread": round(self.median_spread, 4),
                "unused_because": self.unused_because,
                "restarts": self.restarts,
                "replica_cost": self.replica_cost,
                "table": table,
                "figures": cost_figures(table),
            },
            indent=1,
        )


def run_profile(options: ProfileOptions, console: Console) -> ProfileReport:
    """Measure, save where a server finds it, and report. UntrustedError: nothing was saved."""
    require_writable(options.output, "--output")
    console.print("starting the engine ...")
    with make_replicas(options.ray, ProfileReplica, (options.arguments,)) as replicas:
        identity = one_identity(replicas.describe())
        require_cache(identity, options.ray)
        if identity["unused_because"]:
            console.print(
                f"a server with these arguments will not use the table: "
                f"{identity['unused_because']}",
                style="yellow",
            )
        started = time.monotonic()
        samples, shares = _measure(replicas, options, console)
        allocation_ms = statistics.median(replicas.broadcast("allocation_ms"))
        table = _trusted(samples, allocation_ms)
        seconds = time.monotonic() - started
        fingerprint = Fingerprint.model_validate(identity["fingerprint"])
        record = CostTableRecord.from_table(table, fingerprint)
        paths = sorted(set(replicas.broadcast("save", record.model_dump_json())))
        if options.output is not None:
            write_record(options.output, record)
            paths.append(str(options.output))
    return ProfileReport(
        record=record,
        model=identity["model"],
        drafter=identity["drafter"],
        paths=tuple(paths),
        num_cells=len(samples),
        num_samples=samples.num_samples,
        seconds=seconds,
        median_spread=samples.median_spread(),
        unused_because=identity["unused_because"],
        restarts=replicas.restarts,
        replica_cost=_relative(shares, table),
    )


def _measure(
    replicas: Replicas, options: ProfileOptions, console: Console
) -> tuple[CellSamples, dict[str, list[StepTiming]]]:
    """Samples until every cell has settled and the table ranks budgets, or time is up."""
    cells = [Cell(**item) for item in replicas.broadcast("cells", options.full)[0]]
    samples = CellSamples(cells, options.repeats, options.max_spread)
    shares: dict[str, list[StepTiming]] = defaultdict(list)
    deadline = time.monotonic() + options.time_limit_s
    console.print(
        f"timing {len(cells)} kinds of step, {options.repeats} times each, for at most "
        f"{options.time_limit_s:.0f} s",
        highlight=False,
    )
    with progress(console) as bars:
        bar = bars.add_task("timing", total=samples.missing(), note="")
        while time.monotonic() < deadline:
            todo = _todo(samples, cells)
            if not todo:
                break
            _one_round(replicas, todo, samples, shares, (bars, bar))
    return samples, shares


def _todo(samples: CellSamples, cells: Sequence[Cell]) -> list[Cell]:
    """What to measure next: unsettled cells, or all if they contradict each other, or nothing."""
    todo = samples.unsettled()
    if not todo:
        try:
            samples.table()
        except CostTableError:
            return list(cells)  # settled one by one, at speeds that do not fit together
    return todo


def _one_round(
    replicas: Replicas,
    todo: Sequence[Cell],
    samples: CellSamples,
    shares: dict[str, list[StepTiming]],
    shown: tuple[Progress, TaskID],
) -> None:
    bars, bar = shown
    portion = min(_PORTION, max(1, len(todo) // replicas.count))
    portions = rounds_of(todo, portion)
    tasks = [[asdict(cell) for cell in cells] for cells in portions]
    for _, result in replicas.map(tasks):
        timings = [_as_timing(item) for item in result["samples"]]
        samples.add(timings)
        shares[result["replica"]] += timings
        done = samples.num_samples
        bars.update(bar, completed=done, total=done + samples.missing())
    unsettled = len(samples.unsettled())
    bars.update(bar, note=f"{unsettled} of {len(samples)} not settled" if unsettled else "settled")


def _as_timing(item: dict[str, Any]) -> StepTiming:
    return StepTiming(
        StepMode(item["mode"]),
        StepShape(item["shape"]),
        num_requests=item["num_requests"],
        num_tokens=item["num_tokens"],
        kv_tokens=item["kv_tokens"],
        forward_ms=item["forward_ms"],
        draft_ms=item["draft_ms"],
        draft_width=item["draft_width"] or None,
    )


def _trusted(samples: CellSamples, allocation_ms: float) -> CostTable:
    try:
        return samples.table(allocation_ms)
    except CostTableError as error:
        load = os.getloadavg()[0]
        raise UntrustedError(
            f"{error}. Nothing was saved. The load of this machine is {load:.1f} on "
            f"{os.cpu_count()} CPUs: stop what else runs on it, pin the engine to cores of its own "
            "(taskset, VLLM_CPU_OMP_THREADS_BIND), fix the clocks of a GPU (nvidia-smi -lgc), give "
            "it longer (--time-limit), or accept more scatter (--max-spread)"
        ) from error


def _relative(shares: dict[str, list[StepTiming]], table: CostTable) -> dict[str, float]:
    """How each replica's target steps compare with the table: 1.05 is 5 % slower."""
    found = {}
    for name, timings in sorted(shares.items()):
        ratios = []
        for timing in timings:
            if timing.draft_width is not None:
                continue
            grid = table.grids[timing.mode, timing.shape]
            row, column = (
                grid.kv_tokens.index(timing.kv_tokens),
                grid.sizes.index(timing.num_tokens),
            )
            ratios.append(timing.forward_ms / float(grid.median_ms[row, column]))
        found[name] = round(statistics.median(ratios), 3)
    return found


def show(report: ProfileReport, console: Console) -> None:
    """The curve in a table with bars, and where it was saved."""
    console.print(curve(report.record))
    console.print(
        f"{report.num_samples} samples in {report.seconds:.0f} s, typical scatter "
        f"{report.median_spread:.1%}",
        highlight=False,
    )
    if len(report.replica_cost) > 1:
        told = ", ".join(f"{name} {ratio:.2f}" for name, ratio in report.replica_cost.items())
        console.print(f"cost by replica, against the table: {told}", highlight=False)
    for path in report.paths:
        console.print(f"saved {path}", highlight=False, soft_wrap=True)


def curve(record: CostTableRecord) -> Table:
    """Step times by size and KV load, with a bar for the time at the lowest load."""
    view = Table(title="time of a step")
    view.add_column("tokens", justify="right")
    grid = record.grids[0]
    for kv in grid.kv_tokens:
        view.add_column(f"ms at {kv} KV", justify="right")
    view.add_column("+-", justify="right")
    view.add_column("", justify="left")
    longest = max(grid.median_ms[0])
    for index, size in enumerate(grid.sizes):
        times = [row[index] for row in grid.median_ms]
        spread = max(row[index] for row in grid.spread_ms)
        view.add_row(
            str(size),
            *(f"{ms:.2f}" for ms in times),
            f"{spread:.2f}",
            "█" * max(1, round(30 * times[0] / longest)),
        )
    draft = record.draft
    view.add_section()
    for index, requests in enumerate(draft.sizes):
        blanks = [""] * (len(grid.kv_tokens) - 1)
        spread_ms = f"{draft.spread_ms[0][index]:.2f}"
        drafted = f"draft, {requests}"
        view.add_row(drafted, f"{draft.median_ms[0][index]:.2f}", *blanks, spread_ms, "")
    for narrow in record.narrow_draft:
        for index, requests in enumerate(narrow.sizes):
            blanks = [""] * (len(grid.kv_tokens) - 1)
            spread_ms = f"{narrow.spread_ms[0][index]:.2f}"
            drafted = f"{narrow.columns} columns, {requests}"
            view.add_row(drafted, f"{narrow.median_ms[0][index]:.2f}", *blanks, spread_ms, "")
    return view
