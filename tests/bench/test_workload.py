"""What cells ask: equal for all modes, other prompts in every repeat, enough requests."""

import json
from pathlib import Path

import pytest

from tests.bench.fakes import FakeEngine
from vllm_dspark.bench.drive import drive
from vllm_dspark.bench.modes import BenchError
from vllm_dspark.bench.workload import (
    WORKLOADS,
    CellOrder,
    Question,
    Sizes,
    hold_out,
    load_questions,
    make_cell,
    random_questions,
)

QUESTIONS = [
    Question(d, f"{d} {i} " + "x" * 80) for d in ("chat", "code", "math") for i in range(20)
]
SIZES = Sizes(tokens_per_request=10, least=30)


def test_cells_repeat_exactly_and_repeats_differ() -> None:
    """Catches modes that are asked different things, and repeats that are not repeats at all."""
    first = make_cell(WORKLOADS["short"], QUESTIONS, 4, 0.0, 0, SIZES)
    assert first == make_cell(WORKLOADS["short"], QUESTIONS, 4, 0.0, 0, SIZES)
    assert first.asks != make_cell(WORKLOADS["short"], QUESTIONS, 4, 0.0, 1, SIZES).asks
    assert CellOrder.of_json(json.loads(json.dumps(first.as_json()))) == first


def test_first_requests_end_at_a_steady_pace() -> None:
    """Catches a first wave that ends all at once, with a storm of prefills behind it."""
    cell = make_cell(WORKLOADS["short"], QUESTIONS, 4, 0.0, 0, SIZES)
    assert [ask.max_tokens for ask in cell.asks[:5]] == [16, 32, 48, 64, 64]


def test_decode_cells_have_no_prefill() -> None:
    """Catches requests that end within the cell, so that others enter."""
    cell = make_cell(WORKLOADS["decode"], QUESTIONS, 4, 0.0, 0, SIZES)
    engine = FakeEngine(per_step=8)
    drive(engine, cell, engine.clock)
    assert len(engine.asked) == 4


def test_domains_are_mixed_in_equal_shares() -> None:
    cell = make_cell(WORKLOADS["short"], QUESTIONS, 6, 0.0, 0, SIZES)
    assert {str(ask.prompt).split()[0] for ask in cell.asks[:3]} == {"chat", "code", "math"}


def test_shift_asks_one_domain_after_the_other() -> None:
    """Catches a shift whose parts are mixed."""
    cell = make_cell(WORKLOADS["shift"], QUESTIONS, 2, 0.0, 0, SIZES)
    domains = [str(ask.prompt).split()[0] for ask in cell.asks]
    assert set(domains) == {"math", "chat"}
    assert domains == sorted(domains, reverse=True)
    assert len(cell.phases) == 2


def test_prefill_prompts_are_long() -> None:
    cell = make_cell(WORKLOADS["prefill"], QUESTIONS, 2, 0.0, 0, SIZES)
    assert min(len(str(ask.prompt)) for ask in cell.asks) >= 4 * 0.9 * 768


@pytest.mark.parametrize("name", WORKLOADS)
@pytest.mark.parametrize("concurrency", [1, 7, 64])
@pytest.mark.parametrize("per_step", [1, 8])
def test_no_cell_runs_out_of_requests(name: str, concurrency: int, per_step: int) -> None:
    """Catches a workload that has too few requests for its tokens, at any speed."""
    engine = FakeEngine(per_step=per_step)
    cell = make_cell(WORKLOADS[name], QUESTIONS, concurrency, 0.0, 0, SIZES)
    drive(engine, cell, engine.clock)
    assert engine.most == concurrency


def test_random_prompts_for_models_without_tokenizer() -> None:
    cell = make_cell(WORKLOADS["short"], random_questions(8, 16), 2, 0.0, 0, SIZES)
    prompt = cell.asks[0].prompt
    assert isinstance(prompt, list) and len(prompt) == 16
    assert random_questions(8, 16) == random_questions(8, 16)


def test_hold_out_is_disjoint_and_stable() -> None:
    """Catches a calibration that has seen the benchmark's prompts."""
    first, rest = hold_out(QUESTIONS)
    assert not set(first) & set(rest) and len(first) + len(rest) == len(QUESTIONS)
    assert hold_out(list(reversed(QUESTIONS)))[0] == list(reversed(first))
    assert 10 < len(first) < 50


def test_prompt_files(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"domain": "math", "prompt": "1 + 1?"}, {"domain": "chat", "prompt": "x" * 99}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert load_questions(path, 50) == [Question("math", "1 + 1?")]
    with pytest.raises(BenchError, match="no prompt of at most 3"):
        load_questions(path, 3)
    path.write_text('{"text": "no prompt"}\n')
    with pytest.raises(BenchError, match='keys "prompt" and "domain"'):
        load_questions(path, 50)


def test_missing_domain_is_named() -> None:
    with pytest.raises(BenchError, match="workload shift: no prompt of domain chat"):
        make_cell(WORKLOADS["shift"], [Question("math", "x")], 1, 0.0, 0, SIZES)
