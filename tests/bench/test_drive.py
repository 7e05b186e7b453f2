"""The load generator and the figures made of what it saw, on an engine with a clock of its own."""

from dataclasses import replace

import pytest

from tests.bench.fakes import FakeEngine
from vllm_dspark.bench.drive import Arrival, Counters, drive, percentiles, summarise
from vllm_dspark.bench.workload import Ask, CellOrder, Phase


def order(phases: tuple[Phase, ...], lengths: tuple[int, ...]) -> CellOrder:
    return CellOrder(tuple(Ask(f"q{i}", n) for i, n in enumerate(lengths)), phases, 0.0)


def test_rate_leaves_out_the_prefills_of_the_first_wave() -> None:
    """Catches a rate that counts the first tokens, or the time in which they were made."""
    engine = FakeEngine(step_s=0.1, per_step=2)
    figures = summarise(drive(engine, order((Phase(2, 8),), (50, 50)), engine.clock))
    # two steps of 2 x 2 tokens after the prefill step
    assert figures["tokens"] == 8
    assert figures["seconds"] == pytest.approx(0.2)
    assert figures["tokens_per_s"] == pytest.approx(40.0)
    assert figures["counters"] == {"vllm:generation_tokens_total": 8.0}
    assert engine.cancelled == [0, 1]


def test_load_is_held_while_requests_end() -> None:
    """Catches a driver that lets the load fall when a request is done, or exceeds it."""
    engine = FakeEngine(per_step=2)
    figures = summarise(drive(engine, order((Phase(3, 60),), (3, 5, 7, *[9] * 12)), engine.clock))
    assert engine.most == 3
    assert set(figures["timeline"]["in_flight"][1:]) == {3.0}
    assert figures["requests_started"] > 3


def test_time_to_first_token_of_late_requests_is_apart() -> None:
    """Catches first-wave prefills (which queue behind each other) in the steady TTFT."""
    engine = FakeEngine(step_s=0.1, per_step=2)
    figures = summarise(drive(engine, order((Phase(2, 40),), (3, 9, *[9] * 12)), engine.clock))
    assert figures["ttft_first_wave_ms"]["count"] == 2
    assert figures["ttft_ms"]["p50"] == pytest.approx(100.0)
    assert figures["ttft_ms"]["count"] == figures["requests_started"] - 2


def test_time_per_output_token() -> None:
    """Catches a TPOT that divides by chunks instead of tokens."""
    engine = FakeEngine(step_s=0.1, per_step=2)
    figures = summarise(drive(engine, order((Phase(1, 20),), (40,)), engine.clock))
    assert figures["tpot_ms"]["p50"] == pytest.approx(50.0)


def test_phases_change_the_load_and_are_timed_apart() -> None:
    """Catches a burst that never falls back, or phases that share their tokens."""
    engine = FakeEngine(step_s=0.1, per_step=1)
    phases = (Phase(1, 5), Phase(4, 40), Phase(1, 40))
    figures = summarise(drive(engine, order(phases, (6,) * 40), engine.clock))
    assert engine.most == 4
    assert figures["timeline"]["in_flight"][-1] < 4
    assert [p["tokens"] for p in figures["phases"]] == [
        5.0,
        pytest.approx(40, abs=4),
        pytest.approx(40, abs=4),
    ]
    rates = [p["tokens"] / p["seconds"] for p in figures["phases"]]
    assert rates[1] > 3 * rates[0]


def test_windows_follow_the_load() -> None:
    """Catches readings that are missing, or that belong to another interval."""

    class Trimming(FakeEngine):
        """Verifies 8 tokens a request and step below four requests, else 2."""

        drafts = request_steps = 0

        def step(self) -> list[Arrival]:
            self.drafts += len(self.left) * (7 if len(self.left) < 4 else 1)
            self.request_steps += len(self.left)
            return super().step()

        def counters(self) -> Counters:
            return {
                "vllm:spec_decode_num_drafts_total": float(self.request_steps),
                "vllm:spec_decode_num_draft_tokens_total": float(self.drafts),
            }

    engine = Trimming(step_s=0.1, per_step=1)
    cell = order((Phase(1, 5), Phase(4, 40), Phase(1, 40)), (6,) * 40)
    figures = summarise(drive(engine, replace(cell, sample_s=0.05), engine.clock))
    windows = [row["window"] for row in figures["windows"]]
    assert windows[0] == windows[-1] == 8.0
    assert windows[len(windows) // 3] == 2.0
    other = Trimming()
    assert summarise(drive(other, cell, other.clock))["windows"] == []


def test_windows_are_followed_step_by_step_in_bursts() -> None:
    """Catches steps that are lost between readings, and sums of another engine or phase."""

    class Slow(FakeEngine):
        """Windows of 8 up to two requests; above, 3 after the first five steps of that load."""

        sums, crowded = (0, 0), 0

        def step(self) -> list[Arrival]:
            many = len(self.left) > 2
            self.crowded = self.crowded + 1 if many else 0
            window = 3 if self.crowded > 5 else 8
            rows, windows = self.sums
            self.sums = (rows + len(self.left), windows + window * len(self.left))
            return super().step()

        def verified(self) -> tuple[int, int]:
            return self.sums

    engine = Slow(step_s=0.01, per_step=1)
    cell = order((Phase(1, 130), Phase(4, 520), Phase(1, 260)), (30,) * 80)
    figures = summarise(drive(engine, replace(cell, sample_s=1.0), engine.clock))
    found = figures["settling"]
    assert [entry["load"] for entry in found] == [1, 4, 1]
    assert [entry["final_window"] for entry in found] == [8.0, 3.0, 8.0]
    assert [entry["settled_after"] for entry in found] == [0, 5, 0]
    other = Slow(step_s=0.01)
    plain = summarise(drive(other, cell, other.clock))["settling"]
    assert all(entry["settled_after"] is None for entry in plain)


def test_cell_without_enough_requests_is_an_error() -> None:
    """Catches a cell that silently runs at a lower load than it is labelled with."""
    engine = FakeEngine()
    with pytest.raises(RuntimeError, match="ran out of its 2 requests"):
        drive(engine, order((Phase(2, 100),), (3, 3)), engine.clock)


def test_percentiles() -> None:
    assert percentiles([]) is None
    assert percentiles([3.0, 1.0, 2.0]) == {"p50": 2.0, "p99": 3.0, "count": 3.0}
