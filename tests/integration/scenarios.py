"""Deterministic workloads (T=0, or made deterministic) that every engine must answer alike.

A scenario is a function of a `Stage`: it drives the engine and returns its `Answer`s in a fixed
order. `test_equality.py` runs each of them once without speculation and then on many DSpark
engines. Each docstring names the bug the scenario catches.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

PROMPT_LENGTHS = (1, 2, 3, 5, 8, 13, 33, 64, 97, 150)


@dataclass(frozen=True)
class Answer:
    """What one completion looks like from outside."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: int | str | None
    logprobs: tuple[dict[int, float], ...] = ()
    prompt_logprobs: tuple[dict[int, float], ...] = ()


@dataclass(frozen=True)
class Stage:
    """An engine and what the target says when nothing constrains it.

    free: tokens of each of `prompts` at T=0; the scenarios cut stop strings and words from it.
    """

    llm: Any
    prompts: list[dict[str, list[int]]]
    free: list[tuple[int, ...]]
    free_text: list[str]


Scenario = Callable[[Stage], list[Answer]]
SCENARIOS: dict[str, Scenario] = {}


def scenario(function: Scenario) -> Scenario:
    SCENARIOS[function.__name__] = function
    return function


def make_prompts(symbols: int) -> list[dict[str, list[int]]]:
    """Prompts of mixed lengths, as token ids."""
    return [
        {"prompt_token_ids": [(7 * i + 11 * j + j * j) % symbols for j in range(length)]}
        for i, length in enumerate(PROMPT_LENGTHS)
    ]


