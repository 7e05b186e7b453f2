"""How results of the simulator look on a terminal."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from vllm_dspark.simulation.result import CellResult, SimulationRecord

Column = tuple[str, list[str]]  # title, values


def print_record(record: SimulationRecord, console: Console) -> None:
    """A table per load and machine; the fastest row of each is marked."""
    console.print(
        f"trace: {record.trace}\ncost table: {record.cost_table}", highlight=False, soft_wrap=True
    )
    several = len({cell.min_gain for cell in record.cells}) > 1
    groups: dict[tuple[str, str, int], list[CellResult]] = {}
    for cell in record.cells:
        groups.setdefault((cell.arrivals, cell.machine, cell.replicas), []).append(cell)
    for (load, machine, replicas), cells_of in groups.items():
        title = load + (f", {replicas} engines" if replicas > 1 else "")
        title += f", {machine}" if machine else ""
        for table in _tables(title, cells_of, several, console.width):
            console.print(table)
    if any(cell.policy == "ours" for cell in record.cells):
        console.print(f"ours: {record.notes['draft_width']}", highlight=False, soft_wrap=True)
    unfinished = [c for c in record.cells if c.completed < c.requests]
    if unfinished:
        console.print(f"{len(unfinished)} runs ended at the step limit, before their requests did")


def _tables(
    title: str, rows: Sequence[CellResult], several_gains: bool, width: int
) -> Iterator[Table]:
    """One table; where the terminal is too narrow several, each with the policies again.

    A cut number would be a wrong one.
    """
    policies, *others = _columns(rows, several_gains)
    best = max(cell.tokens_per_s for cell in rows)
    styles = ["bold" if cell.tokens_per_s >= best else "" for cell in rows]
    for number, columns in enumerate(_fitting(policies, others, width)):
        table = Table(box=box.SIMPLE_HEAD, padding=0, title_justify="left")
        table.title = title if number == 0 else None
        table.add_column(columns[0][0], overflow="fold")
        for column in columns[1:]:
            table.add_column(column[0], justify="right", no_wrap=True, min_width=_width(column))
        for index, style in enumerate(styles):
            table.add_row(*(values[index] for _, values in columns), style=style or None)
        yield table


def _fitting(first: Column, others: Sequence[Column], width: int) -> Iterator[list[Column]]:
    """The other columns in as few groups as fit beside the first one; at least one in each."""
    group, used = [first], _width(first) + 2  # the box's edges
    for column in others:
        more = _width(column) + 1
        if used + more > width and len(group) > 1:
            yield group
            group, used = [first], _width(first) + 2
        group.append(column)
        used += more
    yield group


def _width(column: Column) -> int:
    title, values = column
    return max(map(len, (title, *values)))


def _columns(rows: Sequence[CellResult], several_gains: bool) -> list[Column]:
    gains = [f", gain {c.min_gain:g}" if several_gains and c.policy == "ours" else "" for c in rows]
    return [
        ("policy", [c.policy + gain for c, gain in zip(rows, gains, strict=True)]),
        ("K", [str(c.width) for c in rows]),
        ("tokens/s", [f"{c.tokens_per_s:.1f}" for c in rows]),
        ("AL", [f"{c.accepted_length:.2f}" for c in rows]),
        ("window", [f"{c.mean_window:.2f}" for c in rows]),
        ("step ms", [f"{c.step_ms:.2f}" for c in rows]),
        ("TPOT ms", [f"{c.tpot_ms.p50:.2f}" for c in rows]),
        ("TTFT ms", [f"{c.ttft_ms.p50:.1f}" for c in rows]),
        ("p99 s", [f"{c.latency_ms.p99 / 1e3:.2f}" for c in rows]),
        ("drafts", [f"{c.draft_share:.0%}" for c in rows]),
    ]
