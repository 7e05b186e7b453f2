"""Arguments and help of `vllm-dspark doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_dspark.cli.exits import code_of, fail

FORWARDING: dict[str, Any] = {
    "options_metavar": "[OPTIONS] TARGET [OPTIONS OF VLLM SERVE]",
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True},
}
EPILOG = (
    "Example: vllm-dspark doctor TARGET --max-num-seqs 64 --speculative-config "
    '\'{"method":"dspark","model":"DRAFTER","num_speculative_tokens":7}\''
)


def doctor(
    context: typer.Context,
    *,
    wheel: Annotated[
        Path | None,
        typer.Option(help="Check a vLLM wheel's version and contract instead; nothing is run."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Leave out what is fine.")] = False,
) -> None:
    """Examine, before serving, whether this engine and drafter will work together.

    Takes what `serve` takes. Exit codes: 0 nothing to do, 4 warnings, 1 errors, 2 wrong usage.
    """
    from rich.console import Console

    from vllm_dspark.cli.doctor.command import as_json as to_json
    from vllm_dspark.cli.doctor.command import print_report, run_doctor
    from vllm_dspark.errors import DSparkConfigError, InputError

    try:
        report = run_doctor(context.args, wheel)
    except (DSparkConfigError, InputError) as error:
        fail(str(error), code_of(error))
    if as_json:
        typer.echo(to_json(report, quiet))
    else:
        print_report(report, Console(), quiet)
    raise typer.Exit(report.exit_code)
