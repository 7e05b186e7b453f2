"""Runs all cells: engines stay up, modes take turns, every cell is kept as soon as it is there.

A chunk is one (workload, concurrency, temperature, repeat): all its modes one after the other, in
an order that rotates from chunk to chunk, under the gate. Repeats are the outermost loop, so that
an interrupted run has something of everything, and a slow hour of the machine meets all rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from vllm_dspark.bench import gate
from vllm_dspark.bench.modes import EngineLaunch, Mode
from vllm_dspark.bench.process import Host, machine_cpu_seconds
from vllm_dspark.bench.store import Cell, CellKey, CellStore
from vllm_dspark.bench.workload import CellOrder, Question, Sizes, Workload, make_cell

Chunk = tuple[Workload, int, float, int]  # workload, concurrency, temperature, repeat
MakeHost = Callable[[EngineLaunch], Host]
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

    def chunks(self) -> Iterator[Chunk]:
        """All chunks, repeats outermost."""
        for repeat in range(self.repeats):
            for workload in self.workloads:
                for temperature in self.temperatures:
                    for concurrency in self.concurrencies:
                        yield workload, concurrency, temperature, repeat


class Progress:
    """Told about what happens; does nothing itself."""

    def starting(self, launch: EngineLaunch) -> None:
        """An engine is about to start."""

    def started(self, launch: EngineLaunch, facts: dict[str, Any]) -> None:
        """An engine is up."""

    def total(self, cells: int) -> None:
        """So many cells are to be measured."""

    def cell(self, cell: Cell) -> None:
        """A cell was measured."""


@dataclass(frozen=True)
class Gates:
    """Commands that wait for the machine: while engines start, and while a chunk is measured."""

    start: str = ""  # around engine starts
    chunk: str = ""  # around chunks
    seconds: float = 0.0  # how long a gate is held, if more than one start or chunk fits


class _Held:
    """Opens a gate for a chunk and keeps it open for further ones while there is time."""

    def __init__(self, command: str, seconds: float) -> None:
        self._command = command
        self._seconds = seconds
        self._stack = ExitStack()
        self._opened = 0.0
        self._longest = 0.0  # chunk so far

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._opened = 0.0

    @contextmanager
    def chunk(self) -> Iterator[None]:
        """The gate is open inside; afterwards only if another chunk as long would fit."""
        if not self._opened:
            self._stack.enter_context(gate.hold(self._command))
            self._opened = time.monotonic()
        begun = time.monotonic()
        yield
        self._longest = max(self._longest, time.monotonic() - begun)
        if time.monotonic() - self._opened + self._longest > self._seconds:
            self.__exit__()


def run(
    grid: Grid,
    questions: Sequence[Question],
    engines: Sequence[EngineLaunch],
    make_host: MakeHost,
    store: CellStore,
    progress: Progress,
    gates: Gates | None = None,
) -> dict[str, Any]:
    """Measure what the store lacks; returns facts about the engines by mode."""
    gates = gates or Gates()
    missing = {key for key in _keys(grid) if key not in store}
    progress.total(len(missing))
    if not missing:
        return {}
    facts: dict[str, Any] = {}
    with ExitStack() as stack:
        hosts: dict[str, Host] = {}
        with _Held(gates.start, gates.seconds) as held:
            for launch in engines:
                if not any(key.mode == mode.name for key in missing for mode in launch.modes):
                    continue
                progress.starting(launch)
                host = make_host(launch)
                stack.callback(host.stop)
                with held.chunk():
                    host.start()
                    _warm_up(host, launch, grid, questions)
                progress.started(launch, host.facts)
                for mode in launch.modes:
                    hosts[mode.name] = host
                    facts[mode.name] = host.facts
        with _Held(gates.chunk, gates.seconds) as held:
            for number, chunk in enumerate(grid.chunks()):
                modes = [m for m in _rotated(grid.modes, number) if _key(chunk, m) in missing]
                if not modes:
                    continue
                order = make_cell(chunk[0], questions, *chunk[1:], grid.sizes)
                measured = _sliced if grid.slice_s else _in_turn
                with held.chunk():
                    for mode, figures in measured(modes, order, hosts, grid.slice_s):
                        cell = Cell(_key(chunk, mode), figures)
                        store.add(cell)
                        progress.cell(cell)
    return facts


Figures = dict[str, Any]


def _in_turn(
    modes: Sequence[Mode], order: CellOrder, hosts: dict[str, Host], _: float
) -> Iterator[tuple[Mode, Figures]]:
    """One whole cell after the other."""
    for mode in modes:
        yield mode, _measured(hosts[mode.name], mode, order, hosts)


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
    cells = [(min(grid.concurrencies), temperature) for temperature in grid.temperatures]
    cells.append((max(grid.concurrencies), grid.temperatures[-1]))
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
