"""What Python calls: the whole simulation, or the world's parts of a step (exact.py plans itself).

Each entry closes over the stamp of this folder's sources; jit.py says why.
"""

from vllm_dspark.simulation.core import learner, planner, policies, ranking, repetition, world
from vllm_dspark.simulation.core.jit import entry, inner, source_stamp
from vllm_dspark.simulation.core.state import (
    ALIVE,
    ARGMAX,
    ARRIVED,
    DUE,
    EARLY_STOP,
    FIXED,
    HISTORY,
    INSTANCE,
    ISSUED,
    JUDGED,
    L_OWNER,
    L_REMAINING,
    L_ROW_OWNER,
    L_ROW_STAMP,
    LAST_KIND,
    N_PREFILLED,
    N_STARTED,
    ORDER,
    OURS,
    P_CAPACITY,
    P_KNOWN,
    PASSED,
    PREFILLED,
    QUEUE_SIZE,
    R_LIMIT,
    R_SAMPLED,
    REPEATED,
    STAMP,
    STARTED,
    STEP,
    TAKEN,
    THRESHOLD,
    TRIM,
    Costs,
    Learner,
    Load,
    Options,
    Planner,
    Requests,
    World,
)

_STAMP = source_stamp()


@inner
def _ours(w, x, p, o, load, c, d, n, drafts, kv_tokens, mixed):
    """Conductor.order with the compiled planner."""
    width = w.row.shape[3]
    arrived, waiting = w.rep[d, ARRIVED], w.rep[d, QUEUE_SIZE]
    w.rep[d, ARRIVED] = 0
    owners = w.slot[d, INSTANCE]
    for i in range(n):
        w.batch[JUDGED, i] = owners[w.batch[ORDER, i]] + 1
    if planner.shortcut(p, o, d, n, drafts == width, arrived, waiting, mixed, w.batch[JUDGED]):
        plan = planner.repeat(p, d, n, drafts, w.batch[TAKEN])
        if o.device and plan.kind == TRIM:
            for i in range(n):
                w.batch[JUDGED, i] = x.slot[d, L_REMAINING, w.batch[ORDER, i]]
            _spread(w, x, p, d, n, width, plan.budget)
        return plan
    stamp = w.slot[d, STAMP, w.batch[ORDER, 0]]
    fresh = learner.gather(
        x, d, w.batch[ORDER], n, stamp, load.by_posterior, p.floats[ALIVE], p.ints[P_KNOWN]
    )
    for i in range(n):
        w.batch[JUDGED, i] = x.slot[d, L_REMAINING, w.batch[ORDER, i]]
    plan = planner.plan(
        p,
        o,
        c,
        d,
        n,
        width,
        drafts,
        kv_tokens,
        arrived,
        waiting,
        mixed,
        w.batch[JUDGED],
        w.batch[TAKEN],
    )
    may_repeat = drafts == width and (o.device or not fresh)
    repetition.allow(p, o, d, n, width, may_repeat, plan, w.batch[ORDER], owners, w.batch[TAKEN])
    if o.device and plan.kind == TRIM:
        _spread(w, x, p, d, n, width, plan.budget)
    return plan


@inner
def _spread(w, x, p, d, n, width, budget):
    """Device windows: the budget goes by the confidences of the drafts at hand."""
    policies.rows_at_hand(w, x, p, d, n, width, True)
    most = 0
    for i in range(n):
        p.ints[P_CAPACITY, i] = min(max(w.batch[JUDGED, i] - 1, 0), width)
        most += p.ints[P_CAPACITY, i]
    if most < budget:
        p.ints[P_CAPACITY, :n] = width
    ranking.admit(p, ranking.rank(p, n, width, 0), n, budget, w.batch[TAKEN])


@inner
def _decide(w, x, p, o, load, c, d, n, drafts, kv_tokens, mixed):
    """The step's decision by the policy of `load`; windows are left in w.batch[TAKEN]."""
    width, policy, out = w.row.shape[3], load.policy, w.batch[TAKEN]
    if world.is_off(load):
        return policies.fixed(n, 0, width, False, out)
    if n == 0 or (drafts == 0 and policy != OURS):
        return policies.fixed(n, 0, width, True, out)
    if policy == FIXED:
        return policies.fixed(n, int(load.knob), width, True, out)
    if mixed and policy != OURS:  # stock trims decode steps only
        return policies.fixed(n, width, width, True, out)
    if policy == ARGMAX:
        return policies.argmax(w, x, p, c, d, n, width, load.lag, kv_tokens, out)
    if policy == THRESHOLD:
        return policies.threshold(w, x, p, d, n, width, load.knob, out)
    if policy == EARLY_STOP:
        return policies.early_stop(w, x, p, c, d, n, width, kv_tokens, out)
    return _ours(w, x, p, o, load, c, d, n, drafts, kv_tokens, mixed)


