"""planning/repeat.py: for how long the previous decision is the next one too."""

from vllm_dspark.planning import repeat as repeat_rules
from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.state import (
    DECIDED_BUDGET,
    DECIDED_SIZE,
    DOUBLINGS,
    NATIVE_STREAK,
    REPEATABLE,
    TRIM,
    Decision,
    Options,
    Planner,
)

LAZY_AFTER, _AWAKE, _PERIODS = repeat_rules._LAZY_AFTER, repeat_rules._AWAKE, repeat_rules._PERIODS
_LAZY_REQUESTS, _MOST_REPEATS = repeat_rules._LAZY_REQUESTS, repeat_rules._MOST_REPEATS
_STEADY, _MOST_DOUBLINGS = repeat_rules._STEADY, repeat_rules._MOST_DOUBLINGS
_HOST_DOUBLINGS = repeat_rules._HOST_DOUBLINGS


@inner
def period(streak: int) -> int:
    """repeat.period."""
    steps = 0
    for least, length in _PERIODS:
        if streak >= least:
            steps = max(steps, length)  # periods grow with what they need
    return steps


@inner
def allow(
    p: Planner,
    o: Options,
    d: int,
    n: int,
    width: int,
    may_repeat: bool,
    decision: Decision,
    order,  # [n] slots
    owners,  # by slot
    drafts,  # [n]
):
    """Repetition.allow: a trimmed plan of a large batch serves some more steps."""
    if decision.kind != TRIM or not decision.draft_next:
        return
    s = p.state[d]
    size, s[DECIDED_SIZE] = s[DECIDED_SIZE], 0
    if not may_repeat or n < _LAZY_REQUESTS:
        return
    moved = abs(decision.budget - s[DECIDED_BUDGET])
    steady = size == n and moved * _STEADY <= n * width
    for i in range(n):
        owner = owners[order[i]] + 1
        steady = steady and p.last[d, 0, i] == owner
        p.last[d, 0, i] = owner
        p.last[d, 1, i] = drafts[i]
    repeats = min(n // _LAZY_REQUESTS, _MOST_REPEATS)
    most = _MOST_DOUBLINGS if o.device else _HOST_DOUBLINGS[repeats]  # repeat.most_doublings
    s[DOUBLINGS] = min(s[DOUBLINGS] + 1, most) if steady else 0
    s[DECIDED_SIZE], s[DECIDED_BUDGET] = n, decision.budget
    s[REPEATABLE] = ((repeats + 1) << s[DOUBLINGS]) - 1


@inner
def rest(p: Planner, d: int) -> int:
    """Repetition.rest: steps from now on that repeat a decision."""
    if p.state[d, REPEATABLE] > 0:
        return p.state[d, REPEATABLE] - 1
    streak = p.state[d, NATIVE_STREAK]
    if streak < LAZY_AFTER:
        return 0
    length = period(streak)
    place = streak % length
    return max(length - min(_AWAKE, length // 2) - place + 1, 0) if place else 0
