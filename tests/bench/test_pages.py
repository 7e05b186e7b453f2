"""What the CPU benchmarks make of their measurements: cost tables and calibrations."""

import json
import random
from pathlib import Path

import numpy as np

from benchmarks import cpu_cost_table, cpu_planning
from vllm_dspark.artifacts.store import read_calibration
from vllm_dspark.planning.cost import StepMode, StepShape


def test_slow_stretches_leave_no_kinks() -> None:
    """Catches a table that keeps what a slow stretch of the machine did to some sizes."""
    source = random.Random(0)
    cells: cpu_cost_table.Cells = {}
    for requests, tokens in cpu_cost_table.shapes(8, 7):
        for kv in (128, 2032):
            slow = [1.0 + 0.6 * (source.random() < 0.4) for _ in range(12)]
            cells[requests, tokens, kv] = [
                ((30.0 + 0.5 * tokens + kv / 1000) * f, (8.0 + requests) * f) for f in slow
            ]
    narrow = {
        (requests, columns): [(5.0 + columns + 0.1 * requests) * f for f in slow]
        for requests in (1, 8)
        for columns in (1, 3)
    }
    table = cpu_cost_table.table_of(cells, narrow)
    ragged = table.grids[StepMode.EAGER, StepShape.RAGGED]
    assert np.allclose(ragged.median_ms[0], [30.128 + 0.5 * n for n in ragged.sizes], rtol=0.02)
    single = table.grids[StepMode.EAGER, StepShape.SINGLE]
    assert single.sizes == (1, 2, 4, 8)
    assert np.allclose(table.draft.median_ms[0], [8.0 + r for r in table.draft.sizes], rtol=0.02)
    for columns in (1, 3):
        passes = table.narrow[columns]
        assert passes.sizes == (1, 8)
        expected = [5.0 + columns + 0.1 * requests for requests in passes.sizes]
        assert np.allclose(passes.median_ms[0], expected, rtol=0.02)


def write_prompts(path: Path) -> None:
    rows = [
        {"id": f"p-{i}", "domain": "math", "source": "s", "prompt": f"what is {i}?"}
        for i in range(800)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_calibration_of_biased_confidences(tmp_path: Path) -> None:
    """Catches a fit that sees the benchmark's prompts, or judges itself on what it was fitted to:
    confidences that are too high by a logit of 1 come out calibrated on prompts left out."""
    prompts, pairs = tmp_path / "prompts.jsonl", tmp_path / "pairs.jsonl"
    write_prompts(prompts)
    cpu_planning.split(prompts, tmp_path)
    texts = [(tmp_path / f"{n}-prompts.jsonl").read_text() for n in ("bench", "calibration")]
    assert not set(texts[0].splitlines()) & set(texts[1].splitlines())
    source = random.Random(0)
    lines = [json.dumps({"kind": "dspark_pairs", "version": 1, "num_positions": 2})]
    for prompt in range(len(cpu_planning.heldout_prompts(prompts))):
        rows = []
        for block in range(240):
            row = [source.uniform(0.3, 0.95) for _ in range(2)]
            true = [1.0 / (1.0 + (1.0 / c - 1.0) * np.e) for c in row]
            accepted = 0
            while accepted < 2 and source.random() < true[accepted]:
                accepted += 1
            rows.append([f"{prompt}|0.0-x", block % 2 == 1, True, block, 2, accepted, row])
        lines.append(json.dumps({"rows": rows}))
    pairs.write_text("\n".join(lines) + "\n")
    cpu_planning.calibrate(pairs, prompts, tmp_path)
    record = read_calibration(tmp_path / "calibration.json", 2)
    for name in cpu_planning.CLASSES:
        for item in getattr(record, f"{name}_quality"):
            assert item.ece_before > 0.1
            assert item.ece_after < 0.05
            assert item.brier_after < item.brier_of_base_rate
        assert np.allclose(getattr(record, f"{name}_offset"), -1.0, atol=0.3)


def test_a_run_without_a_cell_has_no_figures(tmp_path):
    """Catches a trace instead of "n cells are left" where time was over before the first cell."""
    from vllm_dspark.bench import plots

    assert plots.draw({"rows": []}, tmp_path, "bench") == []
    assert not list(tmp_path.iterdir())
