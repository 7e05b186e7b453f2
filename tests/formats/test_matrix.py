"""Support matrix and known reports are what the recorded outcomes say, of tests that exist."""

import ast
import json
from pathlib import Path

from tests.support.known_reports import render_reports
from tests.support.matrix import DRAFTS, SECTIONS, matches, patterns, render

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "docs/support-outcomes.json"


def _record() -> dict:
    return json.loads(RECORD.read_text())


def _functions() -> set[str]:
    """file::test of every test function, methods by their own name."""
    found = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test"):
                found.add(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def test_the_page_is_generated_from_the_record() -> None:
    """Catches a page edited by hand, or not written anew after rows or outcomes changed."""
    for name, page in (("support-matrix", render), ("known-reports", render_reports)):
        written = (ROOT / f"docs/{name}.md").read_text()
        assert written == page(_record()), f"{name}: run tools/support_matrix.py"


def test_rows_name_tests_that_exist() -> None:
    """Catches a row whose tests were renamed or removed."""
    functions = _functions()
    for pattern in patterns():
        bare = pattern.split("[")[0].rstrip("*")
        file, _, name = bare.partition("::")
        assert any(f.startswith(f"{file}::") for f in functions), pattern
        if name and "*" not in name:
            assert any(f.startswith(f"{file}::{name}") for f in functions), pattern


def test_recorded_tests_still_exist() -> None:
    """Catches outcomes of tests that are gone: the record has to be made anew."""
    functions = _functions()
    for node in _record()["outcomes"]:
        file, *_, name = node.split("[")[0].split("::")
        assert f"{file}::{name}" in functions, f"{node}: record again (tools/support_matrix.py)"


def test_no_row_has_failed() -> None:
    """Catches a matrix published with a failing promise."""
    failed = [node for node, outcome in _record()["outcomes"].items() if outcome == "failed"]
    assert failed == []


def test_a_failing_row_would_show() -> None:
    row = SECTIONS[0].rows[0]
    node = f"{DRAFTS}[deepspec, x]"
    assert matches(row.tests[0], node)
    page = render({"outcomes": {node: "failed"}, "versions": {}})
    assert f"| {row.what} | not shown yet (meant: {row.result}) | **1 failed** |" in page
