"""Command lines of `profile`, `calibrate` and `plot`; what they do is in the files of that name."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from vllm_dspark.cli.exits import EXIT_USAGE, code_of, fail
from vllm_dspark.cli.numbers import number
from vllm_dspark.cli.output import console_for, require_writable, write_json
from vllm_dspark.cli.spread import RayPlace
from vllm_dspark.errors import DSparkError

# Options of the measuring commands; everything else on their command lines belongs to vLLM.
FORWARDING: dict[str, Any] = {
    "options_metavar": "[OPTIONS] TARGET [OPTIONS OF VLLM SERVE]",
    "context_settings": {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": ["-h", "--help"],
    },
}
_DRAFTER = '--speculative-config \'{"method": "dspark", "model": "DRAFTER"}\''
PROFILE_EXAMPLE = f"Example: vllm-dspark profile TARGET {_DRAFTER} --full --plot cost.svg"
CALIBRATE_EXAMPLE = (
    f"Example: vllm-dspark calibrate TARGET {_DRAFTER} --prompts prompts.jsonl --json result.json"
)
PLOT_EXAMPLE = "Example: vllm-dspark plot profile.json calibrate.json --html report.html"

JsonFile = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the result as JSON (- for stdout)."),
]
RayAddress = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="Spread the work over a Ray cluster: auto (the running one), local, or an address.",
    ),
]
NumReplicas = Annotated[
    int,
    number("--replicas", min=0, max=4096, help="Engines on the cluster; 0: as many as fit."),
]
OutputFile = Annotated[
    Path | None,
    typer.Option("--output", metavar="FILE", help="Write the artifact to this file too."),
]


def profile(
    context: typer.Context,
    *,
    full: Annotated[
        bool, typer.Option("--full/--quick", help="More sizes and KV loads, twice the time.")
    ] = False,
    repeats: Annotated[int, number(min=3, max=1000, help="Samples of each kind of step.")] = 5,
    max_spread: Annotated[
        float,
        number(min=0.01, max=1.0, help="Scatter that a settled time may have."),
    ] = 0.15,
    time_limit: Annotated[
        float,
        number(min=1.0, max=1e6, help="Seconds of timing before a noisy machine is refused."),
    ] = 180.0,
    output: OutputFile = None,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the curve (PNG or SVG).")
    ] = None,
    ray: RayAddress = None,
    replicas: NumReplicas = 0,
) -> None:
    """Measure what steps cost here, and keep the table where `serve` finds it.

    Takes TARGET and the options of `vllm serve`: a table is found by a server with the same ones.
    Measures until times scatter little enough, or gives up at the time limit (exit code 3,
    nothing kept).
    """
    arguments = _engine_arguments(context)
    with _reporting(json_file) as console:
        from vllm_dspark.cli import profile as command
        from vllm_dspark.cli.draw import draw_image, require_drawable
        from vllm_dspark.cli.figures import cost_figures
        from vllm_dspark.cli.preflight import require_servable

        _require_outputs(json_file, output, plot_file)
        require_drawable(plot_file)
        require_servable(arguments, here=ray is None)
        _preload()
        options = command.ProfileOptions(
            arguments=arguments,
            full=full,
            repeats=repeats,
            max_spread=max_spread,
            time_limit_s=time_limit,
            output=output,
            ray=_place(ray, replicas, arguments),
        )
        report = command.run_profile(options, console)
        command.show(report, console)
        write_json(json_file, report.to_json())
        if plot_file is not None:
            draw_image(cost_figures(report.record.model_dump(mode="json")), plot_file)


def calibrate(
    context: typer.Context,
    *,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="JSONL file or Hugging Face dataset folder; default: the packaged samples.",
        ),
    ] = None,
    field: Annotated[
        str | None, typer.Option(help="Field that holds the prompt; default: a known name.")
    ] = None,
    limit: Annotated[
        int | None,
        number(min=2, max=10_000_000, help="Use this many prompts, chosen at random."),
    ] = None,
    temperature: Annotated[
        list[float] | None,
        typer.Option(help="Sampling temperature, may be repeated; 0 is greedy. Default: 0 and 1."),
    ] = None,
    max_tokens: Annotated[int, number(min=2, max=1_000_000, help="Tokens per answer.")] = 256,
    held_out: Annotated[
        float, typer.Option(help="Share of the prompts that judge instead of fit.")
    ] = 0.5,
    split_seed: Annotated[
        int, number(min=0, max=2**32 - 1, help="Seed of choosing and splitting.")
    ] = 0,
    min_outcomes: Annotated[
        int,
        number(min=1, max=1_000_000, help="Accepted and rejected drafts that each position needs."),
    ] = 20,
    method: Annotated[
        str,
        typer.Option(
            "--fit",
            help="sts: a temperature per position; affine: an offset too; auto: affine only where "
            "temperatures clearly fall short.",
        ),
    ] = "auto",
    chat: Annotated[
        bool, typer.Option("--chat/--raw", help="Put prompts through the chat template, or not.")
    ] = True,
    recording: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Fit from what a server recorded (option record_confidences) instead of running "
            "prompts; with TARGET and its options the result goes into the cache.",
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Judge this calibration beside, ours or another engine's temperatures.",
        ),
    ] = None,
    output: OutputFile = None,
    json_file: JsonFile = None,
    plot_file: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw ECE and reliability.")
    ] = None,
    ray: RayAddress = None,
    replicas: NumReplicas = 0,
) -> None:
    """Fit how far to trust the drafter's confidences, and keep it where `serve` finds it.

    Takes TARGET and the options of `vllm serve`. Runs the prompts at full windows, fits one
    temperature per position for greedy and for sampled requests on one half of them, and judges
    on the other half. Too little data: exit code 3, nothing kept.
    """
    arguments = _engine_arguments(context, needed=recording is None)
    with _reporting(json_file) as console:
        from vllm_dspark.cli import calibrate as command
        from vllm_dspark.cli import calibrate_view as view
        from vllm_dspark.cli.draw import require_drawable
        from vllm_dspark.cli.preflight import require_servable

        _require_outputs(json_file, output, plot_file)
        require_drawable(plot_file)
        options = command.CalibrateOptions(
            arguments=arguments,
            prompts=prompts,
            field=field,
            limit=limit,
            temperatures=tuple(temperature) if temperature else (0.0, 1.0),
            max_tokens=max_tokens,
            held_out=held_out,
            seed=split_seed,
            min_outcomes=min_outcomes,
            method=method,
            chat=chat,
            recording=recording,
            against=against,
            output=output,
            ray=_place(ray, replicas, arguments),
        )
        command.check(options)
        if arguments:
            require_servable(arguments, here=ray is None)
        if recording is None:
            _preload()
        report = command.run_calibrate(options, console)
        view.show(report, console)
        write_json(json_file, report.to_json())
        if plot_file is not None:
            view.reliability_files(report, plot_file)


def plot(
    files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="JSON of any command.")],
    *,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="One PNG or SVG image.")
    ] = None,
    page: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="A page that opens offline.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Draw only this kind of figure; may be repeated.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Draw what commands measured: cost curve, reliability, frontier, windows, step breakdown.

    Reads the --json output of profile, calibrate, simulate and bench, and artifacts.
    """
    with _reporting(json_file) as console:
        from vllm_dspark.cli.plot import run_plot

        require_writable(json_file, "--json")
        report = run_plot(files, out, page, only or ())
        for path in report.paths:
            console.print(f"wrote {path}", highlight=False, soft_wrap=True)
        write_json(json_file, report.to_json())


