"""Engines and hosts that need no vLLM, with time of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_dspark.bench.drive import Arrival, Counters, RunningCell, drive, summarise
from vllm_dspark.bench.modes import EngineLaunch, Mode
from vllm_dspark.bench.workload import Ask, CellOrder


@dataclass
class FakeEngine:
    """Every step takes `step_s` and gives each request `per_step` tokens; prefills take a step."""

    step_s: float = 0.1
    per_step: int = 2
    now: float = 100.0
    left: dict[int, int] = field(default_factory=dict)
    new: set[int] = field(default_factory=set)
    asked: list[Ask] = field(default_factory=list)
    cancelled: list[int] = field(default_factory=list)
    paused: bool = False
    most: int = 0
    emitted: int = 0

    def clock(self) -> float:
        return self.now

    def add(self, request: int, ask: Ask, temperature: float) -> None:
        self.left[request] = ask.max_tokens
        self.new.add(request)
        self.asked.append(ask)

    def pause(self) -> None:
        assert not self.paused
        self.paused = True

    def resume(self) -> None:
        assert self.paused
        self.paused = False

    def step(self) -> list[Arrival]:
        assert not self.paused, "an engine whose turn is over was asked for a step"
        self.now += self.step_s
        self.most = max(self.most, len(self.left))
        arrivals = []
        for request, left in list(self.left.items()):
            tokens = 1 if request in self.new else min(self.per_step, left)
            self.new.discard(request)
            self.left[request] = left - tokens
            self.emitted += tokens
            done = self.left[request] == 0
            arrivals.append(Arrival(request, tokens, done))
            if done:
                del self.left[request]
        return arrivals

    def cancel(self, requests: Sequence[int]) -> None:
        self.cancelled += requests
        assert set(requests) == set(self.left), "a request was forgotten, or cancelled twice"
        self.left.clear()
        self.new.clear()

    def verified(self) -> tuple[int, int] | None:
        return None

    def counters(self) -> Counters:
        return {"vllm:generation_tokens_total": float(self.emitted), "still": 1.0}


class FakeHost:
    """A host whose modes run at given tokens per step; counts what is asked of it."""

    def __init__(self, launch: EngineLaunch, speeds: dict[str, int], log: list[str]) -> None:
        self.launch, self.log, self._speeds = launch, log, speeds
        self.facts: dict[str, Any] = {"start_s": 1.0}

    def start(self) -> None:
        self.log.append(f"start {self.launch.mode.name}")

    def run(self, mode: Mode, order: CellOrder) -> dict[str, Any]:
        self.log.append(f"run {mode.name} {len(order.asks)} {order.phases[0].concurrency}")
        engine = FakeEngine(per_step=self._speeds[mode.name])
        return summarise(drive(engine, order, engine.clock))

    def begin(self, mode: Mode, order: CellOrder, seconds: float) -> dict[str, Any] | None:
        self.log.append(f"begin {mode.name}")
        self.fake = FakeEngine(per_step=self._speeds[mode.name])
        self.cell = RunningCell(self.fake, order, self.fake.clock)
        return self._slice(seconds)

    def proceed(self, seconds: float) -> dict[str, Any] | None:
        self.log.append(f"proceed {self.launch.mode.name}")
        self.fake.now += 1000.0  # of the other modes' slices
        return self._slice(seconds)

    def _slice(self, seconds: float) -> dict[str, Any] | None:
        return summarise(self.cell.trace) if self.cell.advance(seconds) else None

    def cpu_seconds(self) -> float:
        return 0.0

    def stop(self) -> None:
        self.log.append(f"stop {self.launch.mode.name}")
