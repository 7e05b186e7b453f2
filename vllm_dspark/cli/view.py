"""What the demo shows while it runs: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from vllm_dspark.demo.client import Completion
from vllm_dspark.demo.measure import Listener
from vllm_dspark.demo.prompts import Prompt
from vllm_dspark.demo.report import HEADER, Report, cells

_SHOWN_STEPS = 24  # newest steps in the row of emitted tokens


class DemoView(Listener):
    """Prints stages and rates; streams answers in a panel when the console is a terminal."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self._live: Live | None = None
        self._stage = ""
        self._started = time.monotonic()

    def __enter__(self) -> DemoView:
        if self.console.is_terminal:
            self._live = Live(console=self.console, refresh_per_second=8, transient=True)
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def stage(self, what: str) -> None:
        self._stage, self._started = what, time.monotonic()
        self._print(f"{what} ...")
        self._draw(Text(f"{what} ..."))

    def stage_done(self, what: str) -> None:
        self._print(f"  {what} ({time.monotonic() - self._started:.0f} s)")
        self._draw(Text(""))

    def step(self, title: str, prompt: Prompt, completion: Completion) -> None:
        # perf_counter of the chunk that just arrived
        self._draw(answer_panel(title, prompt, completion))

    def answer(self, title: str, prompt: Prompt, completion: Completion) -> None:
        if self._live is not None:
            self.console.print(answer_panel(title, prompt, completion))
        else:
            self._print(f"  [{title}, {prompt.domain}] {prompt.text}")
            self._print(f"  {completion.text.strip()}")
            self._print(f"  {stream_line(completion)}")

    def rate(self, title: str, concurrency: int, round_index: int, tokens_per_s: float) -> None:
        self._print(f"  round {round_index + 1}: {title:<20} {tokens_per_s:7.1f} tokens/s")

    def _print(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False)

    def _draw(self, what: Panel | Text) -> None:
        if self._live is not None:
            self._live.update(what)


def stream_line(completion: Completion) -> str:
    """Rate, accepted length and newest steps of one streamed answer."""
    steps = completion.steps[1:] or completion.steps  # the first token comes from the prefill
    mean = sum(steps) / len(steps)
    newest = " ".join(map(str, steps[-_SHOWN_STEPS:]))
    return (
        f"{completion.tokens_per_s:.1f} tokens/s, {mean:.2f} tokens per step; "
        f"tokens of the last steps: {newest}"
    )


def answer_panel(title: str, prompt: Prompt, completion: Completion) -> Panel:
    """One answer as it stands now."""
    texts = (Text(prompt.text, style="bold"), Text(completion.text.strip()))
    body = Group(*texts, Text(stream_line(completion)))
    return Panel(body, title=f"{title}: {prompt.domain}", title_align="left")


def result_table(report: Report) -> Table:
    """The closing table."""
    table = Table(
        title="SmolLM2-135M-Instruct; plain: vLLM without speculation",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for name in HEADER:
        table.add_column(name, justify="left" if name in ("engine", "identical") else "right")
    for row in report.rows:
        table.add_row(*cells(row.as_json()))
    return table
