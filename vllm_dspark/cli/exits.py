"""Exit codes and error messages that all commands share."""

from typing import NoReturn

import typer

EXIT_FAILED, EXIT_USAGE, EXIT_WARNINGS = 1, 2, 3


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """End the command with one line on stderr."""
    typer.echo(f"vllm-dspark: error: {message}", err=True)
    raise typer.Exit(code)
