"""The process that `vllm-dspark serve` becomes, without a vLLM."""

import sys
from types import ModuleType

import pytest

from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.integration import serving


@pytest.fixture(autouse=True)
def arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["python"])


def test_cuda_build_hands_over_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a CUDA server that bypasses vLLM's own command, or changes its arguments."""
    seen: list[list[str]] = []
    module = ModuleType("vllm.entrypoints.cli.main")
    module.main = lambda: seen.append(list(sys.argv))  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.entrypoints", "vllm.entrypoints.cli"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(serving, "is_cpu_build", lambda: False)
    assert serving.main(["model", "--port", "1"]) == 0
    assert seen == [["vllm", "serve", "model", "--port", "1"]]


def test_our_errors_are_one_message(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a stack trace where one line names the option."""

    def fail() -> None:
        raise DSparkConfigError("dspark.windos = 'host': unknown option")

    monkeypatch.setattr(serving, "is_cpu_build", lambda: True)
    monkeypatch.setattr(serving, "_serve_subcommand", fail)
    assert serving.main(["model"]) == 2
    assert capsys.readouterr().err == (
        "vllm-dspark: error: dspark.windos = 'host': unknown option\n"
    )


@pytest.mark.parametrize("code", [0, 3])
def test_exit_codes_of_vllm_pass(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """Catches an exit code that is swallowed on the way out."""

    def leave() -> None:
        sys.exit(code)

    monkeypatch.setattr(serving, "is_cpu_build", lambda: True)
    monkeypatch.setattr(serving, "_serve_subcommand", leave)
    with pytest.raises(SystemExit) as left:
        serving.main([])
    assert left.value.code == code
