"""planning.planner.Planner, compiled: the same decisions at a fraction of the time.

Follows planner.py, budget.py, hysteresis.py and drain.py for what a simulated engine shows them:
no foreign prefill rows inside a planned step, all requests drafted alike, no test windows.
tests/simulation/test_fast_planner.py holds both against each other step by step.
"""

import numpy as np

from vllm_dspark.planning import budget as budgets
from vllm_dspark.planning import drain, hysteresis
from vllm_dspark.planning.plan import Reason
from vllm_dspark.simulation.core import repetition
from vllm_dspark.simulation.core.costs import (
    between,
    cell,
    draft_ms,
    place,
    rounded,
    uniform_ms,
)
from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.ranking import admit, gain, rank, survive, total_gain
from vllm_dspark.simulation.core.state import (
    ALIVE,
    DECIDED_SIZE,
    KIND,
    LARGEST,
    LAST_KIND,
    LAST_REASON,
    LAST_SIZE,
    NATIVE,
    NATIVE_STREAK,
    NUM_SIZES,
    P_CAPACITY,
    P_FULL,
    P_KEPT,
    P_KNOWN,
    PROBING,
    RAGGED,
    REPEATABLE,
    REPEATED,
    SINCE_DRAFT,
    SKIP,
    STREAK,
    TRIM,
    UNJUDGED,
    WANTED,
    Costs,
    Decision,
    Options,
    Planner,
    Ranked,
)

_CODE = {reason: index for index, reason in enumerate(Reason)}
_MIXED, _UNPRICED = _CODE[Reason.MIXED], _CODE[Reason.UNPRICED]
_UNKNOWN, _NATIVE_BEST = _CODE[Reason.UNKNOWN], _CODE[Reason.NATIVE_BEST]
_MIN_GAIN, _HYSTERESIS = _CODE[Reason.MIN_GAIN], _CODE[Reason.HYSTERESIS]
_DRAIN_GUARD, _TRIM_GAIN = _CODE[Reason.DRAIN_GUARD], _CODE[Reason.TRIM_GAIN]
_NO_DRAFTS, _SKIP_GAIN = _CODE[Reason.NO_DRAFTS], _CODE[Reason.SKIP_GAIN]
_SKIP_LEFTOVER = _CODE[Reason.SKIP_LEFTOVER]
_PROBE_DRAFT, _PROBE_VERIFY = _CODE[Reason.PROBE_DRAFT], _CODE[Reason.PROBE_VERIFY]

_NUM_CANDIDATES = budgets._NUM_CANDIDATES
_ROUNDING = hysteresis._ROUNDING
_SHRUNK, _CRITICAL = drain._SHRUNK, drain._CRITICAL
_NOTHING = (-1, -1, 0.0, 0.0)  # no option: budget, padded size, ms, tokens


@inner
def draining(p: Planner, d: int, n: int, arrived: int, waiting: int) -> bool:
    """DrainWatch.update."""
    s = p.state[d]
    if arrived > 0:
        s[LARGEST] = n
    s[LARGEST] = max(s[LARGEST], n)
    return waiting == 0 and n <= _SHRUNK * s[LARGEST]


@inner
def shortcut(
    p: Planner,
    o: Options,
    d: int,
    n: int,
    full: bool,  # every request has its K drafts
    arrived: int,
    waiting: int,
    mixed: bool,
    owners,  # [n]
) -> bool:
    """Planner.shortcut: whether the previous decision stands for this step too (repeat.py)."""
    s, last = p.state[d], p.last[d]
    if not o.lazy or arrived or mixed or s[LAST_SIZE] != n:
        return False
    if s[LAST_KIND] == NATIVE:
        streak = s[NATIVE_STREAK]
        if streak < repetition.LAZY_AFTER or streak % repetition.period(streak) == 0:
            return False
    else:
        if not s[REPEATABLE] or not full:
            return False
        for i in range(n):
            if last[0, i] != owners[i]:
                return False
    drains = draining(p, d, n, 0, waiting)
    return not (drains and s[LAST_KIND] == TRIM)


@inner
def repeat(p: Planner, d: int, n: int, drafts: int, out):
    """The plan that `shortcut` allowed."""
    s = p.state[d]
    reason, left = s[LAST_REASON], max(s[REPEATABLE] - 1, 0)
    if s[LAST_KIND] == NATIVE:
        decision = _native(s, n, drafts, reason, 0.0, 0.0, out)
    else:
        budget = 0
        for i in range(n):
            out[i] = p.last[d, 1, i]
            budget += out[i]
        decision = Decision(TRIM, reason, budget, True, 0.0, 0.0)
    _note(s, n, decision)
    s[REPEATABLE], s[REPEATED] = left, 1
    return decision