@inner
def _learn(w, x, p, o, load, d, n, stamp):
    """Conductor.learn: outcomes first, then the rows that have arrived."""
    rest, s = repetition.rest(p, d), p.state[d]
    sets_windows = n > 0 and not o.device and s[LAST_KIND] == TRIM
    if sets_windows and s[REPEATED]:
        learner.record_repeated(x, d, w.batch[ORDER], n, w.batch[JUDGED], w.batch[PASSED])
    elif rest and not sets_windows:
        learner.count_emitted(x, d, w.batch[ORDER], n, w.batch[PASSED])
    elif n:
        learner.record_outcomes(
            x, d, w.batch[ORDER], n, stamp, w.batch[JUDGED], w.batch[PASSED], load.learn
        )
    place = (w.rep[d, STEP] - load.lag) % HISTORY
    shown = w.row_stamp[d, place]
    wanted = rest < 2 or (sets_windows and x.scalars[d, DUE])
    if not wanted or shown == 0 or shown != w.rep[d, STEP] - load.lag:
        return
    count = 0
    for i in range(n + w.counts[N_PREFILLED]):
        slot = w.batch[ORDER, i] if i < n else w.batch[PREFILLED, i - n]
        if w.row_owner[d, place, slot] != w.slot[d, INSTANCE, slot] + 1:
            continue
        for k in range(w.row.shape[3]):
            x.row[d, slot, k] = w.row[d, place, slot, k]
        x.slot[d, L_ROW_OWNER, slot] = x.slot[d, L_OWNER, slot]
        x.slot[d, L_ROW_STAMP, slot] = shown
        w.batch[STARTED, count] = slot
        count += 1
    if x.scalars[d, DUE]:
        learner.pair(x, d, w.batch[STARTED], count, load.learn)


@inner
def _add(w, x, load, t, d):
    """Conductor.scheduled: newcomers enter the request table."""
    for i in range(w.counts[N_STARTED]):
        slot = w.batch[STARTED, i]
        j = w.slot[d, INSTANCE, slot]
        r = load.trace[j]
        learner.add(x, d, slot, load.owner[j], t.request[R_SAMPLED, r], t.request[R_LIMIT, r] - 1)


def _entries(stamp: int):
    @entry
    def run(
        w: World,
        x: Learner,
        p: Planner,
        o: Options,
        load: Load,
        t: Requests,
        c: Costs,
        max_steps: int,
    ) -> int:
        if stamp < 0:  # binds the stamp, see jit.py
            return -1
        ours = load.policy == OURS
        for steps in range(max_steps):
            d = world.next_replica(w, load)
            if d < 0:
                return steps
            n, drafts, kv_tokens, mixed = world.begin(w, load, d)
            made_by = w.slot[d, STAMP, w.batch[ORDER, 0]] if n else 0
            plan = _decide(w, x, p, o, load, c, d, n, drafts, kv_tokens, mixed)
            world.schedule(w, load, t, d, n)
            _add(w, x, load, t, d)
            world.complete(w, load, t, c, d, n, plan.kind, plan.draft_next)
            if n:
                w.kinds[plan.kind, plan.reason] += 1
            if ours and n:
                _learn(w, x, p, o, load, d, n, made_by)
            elif ours:
                _learn(w, x, p, o, load, d, 0, 0)
        return max_steps

    @entry
    def begin(w: World, load: Load):
        """(replica or -1, requests, drafts of each, kv tokens, mixed)."""
        if stamp < 0:
            return -1, 0, 0, 0, False
        d = world.next_replica(w, load)
        if d < 0:
            return -1, 0, 0, 0, False
        n, drafts, kv_tokens, mixed = world.begin(w, load, d)
        return d, n, drafts, kv_tokens, mixed

    @entry
    def schedule(w: World, load: Load, t: Requests, d: int, n: int) -> int:
        if stamp >= 0:
            world.schedule(w, load, t, d, n)
        return w.counts[N_STARTED]

    @entry
    def complete(
        w: World, load: Load, t: Requests, c: Costs, d: int, n: int, plan: int, next_: bool
    ):
        if stamp < 0:
            return 0.0
        return world.complete(w, load, t, c, d, n, plan, next_)

    @entry
    def start(w: World, load: Load) -> int:
        if stamp >= 0:
            world.start(w, load)
        return w.counts[ISSUED]

    return run, begin, schedule, complete, start


run, begin, schedule, complete, start = _entries(_STAMP)
