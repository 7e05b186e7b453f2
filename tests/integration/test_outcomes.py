"""What is recorded of each step is what happened: drafted, admitted, verified, accepted."""

import json
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.scenarios import generate, make_prompts, params
from tests.integration.test_equality import MARKOV, SYMBOLS
from tests.support.engines import dspark, engine, runner_of, scheduler_of

pytestmark = pytest.mark.engine

RANDOM_WINDOWS = {"test_windows": "random", "test_windows_seed": 41}


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("width", [7, 3, 1])
def test_records_sum_to_the_totals_and_to_the_tokens(
    build: Callable, tmp_path: Path, width: int
) -> None:
    """Catches double counting, wrong positions, lost steps: file, totals and tokens must agree."""
    pair, path = build(MARKOV), tmp_path / "deep" / "outcomes.jsonl"
    options = {**RANDOM_WINDOWS, "record_outcomes": str(path)}
    speculative = dspark(pair.drafter, options, num_speculative_tokens=width)
    with engine(pair.target, speculative) as llm:
        found = generate(llm, make_prompts(SYMBOLS), params(50))
        totals = scheduler_of(llm).dspark_totals
    steps = _rows(path)
    assert all(set(step) == {"step", "t", "requests"} for step in steps)
    assert all(a["step"] < b["step"] and a["t"] <= b["t"] for a, b in pairwise(steps))
    assert totals.steps == len(steps)

    rows = [row for step in steps for row in step["requests"]]
    counts = np.array([row[1:] for row in rows])  # drafted, admitted, verified, accepted
    assert totals.request_steps == len(rows)
    assert (np.diff(counts, axis=1) <= 0).all(), "accepted <= verified <= admitted <= drafted"
    assert (counts[:, 0] <= width).all()
    kinds = (totals.drafted, totals.admitted, totals.verified, totals.accepted)
    for column, total in enumerate(kinds):
        assert total.sum() == counts[:, column].sum()
        by_position = [(counts[:, column] > k).sum() for k in range(width)]
        assert total.tolist() == by_position
    sizes = np.bincount(counts[:, 2], minlength=width + 1)
    assert totals.windows[: width + 1].tolist() == sizes.tolist()
    emitted = sorted(len(answer.tokens) - 1 for answer in found)  # the first is the prompt step's
    assert totals.accepted_length == pytest.approx(sum(emitted) / len(rows))

    by_request: dict[str, list[int]] = defaultdict(list)
    for name, *_, accepted in rows:
        by_request[name].append(1 + accepted)
    # every row emits its accepted drafts and one token of the target's own, which a last row lacks
    # where max_tokens is reached inside the accepted drafts
    recorded = sorted(sum(rows_of) for rows_of in by_request.values())
    lacking = [high - number for high, number in zip(recorded, emitted, strict=True)]
    assert set(lacking) <= {0, 1}, lacking


def test_tokens_are_exactly_the_recorded_ones(build: Callable, tmp_path: Path) -> None:
    """Catches an accepted count that is off by one: requests that end where a block ends."""
    pair, path = build(MARKOV), tmp_path / "outcomes.jsonl"
    prompt = make_prompts(SYMBOLS)[5:6]
    with engine(
        pair.target,
        dspark(pair.drafter, {"record_outcomes": str(path)}, num_speculative_tokens=7),
    ) as llm:
        generate(llm, prompt, params(60))
        # readable while the log is open: it is written line by line
        blocks = [1 + step["requests"][0][-1] for step in _rows(path)]
        for number in range(1, 7):
            before = scheduler_of(llm).dspark_totals.accepted.sum()
            steps = scheduler_of(llm).dspark_totals.request_steps
            length = 1 + sum(blocks[:number])
            (answer,) = generate(llm, prompt, params(length))
            totals = scheduler_of(llm).dspark_totals
            assert len(answer.tokens) == length
            assert totals.request_steps - steps == number
            assert totals.accepted.sum() - before + number == length - 1


def test_short_run_by_hand(build: Callable, tmp_path: Path) -> None:
    """Catches any wrong count: each step is recomputed from the drafts and the target's own text.

    At T=0 a step accepts the longest admitted prefix of the drafts that the target would have
    written itself; the drafts are read from the drafter before each step.
    """
    pair, path = build(MARKOV), tmp_path / "outcomes.jsonl"
    prompt = make_prompts(SYMBOLS)[4:5]
    with engine(pair.target) as llm:
        (free,) = generate(llm, prompt, params(40))
    windows = [8, 1, 3, 5, 2, 8, 4]
    options = {"test_windows": windows, "record_outcomes": str(path)}
    with engine(pair.target, dspark(pair.drafter, options, num_speculative_tokens=7)) as llm:
        scheduler, speculator, drafts = scheduler_of(llm), runner_of(llm).speculator, []
        schedule = scheduler.schedule

        def spy(*args: Any, **kwargs: Any) -> Any:
            if any(r.spec_token_ids for r in scheduler.running):
                drafts.append(speculator.draft_tokens[0].tolist())
            return schedule(*args, **kwargs)

        scheduler.schedule = spy
        (found,) = generate(llm, prompt, params(24))
    assert found.tokens == free.tokens[:24]

    steps = _rows(path)
    assert len(steps) == len(drafts)
    done, expected = 1, []  # the prompt's step emits the first token
    for step, tokens in zip(steps, drafts, strict=True):
        window = windows[step["step"] % len(windows)]
        admitted = tokens[: window - 1]
        accepted = 0
        for token, wanted in zip(admitted, found.tokens[done:], strict=False):
            if token != wanted:
                break
            accepted += 1
        # near the end vLLM verifies no more drafts than tokens are still wanted
        expected.append((len(tokens), len(admitted), accepted))
        done += 1 + accepted
    records = [tuple(step["requests"][0][1:]) for step in steps]
    for (drafted, admitted, verified, accepted), wanted in zip(records, expected, strict=True):
        assert (drafted, admitted, accepted) == wanted
        assert verified == admitted
