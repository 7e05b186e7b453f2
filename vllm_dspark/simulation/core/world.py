"""The simulated engines: who runs, what a step costs, what is accepted.

A step of replica d goes through `begin` (who decodes), a policy (how many drafts of each request
are verified), `schedule` (prefill chunks and newcomers in what is left of the token budget) and
`complete` (time passes, drafts are judged, the drafter runs). Requests keep the order of their
admission, as in vLLM's scheduler; a prompt's last chunk emits the first token.

Which recorded step a draft pass stands for: the first one of the request's trace that starts at or
behind the current output position. Not the one that covers it: long accepted stretches cover more
positions, so that would prefer them (acceptance 0.5 would be read as 0.75).
"""

import numpy as np

from vllm_dspark.simulation.core.costs import draft_ms, true_ms
from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.state import (
    ACCEPTED,
    ADMITTED,
    DECODE_MS,
    DECODE_STEPS,
    DRAFT_PASSES,
    FIXED,
    HISTORY,
    IDLE_MS,
    NATIVE,
    OFF,
    PREFILL_STEPS,
    ROWS,
    STEADY_MS,
    STEADY_TOKENS,
    STEP_MS,
    STEPS,
    TIMELINE,
    TOKENS,
    VERIFY_TOKENS,
    Costs,
    Load,
    Requests,
    World,
)

_STARTED, _FINISHED, _PREFILLED, _PREFILL_ROWS = range(4)


@inner
def issue(w: World, load: Load, now: float):
    """Send the next request to the replica with the fewest outstanding ones."""
    j = w.issued[0]
    d = 0
    for other in range(1, w.clock.size):
        if w.outstanding[other] < w.outstanding[d]:
            d = other
    if w.outstanding[d] == 0 and w.clock[d] < now:  # an idle replica wakes up
        w.totals[IDLE_MS] += now - w.clock[d]
        w.clock[d] = now
    w.issued[0] += 1
    w.arrive_ms[j] = now
    w.queue_next[j] = -1
    if w.queue_size[d] == 0:
        w.queue_head[d] = j
    else:
        w.queue_next[w.queue_tail[d]] = j
    w.queue_tail[d] = j
    w.queue_size[d] += 1
    w.outstanding[d] += 1


@inner
def start(w: World, load: Load):
    """The first requests of a closed loop."""
    for _ in range(min(load.concurrency, load.trace.size)):
        issue(w, load, 0.0)


@inner
def next_replica(w: World, load: Load) -> int:
    """The replica whose turn it is, after requests due by then have arrived; -1 at the end."""
    total = load.trace.size
    while True:
        d, now = -1, np.inf
        for other in range(w.clock.size):
            if w.outstanding[other] and w.clock[other] < now:
                d, now = other, w.clock[other]
        if load.concurrency or w.issued[0] == total:
            return d
        due = load.arrival_ms[w.issued[0]]
        if due > now:
            return d
        issue(w, load, due)


@inner
def begin(w: World, load: Load, d: int):
    """(requests that decode, drafts of each, kv tokens, whether prefill rows are expected)."""
    n = kv_tokens = 0
    drafts = 0
    for i in range(w.num_running[d]):
        slot = w.running[d, i]
        if w.prefill_left[d, slot] == 0:
            w.order[n] = slot
            kv_tokens += w.context[d, slot]
            drafts = 1 if w.stamp[d, slot] > 0 else drafts
            n += 1
    has_room = w.num_running[d] < load.max_seqs
    mixed = n < w.num_running[d] or (w.queue_size[d] > 0 and has_room)
    width = w.row.shape[3]
    for i in range(n):
        w.num_drafts[i] = drafts * width
    return n, drafts * width, kv_tokens, mixed


