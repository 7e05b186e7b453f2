"""Arguments and help of `vllm-dspark top`."""

from __future__ import annotations

from typing import Annotated

import typer

from vllm_dspark.cli.exits import EXIT_USAGE, EXIT_WARNINGS, code_of, fail
from vllm_dspark.cli.numbers import number

EPILOG = "Example: vllm-dspark top localhost:8000 --once --json"


def top(
    server: Annotated[str, typer.Argument(help="Host and port, or an address.")] = "localhost:8000",
    *,
    interval: Annotated[
        float,
        number(min=0.0, max=3600.0, help="Seconds between two readings."),
    ] = 2.0,
    once: Annotated[
        bool,
        typer.Option(
            "--once", help="One period only (two readings; --interval 0: all since the start)."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --once: one JSON object.")] = False,
) -> None:
    """Watch a running server: speed, accepted length, windows, decisions, predictions.

    Exit codes: 0 done, 1 the server does not answer, 2 wrong usage, 4 (--once) its engines run
    without the plugin, 130 interrupted.
    """
    from rich.console import Console

    from vllm_dspark.cli.top import command
    from vllm_dspark.cli.top.view import render
    from vllm_dspark.errors import InputError, ScrapeError

    if as_json and not once:
        fail("--json needs --once", EXIT_USAGE)
    if interval == 0.0 and not once:
        fail("--interval 0 needs --once", EXIT_USAGE)
    try:
        url = command.metrics_url(server)
        if not once:
            command.watch(url, interval, Console())
            return
        engines = command.read_once(url, interval)
    except (ScrapeError, InputError) as error:
        fail(str(error), code_of(error))
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(command.as_json(url, engines))
    else:
        Console().print(render(url, engines))
    if message := command.plugin_absent(url, engines):
        fail(message, EXIT_WARNINGS)
