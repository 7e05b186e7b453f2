"""Files of confidence and outcome pairs."""

import json
import math

import pytest

from vllm_dspark.artifacts.pairs import PairReader, read_pairs
from vllm_dspark.errors import InputError

HEADER = {"kind": "dspark_pairs", "version": 1, "num_positions": 2}
ROW = ["r-1", False, True, 9, 2, 1, [0.9, None]]


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_reading(tmp_path):
    """Catches columns that change places."""
    path = write(tmp_path / "p", HEADER, {"step": 3, "t": 0.1, "rows": [ROW, ROW]})
    width, pairs = read_pairs(path)
    assert width == 2
    assert len(pairs) == 2
    pair = pairs[0]
    assert (pair.request_id, pair.sampled, pair.untouched) == ("r-1", False, True)
    assert (pair.stamp, pair.verified, pair.accepted) == (9, 2, 1)
    assert pair.confidence[0] == 0.9
    assert math.isnan(pair.confidence[1])


def test_following_a_file_that_grows(tmp_path):
    """Catches a half-written line, and rows counted twice by the next read."""
    path = write(tmp_path / "p", HEADER)
    reader = PairReader(path)
    assert reader.read() == []
    line = json.dumps({"step": 1, "t": 0, "rows": [ROW]}) + "\n"
    with path.open("a") as file:
        file.write(line[:20])
        file.flush()
        assert reader.read() == []
        file.write(line[20:])
        file.flush()
        assert len(reader.read()) == 1
    assert reader.read() == []


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"kind": "cost_table", "version": 1}], "line 1: is of kind 'cost_table'"),
        ([{**HEADER, "version": 9}], "version 9"),
        ([{**HEADER, "num_positions": 0}], "num_positions = 0"),
        ([{"rows": []}], "comes before a header"),
        ([HEADER, {"rows": [ROW[:3]]}], "line 2: holds no rows"),
        ([HEADER, {"rows": [[*ROW[:4], 1, 2, [0.5, 0.5]]]}], "2 of 1 accepted"),
        ([HEADER, {"rows": [[*ROW[:6], [0.5]]]}], "1 confidences"),
        ([HEADER, {**HEADER, "num_positions": 3}], "num_positions = 3"),
        ([[1]], "is no JSON object"),
        ([], "is empty"),
    ],
)
def test_bad_files_are_named(tmp_path, lines, message):
    """Catches a traceback, or another file taken for pairs."""
    with pytest.raises(InputError, match=message):
        read_pairs(write(tmp_path / "p", *lines))


def test_missing_file(tmp_path):
    """Catches a traceback for a wrong name."""
    with pytest.raises(InputError, match="cannot read"):
        read_pairs(tmp_path / "nowhere")
