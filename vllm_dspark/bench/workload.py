"""What is asked of an engine: prompts, output lengths, and the load held while they run.

A cell holds a load: `concurrency` requests are in flight, the next one enters when one is done,
and the clock stops after a number of output tokens, the same for all modes. The first requests
have lengths spread evenly over one output length, so that requests end (and prefills arrive) at a
steady pace from the start instead of all at once. All modes get the same prompts in the same order;
another repeat gets others.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.bench.modes import BenchError

RANDOM_TOKENS = 1000  # random prompts draw from this many token ids, above the special ones
_FIRST_TOKEN = 100
_SAMPLE_S = 0.25  # a reading costs about a millisecond


@dataclass(frozen=True)
class Question:
    """One prompt, a text (put into the chat template) or token ids, with its domain."""

    domain: str
    text: str = ""
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Ask:
    """One request. prompt: text or token ids."""

    prompt: str | list[int]
    max_tokens: int


@dataclass(frozen=True)
class Phase:
    """A load to hold: requests in flight, until so many tokens were emitted in the phase."""

    concurrency: int
    tokens: int


@dataclass(frozen=True)
class CellOrder:
    """One cell as the worker gets it. The asks are more than it will need.

    sample_s: seconds between readings of the counters within the cell; 0 takes none. replay: file
    of the trace whose confidences and acceptance are repeated.
    """

    asks: tuple[Ask, ...]
    phases: tuple[Phase, ...]
    temperature: float
    sample_s: float = 0.0
    replay: str | None = None

    def as_json(self) -> dict[str, Any]:
        """For the pipe to the worker."""
        return asdict(self)

    @classmethod
    def of_json(cls, obj: dict[str, Any]) -> CellOrder:
        """Inverse of `as_json`."""
        return cls(
            tuple(Ask(a["prompt"], a["max_tokens"]) for a in obj["asks"]),
            tuple(Phase(p["concurrency"], p["tokens"]) for p in obj["phases"]),
            obj["temperature"],
            obj["sample_s"],
            obj["replay"],
        )


@dataclass(frozen=True)
class Workload:
    """A kind of traffic.

    output_tokens: of a request. domains: one after the other over the cell (a shift), each a set
    of domains to mix; empty mixes all. prompt_tokens: least prompt length in characters / 4, by
    joining questions; 0 takes them as they are. burst: the load goes 1, N, 1. outlast: requests
    are longer than the cell, so that none ends or enters in it: decode steps only. only: loads at
    which it is measured; empty: at all of the run. replay: file of a trace whose confidences and
    acceptance all modes with drafts repeat (integration/replay.py).
    """

    name: str
    output_tokens: int
    domains: tuple[tuple[str, ...], ...] = ((),)
    prompt_tokens: int = 0
    burst: bool = False
    outlast: bool = False
    only: tuple[int, ...] = ()
    replay: str | None = None

    def as_json(self) -> dict[str, Any]:
        """What makes its cells what they are, for the fingerprint."""
        left_out = ("only", "replay")  # the recording counts, wherever it lies
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        if self.replay is not None:
            found["recording"] = hashlib.sha256(Path(self.replay).read_bytes()).hexdigest()
        return found


WORKLOADS = {
    w.name: w
    for w in (
        Workload("decode", 1024, outlast=True),
        Workload("short", 64),
        Workload("long", 384),
        Workload("shift", 96, domains=(("math",), ("chat",))),
        Workload("burst", 96, burst=True),
        Workload("prefill", 32, prompt_tokens=768),
    )
}


def load_questions(path: Path, max_characters: int) -> list[Question]:
    """Questions of a JSONL file with the keys `prompt` and `domain`, overlong ones left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        rows = [json.loads(line) for line in lines if line.strip()]
        found = [Question(str(row["domain"]), str(row["prompt"])) for row in rows]
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"no {error}" if isinstance(error, KeyError) else str(error)
        if isinstance(error, OSError):
            why = error.strerror or why
        raise BenchError(
            f"cannot read prompts from {path}: {why}; wanted are JSON lines with the keys "
            '"prompt" and "domain"'
        ) from error
    short = [question for question in found if len(question.text) <= max_characters]
    if not short:
        raise BenchError(f"{path} has no prompt of at most {max_characters} characters")
    return short


