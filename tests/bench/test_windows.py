"""Counters of a cell as shares and means."""

import pytest

from vllm_dspark.bench.windows import Drafts

OURS = {
    "vllm:dspark_request_steps_total": 10.0,
    "vllm:dspark_drafted_tokens_total{position=0}": 10.0,
    "vllm:dspark_drafted_tokens_total{position=1}": 10.0,
    "vllm:dspark_admitted_tokens_total{position=0}": 10.0,
    "vllm:dspark_admitted_tokens_total{position=1}": 5.0,
    "vllm:dspark_verified_tokens_total{position=0}": 10.0,
    "vllm:dspark_verified_tokens_total{position=1}": 5.0,
    "vllm:dspark_accepted_tokens_total{position=0}": 8.0,
    "vllm:dspark_steps_total{kind=trim,reason=trim_gain}": 3.0,
    "vllm:dspark_steps_total{kind=skip_draft,reason=skip_gain}": 1.0,
    "vllm:dspark_timed_steps_total": 4.0,
    "vllm:dspark_measured_step_seconds_total": 0.8,
    "vllm:dspark_predicted_step_seconds_total": 0.6,
    "vllm:dspark_measured_draft_seconds_total": 0.2,
    "vllm:spec_decode_num_drafts_total": 99.0,
}


def test_our_counters() -> None:
    """Catches vLLM's counters winning over ours, which know what was trimmed."""
    found = Drafts.sum_of([OURS, OURS]).as_json()
    assert found["accepted_length"] == pytest.approx(1.8)
    assert found["window"] == pytest.approx(2.5)
    assert found["admitted_per_step"] == pytest.approx(1.5)
    assert found["drafted_per_step"] == pytest.approx(2.0)
    assert found["skip_share"] == pytest.approx(0.25)
    assert found["step_ms"] == pytest.approx(200.0)
    assert found["predicted_step_ms"] == pytest.approx(150.0)
    assert found["draft_share"] == pytest.approx(0.25)
    assert list(found["plans"]) == [
        "kind=trim,reason=trim_gain",
        "kind=skip_draft,reason=skip_gain",
    ]


def test_stock_counters() -> None:
    stock = {
        "vllm:spec_decode_num_drafts_total": 10.0,
        "vllm:spec_decode_num_draft_tokens_total": 70.0,
        "vllm:spec_decode_num_accepted_tokens_total": 30.0,
    }
    found = Drafts.sum_of([stock]).as_json()
    assert found["accepted_length"] == pytest.approx(4.0)
    assert found["window"] == pytest.approx(8.0)
    assert found["admitted_per_step"] is None


def test_no_speculation() -> None:
    found = Drafts.sum_of([{}]).as_json()
    assert found["accepted_length"] is None and found["window"] is None
