"""`vllm-dspark bench`: modes x load x temperature, interleaved, on this machine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from vllm_dspark.artifacts.store import write_atomic
from vllm_dspark.bench import plots, report
from vllm_dspark.bench.fleet import Limits
from vllm_dspark.bench.identity import SOURCE, fingerprint
from vllm_dspark.bench.modes import BenchError, EngineLaunch, Mode, PairSpec, plan_engines
from vllm_dspark.bench.process import Host, WorkerHost
from vllm_dspark.bench.progress import Progress
from vllm_dspark.bench.runner import Gates, Grid, run
from vllm_dspark.bench.server import ServerHost
from vllm_dspark.bench.store import Cell, CellStore, read_cells
from vllm_dspark.bench.workload import (
    WORKLOADS,
    Question,
    Sizes,
    Workload,
    load_questions,
    random_questions,
)
from vllm_dspark.cli.bench_checks import check, pair_fields
from vllm_dspark.cli.demo import stop_on_signals
from vllm_dspark.cli.numbers import Within
from vllm_dspark.cli.output import make_folder
from vllm_dspark.cli.serve import serve_environment
from vllm_dspark.config import process_environment
from vllm_dspark.cpu.build import is_cpu_build
from vllm_dspark.demo.prompts import DOMAINS, prompts_of
from vllm_dspark.demo.target import drafter_path, ensure_target

__all__ = ["BenchOptions", "check", "compare", "run_bench"]

_RANDOM_LENGTH = 128  # tokens of a random prompt, as in DESIGN.md's table


@dataclass(frozen=True)
class BenchOptions:
    """What the command line says."""

    out: Path
    modes: tuple[Mode, ...]
    concurrencies: tuple[int, ...]
    temperatures: tuple[float, ...]
    workloads: tuple[Workload, ...]
    repeats: int
    sizes: Sizes
    target: str | None = None
    drafter: str | None = None
    prompts: Path | None = None
    max_prompt_characters: int = 400
    replays: tuple[Path, ...] = ()  # traces whose acceptance and confidences all modes repeat
    pair: dict[str, Any] = field(default_factory=dict)  # other fields of PairSpec
    slice_s: float = 0.0
    server: bool = False
    share_engines: bool = False
    engine_process: bool = False
    outrank: bool = False
    gates: Gates = field(default_factory=Gates)
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def parse(
        cls,
        *,
        modes: str,
        concurrencies: str,
        temperatures: str,
        workloads: str,
        sizes: tuple[int, int, int],
        pair: str,
        gates: tuple[str, str, float],
        limits: tuple[float, int, bool],
        **others: Any,
    ) -> BenchOptions:
        """From the command line's texts; BenchError names the option that cannot be read."""
        return cls(
            modes=tuple(_items("--modes", modes, Mode.parse)),
            concurrencies=tuple(_items("--concurrency", concurrencies, _requests)),
            temperatures=tuple(_items("--temperature", temperatures, _temperature)),
            workloads=tuple(_items("--workload", workloads, _workload)),
            sizes=Sizes(*sizes),
            pair=pair_fields(pair),
            gates=Gates(*gates),
            limits=Limits(*limits),
            **others,
        )


_Item = TypeVar("_Item")
_requests = Within(int, 1, 65536)
_temperature = Within(float, 0.0, 100.0)


def _items(option: str, text: str, read: Callable[[str], _Item]) -> list[_Item]:
    try:
        found = [read(part.strip()) for part in text.split(",")]
    except ValueError as error:
        raise BenchError(f"{option} {text!r}: {error}") from error
    if len(set(found)) < len(found):
        raise BenchError(f"{option} {text!r}: something is there twice")
    return found


def _workload(text: str) -> Workload:
    """`burst`, or `burst@128+256`: only at these loads."""
    name, limited, loads = text.partition("@")
    if name not in WORKLOADS:
        raise ValueError(f"{name!r} is no workload; choose from {', '.join(WORKLOADS)}")
    only = tuple(map(_requests, loads.split("+"))) if limited else ()
    return dataclasses.replace(WORKLOADS[name], only=only)


def run_bench(options: BenchOptions, console: Console) -> dict[str, Any]:
    """Measure what is missing in the run's folder, then write report, plots and tables.

    options: as `bench_checks.check` found them good.
    """
    make_folder(options.out, "--out", parents=True)
    pair = _pair(options)
    grid = _grid(options)
    questions = _questions(options, pair)
    engines = plan_engines(
        list(grid.modes), pair, is_cpu=is_cpu_build(), share=options.share_engines
    )
    transport = _transport(options)
    identity = fingerprint(pair, grid.workloads, questions, grid.sizes, transport)
    store = CellStore(options.out / "cells.jsonl", identity)
    with stop_on_signals(), BarProgress(console) as progress:
        facts = run(
            grid,
            questions,
            engines,
            _host_maker(options),
            store,
            progress,
            options.gates,
            options.limits,
        )
    found = report.make_report(
        identity,
        store.cells.values(),
        settings=_settings(options),
        conditions={"engines": facts, "transport": transport, "outrank": options.outrank},
    )
    write_report(found, options.out, "bench", console)
    return found


def compare(files: Sequence[Path], out: Path, console: Console) -> dict[str, Any]:
    """One report of several runs' cells; refuses runs of different fingerprints."""
    identity, cells = read_cells(files, ignore=SOURCE)
    found = report.make_report(identity, cells)
    make_folder(out, "--out", parents=True)
    write_report(found, out, "bench", console)
    return found