def params(max_tokens: int = 32, **changes: Any) -> Any:
    """Greedy sampling parameters that do not end at <eos> unless told."""
    from vllm import SamplingParams

    return SamplingParams(
        **{"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **changes}
    )


def generate(llm: Any, prompts: Sequence[Any], sampling: Any) -> list[Answer]:
    outputs = llm.generate(list(prompts), sampling, use_tqdm=False)
    return [answer for output in outputs for answer in answers(output)]


def answers(output: Any) -> list[Answer]:
    """Every completion of one request output."""
    prompt_logprobs = tuple(_values(entry) for entry in output.prompt_logprobs or ())
    return [
        Answer(
            tuple(c.token_ids),
            c.text,
            c.finish_reason,
            c.stop_reason,
            tuple(_values(entry) for entry in c.logprobs or ()),
            prompt_logprobs,
        )
        for c in output.outputs
    ]


def _values(entry: dict[int, Any] | None) -> dict[int, float]:
    return {token: value.logprob for token, value in (entry or {}).items()}


def drive(llm: Any, arrivals: dict[str, tuple[int, Any, Any]], aborts: dict[str, int]) -> dict:
    """Step an engine by hand; finished outputs by request id.

    arrivals: id -> (step at which it is added, prompt, sampling params); aborts: id -> step.
    """
    engine, finished, step = llm.llm_engine, {}, 0
    last = max([at for at, _, _ in arrivals.values()] + list(aborts.values()))
    while step <= last or engine.has_unfinished_requests():
        for request_id, (at, prompt, sampling) in arrivals.items():
            if at == step:
                engine.add_request(request_id, prompt, sampling)
        doomed = [request_id for request_id, at in aborts.items() if at == step]
        if doomed:
            engine.abort_request(doomed)
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output
        step += 1
    return finished


@scenario
def mixed_prompt_lengths(stage: Stage) -> list[Answer]:
    """Catches wrong offsets in ragged batches; more requests than slots, so slots are reused."""
    return generate(stage.llm, stage.prompts, params(40))


@scenario
def one_request(stage: Stage) -> list[Answer]:
    """Catches what only a batch of one shows (uniform shapes), over many blocks."""
    return generate(stage.llm, stage.prompts[3:4], params(120))


@scenario
def repeated_prompts_and_shared_prefixes(stage: Stage) -> list[Answer]:
    """Catches missing drafter context KV behind prefix-cache hits, and rows of earlier owners."""
    base = stage.prompts[-1]["prompt_token_ids"] * 2
    shared = [{"prompt_token_ids": [*base, i, i + 1]} for i in range(4)]
    repeated = [{"prompt_token_ids": base}, {"prompt_token_ids": base}]
    first = generate(stage.llm, shared + repeated, params(24))
    return first + generate(stage.llm, repeated + shared, params(24))


@scenario
def late_arrivals(stage: Stage) -> list[Answer]:
    """Catches steps that mix prefills with verification (other offsets than pure decode).

    A one-token prompt that joins running requests gets K slots for drafts it does not have (vLLM
    keeps batches uniform); penalties must not count them.
    """
    arrivals = {
        f"late-{i}": (2 * i, prompt, params(30)) for i, prompt in enumerate(stage.prompts[:8])
    }
    penalised = params(30, repetition_penalty=1.3, frequency_penalty=0.4)
    arrivals["late-one"] = (9, stage.prompts[0], penalised)
    finished = drive(stage.llm, arrivals, {})
    return [a for request_id in arrivals for a in answers(finished[request_id])]


@scenario
def abort_in_flight(stage: Stage) -> list[Answer]:
    """Catches survivors that read the row, stamp or window of an aborted neighbour."""
    arrivals = {f"abort-{i}": (0, prompt, params(36)) for i, prompt in enumerate(stage.prompts[:6])}
    finished = drive(stage.llm, arrivals, {"abort-0": 3, "abort-3": 5})
    survivors = [name for name in arrivals if name not in ("abort-0", "abort-3")]
    return [a for request_id in survivors for a in answers(finished[request_id])]


@scenario
def stop_strings(stage: Stage) -> list[Answer]:
    """Catches text or tokens past a stop string, or stops missed.

    One token is one character, and the stops (three characters, starting at every index of a run
    longer than a block) end at every place of a block: inside accepted ones and across two.
    """
    text, prompt = stage.free_text[5], stage.prompts[5]
    places = range(2, 24)
    stops = [params(40, stop=[text[i : i + 3]]) for i in places]
    stops += [params(40, stop=[text[9:12]], include_stop_str_in_output=True)]
    return generate(stage.llm, [prompt] * len(stops), stops)


@scenario
def stop_tokens_after_min_tokens(stage: Stage) -> list[Answer]:
    """Catches a stop token honoured too early, or accepted drafts past it that are not cut."""
    tokens, prompt = stage.free[5], stage.prompts[5]
    chosen = [params(40, stop_token_ids=[tokens[i]], min_tokens=i) for i in range(1, 22)]
    chosen += [params(40, stop_token_ids=[tokens[3]], min_tokens=n) for n in (4, 9, 17)]
    return generate(stage.llm, [prompt] * len(chosen), chosen)


@scenario
def end_of_sequence(stage: Stage) -> list[Answer]:
    """Catches <eos> treated as an ordinary accepted draft; few rivals make it likely in places."""
    eos = stage.llm.get_tokenizer().eos_token_id
    free = sorted(set(stage.free[4]))
    rivals = [[*free[i::6], eos] for i in range(6)] + [[*free[i::9], eos] for i in range(9)]
    chosen = [params(40, ignore_eos=False, allowed_token_ids=ids) for ids in rivals]
    chosen += [params(40, ignore_eos=False, min_tokens=11, allowed_token_ids=rivals[-1])]
    found = generate(stage.llm, [stage.prompts[4]] * len(chosen), chosen)
    assert {"stop", "length"} == {a.finish_reason for a in found}
    return found


@scenario
def max_tokens_inside_a_block(stage: Stage) -> list[Answer]:
    """Catches tokens past max_tokens: every length from 1 to beyond two blocks."""
    return generate(stage.llm, [stage.prompts[5]] * 18, [params(n) for n in range(1, 19)])


@scenario
def penalties(stage: Stage) -> list[Answer]:
    """Catches penalties that ignore the drafts before a row of the same window."""
    changed = [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.9},
        {"repetition_penalty": 1.4},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        {},
    ]
    return generate(stage.llm, stage.prompts[3:8], [params(40, **c) for c in changed])


