"""The `vllm-dspark` command.

Exit codes: see exits.py. `serve` has the exit codes of `vllm serve`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from vllm_dspark import __version__
from vllm_dspark.cli import measuring_commands as measuring
from vllm_dspark.cli.doctor import cli as doctor_cli
from vllm_dspark.cli.exits import EXIT_USAGE, fail
from vllm_dspark.cli.numbers import number
from vllm_dspark.cli.simulate import cli as simulate_cli
from vllm_dspark.cli.top import cli as top_cli

# More would be a mistyped number: no cell of a benchmark needs it.
_TOKENS = 10_000_000

app = typer.Typer(
    name="vllm-dspark",
    help="DSpark speculative decoding for vLLM.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"vllm-dspark {__version__}")
        raise typer.Exit()


@app.callback()
def _group(
    _version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the plugin's version."
        ),
    ] = False,
) -> None:
    """DSpark speculative decoding for vLLM."""


@app.command(
    epilog="Example: vllm-dspark demo --json result.json",
)
def demo(
    *,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help='Write the result to FILE ("-": print it).'),
    ] = None,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32 (outputs equal throughout).")] = (
        "bfloat16"
    ),
    prompts: Annotated[int, number(min=1, max=12, help="Prompts per domain.")] = 4,
    max_tokens: Annotated[int, number(min=2, max=1024, help="Tokens per answer.")] = 96,
    rounds: Annotated[int, number(min=1, max=1000, help="Timed repeats of every prompt.")] = 3,
    concurrency: Annotated[int, number(min=2, max=8, help="Requests of a wave.")] = 4,
    num_speculative_tokens: Annotated[
        int,
        number("-k", "--num-speculative-tokens", min=1, max=1024, help="Drafts per step."),
    ] = 7,
    drafter: Annotated[
        Path | None, typer.Option(help="Another drafter than the packaged one.")
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Keep the servers' logs in this folder (a short path).")
    ] = None,
    compile_model: Annotated[
        bool, typer.Option("--compile/--eager", help="Let vLLM compile the models (slow start).")
    ] = False,
) -> None:
    """Compare vLLM without speculation and with DSpark on a small real model, on this machine."""
    from vllm_dspark.cli import demo as command
    from vllm_dspark.cli.output import console_for, require_writable, write_json
    from vllm_dspark.cli.serve import INSTALL_HINT, has_vllm
    from vllm_dspark.demo.client import ServerError
    from vllm_dspark.demo.target import TargetError
    from vllm_dspark.errors import DSparkError, InputError

    if dtype not in ("bfloat16", "float32"):
        fail(f"--dtype {dtype!r}: choose bfloat16 or float32", EXIT_USAGE)
    if drafter is not None and not (drafter / "config.json").is_file():
        fail(f"--drafter {drafter}: there is no config.json in it", EXIT_USAGE)
    if not has_vllm():
        fail(INSTALL_HINT)
    options = command.DemoOptions(
        dtype=dtype,
        prompts=prompts,
        max_tokens=max_tokens,
        rounds=rounds,
        concurrency=concurrency,
        num_speculative_tokens=num_speculative_tokens,
        drafter=drafter,
        log_folder=logs,
        compile=compile_model,
    )
    try:
        require_writable(json_file, "--json")
        report = command.run_demo(options, console_for(json_file))
        write_json(json_file, json.dumps(report.as_json(), indent=2))
    except InputError as error:
        fail(str(error), EXIT_USAGE)
    except (DSparkError, TargetError, ServerError, OSError) as error:
        fail(str(error))
    if not report.identity.holds:
        fail("greedy outputs differ from those without speculation")


class _PassThrough(TyperCommand):
    """Leaves every argument alone: `--help`, unknown flags and `--` belong to vLLM."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        # ctx is click's Context, which typer may or may not bring along under its own name
        ctx.args = list(args)
        return args


@app.command(
    cls=_PassThrough,
    add_help_option=False,
    epilog="Example: vllm-dspark serve TARGET --speculative-config "
    '\'{"method":"dspark","model":"DRAFTER"}\'',
)
def serve(context: typer.Context) -> None:
    """Start a server: takes what `vllm serve` takes, also on the CPU build."""
    from vllm_dspark.cli.serve import INSTALL_HINT, has_vllm, replace_process

    if not has_vllm():
        fail(INSTALL_HINT)
    replace_process(context.args)


