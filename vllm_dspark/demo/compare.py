"""Are two sets of greedy outputs the same, and if not, is a near-tie the reason?

Greedy decoding takes the argmax of logits that were computed in some batch shape. In bf16 the same
token's logit differs between batch shapes, with and without speculation, so where the two best
tokens lie closer together than that, either may win. A request counts as

    equal      same tokens throughout
    near_tie   parts at a step where the two tokens are the reference's two best and their logit gap
               is no larger than the change of such gaps between batch sizes, measured on the server
               without speculation
    different  anything else: a defect

The measured change (`batch_shape_change`) is the largest one seen over the steps of all prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from vllm_dspark.demo.client import Client, Step


@dataclass(frozen=True)
class Difference:
    """Where one request first differs; gap: of the two tokens, None if not the best two."""

    request: str
    step: int
    expected: int | None
    got: int | None
    gap: float | None


@dataclass(frozen=True)
class Identity:
    """Counts of requests, and what parted."""

    equal: int
    near_tie: int
    different: int
    differences: tuple[Difference, ...] = ()

    @property
    def holds(self) -> bool:
        """No request is different for another reason than a near-tie."""
        return self.different == 0

    def counts(self) -> dict[str, int]:
        """The three counts, for JSON."""
        return {"equal": self.equal, "near_tie": self.near_tie, "different": self.different}

    def as_json(self) -> dict[str, object]:
        """Counts and differences, for JSON."""
        return {**self.counts(), "differences": [asdict(d) for d in self.differences]}


def first_difference(expected: Sequence[int], got: Sequence[int]) -> int | None:
    """Index of the first step at which two outputs part, None when they are equal."""
    for step, (a, b) in enumerate(zip(expected, got, strict=False)):
        if a != b:
            return step
    return None if len(expected) == len(got) else min(len(expected), len(got))


def find_differences(
    expected: Mapping[str, Sequence[int]], got: Mapping[str, Sequence[int]]
) -> dict[str, int]:
    """Request name -> first differing step, for the requests of `got` that differ."""
    parted = {name: first_difference(expected[name], tokens) for name, tokens in got.items()}
    return {name: step for name, step in parted.items() if step is not None}


def measure_gap(
    reference: Client, prompt: Sequence[int], expected: Sequence[int], got: Sequence[int], step: int
) -> float | None:
    """Logit gap between the two tokens of `step`, asked from the server without speculation.

    None when one output ends there (no token to compare) or a token is not among the best two.
    """
    if step >= len(expected) or step >= len(got):
        return None
    answer = reference.greedy_steps([*prompt, *expected[:step]], max_tokens=1)[0]
    gap = answer.gap(expected[step], got[step])
    return None if gap is None else abs(gap)


def classify(
    expected: Mapping[str, Sequence[int]],
    got: Mapping[str, Sequence[int]],
    gaps: Mapping[str, float | None],
    batch_shape_change: float,
) -> Identity:
    """Count requests. gaps: the measured gap of every request that differs."""
    near, differences = 0, []
    for name, step in find_differences(expected, got).items():
        gap = gaps[name]
        near += gap is not None and gap <= batch_shape_change
        differences.append(
            Difference(name, step, _at(expected[name], step), _at(got[name], step), gap)
        )
    different = len(differences) - near
    return Identity(len(got) - len(differences), near, different, tuple(differences))


def gap_change(alone: Sequence[Step], batched: Sequence[Step]) -> float:
    """Largest change of a top-2 gap between two runs of one prompt, over their common prefix.

    The first step with another token still counts: both runs computed it from the same prefix.
    """
    change = 0.0
    for a, b in zip(alone, batched, strict=False):
        first, second = sorted(a.logprobs, key=lambda token: -a.logprobs[token])[:2]
        before, after = a.gap(first, second), b.gap(first, second)
        if before is not None and after is not None:
            change = max(change, abs(before - after))
        if a.token_id != b.token_id:
            break
    return change


def batch_shape_change(
    reference: Client,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    batch_sizes: Sequence[int] = (2, 4, 8),
) -> float:
    """Largest change of a top-2 gap that batch size alone makes, without speculation."""
    alone = [reference.greedy_steps(list(p), max_tokens) for p in prompts]
    change = 0.0
    for size in batch_sizes:
        with ThreadPoolExecutor(size) as pool:
            batched = list(pool.map(lambda p: reference.greedy_steps(list(p), max_tokens), prompts))
        changes = (gap_change(a, b) for a, b in zip(alone, batched, strict=True))
        change = max(change, *changes)
    return change


def _at(tokens: Sequence[int], step: int) -> int | None:
    return tokens[step] if step < len(tokens) else None
