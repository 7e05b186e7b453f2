"""The figures on a terminal."""

from collections.abc import Sequence

from rich import box
from rich.columns import Columns
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_dspark.cli.top.figures import EngineFigures

_BAR = 20  # characters of a full bar
_SHOWN = 5  # reasons that are listed


def render(url: str, engines: Sequence[EngineFigures], note: str = "") -> RenderableType:
    """One panel per engine, with a line for trouble."""
    head = Text(f"{url}  {note}", style="dim" if not note else "yellow")
    return Group(head, *(_panel(engine) for engine in engines))


def _panel(e: EngineFigures) -> Panel:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 0))
    table.add_column(style="bold")
    table.add_column()
    for name, text in _lines(e):
        table.add_row(name, text)
    parts = [part for part in (table, _windows(e), _positions(e)) if part is not None]
    columns = Columns(parts, padding=(0, 2))  # side by side where the terminal is wide enough
    state = "plugin absent" if e.scheduling is None else "scheduling"
    if e.scheduling is False:
        state = f"full windows: {e.off_reason or 'scheduling is off'}"
    title = f"{e.model or 'model'}, engine {e.engine}: {state}"
    if e.restarted:
        title += " (restarted)"
    return Panel(columns, title=Text(title), title_align="left", box=box.ROUNDED)


def _lines(e: EngineFigures) -> list[tuple[str, str]]:
    period = f"last {e.seconds:.0f} s" if e.seconds else "since its start"
    usage = "" if e.kv_usage is None else f", KV cache {e.kv_usage:.0%}"
    lines = [
        ("period", period),
        ("requests", f"{e.running:.0f} running, {e.waiting:.0f} waiting{usage}"),
        ("tokens/s", number(e.tokens_per_s, ".1f")),
    ]
    if e.scheduling is None:
        return lines
    steps = "" if e.steps_per_s is None else f" ({e.steps_per_s:.1f} steps/s)"
    step = f"{number(e.measured_ms, '.2f')} ms, predicted {number(e.predicted_ms, '.2f')} ms"
    lines += [
        ("accepted length", f"{number(e.accepted_length, '.2f')}{steps}"),
        ("window", f"{number(e.mean_window, '.2f')} of {e.width + 1}"),
        ("step", step),
        ("tokens kept", number(e.tokens_kept, ".0%")),
        ("ECE", number(e.ece, ".3f")),
        ("drafting", f"{number(e.draft_share, '.0%')} of steps"),
        ("kinds", _listed(e.kinds)),
        ("reasons", _listed(e.reasons)),
    ]
    troubles = [f"{name} {count:.0f}" for name, count in e.fallbacks.items()]
    if e.drifted_cells:
        troubles.append(f"{e.drifted_cells} cost cells drifted")
    if e.invalid_confidences:
        troubles.append(f"{e.invalid_confidences:.0f} invalid confidences")
    if troubles:
        lines.append(("trouble", ", ".join(troubles)))
    return lines


def number(value: float | None, form: str) -> str:
    """A figure, or a dash where there is none."""
    return "-" if value is None else format(value, form)


def _listed(shares: dict[str, float]) -> str:
    parts = [f"{name} {share:.0%}" for name, share in list(shares.items())[:_SHOWN]]
    return ", ".join(parts) or "-"


def _windows(e: EngineFigures) -> Table | None:
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("window", "rows", ""):
        table.add_column(title, justify="right" if title else "left")
    for window, share in e.windows.items():
        table.add_row(str(window), f"{share:.0%}", "█" * round(share * _BAR))
    return table if e.windows else None


def _positions(e: EngineFigures) -> Table | None:
    if not e.acceptance:
        return None
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("draft", "accepted", "ECE"):
        table.add_column(title, justify="right")
    for k, (accepted, ece) in enumerate(zip(e.acceptance, e.ece_by_position, strict=True)):
        table.add_row(str(k + 1), number(accepted, ".0%"), number(ece, ".3f"))
    return table