def write_report(found: dict[str, Any], folder: Path, stem: str, console: Console) -> None:
    """JSON, tables and plots of one report."""
    write_atomic(folder / f"{stem}.json", json.dumps(found, indent=1) + "\n")
    header, lines = report.header_and_lines(found)
    console.print(_table("output tokens/s, medians", header, lines))
    drafts = report.drafts_table(found)
    if drafts[1]:
        console.print(_table("ours: drafts and steps", *drafts))
    if plots.available():
        plots.draw(found, folder, stem)
    else:
        console.print(plots.INSTALL_HINT)
    console.print(f"written to {folder / stem}.json", highlight=False)


def _table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    table = Table(title=title)
    for name in header:
        table.add_column(name, justify="right")
    for line in lines:
        table.add_row(*(cell.replace("**", "") for cell in line))
    return table


def _pair(options: BenchOptions) -> PairSpec:
    if options.target is None or options.drafter is None:
        target, drafter = str(ensure_target()), str(drafter_path())
    else:
        target, drafter = options.target, options.drafter
    seqs = _grid(options).loads[-1]
    replayed = bool(options.replays)
    fields = {"max_num_seqs": seqs, **options.pair, "replayed": replayed}
    return PairSpec(target, drafter, **fields)


def _grid(options: BenchOptions) -> Grid:
    return Grid(
        _replayed(options.workloads, options.replays),
        options.concurrencies,
        options.temperatures,
        options.repeats,
        options.modes,
        options.sizes,
        options.slice_s,
    )


def _replayed(workloads: Sequence[Workload], replays: Sequence[Path]) -> tuple[Workload, ...]:
    """Every workload with every recording, each a row of its own if there are several."""
    if not replays:
        return tuple(workloads)
    return tuple(
        dataclasses.replace(
            workload,
            name=f"{workload.name}, {path.stem}" if len(replays) > 1 else workload.name,
            replay=str(path),
        )
        for workload in workloads
        for path in replays
    )


def _questions(options: BenchOptions, pair: PairSpec) -> list[Question]:
    if not pair.has_tokenizer:
        return random_questions(256, _RANDOM_LENGTH)
    if options.prompts is not None:
        return load_questions(options.prompts, options.max_prompt_characters)
    return [Question(p.domain, p.text) for domain in DOMAINS for p in prompts_of(domain)]


def _transport(options: BenchOptions) -> str:
    if options.server:
        return "server"
    return "engine core process" if options.engine_process else "in process"


def _host_maker(options: BenchOptions) -> Any:
    environment = serve_environment(process_environment())
    environment.pop("VLLM_USE_V2_MODEL_RUNNER", None)  # each mode decides anew
    environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1" if options.engine_process else "0"

    def make(launch: EngineLaunch) -> Host:
        if options.server:
            apart = {**environment, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
            return ServerHost(launch, apart, options.out, favoured=options.outrank)
        return WorkerHost(launch, environment, options.out, favoured=options.outrank)

    return make


def _settings(options: BenchOptions) -> dict[str, Any]:
    """The options without paths of this machine."""
    return {
        "modes": [mode.name for mode in options.modes],
        "concurrencies": list(options.concurrencies),
        "temperatures": list(options.temperatures),
        "workloads": [
            "@".join([w.name, "+".join(map(str, w.only))] if w.only else [w.name])
            for w in options.workloads
        ],
        "repeats": options.repeats,
        "slice_s": options.slice_s,
        "tokens_per_request": options.sizes.tokens_per_request,
        "prompts": options.prompts.name if options.prompts else "demo",
        "replays": [path.name for path in options.replays],
        **{k: v for k, v in options.pair.items() if k != "plugin_options"},
    }


class BarProgress(Progress):
    """A progress bar; every engine start and cell is also a line where there is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._bar.add_task("cells", total=None)

    def __enter__(self) -> BarProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def starting(self, launch: EngineLaunch) -> None:
        names = ", ".join(mode.name for mode in launch.modes)
        self._bar.update(self._task, description=f"starting {names}")
        self._say(f"starting {names} ...")

    def started(self, launch: EngineLaunch, facts: dict[str, Any]) -> None:
        names = ", ".join(mode.name for mode in launch.modes)
        self._say(f"{names}: engine up after {facts.get('start_s', 0.0):.0f} s")

    def failed(self, mode: Mode, error: BenchError) -> None:
        self._say(f"{mode.name} is left out: {error}")

    def out_of_time(self, cells: int) -> None:
        self._say(f"{cells} cells are left; the same command goes on with them")

    def total(self, cells: int) -> None:
        self._bar.update(self._task, total=cells)

    def cell(self, cell: Cell) -> None:
        key = cell.key
        text = (
            f"{key.workload} T={key.temperature:g} requests={key.concurrency} "
            f"repeat={key.repeat} {key.mode}"
        )
        self._bar.update(self._task, description=text, advance=1)
        foreign = cell.figures["cpu_s"]["foreign"]
        self._say(
            f"{text}: {cell.tokens_per_s:.1f} tokens/s in {cell.figures['seconds']:.1f} s"
            + (f" ({foreign:.1f} s of CPU were taken by others)" if foreign > 0.5 else "")
        )

    def _say(self, line: str) -> None:
        self._bar.console.print(line, highlight=False, markup=False)
