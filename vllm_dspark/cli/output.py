"""How commands of this package show progress and hand out results."""

from __future__ import annotations

import tempfile
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

from vllm_dspark.errors import DSparkError, InputError

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


class OutputError(DSparkError):
    """A file could not be written although nothing spoke against it before (exit code 1)."""


def write_file(path: Path, text: str) -> None:
    """A file in one step, or OutputError naming why it cannot be written."""
    # Imported here: pydantic would slow down every start of the command.
    from vllm_dspark.artifacts.store import write_atomic

    try:
        write_atomic(path, text)
    except OSError as error:
        raise OutputError(f"cannot write {path}: {error.strerror}; name another file") from error


def require_writable(path: Path | None, option: str = "") -> None:
    """Raise InputError before minutes of work whose result could not be written.

    A folder that is not there is a mistyped one: commands make no folders for files.
    """
    if path is None or path == STDOUT:
        return
    from vllm_dspark.artifacts.store import why_unwritable

    start = f"{option}: " if option else ""
    why = why_unwritable(path)
    if not why and not path.absolute().parent.exists():
        why = f"there is no folder {path.parent}; make it first, or name another file"
    if why:
        raise InputError(f"{start}cannot write {path}: {why}")


def make_folder(path: Path, option: str, *, parents: bool = False) -> None:
    """Make a folder for several files, or InputError; parents: those above it too."""
    try:
        path.mkdir(parents=parents, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except FileNotFoundError as error:
        missing = path.parent if not path.parent.exists() else path
        raise InputError(
            f"{option} {path}: there is no folder {missing} and it cannot be made here; name "
            "another folder"
        ) from error
    except OSError as error:
        why = "it is a file" if path.is_file() else error.strerror
        raise InputError(f"{option} {path}: {why}; name a folder that can be written") from error


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
