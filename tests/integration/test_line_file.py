"""Recordings of a serving engine: files that cannot be opened, and a disk that fills up."""

import json
import logging
from pathlib import Path

import pytest

from tests.artifacts.records import cost_record
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.integration.line_file import LineFile
from vllm_dspark.integration.recording import PairRecorder
from vllm_dspark.integration.startup import keep_table


@pytest.mark.parametrize("name", ["file/pairs.jsonl", ".", "x" * 300])
def test_a_file_that_cannot_be_opened(tmp_path: Path, name: str) -> None:
    """Catches a bare OSError from the engine core, which names neither option nor remedy."""
    (tmp_path / "file").write_text("")
    with pytest.raises(DSparkConfigError, match="leave the option out") as caught:
        PairRecorder(tmp_path / name, 3)
    assert "dspark.record_confidences = " in str(caught.value)


def test_a_full_disk_ends_the_recording_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Catches an engine that dies in the middle of a step because its recording cannot grow."""
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("/dev/full is a file of Linux")
    lines = LineFile(full, "record_outcomes")
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            lines.write({"step": step})
    assert [r.getMessage() for r in caplog.records] == [
        "vllm-dspark: record_outcomes ends here, /dev/full cannot be written: No space left on "
        "device; serving goes on"
    ]
    lines.close()


def test_lines_can_be_read_while_they_are_written(tmp_path: Path) -> None:
    """Catches lines that wait in a buffer for an engine's orderly end."""
    path = tmp_path / "new" / "lines.jsonl"
    lines = LineFile(path, "record_outcomes")
    lines.write({"step": 1})
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1}]
    lines.close()
    lines.write({"step": 2})
    assert len(path.read_text().splitlines()) == 1


@pytest.mark.parametrize(("folder", "words"), [("file", "used but not kept"), ("new", "kept in")])
def test_a_cache_that_cannot_be_written_costs_a_measurement(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, folder: str, words: str
) -> None:
    """Catches a start that ends, after minutes of measuring, because its table cannot be saved."""
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.INFO, logger="vllm.vllm_dspark"):
        keep_table(cost_record(), tmp_path / folder)
    (record,) = caplog.records
    assert words in record.getMessage()
    assert bool(list(tmp_path.glob("*/cost-table-*.json"))) is (folder == "new")