def random_questions(number: int, length: int, seed: int = 0) -> list[Question]:
    """Prompts of random token ids, for models without a tokenizer."""
    source = random.Random(seed)
    return [
        Question(
            "random",
            token_ids=tuple(_FIRST_TOKEN + source.randrange(RANDOM_TOKENS) for _ in range(length)),
        )
        for _ in range(number)
    ]


def hold_out(
    questions: Sequence[Question], share: float = 0.5
) -> tuple[list[Question], list[Question]]:
    """Two disjoint parts of the questions, the same ones in every run: (first share, rest)."""

    def place(question: Question) -> float:
        text = question.text or repr(question.token_ids)
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") / 2**32

    first = [q for q in questions if place(q) < share]
    return first, [q for q in questions if place(q) >= share]


@dataclass(frozen=True)
class Sizes:
    """How much work a cell is: tokens per request in flight, within bounds."""

    tokens_per_request: int = 24
    least: int = 120
    most: int = 4096

    def tokens(self, concurrency: int) -> int:
        """Output tokens of a cell."""
        return max(self.least, min(self.most, concurrency * self.tokens_per_request))


def make_cell(
    workload: Workload,
    questions: Sequence[Question],
    concurrency: int,
    temperature: float,
    repeat: int,
    sizes: Sizes,
) -> CellOrder:
    """The requests and phases of one cell; equal for all modes."""
    phases = _phases(workload, concurrency, sizes)
    total = sum(phase.tokens for phase in phases)
    # A request emits at most output_tokens, and a burst ends with N requests unfinished.
    number = 2 * concurrency + total // workload.output_tokens + 8
    source = random.Random(f"{workload.name}/{concurrency}/{temperature}/{repeat}")
    texts = _in_order(workload, questions, number, source)
    asks = []
    for index, prompt in enumerate(texts):
        length = workload.output_tokens
        if index < concurrency and not (workload.burst or workload.outlast):
            length = max(2, round(length * (index + 1) / concurrency))
        asks.append(Ask(prompt, length))
    sample_s = _SAMPLE_S if workload.burst else 0.0
    return CellOrder(tuple(asks), phases, temperature, sample_s, workload.replay)


def _phases(workload: Workload, concurrency: int, sizes: Sizes) -> tuple[Phase, ...]:
    tokens = sizes.tokens(concurrency)
    if workload.burst:
        alone = sizes.tokens(1)
        return Phase(1, alone), Phase(concurrency, tokens), Phase(1, alone)
    parts = len(workload.domains)
    return tuple(Phase(concurrency, max(1, tokens // parts)) for _ in range(parts))


def _in_order(
    workload: Workload, questions: Sequence[Question], number: int, source: random.Random
) -> list[str | list[int]]:
    """Prompts as they will be asked: domains in equal shares, part after part."""
    parts = len(workload.domains)
    prompts: list[str | list[int]] = []
    for part, domains in enumerate(workload.domains):
        by_domain: dict[str, list[Question]] = {}
        for question in questions:
            if not domains or question.domain in domains:
                by_domain.setdefault(question.domain, []).append(question)
        if not by_domain:
            raise BenchError(
                f"workload {workload.name}: no prompt of domain {' or '.join(domains)}"
            )
        columns = [source.sample(group, len(group)) for _, group in sorted(by_domain.items())]
        share = number // parts + (number % parts if part == parts - 1 else 0)
        cursor = 0
        for _ in range(share):
            text: list[Question] = []
            while not text or _size(text) < workload.prompt_tokens:
                column = columns[cursor % len(columns)]
                text.append(column[cursor // len(columns) % len(column)])
                cursor += 1
            prompts.append(_joined(text))
    return prompts


def _size(questions: Sequence[Question]) -> int:
    """Tokens, about: four characters each."""
    return sum(len(q.token_ids) or len(q.text) // 4 for q in questions)


def _joined(questions: Sequence[Question]) -> str | list[int]:
    if questions[0].token_ids:
        return [token for q in questions for token in q.token_ids]
    return "\n\n".join(q.text for q in questions)
