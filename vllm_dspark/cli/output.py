"""How commands of this package show progress and hand out results."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from vllm_dspark.errors import InputError

STDOUT = Path("-")


def console_for(json_file: Path | None) -> Console:
    """Where people read: standard error if the JSON goes to standard output."""
    return Console(stderr=json_file == STDOUT)


def write_json(path: Path | None, text: str) -> None:
    """The result as JSON, to a file or (for "-") to standard output; None writes nothing."""
    if path is None:
        return
    if path == STDOUT:
        typer.echo(text)
        return
    write_file(path, text + "\n")


def write_file(path: Path, text: str) -> None:
    """A file in one step, or InputError naming why it cannot be written."""
    # Imported here: pydantic would slow down every start of the command.
    from vllm_dspark.artifacts.store import write_atomic

    try:
        write_atomic(path, text)
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror}") from error


def require_writable(path: Path | None) -> None:
    """Raise InputError before minutes of work whose result could not be written."""
    if path is None or path == STDOUT:
        return
    from vllm_dspark.artifacts.store import why_unwritable

    if why := why_unwritable(path):
        raise InputError(f"cannot write {path}: {why}")


@contextmanager
def progress(console: Console) -> Iterator[Progress]:
    """Bars with counts, elapsed and remaining time; nothing where there is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
        yield bars
