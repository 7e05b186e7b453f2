"""One GPU session: proves the kernels right on the device, then times them. Saves after every row.

    python benchmarks/kernels/run_gpu.py --out $OUT/h200-kernels.json --budget-s 540
    python benchmarks/kernels/run_gpu.py --stages sweep --out $OUT/sweep.json --budget-s 300

Stages, in order: tests (pytest on the device), checks (graph replays with changed inputs), draft,
windows, attention, rejection, block; `sweep` and `sweep-draft` only when named. With vLLM
importable (PYTHONPATH to its tree) stock is timed beside ours; without it `stock_us` is null and
the reason is under `problems`.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.kernels import bench_attention, bench_draft, bench_step  # noqa: E402
from benchmarks.kernels.harness import Recorder, copy_bandwidth  # noqa: E402

_CHECKS = {
    "ragged attention": bench_attention.check,
    "drafting head": bench_draft.check,
    "windows": bench_step.check_windows,
    "rejection": bench_step.check_rejection,
}
_STAGES = {
    "draft": bench_draft.measure,
    "windows": bench_step.measure_windows,
    "attention": bench_attention.measure,
    "rejection": bench_step.measure_rejection,
    "block": bench_step.measure_block,
    "sweep": bench_attention.sweep,
    "sweep-draft": bench_draft.sweep,
}
_DEFAULT = "tests,checks,draft,windows,attention,rejection,block"


def run_tests(recorder: Recorder, limit_s: float) -> None:
    """The interpreter's test-suite, compiled and on the device."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "tests/kernels", "--tb=short"]
    command += ["-p", "no:cacheprovider", "--deselect", "tests/kernels/test_cross_compile.py"]
    try:
        import xdist  # noqa: F401

        command += ["-n", "8"]
    except ImportError:
        pass
    environment = os.environ | {"DSPARK_TEST_DEVICE": "cuda", "PYTHONPATH": _python_path()}
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )
        print(done.stdout[-3000:], done.stderr[-500:], flush=True)
        tail = done.stdout.strip().splitlines()[-1:] or ["no output"]
        recorder.checks["tests/kernels on the device"] = f"rc {done.returncode}: {tail[0]}"
    except subprocess.TimeoutExpired as error:
        recorder.problem("tests/kernels on the device", error)
    recorder.save()


def _python_path() -> str:
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--budget-s", type=float, default=540.0)
    parser.add_argument("--tests-s", type=float, default=240.0)
    parser.add_argument("--stages", default=_DEFAULT)
    arguments = parser.parse_args()
    stages = arguments.stages.split(",")
    unknown = set(stages) - set(_STAGES) - {"tests", "checks"}
    if unknown:
        parser.error(
            f"unknown stages {sorted(unknown)}; choose from tests, checks, {list(_STAGES)}"
        )
    begin = time.monotonic()
    recorder = Recorder(arguments.out, begin + arguments.budget_s)
    recorder.copy_gbps = copy_bandwidth()
    print(f"copy bandwidth {recorder.copy_gbps:.0f} GB/s", flush=True)
    recorder.save()
    if "tests" in stages:
        run_tests(recorder, min(arguments.tests_s, arguments.budget_s))
    if "checks" in stages:
        for name, check in _CHECKS.items():
            try:
                check(recorder)
            except Exception as error:  # a wrong kernel must not hide the others' results
                recorder.problem(f"check of {name}", error)
            print(f"checked {name} at {time.monotonic() - begin:.0f} s", flush=True)
    for stage in stages:
        if stage in _STAGES and not recorder.out_of_time():
            _STAGES[stage](recorder)
            torch.cuda.empty_cache()
            print(f"stage {stage} done at {time.monotonic() - begin:.0f} s", flush=True)
    recorder.save()
    print(f"{len(recorder.rows)} rows, {len(recorder.problems)} problems -> {arguments.out}")
    for name, verdict in recorder.checks.items():
        print(f"check {name}: {verdict}")
    return 1 if recorder.problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
