"""Runs all cells: engines stay up, modes take turns, every cell is kept as soon as it is there.

A chunk is one (workload, concurrency, temperature, repeat): all its modes one after the other, in
an order that rotates from chunk to chunk, under the gate. Repeats are the outermost loop, so that
an interrupted run has something of everything, and a slow hour of the machine meets all rows.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_dspark.bench.fleet import Deadline, Fleet, Limits, MakeHost
from vllm_dspark.bench.gate import HeldGate
from vllm_dspark.bench.modes import BenchError, EngineLaunch, Mode
from vllm_dspark.bench.process import Host, machine_cpu_seconds
from vllm_dspark.bench.progress import Progress
from vllm_dspark.bench.store import Cell, CellKey, CellStore
from vllm_dspark.bench.workload import CellOrder, Question, Sizes, Workload, make_cell

Chunk = tuple[Workload, int, float, int]  # workload, concurrency, temperature, repeat
WARM_UP = -1  # repeat number of cells that are run and thrown away


@dataclass(frozen=True)
class Grid:
    """Which cells to measure."""

    workloads: tuple[Workload, ...]
    concurrencies: tuple[int, ...]
    temperatures: tuple[float, ...]
    repeats: int
    modes: tuple[Mode, ...]
    sizes: Sizes
    slice_s: float = 0.0  # cells of a chunk take turns of this length; 0: one after the other

    @property
    def loads(self) -> list[int]:
        """Every load of any workload, ascending."""
        return sorted({load for w in self.workloads for load in w.only or self.concurrencies})

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, repeats outermost."""
        for repeat in range(self.repeats):
            for workload in self.workloads:
                for temperature in self.temperatures:
                    for concurrency in workload.only or self.concurrencies:
                        yield workload, concurrency, temperature, repeat


@dataclass(frozen=True)
class Gates:
    """Commands that wait for the machine: while engines start, and while a chunk is measured."""

    start: str = ""  # around engine starts
    chunk: str = ""  # around chunks
    seconds: float = 0.0  # how long a gate is held, if more than one start or chunk fits


def run(
    grid: Grid,
    questions: Sequence[Question],
    engines: Sequence[EngineLaunch],
    make_host: MakeHost,
    store: CellStore,
    progress: Progress,
    gates: Gates | None = None,
    limits: Limits | None = None,
) -> dict[str, Any]:
    """Measure what the store lacks; returns facts about the engines by mode."""
    gates, limits = gates or Gates(), limits or Limits()
    missing = {key for key in _keys(grid) if key not in store}
    progress.total(len(missing))
    if not missing:
        return {}
    deadline = Deadline(limits.seconds)

    def warm_up(host: Host, launch: EngineLaunch) -> None:
        _warm_up(host, launch, grid, questions)

    with Fleet(make_host, warm_up, progress, limits) as fleet:
        names = {key.mode for key in missing}
        wanted = [e for e in engines if names & {mode.name for mode in e.modes}]
        with HeldGate(gates.start, gates.seconds) as gate:
            fleet.start(wanted, gate, deadline)
        with HeldGate(gates.chunk, gates.seconds) as gate:
            for cell in _cells(grid, questions, fleet, missing, gate, deadline):
                store.add(cell)
                missing.discard(cell.key)
                progress.cell(cell)
        if missing:
            progress.out_of_time(len(missing))
        return fleet.facts


def _cells(
    grid: Grid,
    questions: Sequence[Question],
    fleet: Fleet,
    missing: set[CellKey],
    gate: HeldGate,
    deadline: Deadline,
) -> Iterator[Cell]:
    """Missing cells, chunk by chunk, those left out that would not be done in time."""
    took: dict[tuple[str, int, float], float] = {}  # by kind of chunk, the last time
    for number, chunk in enumerate(grid.chunks()):
        wanted = [m for m in _rotated(grid.modes, number) if _key(chunk, m) in missing]
        modes = [mode for mode in wanted if mode.name in fleet.hosts]
        kind = (chunk[0].name, chunk[1], chunk[2])
        longest = max(took.values(), default=0.0)
        if not modes or not deadline.fits(took.get(kind, longest)):
            continue
        order = make_cell(chunk[0], questions, *chunk[1:], grid.sizes)
        begun = time.monotonic()
        with gate.chunk():
            if grid.slice_s:
                found = _sliced(modes, order, fleet.hosts, grid.slice_s)
            else:
                found = _in_turn(modes, order, fleet)
            for mode, figures in found:
                yield Cell(_key(chunk, mode), figures)
        took[kind] = time.monotonic() - begun


