"""Exit codes of the `vllm-dspark` command, and the one way to leave with an error.

| code | meaning |
|---|---|
| 0 | done |
| 1 | it ran and failed: an engine or server died, outputs differ, a file could not be written |
| 2 | wrong usage: an unknown option, a bad value, an input file that holds something else |
| 3 | it ran, but the result must not be used (noisy machine, too little data): nothing was kept |
| 4 | done, with a warning: `doctor` has some but no errors (1), `top` sees no plugin |
| 130 | interrupted |
"""

from __future__ import annotations

from typing import NoReturn

import typer

from vllm_dspark.errors import (
    ArtifactError,
    DSparkConfigError,
    InputError,
    SimulationError,
    UntrustedError,
)

EXIT_FAILED, EXIT_USAGE, EXIT_UNTRUSTED, EXIT_WARNINGS = 1, 2, 3, 4


def fail(message: str, code: int = EXIT_FAILED) -> NoReturn:
    """Print an error and leave."""
    typer.echo(f"vllm-dspark: error: {message}", err=True)
    raise typer.Exit(code)


def code_of(error: Exception) -> int:
    """The exit code of one of our errors."""
    if isinstance(error, UntrustedError):
        return EXIT_UNTRUSTED
    if isinstance(error, InputError | DSparkConfigError | ArtifactError | SimulationError):
        return EXIT_USAGE
    return EXIT_FAILED
