"""Hooks of the mkdocs build: the command reference, and pages that mkdocs.yml does not name.

Both are made while the site is built, so they cannot be stale: the first from the `vllm-dspark`
command itself, the second from the files in docs/ and docs/benchmarks.
"""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # the checkout's own package, installed or not

_MEASURED, _MORE = "Measured", "More"
_COMMANDS = "<!-- commands -->"


def on_config(config: Any) -> Any:
    """Put every page of docs/benchmarks, and pages that mkdocs.yml does not name, into the
    navigation.
    """
    docs, nav = Path(config["docs_dir"]), config["nav"]
    named: set[str] = set()
    for entry in nav:
        if isinstance(entry, dict) and _MEASURED in entry:
            measured = (docs / "benchmarks").glob("*.md")
            entry[_MEASURED] = sorted(f"benchmarks/{path.name}" for path in measured)
        named |= {entry} if isinstance(entry, str) else {p for ps in entry.values() for p in ps}
    more = sorted({path.name for path in docs.glob("*.md")} - named)
    if more:
        nav.append({_MORE: more})
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in the command reference."""
    del page
    return markdown.replace(_COMMANDS, command_reference()) if _COMMANDS in markdown else markdown


def command_reference() -> str:
    """One section per command: what it does, its usage line, arguments, options, example."""
    import typer

    from vllm_dspark.cli.main import app

    group = typer.main.get_command(app)
    parts = []
    for name, command in sorted(group.commands.items()):  # type: ignore[attr-defined]
        if not command.hidden:
            parts.append(_section(name, command))
    return "\n\n".join(parts)


def _section(name: str, command: Any) -> str:
    lines = [f"## `{name}`", "", command.help or "", ""]
    rows = [_row(parameter) for parameter in command.params if not getattr(parameter, "hidden", 0)]
    if rows:
        lines += ["| argument | default | meaning |", "|---|---|---|", *rows, ""]
    if command.epilog:
        lines += [f"    {command.epilog.removeprefix('Example:').strip()}", ""]
    return "\n".join(lines)


def _row(parameter: Any) -> str:
    spelled = [*parameter.opts, *parameter.secondary_opts]
    names = ", ".join(f"`{name}`" for name in spelled)
    if parameter.param_type_name == "argument":
        names = f"`{parameter.make_metavar()}`" if parameter.name is None else f"`{parameter.name}`"
    default = parameter.default
    shown = "" if default is None or callable(default) else f"`{default}`"
    if parameter.required:
        shown = "required"
    meaning = " ".join((getattr(parameter, "help", None) or "").split()).replace("|", "\\|")
    return f"| {names} | {shown} | {meaning} |"
