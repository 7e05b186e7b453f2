"""`vllm-dspark demo`: from nothing to a measured comparison on the small demo pair."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from rich.console import Console

from vllm_dspark.cli.output import make_folder
from vllm_dspark.cli.preflight import require_drafter
from vllm_dspark.cli.view import DemoView, result_table
from vllm_dspark.demo.measure import Plan, run
from vllm_dspark.demo.report import Report
from vllm_dspark.demo.server import ServeSettings
from vllm_dspark.demo.target import drafter_path, ensure_target, target_path


@dataclass(frozen=True)
class DemoOptions:
    """What the command line says; None means the demo's own choice."""

    dtype: str = "bfloat16"
    prompts: int = 4
    max_tokens: int = 96
    rounds: int = 3
    concurrency: int = 4
    num_speculative_tokens: int = 7
    drafter: Path | None = None
    log_folder: Path | None = None
    compile: bool = False


def run_demo(options: DemoOptions, console: Console) -> Report:
    """Make the target if it is missing, measure, show the table.

    InputError for a drafter that cannot serve what is asked, before anything starts.
    """
    drafter = options.drafter or drafter_path()
    width = options.num_speculative_tokens
    require_drafter(str(target_path()), str(drafter), {f"-k {width}": width})
    if options.log_folder is not None:
        make_folder(options.log_folder, "--logs")
    console.print("looking for the target (SmolLM2-135M-Instruct, converted once) ...")
    target = ensure_target()
    # once more: without the target's config its tensors could not be looked at
    require_drafter(str(target), str(drafter), {f"-k {width}": width})
    plan = Plan(
        ServeSettings(
            target,
            dtype=options.dtype,
            num_speculative_tokens=options.num_speculative_tokens,
            extra_arguments=() if options.compile else ("--enforce-eager",),
        ),
        drafter,
        prompts_per_domain=options.prompts,
        max_tokens=options.max_tokens,
        rounds=options.rounds,
        concurrency=options.concurrency,
        log_folder=options.log_folder,
    )
    with stop_on_signals(), DemoView(console) as view:
        report = run(plan, view)
    show(report, console)
    return report


@contextmanager
def stop_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C does, so that no server is left behind."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, leave) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def show(report: Report, console: Console) -> None:
    """Table and verdict."""
    console.print(result_table(report))
    low, high = report.speedup_range()
    length = report.row("dspark").accepted_length
    console.print(
        f"DSpark makes {report.speedup():.2f} times the tokens per second of the faster engine "
        f"without speculation at one request (rounds: {low:.2f} to {high:.2f}); "
        + (f"accepted length {length:.2f}." if length else "nothing was drafted."),
        highlight=False,
    )
    counts = report.identity.counts()
    console.print(
        f"Greedy outputs against vLLM without speculation: {counts['equal']} equal, "
        f"{counts['near_tie']} part at a near-tie, {counts['different']} different.",
        highlight=False,
    )
    for item in report.identity.differences:
        gap = "not the best two" if item.gap is None else f"logit gap {item.gap:.4f}"
        console.print(
            f"  {item.request} step {item.step}: {item.expected} / {item.got}, {gap}; batch shape "
            f"alone changes gaps by up to {report.batch_shape_change:.4f}",
            highlight=False,
        )
