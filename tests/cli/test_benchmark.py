"""The page and README table that the CPU benchmark writes."""

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.test_report import report

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("cpu_demo", ROOT / "benchmarks/cpu_demo.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(module, "FOLDER", tmp_path / "docs")
    return module


@pytest.fixture
def found() -> dict[str, Any]:
    result = json.loads(json.dumps(report().as_json()))
    result["settings"] = {
        "dtype": "bfloat16", "rounds": 3, "interleaved": False, "prompts_per_domain": 4,
        "max_tokens": 96, "target": "SmolLM2", "num_speculative_tokens": 7,
        "extra_arguments": ["--enforce-eager"],
    }  # fmt: skip
    result["environment"] = {"cpu": "Some CPU", "cores": 2, "load_average": [0.5, 1, 2]}
    return result


def test_readme_table_is_replaced_and_nothing_else(
    benchmark: ModuleType, tmp_path: Path, found: dict[str, Any]
) -> None:
    """Catches a README that loses text, or collects a table per run."""
    begin, end = benchmark.README_MARKS
    (tmp_path / "README.md").write_text(f"before\n{begin}\nold\n{end}\nafter\n")
    benchmark.write(found)
    benchmark.write(found)
    text = (tmp_path / "README.md").read_text()
    assert text.startswith("before\n") and text.endswith("\nafter\n")
    assert "old" not in text
    assert text.count("**2.00x** (single rounds: 2.00 to 2.00)") == 1


def test_float32_has_its_own_page(
    benchmark: ModuleType, tmp_path: Path, found: dict[str, Any]
) -> None:
    """Catches a float32 run overwriting the published bf16 numbers."""
    found["settings"]["dtype"] = "float32"
    benchmark.write(found)
    assert sorted(p.name for p in (tmp_path / "docs").iterdir()) == [
        "cpu-demo-float32.json",
        "cpu-demo-float32.md",
    ]


def test_page_says_under_what_conditions(benchmark: ModuleType, found: dict[str, Any]) -> None:
    """Catches a page that hides a loaded machine or engines measured one after the other."""
    page = benchmark.page(found)
    for fact in ("one engine after the other", "0.5, 1.0, 2.0", "--enforce-eager", "0.1000"):
        assert fact in page


def test_readme_of_the_repository_has_the_marks(benchmark: ModuleType) -> None:
    """Catches marks that an edit of the README removed."""
    text = (ROOT / "README.md").read_text()
    assert all(text.count(mark) == 1 for mark in benchmark.README_MARKS)