@inner
def schedule(w: World, load: Load, t: Requests, d: int, n: int):
    """Prefill chunks and newcomers, as far as the step's token budget goes."""
    left = load.max_batched - n
    for i in range(n):
        left -= w.admitted[i]
    rows = prefilled = started = 0
    for i in range(w.num_running[d]):
        slot = w.running[d, i]
        if w.prefill_left[d, slot]:
            chunk = _prefill(w, d, slot, left)
            rows, left = rows + chunk, left - chunk
            if w.prefill_left[d, slot] == 0:
                w.prefilled[prefilled] = slot
                prefilled += 1
    while w.queue_size[d] and w.num_running[d] < load.max_seqs and left > 0:
        slot = _admit(w, load, t, d)
        w.started[started] = slot
        started += 1
        chunk = _prefill(w, d, slot, left)
        rows, left = rows + chunk, left - chunk
        if w.prefill_left[d, slot] == 0:
            w.prefilled[prefilled] = slot
            prefilled += 1
    w.counts[_STARTED], w.counts[_FINISHED] = started, 0
    w.counts[_PREFILLED], w.counts[_PREFILL_ROWS] = prefilled, rows
    w.arrived[d] += started


@inner
def _prefill(w: World, d: int, slot: int, left: int) -> int:
    chunk = min(w.prefill_left[d, slot], max(left, 0))
    w.prefill_left[d, slot] -= chunk
    w.context[d, slot] += chunk
    return chunk


@inner
def _admit(w: World, load: Load, t: Requests, d: int) -> int:
    """Give the next waiting request a slot."""
    j = w.queue_head[d]
    w.queue_head[d] = w.queue_next[j]
    w.queue_size[d] -= 1
    w.num_free[d] -= 1
    slot = w.free[d, w.num_free[d]]
    w.running[d, w.num_running[d]] = slot
    w.num_running[d] += 1
    w.instance[d, slot] = j
    w.emitted[d, slot] = w.context[d, slot] = w.stamp[d, slot] = 0
    r = load.trace[j]
    w.prefill_left[d, slot] = max(t.prompt[r], 1)
    w.record[d, slot] = t.first[r]
    return slot


@inner
def complete(
    w: World, load: Load, t: Requests, c: Costs, d: int, n: int, kind: int, draft: bool
) -> float:
    """Run the step: time, acceptance, drafting, arrivals of a closed loop. Returns its ms."""
    width = w.row.shape[3]
    w.step[d] += 1
    rows, admitted, kv_tokens = n, 0, 0
    for i in range(n):
        admitted += w.admitted[i]
        kv_tokens += w.context[d, w.order[i]]
    rows += admitted + w.counts[_PREFILL_ROWS]
    sampling = n + w.counts[_PREFILLED]
    prefill = w.counts[_PREFILL_ROWS] > 0
    ms = _duration(c, load, prefill, kind, admitted, width * n, kv_tokens, rows)
    if draft and sampling:
        ms += draft_ms(c, sampling)
    w.clock[d] += ms
    emitted = _judge(w, load, t, d, n)
    for i in range(w.counts[_PREFILLED]):
        slot = w.prefilled[i]
        w.first_ms[w.instance[d, slot]] = w.clock[d]
        _emit(w, load, t, d, slot, 1)
    _draft(w, t, d, draft)
    _count(w, d, n, admitted, emitted, ms, draft and sampling > 0)
    _retire(w, load, t, d)
    return ms


@inner
def _duration(c: Costs, load: Load, prefill, kind, admitted, full, kv_tokens, rows) -> float:
    """Time of the step without the drafter."""
    if prefill:
        grid = c.mixed if c.mixed.exists else c.ragged
        return c.overhead_ms + true_ms(c, grid, False, kv_tokens, rows)
    if admitted == 0:
        return c.overhead_ms + true_ms(c, c.single, False, kv_tokens, rows)
    if load.policy == FIXED or kind == NATIVE:
        return c.overhead_ms + true_ms(c, c.native, admitted != full, kv_tokens, rows)
    return c.overhead_ms + c.allocation_ms + true_ms(c, c.ragged, False, kv_tokens, rows)


@inner
def _judge(w: World, load: Load, t: Requests, d: int, n: int) -> int:
    """Accept, emit; returns emitted tokens. Fills w.judged and w.passed."""
    total = 0
    for i in range(n):
        slot = w.order[i]
        drafts = w.admitted[i]
        accepted = min(drafts, t.accepted[w.record[d, slot]])
        left = t.output[load.trace[w.instance[d, slot]]] - w.emitted[d, slot]
        emitted = min(accepted + 1, left)
        # Nothing is known of drafts behind the end of a request.
        w.judged[i] = emitted if emitted <= accepted else drafts
        w.passed[i] = min(accepted, emitted)
        w.windows[drafts + 1] += 1
        w.totals[ACCEPTED] += w.passed[i]
        _emit(w, load, t, d, slot, emitted)
        total += emitted
    return total


