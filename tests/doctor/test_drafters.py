"""Drafters that load, or nearly do, and do not serve their target."""

from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.doctor.subjects import NAMES_A_REMEDY, findings, named, subject
from vllm_dspark.cli.doctor import drafter
from vllm_dspark.errors import ContractError

CLEAN = ("--max-num-seqs", "32", "--max-model-len", "4000")
PROMISE = {"quantization_config": {"quant_method": "fp8"}}


def _registry(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """A vLLM with these classes."""
    text = "\n".join(f'    "{name}": ("file", "Class"),' for name in names)
    monkeypatch.setattr(drafter, "installed_source", lambda _: text)


def test_number_of_target_layers(tmp_path: Path) -> None:
    """Catches a drafter of a deeper target whose layer ids exist here by chance."""
    made = subject(tmp_path, *CLEAN, drafter={"num_target_layers": 8})
    (found,) = named(findings(made), "target_match")
    assert found.level == "error"
    assert "num_target_layers = 8, but the target's config has 6 layers" in found.message
    assert NAMES_A_REMEDY.search(found.flag)


def test_a_class_that_vllm_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an architecture that neither vLLM nor the plugin can load."""
    _registry(monkeypatch, "Qwen3DSparkModel", "K3DSparkModel")
    made = subject(tmp_path, *CLEAN, drafter={"architectures": ["Qwen3DSparkModell"]})
    (found,) = named(findings(made), "drafter_class")
    assert found.level == "error"
    assert "did you mean 'Qwen3DSparkModel'?" in found.message
    assert found.reason
    assert NAMES_A_REMEDY.search(found.flag)
    for known in ("K3DSparkModel", "Qwen3DSparkModel"):
        (tmp_path / known).mkdir()
        made = subject(tmp_path / known, *CLEAN, drafter={"architectures": [known]})
        assert not named(findings(made), "drafter_class"), known


def test_no_claim_about_classes_without_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a class called unknown because no vLLM is there to know it."""

    def missing(path: str) -> str:
        raise ContractError(path)

    monkeypatch.setattr(drafter, "installed_source", missing)
    made = subject(tmp_path, *CLEAN, drafter={"architectures": ["FooDSparkModel"]})
    assert not named(findings(made), "drafter_class")


def test_promised_quantization_of_plain_weights(tmp_path: Path) -> None:
    """Catches weights called fp8 because the config says so: what is stored decides."""
    made = subject(tmp_path, *CLEAN, drafter=PROMISE)
    (found,) = named(findings(made), "draft_quantization")
    assert "promises fp8" in found.message
    assert "holds plain weights" in found.message
    assert "quantization_config" in found.flag
    (tmp_path / "dspark-drafter" / "model.safetensors").unlink()
    (found,) = named(findings(made), "draft_quantization")
    assert "promises" in found.message
    assert "holds" not in found.message, "nothing is known about a file that is not there"


def test_a_head_that_the_file_lacks(tmp_path: Path) -> None:
    """Catches a message and a reason that contradict each other."""
    made = subject(tmp_path, *CLEAN)
    file = tmp_path / "dspark-drafter" / "model.safetensors"
    tensors = {n: t for n, t in load_file(file).items() if not n.startswith("confidence_head")}
    save_file(tensors, file)
    (found,) = named(findings(made), "no_confidence_head")
    assert "promises one" in found.message
    assert "windows stay full" in found.message
    assert "running acceptance" not in found.message + found.reason
