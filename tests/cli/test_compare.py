"""Identity of greedy outputs: equal, near-tie, different."""

import pytest

from vllm_dspark.demo.client import Step
from vllm_dspark.demo.compare import (
    batch_shape_change,
    classify,
    find_differences,
    first_difference,
    gap_change,
    measure_gap,
)


class FakeReference:
    """A server without speculation whose logprobs depend on how many ask at once."""

    def __init__(self, steps: dict[tuple[int, ...], list[Step]]) -> None:
        self.steps = steps
        self.asked: list[tuple[int, ...]] = []

    def greedy_steps(self, prompt: list[int], max_tokens: int) -> list[Step]:
        self.asked.append(tuple(prompt))
        return self.steps[tuple(prompt)][:max_tokens]


@pytest.mark.parametrize(
    ("expected", "got", "step"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([], [1], 0),
    ],
)
def test_first_difference(expected: list[int], got: list[int], step: int | None) -> None:
    """Catches an output that merely stops early (or runs on) passing as equal."""
    assert first_difference(expected, got) == step


def test_gap_is_asked_after_the_common_prefix() -> None:
    """Catches a gap measured at the wrong step, where the two tokens are not rivals."""
    reference = FakeReference({(7, 8, 1, 2): [Step(5, {5: -0.5, 6: -0.75})]})
    gap = measure_gap(reference, [7, 8], [1, 2, 5, 9], [1, 2, 6, 9], 2)  # type: ignore[arg-type]
    assert gap == pytest.approx(0.25)
    assert reference.asked == [(7, 8, 1, 2)]


@pytest.mark.parametrize(("got", "reason"), [([1, 2, 4], "third-best token"), ([1, 2], "ended")])
def test_no_gap_without_two_rivals(got: list[int], reason: str) -> None:
    """Catches an early end or an unlikely token being excused as a near-tie."""
    reference = FakeReference({(7, 1, 2): [Step(5, {5: -0.5, 6: -0.75})]})
    assert measure_gap(reference, [7], [1, 2, 5], got, 2) is None, reason  # type: ignore[arg-type]


def test_counts_of_all_three_kinds() -> None:
    """Catches a gap above the measured change (or none at all) being counted as a near-tie."""
    expected = {name: [1, 2, 3] for name in "abcd"}
    got = {"a": [1, 2, 3], "b": [1, 2, 4], "c": [1, 2, 4], "d": [1, 2]}
    assert find_differences(expected, got) == {"b": 2, "c": 2, "d": 2}
    found = classify(expected, got, {"b": 0.1, "c": 0.2, "d": None}, batch_shape_change=0.1)
    assert found.counts() == {"equal": 1, "near_tie": 1, "different": 2}
    assert not found.holds
    assert [(d.request, d.expected, d.got) for d in found.differences] == [
        ("b", 3, 4),
        ("c", 3, 4),
        ("d", 3, None),
    ]


def test_near_ties_alone_hold() -> None:
    """Catches a near-tie turning the verdict, and a zero gap needing a measured change."""
    found = classify({"a": [1]}, {"a": [2]}, {"a": 0.0}, batch_shape_change=0.0)
    assert found.counts() == {"equal": 0, "near_tie": 1, "different": 0}
    assert found.holds


def test_gap_change_stops_after_the_first_other_token() -> None:
    """Catches a comparison of steps whose prefixes are no longer the same."""
    alone = [Step(1, {1: -0.1, 2: -0.3}), Step(3, {3: -0.2, 4: -0.25}), Step(5, {5: 0.0, 6: -9})]
    batched = [Step(1, {1: -0.1, 2: -0.32}), Step(4, {4: -0.2, 3: -0.21}), Step(5, {5: 0, 6: 0})]
    # gaps: 0.20 -> 0.22, then 0.05 -> -0.01 (the argmax flips); the third step must not count
    assert gap_change(alone, batched) == pytest.approx(0.06)


def test_batch_shape_change_takes_the_worst_prompt_and_size() -> None:
    """Catches a mean, or a single batch size, where the largest change is wanted."""

    class Drifting(FakeReference):
        def greedy_steps(self, prompt: list[int], max_tokens: int) -> list[Step]:
            self.asked.append(tuple(prompt))
            alone = len(self.asked) <= 3  # the first pass asks one by one
            shift = 0.0 if alone else 0.01 * prompt[0]
            return [Step(1, {1: -0.1, 2: -0.3 - shift})]

    change = batch_shape_change(Drifting({}), [[1], [4], [2]], 1, batch_sizes=(2,))  # type: ignore[arg-type]
    assert change == pytest.approx(0.04)
