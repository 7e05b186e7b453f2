"""The measurement itself, on servers that answer from a table (no vLLM)."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vllm_dspark.demo import measure
from vllm_dspark.demo.client import Completion, ServerError, SpeculationCounters, Step
from vllm_dspark.demo.measure import Listener, Plan
from vllm_dspark.demo.server import EngineSpec, ServeSettings

ANSWER = [5, 6, 7, 8]
PLAN = Plan(
    ServeSettings(Path("target")), Path("drafter"), prompts_per_domain=2, rounds=2, concurrency=2
)
# Logit gap of the two best tokens at every step, and how much a batch of several changes it.
GAP, CHANGE = 0.25, 0.5


class FakeClient:
    """Answers `ANSWER`, unless `twist` changes it."""

    def __init__(self, world: "World", spec: EngineSpec) -> None:
        self.world, self.spec = world, spec
        self.steps = 0
        self.probes = 0

    def stream(self, message: str, max_tokens: int, **options: Any) -> Completion:
        self.world.asked.append(self.spec.name)
        tokens = self.world.twist(self.spec.name, list(ANSWER))
        self.steps += 2
        now = time.perf_counter()
        seconds = {"v1": 0.2, "v2": 0.4, "dspark": 0.1}[self.spec.name]
        return Completion([1, 2], tokens, [1, 3], "text", now - seconds, now)

    def greedy_steps(self, prompt: list[int], max_tokens: int) -> list[Step]:
        assert self.spec.name == "v1", "only an engine without speculation may be the judge"
        self.probes += 1
        alone = self.probes <= 6  # 3 domains x 2 prompts are asked one by one first
        gap = GAP if alone or max_tokens == 1 else GAP + self.world.change
        return [Step(8, {8: -0.1, 9: -0.1 - gap})] * max_tokens

    def counters(self) -> SpeculationCounters:
        return SpeculationCounters(self.steps, 7 * self.steps, self.steps)


class World:
    """What servers were started, and how their answers differ from `ANSWER`."""

    def __init__(self, change: float = CHANGE) -> None:
        self.change = change
        self.twist: Callable[[str, list[int]], list[int]] = lambda name, tokens: tokens
        self.asked: list[str] = []
        self.running: list[str] = []
        self.most_running = 0
        self.started: list[str] = []
        self.broken = ""

    def server(self, spec: EngineSpec, settings: ServeSettings, folder: Path) -> Any:
        world = self

        class FakeServer:
            def __init__(self) -> None:
                self.spec, self.client = spec, FakeClient(world, spec)
                world.running.append(spec.name)
                world.started.append(spec.name)
                world.most_running = max(world.most_running, len(world.running))

            def wait_until_ready(self) -> float:
                if spec.name == world.broken:
                    raise ServerError("died")
                return 1.0

            def stop(self) -> None:
                world.running.remove(spec.name)

            def __enter__(self) -> "FakeServer":
                return self

            def __exit__(self, *_: object) -> None:
                self.stop()

        return FakeServer()


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    made = World()
    monkeypatch.setattr(measure, "Server", made.server)
    monkeypatch.setattr(measure, "available_memory", lambda: 64e9)
    return made


def test_rows_and_speedup(world: World) -> None:
    """Catches a row that is missing, timed wrongly, or compared with the slower baseline."""
    found = measure.run(PLAN, Listener())
    keys = [(row.engine, row.concurrency, row.temperature) for row in found.rows]
    assert keys == [
        *((name, 1, 0.0) for name in ("v1", "v2", "dspark")),
        *((name, 2, 0.0) for name in ("v1", "v2", "dspark")),
        ("dspark", 1, 1.0),
    ]
    assert found.row("v1").rounds == [pytest.approx(20.0, rel=0.01)] * 2
    assert found.speedup() == pytest.approx(2.0, rel=0.01)
    assert found.row("dspark").accepted_length == pytest.approx(2.0)
    assert found.row("dspark", temperature=1.0).accepted_length == pytest.approx(2.0)
    assert found.identity.counts() == {"equal": 12, "near_tie": 0, "different": 0}
    assert found.batch_shape_change is None  # nothing differed: nothing to excuse
    assert found.settings["interleaved"] is True
    assert world.running == []


def test_engines_take_turns(world: World) -> None:
    """Catches one engine always going first, or all its requests in one stretch."""
    measure.run(PLAN, Listener())
    timed = world.asked[3 + 3 :][: 2 * 6 * 3]  # after warm-up and show
    triples = [tuple(timed[i : i + 3]) for i in range(0, len(timed), 3)]
    assert all(sorted(t) == ["dspark", "v1", "v2"] for t in triples)
    assert {t[0] for t in triples} == {"dspark", "v1", "v2"}


def test_near_tie_is_excused(world: World) -> None:
    """Catches a flip inside the batch-shape change being reported as a defect."""
    world.twist = lambda name, tokens: [5, 6, 7, 9] if name == "dspark" else tokens
    found = measure.run(PLAN, Listener())
    assert found.batch_shape_change == pytest.approx(CHANGE)
    assert found.row("dspark").identity.counts() == {"equal": 0, "near_tie": 6, "different": 0}
    assert found.row("v2").identity.counts() == {"equal": 6, "near_tie": 0, "different": 0}
    assert found.identity.holds


@pytest.mark.parametrize("answer", [[5, 6, 7, 4], [5, 6, 7], [5, 6, 7, 8, 8]])
def test_other_differences_are_defects(world: World, answer: list[int]) -> None:
    """Catches an unlikely token, or an output of another length, passing for a near-tie."""
    world.twist = lambda name, tokens: answer if name == "dspark" else tokens
    found = measure.run(PLAN, Listener())
    assert found.row("dspark").identity.counts()["different"] == 6
    assert not found.identity.holds


def test_gap_beyond_the_batch_shape_change_is_a_defect(world: World) -> None:
    """Catches a limit that lets every flip of the two best tokens pass."""
    world.change = GAP / 2
    world.twist = lambda name, tokens: [5, 6, 7, 9] if name == "dspark" else tokens
    assert not measure.run(PLAN, Listener()).identity.holds


def test_difference_in_a_later_round_counts(world: World) -> None:
    """Catches a comparison that looks at the first round only."""
    seen = []

    def twist(name: str, tokens: list[int]) -> list[int]:
        if name != "dspark":
            return tokens
        seen.append(name)
        second_round = 1 + 3 + 6 < len(seen) <= 1 + 3 + 12  # warm-up, show, first round
        return [4, 4, 4, 4] if second_round else tokens

    world.twist = twist
    assert measure.run(PLAN, Listener()).row("dspark").identity.counts()["different"] == 6


def test_one_at_a_time_when_memory_is_small(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches three servers on a machine with room for one; the judge is started again."""
    monkeypatch.setattr(measure, "available_memory", lambda: 4e9)
    world.twist = lambda name, tokens: [5, 6, 7, 9] if name == "dspark" else tokens
    found = measure.run(PLAN, Listener())
    assert world.most_running == 1
    assert world.started == ["v1", "v2", "dspark", "v1"]
    assert found.settings["interleaved"] is False
    assert found.identity.counts() == {"equal": 0, "near_tie": 12, "different": 0}


def test_servers_stop_when_one_fails(world: World) -> None:
    """Catches servers that outlive a failed demo."""
    world.broken = "dspark"
    with pytest.raises(ServerError, match="died"):
        measure.run(PLAN, Listener())
    assert world.running == []