Figures = dict[str, Any]


def _in_turn(
    modes: Sequence[Mode], order: CellOrder, fleet: Fleet
) -> Iterator[tuple[Mode, Figures]]:
    """One whole cell after the other."""
    for mode in modes:
        host = fleet.hosts.get(mode.name)
        if host is None:  # its engine failed in another mode of this chunk
            continue
        try:
            figures = _measured(host, mode, order, fleet.hosts)
        except BenchError as error:
            fleet.drop(mode, error)
            continue
        yield mode, figures


def _sliced(
    modes: Sequence[Mode], order: CellOrder, hosts: dict[str, Host], seconds: float
) -> Iterator[tuple[Mode, Figures]]:
    """A slice of each cell in turn until all are done.

    Which engine was idle when cannot be told apart any more: `foreign` is the chunk's, in shares.
    """
    used = {mode.name: hosts[mode.name].cpu_seconds() for mode in modes}
    machine = machine_cpu_seconds()
    done: dict[str, Figures] = {}
    for mode in modes:
        figures = hosts[mode.name].begin(mode, order, seconds)
        if figures is not None:
            done[mode.name] = figures
    while left := [mode for mode in modes if mode.name not in done]:
        for mode in left:
            figures = hosts[mode.name].proceed(seconds)
            if figures is not None:
                done[mode.name] = figures
    used = {name: hosts[name].cpu_seconds() - before for name, before in used.items()}
    foreign = max(0.0, machine_cpu_seconds() - machine - sum(used.values()))
    total = sum(figures["seconds"] for figures in done.values())
    for mode in modes:
        figures, own = done[mode.name], used[mode.name]
        taken = foreign * figures["seconds"] / total
        cpu = {"engine": own, "idle_engines": 0.0, "foreign": taken}
        yield mode, {**figures, "cpu_s": cpu}


def _measured(host: Host, mode: Mode, order: CellOrder, hosts: dict[str, Host]) -> dict[str, Any]:
    """One cell, and what else the machine did meanwhile."""
    own, machine = host.cpu_seconds(), machine_cpu_seconds()
    others = {id(other): other for other in hosts.values() if other is not host}
    idle = sum(other.cpu_seconds() for other in others.values())
    figures = host.run(mode, order)
    idle = sum(other.cpu_seconds() for other in others.values()) - idle
    own, machine = host.cpu_seconds() - own, machine_cpu_seconds() - machine
    # foreign: neither the engine measured nor the idle ones; a figure above a few per cent of
    # `engine` means that the machine was not quiet
    foreign = max(0.0, machine - own - idle)
    return {**figures, "cpu_s": {"engine": own, "idle_engines": idle, "foreign": foreign}}


def _warm_up(host: Host, launch: EngineLaunch, grid: Grid, questions: Sequence[Question]) -> None:
    """Run what compiles or loads on first use: all temperatures alone, and the largest load."""
    cells = [(grid.loads[0], temperature) for temperature in grid.temperatures]
    cells.append((grid.loads[-1], grid.temperatures[-1]))
    for concurrency, temperature in cells:
        sizes = Sizes(tokens_per_request=2, least=12)
        order = make_cell(grid.workloads[0], questions, concurrency, temperature, WARM_UP, sizes)
        for mode in launch.modes:
            host.run(mode, order)


def _keys(grid: Grid) -> Iterator[CellKey]:
    for chunk in grid.chunks():
        for mode in grid.modes:
            yield _key(chunk, mode)


def _key(chunk: Chunk, mode: Mode) -> CellKey:
    workload, concurrency, temperature, repeat = chunk
    return CellKey(workload.name, concurrency, temperature, mode.name, repeat)


def _rotated(modes: Sequence[Mode], by: int) -> list[Mode]:
    start = by % len(modes)
    return [*modes[start:], *modes[:start]]
