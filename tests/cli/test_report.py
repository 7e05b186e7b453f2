"""The JSON file, the speedup and the tables of a demo run."""

import json

import pytest

from vllm_dspark.demo.client import SpeculationCounters
from vllm_dspark.demo.compare import Difference, Identity
from vllm_dspark.demo.report import Report, Row, domain_table, markdown_table


def report(different: int = 0) -> Report:
    parted = (Difference("math-0", 3, 5, 6, None),) * different
    ours = Row("dspark", "DSpark", 1, 0.0, [40.0, 60.0, 50.0])
    ours.counters = {
        "math": SpeculationCounters(request_steps=10, drafted=70, accepted=20),
        "code": SpeculationCounters(request_steps=30, drafted=210, accepted=30),
    }
    ours.identity = Identity(4, 1, 0)
    wave = Row("dspark", "DSpark", 4, 0.0, [90.0], identity=Identity(5, 0, different, parted))
    return Report(
        [
            Row("v1", "V1", 1, 0.0, [20.0, 30.0, 25.0]),
            Row("v2", "V2", 1, 0.0, [24.0, 22.0, 23.0], identity=Identity(5, 0, 0)),
            ours,
            wave,
            Row("dspark", "DSpark", 1, 1.0),
        ],
        settings={"rounds": 3},
        environment={"cores": 2},
        batch_shape_change=0.1,
    )


def test_speedup_is_against_the_faster_baseline() -> None:
    """Catches a speedup against the slower engine, or of best rounds instead of medians."""
    assert report().faster_baseline().engine == "v1"
    assert report().speedup() == pytest.approx(50.0 / 25.0)
    assert report().speedup_range() == (pytest.approx(2.0), pytest.approx(2.0))


def test_accepted_length_is_a_macro_average() -> None:
    """Catches a mean weighted by steps: math 3.0 and code 2.0 must give 2.5, not 2.25."""
    assert report().row("dspark").accepted_length == pytest.approx(2.5)
    assert report().row("dspark").window == pytest.approx(8.0)
    assert report().row("v1").accepted_length is None


@pytest.mark.parametrize("different", [0, 2])
def test_json_has_the_promised_keys(different: int) -> None:
    """Catches a renamed key, and a verdict that leaves out the waves of several requests."""
    found = json.loads(json.dumps(report(different).as_json()))
    assert found["identical"] is (different == 0)
    assert found["requests"] == {"equal": 9, "near_tie": 1, "different": different}
    assert found["speedup"] == pytest.approx(2.0)
    assert found["accepted_length"] == pytest.approx(2.5)
    assert [row["engine"] for row in found["rows"]] == ["v1", "v2", "dspark", "dspark", "dspark"]
    assert found["rows"][2]["accepted_length_by_domain"] == {"math": 3.0, "code": 2.0}


def test_tables() -> None:
    """Catches a hidden difference and empty cells that read as zero."""
    rows = json.loads(json.dumps(report(2).as_json()))["rows"]
    lines = markdown_table(rows).splitlines()
    assert len(lines) == 2 + len(rows)
    assert "2 DIFFERENT" in lines[5]
    assert "reference" in lines[2]
    assert lines[6] == "| DSpark | 1 | 1 |  |  |  |  |  |"
    assert domain_table(rows).splitlines()[2] == "| 1 | 0 | 2.00 | 3.00 |"


def test_speedup_needs_timed_rounds() -> None:
    """Catches a speedup made up from nothing."""
    empty = Report(
        [Row("v1", "", 1, 0.0), Row("v2", "", 1, 0.0), Row("dspark", "", 1, 0.0)], {}, {}
    )
    with pytest.raises(ValueError, match="no timed rounds"):
        empty.speedup()