@inner
def _note(s, n: int, decision: Decision):
    """Planner._finish: advance what depends on the plan that was made."""
    s[PROBING] = int(decision.reason == _PROBE_DRAFT)
    s[SINCE_DRAFT] = 0 if decision.draft_next else s[SINCE_DRAFT] + 1
    settled = decision.reason in (_NATIVE_BEST, _MIN_GAIN)
    s[NATIVE_STREAK] = s[NATIVE_STREAK] + 1 if settled else 0
    s[LAST_SIZE], s[LAST_REASON], s[LAST_KIND] = n, decision.reason, decision.kind
    s[REPEATABLE] = s[REPEATED] = 0
    if decision.kind != TRIM:
        s[DECIDED_SIZE] = 0


@inner
def plan(
    p: Planner,
    o: Options,
    c: Costs,
    d: int,
    n: int,
    width: int,
    drafts: int,  # of every request: K, or 0 after a step that drafted nothing
    kv_tokens: int,
    arrived: int,
    waiting: int,
    mixed: bool,
    remaining,  # [n] tokens left at most
    out,  # [n] drafts admitted
):
    """Planner.plan on what `gather` left in p.floats[ALIVE] and p.ints[P_KNOWN]."""
    drains = draining(p, d, n, arrived, waiting)
    decision = _decide(p, o, c, d, n, width, drafts, kv_tokens, drains, mixed, remaining, out)
    _note(p.state[d], n, decision)
    return decision


@inner
def _decide(p, o, c, d, n, width, drafts, kv_tokens, drains, mixed, remaining, out):
    s = p.state[d]
    if mixed:
        s[UNJUDGED] += 1
        if s[UNJUDGED] >= o.probe_interval:
            _reset(s)
        return _native(s, n, drafts, _MIXED, 0.0, 0.0, out)
    if s[KIND] != SKIP and not p.ints[P_KNOWN, :n].any():
        s[UNJUDGED] += 1
        _reset(s)
        return _native(s, n, drafts, _UNKNOWN, 0.0, 0.0, out)
    s[UNJUDGED] = 0
    survive(p.floats[ALIVE], n, width)
    for i in range(n):
        p.ints[P_CAPACITY, i] = min(max(remaining[i] - 1, 0), width)
    r = rank(p, n, width, o.floor)
    drafted = c.overhead_ms + draft_ms(c, n)
    native_size, native = uniform_ms(c, True, kv_tokens, n + n * width)
    native += drafted
    native_tokens = n + total_gain(p, r)
    ragged = drafted + (c.allocation_ms if o.device else 0.0)
    trim = best_ragged(p, r, c, n, kv_tokens, ragged)
    single_size, single = -1, 0.0
    if o.skip_draft:
        single_size, single = uniform_ms(c, False, kv_tokens, n)
    single += c.overhead_ms
    if native_size < 0 or (trim[0] < 0 and single_size < 0):
        _reset(s)
        return _native(s, n, drafts, _UNPRICED, 0.0, 0.0, out)
    kind, reason = _select(
        s,
        o,
        native_tokens / native,
        trim[3] / trim[2] if trim[0] >= 0 else 0.0,
        n / single if single_size >= 0 else 0.0,
    )
    if kind == SKIP:
        return _pause(p, r, o, c, s, n, width, drafts, kv_tokens, single, out)
    if drafts == 0:
        return _single(n, single, _NO_DRAFTS, True, c, out)
    if kind == TRIM:
        guarded = drains and o.drain_guard
        if guarded and _delays(p, r, c, n, width, native, trim, remaining):
            return _native(s, n, drafts, _DRAIN_GUARD, native, native_tokens, out)
        admit(p, r, n, trim[0], out)
        return Decision(TRIM, reason, trim[0], True, trim[2], trim[3])
    return _native(s, n, drafts, reason, native, native_tokens, out)


