"""A short soak of the engine (tests/formats/soak.py runs it at full length)."""

from pathlib import Path

import pytest

from tests.formats.soak import soak


@pytest.mark.engine
def test_nothing_leaks_sticks_or_comes_out_wrong(tmp_path: Path) -> None:
    """Catches blocks, slots, rows or series that are never given back, in 120 requests."""
    report = soak(tmp_path, count=120, blocks=6)
    assert report.problems == []
    assert report.preemptions > 0 and report.aborted > 0 and report.compared > 30
