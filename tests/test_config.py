"""Options: every refusal names the option, the value seen and what is allowed."""

import json

import pytest
from pydantic import ValidationError

from vllm_dspark.config import DSparkConfig, option_reference
from vllm_dspark.errors import DSparkConfigError


def test_defaults_are_the_documented_ones():
    config = DSparkConfig.from_mapping({})
    assert config == DSparkConfig.from_mapping(None)
    assert config.confidence_min_predicted_gain == 0.04
    assert config.validate_confidence_artifact_freshness is False
    assert config.confidence_mixed_evidence is None
    assert (config.windows, config.kernels, config.scheduling) == ("auto", "auto", "auto")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("windows", "hots"),
        ("scheduling", "no"),
        ("enabled", "yes"),
        ("enabled", 1),
        ("confidence_min_predicted_gain", 1.0),
        ("confidence_min_predicted_gain", -0.01),
        ("confidence_min_predicted_gain", float("nan")),
        ("confidence_min_predicted_gain", float("inf")),
        ("hysteresis_steps", 1.5),
        ("probe_interval", True),
        ("confidence_mixed_evidence", {}),
        ("cost_table", ""),
        ("test_windows", 0),
        ("test_windows", []),
        ("test_windows", [1, "full"]),
        ("test_windows_seed", -1),
    ],
)
def test_bad_value_names_option_value_and_allowed(name, value):
    with pytest.raises(DSparkConfigError) as caught:
        DSparkConfig.from_mapping({name: value})
    message = str(caught.value)
    allowed = {option.name: option.allowed for option in option_reference()}
    assert f"dspark.{name}" in message
    assert allowed[name] in message
    assert f" = {value!r}" in message  # as given: a list is no tuple


def test_unknown_option_suggests_the_close_one():
    with pytest.raises(DSparkConfigError, match="did you mean 'hysteresis_steps'"):
        DSparkConfig.from_mapping({"hysteresis_step": 3})
    with pytest.raises(DSparkConfigError, match=r"options are .*probe_interval"):
        DSparkConfig.from_mapping({"zzz": 3})


def test_every_bad_option_is_reported_at_once():
    with pytest.raises(DSparkConfigError) as caught:
        DSparkConfig.from_mapping({"windows": 3, "metrics": "on", "oops": None})
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("obj", [5, "host", ["windows"], True])
def test_not_an_object(obj):
    with pytest.raises(DSparkConfigError, match="must be a JSON object"):
        DSparkConfig.from_mapping(obj)


def test_options_are_checked_against_the_draft_width():
    assert DSparkConfig.from_mapping({"request_floor": 7, "test_windows": [1, 8]}, 7)
    with pytest.raises(DSparkConfigError, match="request_floor = 8"):
        DSparkConfig.from_mapping({"request_floor": 8}, 7)
    for windows in (9, [1, 9]):
        with pytest.raises(DSparkConfigError, match="allowed: 1 to 8") as caught:
            DSparkConfig.from_mapping({"test_windows": windows}, 7)
        assert f"test_windows = {windows!r} exceeds" in str(caught.value)


def test_round_trip_through_json():
    given = {"windows": "host", "test_windows": [1, 3], "cost_table": "/tmp/t.json"}
    config = DSparkConfig.from_mapping(given, 7)
    assert json.loads(json.dumps(config.to_mapping())) == given
    assert DSparkConfig.from_mapping(config.to_mapping()) == config
    assert DSparkConfig.from_mapping(config) is config
    hash(config)


def test_frozen():
    with pytest.raises(ValidationError):
        DSparkConfig().windows = "host"


def test_cache_dir_order(monkeypatch, tmp_path):
    monkeypatch.delenv("VLLM_DSPARK_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert DSparkConfig().resolved_cache_dir() == tmp_path / "vllm-dspark"
    monkeypatch.setenv("VLLM_DSPARK_CACHE_DIR", str(tmp_path / "env"))
    assert DSparkConfig().resolved_cache_dir() == tmp_path / "env"
    option = DSparkConfig.from_mapping({"cache_dir": str(tmp_path / "option")})
    assert option.resolved_cache_dir() == tmp_path / "option"


def test_reference_documents_every_option():
    rows = option_reference()
    assert [row.name for row in rows] == list(DSparkConfig.model_fields)
    for row in rows:
        assert row.description.endswith("."), row
        assert row.allowed != "see the documentation", row
        json.loads(row.default)
