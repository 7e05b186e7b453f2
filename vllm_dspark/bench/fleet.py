"""The engines of a run: started (several at once where that disturbs nobody), kept, dropped."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from vllm_dspark.bench.gate import HeldGate
from vllm_dspark.bench.modes import BenchError, EngineLaunch, Mode
from vllm_dspark.bench.process import Host
from vllm_dspark.bench.progress import Progress

MakeHost = Callable[[EngineLaunch], Host]


@dataclass(frozen=True)
class Limits:
    """What a run may take. seconds: it starts nothing that would not be done by then, 0 knows no
    limit. parallel_starts: engines that start at once. keep_going: a mode that fails is left out
    instead of ending the run.
    """

    seconds: float = 0.0
    parallel_starts: int = 1
    keep_going: bool = False


class Deadline:
    """Whether something that takes so long is still to be started."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds if seconds else float("inf")

    def fits(self, seconds: float) -> bool:
        """Whether it would be done in time."""
        return time.monotonic() + seconds < self._end


@dataclass
class Fleet:
    """Running engines by mode. facts: what each said when it was up, or why it is not."""

    make_host: MakeHost
    warm_up: Callable[[Host, EngineLaunch], None]
    progress: Progress
    limits: Limits
    hosts: dict[str, Host] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    _made: list[Host] = field(default_factory=list)  # every host, also one that did not come up
    _longest: float = 0.0  # start so far, in seconds

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        if self._made:  # at once: a GPU's memory takes seconds to be given back
            with ThreadPoolExecutor(len(self._made)) as pool:
                list(pool.map(lambda host: host.stop(), self._made))

    def start(self, launches: Sequence[EngineLaunch], gate: HeldGate, deadline: Deadline) -> None:
        """Bring the engines up.

        Those that time their steps while they start do so alone, after all others: what they find
        must not depend on their neighbours.
        """
        count = self.limits.parallel_starts
        together = [launch for launch in launches if count > 1 and not launch.times_steps]
        if together:
            with gate.chunk(), ThreadPoolExecutor(count) as pool:
                waiting = {pool.submit(self._start_one, launch): launch for launch in together}
                for done in as_completed(waiting):
                    self._settle(waiting[done], done.result)
        for launch in launches:
            if launch in together:
                continue
            if not deadline.fits(self._longest):
                self._refuse(launch, BenchError("the time was over before it could start"))
                continue
            with gate.chunk():
                self._settle(launch, lambda launch=launch: self._start_one(launch))  # type: ignore[misc]

    def _start_one(self, launch: EngineLaunch) -> Host:
        self.progress.starting(launch)
        begun = time.monotonic()
        host = self.make_host(launch)
        self._made.append(host)
        host.start()
        self.warm_up(host, launch)
        self._longest = max(self._longest, time.monotonic() - begun)
        return host

    def _settle(self, launch: EngineLaunch, result: Callable[[], Host]) -> None:
        try:
            host = result()
        except BenchError as error:
            if not self.limits.keep_going:
                raise
            self._refuse(launch, error)
            return
        self.progress.started(launch, host.facts)
        for mode in launch.modes:
            self.hosts[mode.name] = host
            self.facts[mode.name] = host.facts

    def _refuse(self, launch: EngineLaunch, error: BenchError) -> None:
        for mode in launch.modes:
            self.facts[mode.name] = {"error": str(error)}
            self.progress.failed(mode, error)

    def drop(self, mode: Mode, error: BenchError) -> None:
        """A mode failed while it was measured: its engine is not asked again."""
        if not self.limits.keep_going:
            raise error
        host = self.hosts[mode.name]
        for name in [name for name, other in self.hosts.items() if other is host]:
            del self.hosts[name]
            self.facts[name] = {**self.facts[name], "error": str(error)}
            self.progress.failed(Mode.parse(name), error)
        host.stop()
