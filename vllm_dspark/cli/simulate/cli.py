"""Arguments and help of `vllm-dspark simulate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_dspark.cli.exits import EXIT_USAGE, code_of, fail
from vllm_dspark.cli.numbers import Within, number, number_list

EPILOG = (
    "Example: vllm-dspark simulate --trace pairs.jsonl --cost-table cost-table.json "
    "--concurrency 1,16,64 --min-gain 0,0.04"
)
_INPUT, _LOAD, _ENGINE, _MACHINE = "Input", "Load", "Engine", "Machine"


# Far above what is measured anywhere, far below what would run for hours or out of memory.
_REQUESTS, _TOKENS, _ENGINES, _RATIO = 1_000_000, 1_000_000, 4096, 1000.0


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
        number(
            min=0.0,
            max=1e6,
            help="Time per step beside the priced part.",
            rich_help_panel=_INPUT,
        ),
    ] = None,
    prompt_tokens: Annotated[
        int,
        number(
            min=1,
            max=_TOKENS,
            help="Length of prompts that pairs do not tell.",
            rich_help_panel=_INPUT,
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
        int,
        number(min=1, max=_REQUESTS, help="Requests of a burst.", rich_help_panel=_LOAD),
    ] = 32,
    requests: Annotated[
        int | None,
        number(
            min=1, max=_REQUESTS, help="Requests in all; default: by load.", rich_help_panel=_LOAD
        ),
    ] = None,
    seed: Annotated[int, number(min=0, max=2**32 - 1, rich_help_panel=_LOAD)] = 0,
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
        number(
            min=0, max=3, help="Draft passes until a confidence is seen.", rich_help_panel=_ENGINE
        ),
    ] = 1,
    max_num_seqs: Annotated[int, number(min=1, max=65536, rich_help_panel=_ENGINE)] = 256,
    max_num_batched_tokens: Annotated[
        int, number(min=1, max=_TOKENS, rich_help_panel=_ENGINE)
    ] = 8192,
    hysteresis: Annotated[int, number(min=0, max=1000, rich_help_panel=_ENGINE)] = 4,
    skip_draft: Annotated[bool, typer.Option(rich_help_panel=_ENGINE)] = True,
    drain_guard: Annotated[bool, typer.Option(rich_help_panel=_ENGINE)] = True,
    probe_interval: Annotated[int, number(min=2, max=100_000, rich_help_panel=_ENGINE)] = 32,
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
        float,
        number(
            min=0.01,
            max=1.0,
            help="Kept by each doubling of TP.",
            rich_help_panel=_MACHINE,
        ),
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
    from vllm_dspark.cli.simulate import command, view
    from vllm_dspark.errors import DSparkError
    from vllm_dspark.simulation.scenario import Arrivals, Policy, Scenario
    from vllm_dspark.simulation.whatif import Machine

    if arrivals not in ("closed", "poisson", "burst") or windows not in ("host", "device"):
        fail("--arrivals: closed, poisson or burst; --windows: host or device", EXIT_USAGE)
    if arrivals != "closed" and not rate:
        fail(f"--arrivals {arrivals} needs --rate", EXIT_USAGE)
    console = console_for(json_file)
    at_least_one, ratio = Within(int, 1, _REQUESTS), Within(float, 0.0, _RATIO, open_below=True)
    try:
        sizes = number_list("--concurrency", concurrency, at_least_one)
        rates = number_list("--rate", rate, Within(float, 0.0, 1e6, open_below=True), needed=False)
        accepted = number_list("--acceptance", acceptance, Within(float, 0.0, 1.0), needed=False)
        widths = number_list("--k", k, Within(int, 1, 1024), needed=False)
        gains = number_list("--min-gain", min_gain, Within(float, 0.0, 0.99))
        replicas = number_list("--dp", dp, Within(int, 1, _ENGINES))
        machines = tuple(
            Machine(b, c, t, tp_efficiency)
            for b, c, t in product(
                number_list("--bandwidth", bandwidth, ratio),
                number_list("--compute", compute, ratio),
                number_list("--tp", tp, Within(int, 1, _ENGINES)),
            )
        )
        require_writable(json_file, "--json")
        require_writable(save_trace, "--save-trace")
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
            accepted,
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
            widths,
            gains,
            replicas,
            machines,
        )
        record = command.run_sweep(sweep, inputs, exact)
        command.save_trace(save_trace, inputs.trace)
        view.print_record(record, console)
        write_json(json_file, record.model_dump_json(indent=1))
    except DSparkError as error:
        fail(str(error), code_of(error))