@app.command(
    epilog="Example: vllm-dspark bench --modes off,fixed3,fixed7,ours --concurrency 1,8,32",
)
def bench(
    *,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Cells, report, plots and logs go here.")
    ] = Path("bench-results"),
    modes: Annotated[
        str, typer.Option(help="Of off, off-v2, fixedK, pluginK, adaptive, ours, ours-full.")
    ] = "off,fixed3,fixed7,ours",
    concurrency: Annotated[str, typer.Option(help="Requests in flight, comma-separated.")] = (
        "1,4,16"
    ),
    temperature: Annotated[str, typer.Option(help="Temperatures, comma-separated.")] = "0",
    workload: Annotated[
        str,
        typer.Option(help="Of decode, short, long, shift, burst, prefill; burst@256: only there."),
    ] = ("short"),
    repeats: Annotated[int, number(min=1, max=1000, help="Interleaved repeats of every cell.")] = 3,
    tokens: Annotated[
        int,
        number(min=1, max=_TOKENS, help="Output tokens of a cell per request in flight."),
    ] = 24,
    least_tokens: Annotated[
        int, number(min=1, max=_TOKENS, help="But at least so many a cell.")
    ] = 120,
    most_tokens: Annotated[
        int,
        number(min=1, max=_TOKENS, help="And at most so many (a GPU makes thousands a second)."),
    ] = 4096,
    time_limit: Annotated[
        float,
        number(min=0.0, max=1e6, help="Start nothing that is not done after so many seconds."),
    ] = 0.0,
    parallel_starts: Annotated[
        int,
        number(min=1, max=64, help="Engines that start at once (those that time steps do not)."),
    ] = 1,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Leave out a mode that fails, measure the others.")
    ] = False,
    target: Annotated[str | None, typer.Option(help="Target model; default: the demo's.")] = None,
    drafter: Annotated[str | None, typer.Option(help="Its DSpark drafter.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON lines with "prompt" and "domain"; default: demo.')
    ] = None,
    pair: Annotated[
        str, typer.Option(metavar="JSON", help="Settings of all engines (PairSpec's fields).")
    ] = "{}",
    replay: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="TRACE",
            help="Repeat recorded confidences and acceptance in all modes (random weights).",
        ),
    ] = None,
    server: Annotated[
        bool, typer.Option("--server/--offline", help="HTTP servers with streaming clients.")
    ] = False,
    engine_process: Annotated[
        bool,
        typer.Option(
            "--engine-process/--in-process",
            help="Offline: engine core in a process of its own, as servers have it.",
        ),
    ] = False,
    share_engines: Annotated[
        bool,
        typer.Option("--share-engines", help="Run ours and pluginK in one engine."),
    ] = False,
    slices: Annotated[
        float,
        number(min=0.0, max=1e6, help="Modes take turns of so many seconds within a cell."),
    ] = 0.0,
    outrank: Annotated[
        bool, typer.Option("--outrank", help="Engines go before all else on the machine (root).")
    ] = False,
    gate: Annotated[str, typer.Option(help="Command prefix that waits for a quiet machine.")] = "",
    gate_seconds: Annotated[
        float,
        number(min=0.0, max=1e6, help="Hold gates over several starts or rows, up to so long."),
    ] = 0.0,
    start_gate: Annotated[str, typer.Option(help="The same, around engine starts.")] = "",
    compare: Annotated[
        list[Path] | None,
        typer.Option(help="Measure nothing: one report of these cells.jsonl files."),
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help='Write the report here too ("-": print it).'),
    ] = None,
) -> None:
    """Measure modes side by side: throughput, latency, drafts; resumes what was interrupted."""
    from vllm_dspark.bench.modes import BenchError
    from vllm_dspark.cli import bench as command
    from vllm_dspark.cli.output import console_for, require_writable, write_json
    from vllm_dspark.cli.serve import INSTALL_HINT, has_vllm
    from vllm_dspark.demo.client import ServerError
    from vllm_dspark.demo.target import TargetError
    from vllm_dspark.errors import DSparkError, InputError

    console = console_for(json_file)
    try:
        require_writable(json_file, "--json")
        if compare:
            write_json(json_file, json.dumps(command.compare(compare, out, console), indent=1))
            return
        options = command.BenchOptions.parse(
            out=out,
            modes=modes,
            concurrencies=concurrency,
            temperatures=temperature,
            workloads=workload,
            repeats=repeats,
            sizes=(tokens, least_tokens, most_tokens),
            pair=pair,
            target=target,
            drafter=drafter,
            prompts=prompts,
            replays=tuple(replay or ()),
            server=server,
            engine_process=engine_process,
            share_engines=share_engines,
            slice_s=slices,
            outrank=outrank,
            gates=(start_gate, gate, gate_seconds),
            limits=(time_limit, parallel_starts, keep_going),
        )
        command.check(options)
    except (BenchError, InputError) as error:
        fail(str(error), EXIT_USAGE)
    if not has_vllm():
        fail(INSTALL_HINT)
    try:
        write_json(json_file, json.dumps(command.run_bench(options, console), indent=1))
    except InputError as error:
        fail(str(error), EXIT_USAGE)
    except (DSparkError, TargetError, ServerError, OSError) as error:
        fail(str(error))


@app.command(epilog="Example: vllm-dspark version --json")
def version(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Print the versions of this plugin and of what it runs on."""
    from vllm_dspark.cli.versions import installed_versions

    found = installed_versions()
    if as_json:
        typer.echo(json.dumps(found))
        return
    for name, installed in found.items():
        typer.echo(f"{name} {installed or 'not installed'}")


app.command(epilog=measuring.PROFILE_EXAMPLE, **measuring.FORWARDING)(measuring.profile)
app.command(epilog=measuring.CALIBRATE_EXAMPLE, **measuring.FORWARDING)(measuring.calibrate)
app.command(epilog=measuring.PLOT_EXAMPLE)(measuring.plot)

app.command(epilog=doctor_cli.EPILOG, **doctor_cli.FORWARDING)(doctor_cli.doctor)
app.command(epilog=simulate_cli.EPILOG)(simulate_cli.simulate)
app.command(epilog=top_cli.EPILOG)(top_cli.top)


if __name__ == "__main__":
    app()
