"""Compilation is lazy, cached where a folder can be written, and works where none can."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vllm_dspark.cpu.jit import lazy_njit

numba = pytest.importorskip("numba")

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from vllm_dspark.cpu import noise
assert "numba" not in sys.modules, "importing must not import numba"
print(noise.gumbel_noise(1, 2, 8).tolist())
"""


def noise_in_a_fresh_process(cache: Path) -> str:
    variables = {"NUMBA_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_compiled_code_is_reused_by_the_next_process(tmp_path: Path) -> None:
    first = noise_in_a_fresh_process(tmp_path)
    written = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nbc")}
    assert written
    assert noise_in_a_fresh_process(tmp_path) == first
    assert written == {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.nbc")}


def test_without_a_writable_folder_it_compiles_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    njit = numba.njit

    def unwritable(*args: Any, cache: bool = False, **options: Any) -> Any:
        if cache:
            raise RuntimeError("cannot cache function 'add': no locator available")
        return njit(*args, **options)

    monkeypatch.setattr(numba, "njit", unwritable)

    @lazy_njit("int64(int64, int64)")
    def add(a, b):  # type: ignore[no-untyped-def]
        return a + b

    assert add(2, 3) == 5


def test_other_errors_of_numba_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **options: Any) -> Any:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(numba, "njit", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        lazy_njit("int64(int64)")(lambda a: a)(1)
