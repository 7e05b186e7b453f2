"""What doctor says about the files of configs/, with no checkpoint at hand."""

from pathlib import Path

import pytest

from tests.doctor.subjects import H200, findings, named
from vllm_dspark.cli.doctor.arguments import parse_serve
from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Machine, Subject

ROOT = Path(__file__).parent.parent.parent
FILES = sorted((ROOT / "configs").glob("*.yaml"))
EMBEDDED = [path for path in FILES if path.stem.startswith("deepseek")]


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_dspark.integration.checkpoints._fetch", lambda *_: None)
    monkeypatch.chdir(ROOT)  # the demo's drafter is named from here


def _of(path: Path, machine: Machine = H200) -> list[Finding]:
    return findings(Subject(parse_serve(["--config", str(path)]), machine))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_only_missing_files_are_worth_a_warning(path: Path) -> None:
    """Catches a file that doctor advises to change, or a check that does not know its model."""
    told = {f.check for f in _of(path) if f.level in ("warning", "error")}
    allowed = {"drafter_files", "target_match", "several_nodes"}  # H200 here is one GPU
    assert told <= ({"target_files"} if path.stem == "demo" else allowed)


@pytest.mark.parametrize("path", EMBEDDED, ids=lambda path: path.stem)
def test_embedded_on_a_cpu(path: Path) -> None:
    """Catches no error where the engine refuses the model (integration/preflight.py)."""
    (found,) = named(_of(path, Machine(cpu_build=True)), "device")
    assert found.level == "error"
    assert not named(_of(path), "device")


def test_the_demo_is_made_not_downloaded() -> None:
    """Catches advice to download a name without an owner."""
    (found,) = named(_of(ROOT / "configs" / "demo.yaml"), "target_files")
    assert "vllm_dspark.demo.target" in found.flag
    assert not any("hf download" in f.flag for f in _of(ROOT / "configs" / "demo.yaml"))
