"""Every kernel compiles for every architecture, within its shared memory and without spills.

Runs the compiler in child processes: this process imported Triton for its interpreter.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks/kernels/compile_kernels.py"
# Dots of at least 64 rows: the tile the table says goes to the warpgroup or tensor-memory units.
BIG_DOTS = {
    ("ragged_attention_kernel", "ragged qwen3-32b K=7 (64 rows, d128)"),
    ("ragged_attention_kernel", "ragged qwen3-8b prefill (128 rows, d128)"),
    ("sample_column_kernel", "draft vanilla r256 R=64"),
}
EXPECTED_UNIT = {80: "mma.sync", 90: "wgmma", 100: "tcgen05", 103: "tcgen05", 120: "mma.sync"}
KERNELS = {
    "attention_plan_kernel", "ragged_attention_kernel", "merge_partials_kernel",
    "_prepare_block_kernel", "_store_context_kernel", "_latent_attention_kernel",
    "sample_column_kernel", "latent_kernel", "finish_block_kernel", "_allocate_kernel",
    "_row_maps_kernel", "row_stats_kernel", "block_ratios_kernel", "block_mass_kernel",
    "resample_kernel",
}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compiled")
    # No interpreter, and not our backend for the CPU build, which would ask for it.
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_BACKENDS_IN_TREE": "1"}
    processes = []
    for archs in ("80,90", "100,103,120"):
        path = folder / f"{archs}.json"
        command = [sys.executable, SCRIPT, "--archs", archs, "--representative", "--json", path]
        processes.append((subprocess.Popen(command, env=environment), path))
    rows = []
    for process, path in processes:
        assert process.wait(timeout=1800) == 0, "the compile script failed; its output is above"
        rows += json.loads(path.read_text())
    return rows


@pytest.mark.parametrize("arch", [80, 90, 100, 103, 120])
def test_compiles_within_the_part(arch, reports):
    rows = [row for row in reports if row["arch"] == arch]
    assert {row["kernel"] for row in rows} == KERNELS
    for row in rows:
        assert row["shared_bytes"] <= row["shared_limit"], row
        assert row["stack_bytes"] == 0, f"spills to local memory: {row}"
        if (row["kernel"], row["case"]) in BIG_DOTS:
            assert EXPECTED_UNIT[arch] in row["instructions"], row
