"""Which OpenMP runtime the CPU engine is started with."""

import pytest

from vllm_dspark.cli import preload, serve


@pytest.fixture(autouse=True)
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preload, "intel_openmp", lambda: "/lib/libiomp5.so")


def test_adds_to_what_is_preloaded() -> None:
    """Catches a preload of the user (an allocator, say) being dropped."""
    before = {"LD_PRELOAD": "/lib/libtcmalloc.so", "X": "1"}
    after = preload.with_openmp(before)
    assert after == {"LD_PRELOAD": "/lib/libtcmalloc.so:/lib/libiomp5.so", "X": "1"}
    assert before["LD_PRELOAD"] == "/lib/libtcmalloc.so"
    assert preload.with_openmp({}) == {"LD_PRELOAD": "/lib/libiomp5.so"}


@pytest.mark.parametrize("present", ["/a/libgomp.so.1", "/a/libiomp5.so", "/a/libomp.so"])
def test_users_runtime_stays_alone(present: str) -> None:
    """Catches two OpenMP runtimes in one process."""
    assert preload.with_openmp({"LD_PRELOAD": present}) == {"LD_PRELOAD": present}


def test_nothing_to_preload(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a preload of a library that is not there."""
    monkeypatch.setattr(preload, "intel_openmp", lambda: None)
    assert preload.with_openmp({"X": "1"}) == {"X": "1"}


@pytest.mark.parametrize(("cpu_build", "expected"), [(True, True), (False, False)])
def test_only_the_cpu_build(
    monkeypatch: pytest.MonkeyPatch, cpu_build: bool, expected: bool
) -> None:
    """Catches a CUDA server that is started with another OpenMP runtime than vLLM's."""
    monkeypatch.setattr(serve, "is_cpu_build", lambda: cpu_build)
    assert ("LD_PRELOAD" in serve.serve_environment({})) is expected