@inner
def _emit(w: World, load: Load, t: Requests, d: int, slot: int, tokens: int):
    j = w.instance[d, slot]
    w.emitted[d, slot] += tokens
    w.context[d, slot] += tokens
    w.totals[TOKENS] += tokens
    if w.emitted[d, slot] >= t.output[load.trace[j]]:
        w.done_ms[j] = w.clock[d]
        w.finished[w.counts[_FINISHED]] = slot
        w.counts[_FINISHED] += 1


@inner
def _draft(w: World, t: Requests, d: int, draft: bool):
    """The drafter runs for all requests that sampled a token."""
    step = w.step[d]
    place = step % HISTORY
    w.row_stamp[d, place] = step if draft else 0
    for i in range(w.num_running[d]):
        slot = w.running[d, i]
        if not draft or w.prefill_left[d, slot] or not w.emitted[d, slot]:
            w.stamp[d, slot] = 0
            continue
        j = w.record[d, slot]
        while t.position[j] < w.emitted[d, slot] and not t.last[j]:
            j += 1
        w.record[d, slot] = j
        w.stamp[d, slot] = step
        w.row_owner[d, place, slot] = w.instance[d, slot] + 1
        for k in range(w.row.shape[3]):
            w.row[d, place, slot, k] = t.confidence[j, k]


@inner
def _retire(w: World, load: Load, t: Requests, d: int):
    """Finished requests leave; in a closed loop each sends its successor."""
    for i in range(w.counts[_FINISHED]):
        slot = w.finished[i]
        w.free[d, w.num_free[d]] = slot
        w.num_free[d] += 1
        w.outstanding[d] -= 1
        w.done[0] += 1
    if w.counts[_FINISHED]:
        kept = 0
        for i in range(w.num_running[d]):
            slot = w.running[d, i]
            if w.emitted[d, slot] < t.output[load.trace[w.instance[d, slot]]]:
                w.running[d, kept] = slot
                kept += 1
        w.num_running[d] = kept
    for _ in range(w.counts[_FINISHED]):
        if load.concurrency and w.issued[0] < load.trace.size:
            issue(w, load, w.clock[d])


@inner
def _count(w: World, d: int, n: int, admitted: int, emitted: int, ms: float, drafted: bool):
    total = w.totals
    total[STEPS] += 1
    total[ROWS] += n
    total[VERIFY_TOKENS] += emitted
    total[ADMITTED] += admitted
    total[STEP_MS] += ms
    total[DRAFT_PASSES] += drafted
    if w.counts[_PREFILL_ROWS]:
        total[PREFILL_STEPS] += 1
    else:
        total[DECODE_STEPS] += 1
        total[DECODE_MS] += ms
    tokens = emitted + w.counts[_PREFILLED]
    if w.issued[0] < w.arrive_ms.size:
        total[STEADY_MS] = max(total[STEADY_MS], w.clock[d])
        total[STEADY_TOKENS] += tokens
    _mark(w, w.clock[d], tokens, n, n + admitted)


@inner
def _mark(w: World, now: float, tokens: int, rows: int, windows: int):
    """Add a step to the timeline; when it is full, neighbours merge and buckets double."""
    while now >= w.bucket_ms[0] * TIMELINE:
        for b in range(TIMELINE // 2):
            for column in range(4):
                w.timeline[b, column] = (
                    w.timeline[2 * b, column] + w.timeline[2 * b + 1, column]
                )
        w.timeline[TIMELINE // 2 :] = 0.0
        w.bucket_ms[0] *= 2.0
    b = int(now / w.bucket_ms[0])
    w.timeline[b, 0] += 1
    w.timeline[b, 1] += tokens
    w.timeline[b, 2] += rows
    w.timeline[b, 3] += windows


@inner
def is_off(load: Load) -> bool:
    """Whether the drafter never runs."""
    return load.policy == OFF or (load.policy == FIXED and load.knob == 0.0)