@scenario
def allowed_tokens(stage: Stage) -> list[Answer]:
    """Catches token rules applied to the first row of a window only."""
    free = stage.free[5]
    changed = [
        {"allowed_token_ids": sorted(set(free[::2]))},
        {"allowed_token_ids": sorted(set(free))},
        {"allowed_token_ids": [free[0]]},
        {},
    ]
    return generate(stage.llm, [stage.prompts[5]] * 4, [params(40, **c) for c in changed])


@scenario
def bad_words(stage: Stage) -> list[Answer]:
    """Catches forbidden words completed by a draft of the same window (two- and three-token)."""
    text = stage.free_text[5]
    words = [[text[i : i + 2]] for i in range(0, 12, 2)] + [[text[i : i + 3]] for i in range(1, 9)]
    chosen = [params(30, bad_words=w) for w in words]
    return generate(stage.llm, [stage.prompts[5]] * len(chosen), chosen)


@scenario
def logprobs(stage: Stage) -> list[Answer]:
    """Catches log-probabilities of the wrong row, of unverified rows, or of masked logits."""
    chosen = [params(24, logprobs=n, prompt_logprobs=m) for n, m in ((0, None), (3, 2), (1, 0))]
    return generate(stage.llm, [stage.prompts[i] for i in (6, 5, 3)], chosen)


@scenario
def structured_choice(stage: Stage) -> list[Answer]:
    """Catches grammars that are not advanced, or rolled back, by whole accepted blocks."""
    options = ["abcdefghij", "abcdefgxyz", "abcdQ", "0123456789abcdefghijkl"]
    return _structured(stage, [{"choice": options}, {"choice": options[:2]}, {"choice": ["zz"]}])


@scenario
def structured_regex(stage: Stage) -> list[Answer]:
    """Catches drafts that a grammar forbids and yet survive, in windows of any length."""
    return _structured(stage, [{"regex": "[a-f]{9}-[0-9]{5}"}, {"regex": "(ab|cd){4,9}!"}])


@scenario
def structured_json(stage: Stage) -> list[Answer]:
    """Catches the same for a grammar with a stack, and that the text is valid JSON when ended."""
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["left", "right"]}, "b": {"enum": [1, 22, 333]}},
        "required": ["a", "b"],
        "additionalProperties": False,
    }
    found = _structured(stage, [{"json": schema, "disable_any_whitespace": True}] * 2)
    for answer in found:
        if answer.finish_reason == "stop":
            assert set(json.loads(answer.text)) == {"a", "b"}, answer.text
    return found


def _structured(stage: Stage, rules: Sequence[dict[str, Any]]) -> list[Answer]:
    """Constrained requests beside an unconstrained one."""
    from vllm.sampling_params import StructuredOutputsParams

    chosen = [
        params(48, ignore_eos=False, structured_outputs=StructuredOutputsParams(**rule))
        for rule in rules
    ]
    prompts = [stage.prompts[3 + i] for i in range(len(chosen))]
    return generate(stage.llm, [*prompts, stage.prompts[2]], [*chosen, params(48)])


@scenario
def parallel_samples(stage: Stage) -> list[Answer]:
    """Catches siblings of n>1 sharing a row; top_k=1 makes sampling deterministic."""
    chosen = params(24, n=3, temperature=1.0, top_k=1)
    return generate(stage.llm, stage.prompts[2:5], chosen)


@scenario
def greedy_beside_sampled(stage: Stage) -> list[Answer]:
    """Catches one request's temperature used for another's rows."""
    chosen = [params(30, temperature=t, top_k=1 if t else 0) for t in (0.0, 1.0, 0.0, 0.7, 0.0)]
    return generate(stage.llm, stage.prompts[2:7], chosen)