# ---- what they share


def _engine_arguments(context: typer.Context, *, needed: bool = True) -> tuple[str, ...]:
    from vllm_dspark.cli.serve import INSTALL_HINT, has_vllm

    if needed and not context.args:
        fail("name the target model, and the options of `vllm serve` (see --help)", EXIT_USAGE)
    if context.args and not has_vllm():
        fail(INSTALL_HINT)
    return tuple(context.args)


@contextmanager
def _reporting(json_file: Path | None) -> Iterator[Console]:
    """Errors of ours as one line and an exit code."""
    try:
        yield console_for(json_file)
    except DSparkError as error:
        fail(str(error), code_of(error))
    except KeyboardInterrupt:
        fail("interrupted, nothing was saved", 130)


def _require_outputs(json_file: Path | None, output: Path | None, plot: Path | None) -> None:
    for option, path in (("--json", json_file), ("--output", output), ("--plot", plot)):
        require_writable(path, option)


def _preload() -> None:
    """Start again with the OpenMP runtime that `serve` uses: a preload needs a new process."""
    from vllm_dspark.cli.serve import serve_environment
    from vllm_dspark.config import process_environment

    environment = process_environment()
    wanted = serve_environment(environment)
    if wanted.get("LD_PRELOAD") != environment.get("LD_PRELOAD"):
        _start_again(wanted)


def _start_again(environment: dict[str, str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-m", "vllm_dspark.cli", *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


def _place(address: str | None, replicas: int, arguments: tuple[str, ...]) -> RayPlace | None:
    """Where replicas run: each gets the GPUs of one engine, and the environment of `serve`."""
    if address is None:
        return None
    from vllm_dspark.cli.serve import serve_environment
    from vllm_dspark.config import process_environment
    from vllm_dspark.cpu.build import is_cpu_build

    gpus = 0
    if not is_cpu_build():
        from vllm_dspark.integration.offline import parse_serve_arguments

        args = parse_serve_arguments(arguments)
        gpus = args.tensor_parallel_size * args.pipeline_parallel_size
    environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # a killed actor leaves no engine behind
    wanted = serve_environment(process_environment())
    if "LD_PRELOAD" in wanted:
        environment["LD_PRELOAD"] = wanted["LD_PRELOAD"]
    return RayPlace(address, replicas, gpus_per_replica=gpus, environment=environment)
