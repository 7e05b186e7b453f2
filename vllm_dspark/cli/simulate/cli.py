"""Arguments and help of `vllm-dspark simulate`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from vllm_dspark.cli.exits import EXIT_USAGE, code_of, fail

EPILOG = (
    "Example: vllm-dspark simulate --trace pairs.jsonl --cost-table cost-table.json "
    "--concurrency 1,16,64 --min-gain 0,0.04"
)
_Number = TypeVar("_Number", int, float)
_INPUT, _LOAD, _ENGINE, _MACHINE = "Input", "Load", "Engine", "Machine"


def _list(option: str, text: str, kind: Callable[[str], _Number]) -> tuple[_Number, ...]:
    """Comma-separated numbers of an option."""
    try:
        return tuple(kind(part) for part in text.split(",") if part.strip())
    except ValueError:
        fail(f"{option} {text!r}: write numbers with commas between them", EXIT_USAGE)


def simulate(
    *,
    trace: Annotated[
        Path | None,
        typer.Option(help="Recorded pairs or a compact trace.", rich_help_panel=_INPUT),
    ] = None,
    acceptance: Annotated[
        str,
        typer.Option(help="Instead: acceptance of each draft, commas.", rich_help_panel=_INPUT),
    ] = "",
    cost_table: Annotated[
        Path | None, typer.Option(help="Prices of steps.", rich_help_panel=_INPUT)
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Of the confidence head.", rich_help_panel=_INPUT)
    ] = None,
    overhead_ms: Annotated[
        float | None,
        typer.Option(help="Time per step beside the priced part.", rich_help_panel=_INPUT),
    ] = None,
    prompt_tokens: Annotated[
        int,
        typer.Option(
            min=1, help="Length of prompts that pairs do not tell.", rich_help_panel=_INPUT
        ),
    ] = 128,
    save_trace: Annotated[
        Path | None, typer.Option(help="Write the compact trace.", rich_help_panel=_INPUT)
    ] = None,
    concurrency: Annotated[
        str, typer.Option(help="Requests at any time, commas.", rich_help_panel=_LOAD)
    ] = "1,8,64",
    arrivals: Annotated[
        str, typer.Option(help="closed, poisson or burst.", rich_help_panel=_LOAD)
    ] = "closed",
    rate: Annotated[
        str, typer.Option(help="Requests per second of an open load.", rich_help_panel=_LOAD)
    ] = "",
    burst_size: Annotated[
        int, typer.Option(min=1, help="Requests of a burst.", rich_help_panel=_LOAD)
    ] = 32,
    requests: Annotated[
        int, typer.Option(min=0, help="Requests in all; 0: by load.", rich_help_panel=_LOAD)
    ] = 0,
    seed: Annotated[int, typer.Option(min=0, rich_help_panel=_LOAD)] = 0,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            help="off, fixed[:K], argmax, threshold:P, early_stop, ours; repeat it.",
            rich_help_panel=_ENGINE,
        ),
    ] = None,
    k: Annotated[
        str, typer.Option("-k", "--k", help="Draft widths, commas.", rich_help_panel=_ENGINE)
    ] = "",
    min_gain: Annotated[
        str, typer.Option(help="Gain margins, commas.", rich_help_panel=_ENGINE)
    ] = "0.04",
    windows: Annotated[str, typer.Option(help="host or device.", rich_help_panel=_ENGINE)] = "host",
    row_lag: Annotated[
        int,
        typer.Option(
            min=0, max=3, help="Draft passes until a confidence is seen.", rich_help_panel=_ENGINE
        ),
    ] = 1,
    max_num_seqs: Annotated[int, typer.Option(min=1, rich_help_panel=_ENGINE)] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, rich_help_panel=_ENGINE)] = 8192,
    hysteresis: Annotated[int, typer.Option(min=0, rich_help_panel=_ENGINE)] = 4,
    skip_draft: Annotated[bool, typer.Option(rich_help_panel=_ENGINE)] = True,
    drain_guard: Annotated[bool, typer.Option(rich_help_panel=_ENGINE)] = True,
    probe_interval: Annotated[int, typer.Option(min=2, rich_help_panel=_ENGINE)] = 32,
    prefill: Annotated[
        bool, typer.Option(help="Whether prompts take time.", rich_help_panel=_ENGINE)
    ] = True,
    exact: Annotated[
        bool,
        typer.Option(
            help="Drive the real planner, not its compiled twin.", rich_help_panel=_ENGINE
        ),
    ] = False,
    dp: Annotated[
        str, typer.Option(help="Data-parallel engines, commas.", rich_help_panel=_MACHINE)
    ] = "1",
    tp: Annotated[
        str,
        typer.Option(help="TP sizes relative to the table's, commas.", rich_help_panel=_MACHINE),
    ] = "1",
    tp_efficiency: Annotated[
        float, typer.Option(help="Kept by each doubling of TP.", rich_help_panel=_MACHINE)
    ] = 0.9,
    bandwidth: Annotated[
        str,
        typer.Option(help="Memory bandwidth over the measured, commas.", rich_help_panel=_MACHINE),
    ] = "1",
    compute: Annotated[
        str, typer.Option(help="Arithmetic over the measured, commas.", rich_help_panel=_MACHINE)
    ] = "1",
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help='Write the results ("-": print them).'),
    ] = None,
) -> None:
    """Replay recorded drafts under other policies, loads, widths and machines, without a GPU.

    Exit codes: 0 done, 1 failed, 2 wrong usage or an unusable file.
    """
    from itertools import product

    from vllm_dspark.cli.output import console_for, require_writable, write_json
    from vllm_dspark.cli.simulate import command
    from vllm_dspark.errors import DSparkError
    from vllm_dspark.simulation.scenario import Arrivals, Policy, Scenario
    from vllm_dspark.simulation.whatif import Machine

    if arrivals not in ("closed", "poisson", "burst") or windows not in ("host", "device"):
        fail("--arrivals: closed, poisson or burst; --windows: host or device", EXIT_USAGE)
    if arrivals != "closed" and not rate:
        fail(f"--arrivals {arrivals} needs --rate", EXIT_USAGE)
    console = console_for(json_file)
    sizes = _list("--concurrency", concurrency, int)
    rates = _list("--rate", rate, float)
    ratios = product(
        _list("--bandwidth", bandwidth, float),
        _list("--compute", compute, float),
        _list("--tp", tp, int),
    )
    try:
        require_writable(json_file)
        loads = (
            tuple(Arrivals("closed", n) for n in sizes)
            if arrivals == "closed"
            else tuple(
                Arrivals(arrivals, rate_per_s=r, burst_size=burst_size)  # type: ignore[arg-type]
                for r in rates
            )
        )
        inputs = command.read_inputs(
            trace,
            _list("--acceptance", acceptance, float),
            cost_table,
            calibration,
            overhead_ms,
            prompt_tokens,
            seed,
        )
        base = Scenario(
            Policy("ours"),
            num_requests=requests or max(512, 4 * max(sizes, default=1)),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            windows=windows,  # type: ignore[arg-type]
            row_lag=row_lag,
            prefill=prefill,
            options=command.planner_options(hysteresis, skip_draft, drain_guard, probe_interval),
            seed=seed,
        )
        sweep = command.Sweep(
            base,
            tuple(policy or command.DEFAULT_POLICIES),
            loads,
            _list("--k", k, int),
            _list("--min-gain", min_gain, float),
            _list("--dp", dp, int),
            tuple(Machine(b, c, t, tp_efficiency) for b, c, t in ratios),
        )
        record = command.run_sweep(sweep, inputs, exact, console)
        command.save_trace(save_trace, inputs.trace)
        command.print_record(record, console)
        write_json(json_file, record.model_dump_json(indent=1))
    except DSparkError as error:
        fail(str(error), code_of(error))
