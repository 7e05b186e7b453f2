"""Arguments and help of `vllm-dspark doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from vllm_dspark.cli.exits import code_of, fail


class _Forwarding(TyperCommand):
    """Keeps vLLM's words from click, which sees `-h` in `-sc.method` and `-dph`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own: list[str] = []
        rest: list[str] = []
        words = iter(args)
        for word in words:
            if word == "--wheel":
                own += [word, *([] if (value := next(words, None)) is None else [value])]
            elif word in _OWN or word.startswith("--wheel="):
                own.append(word)
            else:
                rest.append(word)
        super().parse_args(ctx, own)
        ctx.args = rest
        return rest


_OWN = ("--json", "--quiet", "--help", "-h")
FORWARDING: dict[str, Any] = {
    "cls": _Forwarding,
    "options_metavar": "[OPTIONS] TARGET [OPTIONS OF VLLM SERVE]",
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
