"""The harness end to end: worker process, real engine, counters, report."""

from pathlib import Path

import pytest
from rich.console import Console

from tests.support.costs import write_cost_table
from tests.support.pairs import PairSpec
from vllm_dspark.bench.modes import Mode
from vllm_dspark.bench.runner import Gates
from vllm_dspark.bench.workload import WORKLOADS, Sizes
from vllm_dspark.cli.bench import BenchOptions, run_bench


@pytest.mark.engine
def test_bench_on_a_tiny_pair(build, tmp_path: Path) -> None:
    """Catches a worker that loses cells or counters, a switch that does not switch, an idle
    engine that burns the machine, and a resumed run that starts engines for nothing."""
    pair = build(PairSpec(kind="markov", noise=0.1))
    dear = write_cost_table(tmp_path / "t.json", base_ms=1.0, per_token_ms=5.0, draft_ms=0.1)
    options = BenchOptions(
        out=tmp_path / "out",
        modes=tuple(map(Mode.parse, ("off", "fixed7", "ours"))),
        concurrencies=(1, 3),
        temperatures=(0.0, 1.0),
        workloads=(WORKLOADS["short"],),
        repeats=2,
        sizes=Sizes(tokens_per_request=24, least=48),
        target=str(pair.target),
        drafter=str(pair.drafter),
        pair={
            "dtype": "float32",
            "max_model_len": 512,
            "kv_cache_bytes": 64 << 20,
            "engine": {"enforce_eager": True},
            "plugin_options": {"cost_table": str(dear), "online_cost": False},
        },
        share_engines=True,
        gates=Gates(),
    )
    found = run_bench(options, Console(quiet=True))
    assert len(found["cells"]) == 3 * 2 * 2 * 2
    assert found["conditions"]["engines"].keys() == {"off", "fixed7", "ours"}
    for row in found["rows"]:
        off, fixed, ours = (row["modes"][name] for name in ("off", "fixed7", "ours"))
        assert off["accepted_length"] is None
        assert fixed["accepted_length"] > 1.5
        assert fixed["window"] > 6.0  # 8, but for the ends of requests
        # (a step that ours planned may be counted after the planner was switched off)
        assert "kind=unplanned,reason=unplanned" in fixed["plans"]
        assert not any("kind=trim" in plan or "kind=skip" in plan for plan in fixed["plans"])
        assert ours["window"] < fixed["window"] - 1.0, "dear tokens, and yet nothing was trimmed"
        assert any("kind=trim" in plan or "kind=skip" in plan for plan in ours["plans"])
        assert row["ours_over_best_fixed"] is not None
    idle = sum(cell["cpu_s"]["idle_engines"] for cell in found["cells"])
    assert idle < 0.2 * sum(cell["seconds"] for cell in found["cells"])
    stamps = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.log")}
    assert len(stamps) == 2
    assert len(run_bench(options, Console(quiet=True))["cells"]) == len(found["cells"])
    assert stamps == {path: path.stat().st_mtime_ns for path in stamps}
