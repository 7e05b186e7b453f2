"""Timing of captured graphs with a cold L2, byte floors, and rows that survive an interruption."""

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

Launch = Callable[[], Any]
# Larger than any L2 these run on (H200: 50 MB, B200: 126 MB).
_FLUSH_BYTES = 256 << 20
# Random inputs that each captured size is replayed with.
REPLAYS = 200


@dataclass
class Row:
    """One measurement; times are medians over replays, per call."""

    kernel: str
    shape: str
    ours_us: float
    stock_us: float | None
    floor_us: float
    goal: bool  # a figure of the issue applies to this row
    ours_p20_us: float = 0.0
    ours_p80_us: float = 0.0
    bytes_moved: int = 0
    note: str = ""


@dataclass
class Recorder:
    """Collects rows and failures; saves after each, and knows when to stop."""

    path: Path
    deadline: float
    copy_gbps: float = 0.0
    rows: list[Row] = field(default_factory=list)
    checks: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def out_of_time(self) -> bool:
        return time.monotonic() > self.deadline

    def floor_us(self, num_bytes: int) -> float:
        return num_bytes / self.copy_gbps * 1e-3

    def add(self, row: Row) -> None:
        self.rows.append(row)
        stock = "-" if row.stock_us is None else f"{row.stock_us:8.1f}"
        print(
            f"{row.kernel:18} {row.shape:52} ours {row.ours_us:8.1f} stock {stock} "
            f"floor {row.floor_us:8.1f} ({row.floor_us / row.ours_us:4.0%})",
            flush=True,
        )
        self.save()

    def problem(self, what: str, error: BaseException) -> None:
        text = f"{what}: {type(error).__name__}: {str(error)[:300]}"
        self.problems.append(text)
        print("PROBLEM", text, flush=True)
        self.save()

    def save(self) -> None:
        record = {
            "host": host_facts(),
            "copy_gbps": self.copy_gbps,
            "checks": self.checks,
            "problems": self.problems,
            "rows": [asdict(row) for row in self.rows],
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(record, indent=1) + "\n")


def host_facts() -> dict[str, str]:
    """What a reader needs to repeat the numbers."""
    import triton

    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    return {
        "gpu": torch.cuda.get_device_name(),
        "driver": driver,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def capture(launches: Sequence[Launch]) -> torch.cuda.CUDAGraph:
    """One graph that runs all `launches`; each is run before, so that it is compiled."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for launch in launches:
            launch()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    return graph


def time_graph(launches: Sequence[Launch], replays: int = 11) -> tuple[float, float, float]:
    """(median, 20th, 80th percentile) microseconds per launch, L2 flushed before each replay.

    `launches` should use different inputs: together they are one graph, so the launch cost of the
    replay is shared and no call finds the previous one's inputs in the cache.
    """
    graph = capture(launches)
    # Flushed by reading: written lines would still be going out to memory while the replay runs.
    flush = torch.zeros(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    sink = torch.zeros((), dtype=torch.float32, device="cuda")
    for _ in range(3):
        graph.replay()
    events = []
    for _ in range(replays):
        torch.sum(flush, dim=0, out=sink)
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        graph.replay()
        end.record()
        events.append((begin, end))
    torch.cuda.synchronize()
    times = sorted(begin.elapsed_time(end) * 1e3 / len(launches) for begin, end in events)
    return statistics.median(times), times[len(times) // 5], times[-1 - len(times) // 5]


def copy_bandwidth() -> float:
    """GB/s of a 1 GiB device copy, bytes read plus bytes written.

    The faster of the driver's copy (2.77 TB/s on an H200) and a kernel's (4.27 TB/s).
    """
    source = torch.ones(1 << 28, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    driver = time_graph([lambda: target.copy_(source)], replays=15)[0]
    kernel = time_graph([lambda: torch.add(source, 1.0, out=target)], replays=15)[0]
    return 2 * source.numel() * source.element_size() / min(driver, kernel) * 1e-3


def num_copies(num_bytes: int, limit: int = 16) -> int:
    """Input sets needed so that one graph touches about 200 MB, at least two."""
    return max(2, min(limit, -(-200_000_000 // max(num_bytes, 1))))


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp_min(1e-9))