@inner
def best_ragged(p: Planner, r: Ranked, c: Costs, base: int, kv_tokens: int, fixed_ms: float):
    """budget.best_ragged: (budget, padded size, ms, tokens) of the highest goodput."""
    sizes, kv = c.sizes[RAGGED], rounded(c, RAGGED, kv_tokens)
    best, best_goodput = _NOTHING, 0.0
    tokens, before = base + r.forced, r.least
    if c.padded:
        first = place(c, RAGGED, base + r.least)
        last = min(place(c, RAGGED, base + r.most), c.shape[RAGGED, NUM_SIZES] - 1)
        for j in range(first, last + 1):
            budget = min(sizes[j] - base, r.most)
            tokens += gain(p, r, before, budget)
            before = budget
            ms = cell(c, RAGGED, kv, j) + fixed_ms
            if tokens / ms > best_goodput:
                best, best_goodput = (budget, sizes[j], ms, tokens), tokens / ms
        return best
    stride = max(1, (r.most - r.least) // _NUM_CANDIDATES)
    budget = r.least
    while True:
        tokens += gain(p, r, before, budget)
        before = budget
        ms = between(c, RAGGED, kv, base + budget, True) + fixed_ms
        if tokens / ms > best_goodput:
            best, best_goodput = (budget, base + budget, ms, tokens), tokens / ms
        if budget == r.most:
            return best
        budget = min(budget + stride, r.most)


@inner
def _select(s, o: Options, native: float, trim: float, skip: float):
    """KindSelector.select."""
    current = s[KIND]
    trim_worth = trim > native * (1.0 + _margin(s, o, TRIM))
    skip_worth = skip > native * (1.0 + _margin(s, o, SKIP))
    if not trim_worth and not skip_worth:
        _reset(s)
        gained = max(trim, skip) > native * (1.0 + _ROUNDING)
        return NATIVE, _MIN_GAIN if gained else _NATIVE_BEST
    if trim_worth and skip_worth:
        bar = 1.0 + o.min_gain / 2.0
        if current == SKIP:
            skip *= bar
        elif current == TRIM:
            trim *= bar
        wanted = TRIM if trim >= skip else SKIP
    else:
        wanted = TRIM if trim_worth else SKIP
    s[STREAK] = s[STREAK] + 1 if wanted == s[WANTED] else 1
    s[WANTED] = wanted
    if s[STREAK] >= o.hysteresis or current == SKIP:
        s[KIND] = wanted
    elif current == NATIVE or not trim_worth:
        s[KIND] = NATIVE
        return NATIVE, _HYSTERESIS
    return s[KIND], _TRIM_GAIN if s[KIND] == TRIM else _SKIP_GAIN


@inner
def _margin(s, o: Options, kind: int) -> float:
    return (o.min_gain / 2.0 if s[KIND] == kind else o.min_gain) + _ROUNDING


@inner
def _reset(s):
    s[KIND] = s[WANTED] = NATIVE
    s[STREAK] = 0


@inner
def _pause(p, r, o, c, s, n, width, drafts, kv_tokens, single, out):
    """Planner._pause: a step while drafting is skipped."""
    if drafts and r.most:
        fixed = c.overhead_ms + (c.allocation_ms if o.device else 0.0)
        if s[PROBING]:
            reason, option = _PROBE_VERIFY, _probe(p, r, c, n, width, kv_tokens, fixed)
        else:
            reason, option = _SKIP_LEFTOVER, best_ragged(p, r, c, n, kv_tokens, fixed)
        if option[0] > 0:
            admit(p, r, n, option[0], out)
            return Decision(TRIM, reason, option[0], False, option[2], option[3])
    if s[SINCE_DRAFT] + 1 >= o.probe_interval:
        return _single(n, single, _PROBE_DRAFT, True, c, out)
    return _single(n, single, _SKIP_GAIN, False, c, out)


@inner
def _probe(p, r, c, n, width, kv_tokens, fixed_ms):
    """Planner._probe: the drafts that fill the first size with room for K of them."""
    wanted = n + max(r.least, min(width, r.most))
    kv = rounded(c, RAGGED, kv_tokens)
    if c.padded:
        j = place(c, RAGGED, wanted)
        if j == c.shape[RAGGED, NUM_SIZES]:
            return _NOTHING
        padded, ms = c.sizes[RAGGED, j], cell(c, RAGGED, kv, j)
    else:
        padded, ms = wanted, between(c, RAGGED, kv, wanted, False)
    budget = min(padded, n + r.most) - n
    return budget, padded, ms + fixed_ms, n + r.forced + gain(p, r, r.least, budget)


@inner
def _delays(p, r, c, n, width, native, trim, remaining) -> bool:
    """Planner._delays with drain.delay_ms."""
    tail = c.overhead_ms + draft_ms(c, 1)
    size, ms = uniform_ms(c, True, 0, width + 1)
    if size >= 0:
        tail += ms
    admit(p, r, n, r.most, p.ints[P_FULL])
    admit(p, r, n, trim[0], p.ints[P_KEPT])
    most = 0.0
    for i in range(n):
        most = max(most, remaining[i] / _expected(p, n, i, p.ints[P_FULL, i]))
    delay = -np.inf
    for i in range(n):
        full = _expected(p, n, i, p.ints[P_FULL, i])
        if remaining[i] / full >= _CRITICAL * most:
            delay = max(delay, (full - _expected(p, n, i, p.ints[P_KEPT, i])) / full)
    return native - trim[2] <= delay * tail


@inner
def _expected(p, n, i, drafts) -> float:
    """Tokens that request i gets from a window of `drafts`."""
    total = np.float32(0.0)
    for k in range(drafts):
        total = np.float32(total + p.floats[ALIVE, k * n + i])
    return 1.0 + np.float64(total)


@inner
def _native(s, n, drafts, reason, ms, tokens, out):
    out[:n] = drafts
    return Decision(NATIVE, reason, n * drafts, s[KIND] != SKIP, ms, tokens)


@inner
def _single(n, single, reason, draft_next, c, out):
    out[:n] = 0
    ms = single
    if draft_next and single > 0.0:
        ms += draft_ms(c, n)
    return Decision(SKIP, reason, 0, draft_next, ms, float(n))
