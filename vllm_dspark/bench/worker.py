"""A process with one engine in it: `python -m vllm_dspark.bench.worker IN OUT`.

IN and OUT are inherited file descriptors that carry JSON lines; standard output is vLLM's. The
first line is the launch, answered when the engine is up; every further one begins a cell or goes on
with it, for a slice of time or to its end. Between lines the process waits in `read` and burns
nothing.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from typing import IO, Any

from vllm_dspark.bench.drive import Arrival, Counters, RunningCell, summarise
from vllm_dspark.bench.workload import Ask, CellOrder


class LocalEngine:
    """Adapts `integration.bench_engine.DrivenEngine` to the load generator's `Engine`."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        from vllm_dspark.integration.bench_engine import DrivenEngine

        self.engine = DrivenEngine(arguments)

        self._speculates = arguments.get("speculative_config") is not None
        self._replayed: str | None = None

    def replay(self, trace: str) -> None:
        """Take acceptance and confidences from a recording from now on, if there are drafts."""
        if self._speculates and trace != self._replayed:
            self.engine.replay(trace)
            self._replayed = trace

    def prepared(self, order: CellOrder) -> CellOrder:
        """The cell with prompts as tokens: making them is not the engine's time."""
        asks = [replace(ask, prompt=self.engine.encode(ask.prompt)) for ask in order.asks]
        return replace(order, asks=tuple(asks))

    def add(self, request: int, ask: Ask, temperature: float) -> None:
        assert not isinstance(ask.prompt, str), "prompts are tokens by now (prepared)"
        self.engine.add(request, ask.prompt, ask.max_tokens, temperature)

    def step(self) -> list[Arrival]:
        return [Arrival(*fields) for fields in self.engine.step()]

    def cancel(self, requests: Sequence[int]) -> None:
        self.engine.cancel(requests)

    def pause(self) -> None:
        self.engine.pause()

    def resume(self) -> None:
        self.engine.resume()

    def counters(self) -> Counters:
        return self.engine.counters()

    def verified(self) -> tuple[int, int] | None:
        return self.engine.verified()


def serve(commands: IO[str], answers: IO[str]) -> None:
    """Start the engine of the first line, then run cells until the pipe closes."""

    def answer(obj: dict[str, Any]) -> None:
        answers.write(json.dumps(obj) + "\n")
        answers.flush()

    launch = json.loads(commands.readline())
    begun = time.perf_counter()
    local = LocalEngine(launch["arguments"])
    answer({"start_s": time.perf_counter() - begun, **local.engine.describe()})
    cell: RunningCell | None = None
    for line in commands:
        command = json.loads(line)
        if "cell" in command:
            if launch["switchable"]:
                local.engine.set_scheduling(command["scheduling"])
            order = CellOrder.of_json(command["cell"])
            if order.replay is not None:
                local.replay(order.replay)
            cell = RunningCell(local, local.prepared(order))
        if cell is None:
            raise RuntimeError("a cell was to go on before one had begun")
        done = cell.advance(command["seconds"])
        answer({"done": done, "figures": summarise(cell.trace) if done else None})
    local.engine.shutdown()


def main() -> None:
    """Serve; what goes wrong is answered, so that the parent can say which mode failed."""
    source, sink = int(sys.argv[1]), int(sys.argv[2])
    with os.fdopen(source) as commands, os.fdopen(sink, "w") as answers:
        try:
            serve(commands, answers)
        except Exception as error:
            traceback.print_exc()
            answers.write(json.dumps({"error": repr(error)}) + "\n")
            raise


if __name__ == "__main__":
    main()
