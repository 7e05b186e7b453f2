"""The simulated engines: who runs, what a step costs, what is accepted.

A step of replica d goes through `begin` (who decodes), a policy (how many drafts of each request
are verified), `schedule` (prefill chunks and newcomers in what is left of the token budget) and
`complete` (time passes, drafts are judged, the drafter runs). Requests keep the order of their
admission, as in vLLM's scheduler; a prompt's last chunk emits the first token.

Which recorded step a draft pass stands for: a cursor runs through the steps of the request's trace,
and a step with w drafts moves it by A_w / A_K, what w drafts give on average over what all give. So
easy and hard stretches stay about in place, and how often a step is used does not depend on its own
outcome. Looking it up by output position would: a refused draft keeps the position where it is, so
refusals would be met more often than they occurred (0.54 for an acceptance of 0.6).
"""

import numpy as np

from vllm_dspark.simulation.core.costs import draft_ms, true_ms
from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.state import (
    ACCEPTED,
    ADMITTED,
    ARRIVE_MS,
    ARRIVED,
    BUCKET_MS,
    CONTEXT,
    DECODE_MS,
    DECODE_STEPS,
    DONE,
    DONE_MS,
    DRAFT_PASSES,
    EMITTED,
    FINISHED,
    FIRST_MS,
    FIXED,
    FREE,
    HISTORY,
    IDLE_MS,
    INSTANCE,
    ISSUED,
    JUDGED,
    MIXED,
    N_FINISHED,
    N_PREFILLED,
    N_STARTED,
    NATIVE,
    NUM_DRAFTS,
    NUM_FREE,
    NUM_RUNNING,
    NUM_SIZES,
    OFF,
    ORDER,
    OUTSTANDING,
    PASSED,
    PREFILL_LEFT,
    PREFILL_ROWS,
    PREFILL_STEPS,
    PREFILLED,
    QUEUE_HEAD,
    QUEUE_SIZE,
    QUEUE_TAIL,
    R_COUNT,
    R_FIRST,
    R_OUTPUT,
    R_PROMPT,
    RAGGED,
    RECORD,
    ROWS,
    RUNNING,
    SINGLE,
    STAMP,
    STARTED,
    STEADY_MS,
    STEADY_TOKENS,
    STEP,
    STEP_MS,
    STEPS,
    TAKEN,
    TIMELINE,
    TOKENS,
    UNIFORM,
    VERIFY_TOKENS,
    Costs,
    Load,
    Requests,
    World,
)


@inner
def issue(w: World, load: Load, now: float):
    """Send the next request to the replica with the fewest outstanding ones."""
    j = w.counts[ISSUED]
    d = 0
    for other in range(1, w.clock.size):
        if w.rep[other, OUTSTANDING] < w.rep[d, OUTSTANDING]:
            d = other
    if w.rep[d, OUTSTANDING] == 0 and w.clock[d] < now:  # an idle replica wakes up
        w.totals[IDLE_MS] += now - w.clock[d]
        w.clock[d] = now
    w.counts[ISSUED] += 1
    w.times[ARRIVE_MS, j] = now
    w.queue_next[j] = -1
    if w.rep[d, QUEUE_SIZE] == 0:
        w.rep[d, QUEUE_HEAD] = j
    else:
        w.queue_next[w.rep[d, QUEUE_TAIL]] = j
    w.rep[d, QUEUE_TAIL] = j
    w.rep[d, QUEUE_SIZE] += 1
    w.rep[d, OUTSTANDING] += 1


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
            if w.rep[other, OUTSTANDING] and w.clock[other] < now:
                d, now = other, w.clock[other]
        if load.concurrency or w.counts[ISSUED] == total:
            return d
        due = load.arrival_ms[w.counts[ISSUED]]
        if due > now:
            return d
        issue(w, load, due)


@inner
def begin(w: World, load: Load, d: int):
    """(requests that decode, drafts of each, kv tokens, whether prefill rows are expected)."""
    n = kv_tokens = 0
    drafts = 0
    for i in range(w.rep[d, NUM_RUNNING]):
        slot = w.slot[d, RUNNING, i]
        if w.slot[d, PREFILL_LEFT, slot] == 0:
            w.batch[ORDER, n] = slot
            kv_tokens += w.slot[d, CONTEXT, slot]
            drafts = 1 if w.slot[d, STAMP, slot] > 0 else drafts
            n += 1
    has_room = w.rep[d, NUM_RUNNING] < load.max_seqs
    mixed = n < w.rep[d, NUM_RUNNING] or (w.rep[d, QUEUE_SIZE] > 0 and has_room)
    width = w.row.shape[3]
    for i in range(n):
        w.batch[NUM_DRAFTS, i] = drafts * width
    return n, drafts * width, kv_tokens, mixed


@inner
def schedule(w: World, load: Load, t: Requests, d: int, n: int):
    """Prefill chunks and newcomers, as far as the step's token budget goes."""
    left = load.max_batched - n
    for i in range(n):
        left -= w.batch[TAKEN, i]
    rows = prefilled = started = 0
    for i in range(w.rep[d, NUM_RUNNING]):
        slot = w.slot[d, RUNNING, i]
        if w.slot[d, PREFILL_LEFT, slot]:
            chunk = _prefill(w, d, slot, left)
            rows, left = rows + chunk, left - chunk
            if w.slot[d, PREFILL_LEFT, slot] == 0:
                w.batch[PREFILLED, prefilled] = slot
                prefilled += 1
    while w.rep[d, QUEUE_SIZE] and w.rep[d, NUM_RUNNING] < load.max_seqs and left > 0:
        slot = _admit(w, load, t, d)
        w.batch[STARTED, started] = slot
        started += 1
        chunk = _prefill(w, d, slot, left)
        rows, left = rows + chunk, left - chunk
        if w.slot[d, PREFILL_LEFT, slot] == 0:
            w.batch[PREFILLED, prefilled] = slot
            prefilled += 1
    w.counts[N_STARTED], w.counts[N_FINISHED] = started, 0
    w.counts[N_PREFILLED], w.counts[PREFILL_ROWS] = prefilled, rows
    w.rep[d, ARRIVED] += started


@inner
def _prefill(w: World, d: int, slot: int, left: int) -> int:
    chunk = min(w.slot[d, PREFILL_LEFT, slot], max(left, 0))
    w.slot[d, PREFILL_LEFT, slot] -= chunk
    w.slot[d, CONTEXT, slot] += chunk
    return chunk


@inner
def _admit(w: World, load: Load, t: Requests, d: int) -> int:
    """Give the next waiting request a slot."""
    j = w.rep[d, QUEUE_HEAD]
    w.rep[d, QUEUE_HEAD] = w.queue_next[j]
    w.rep[d, QUEUE_SIZE] -= 1
    w.rep[d, NUM_FREE] -= 1
    slot = w.slot[d, FREE, w.rep[d, NUM_FREE]]
    w.slot[d, RUNNING, w.rep[d, NUM_RUNNING]] = slot
    w.rep[d, NUM_RUNNING] += 1
    w.slot[d, INSTANCE, slot] = j
    w.slot[d, EMITTED, slot] = w.slot[d, CONTEXT, slot] = w.slot[d, STAMP, slot] = 0
    w.cursor[d, slot] = 0.0
    r = load.trace[j]
    w.slot[d, PREFILL_LEFT, slot] = max(t.request[R_PROMPT, r], 1)
    return slot


@inner
def complete(
    w: World, load: Load, t: Requests, c: Costs, d: int, n: int, kind: int, draft: bool
) -> float:
    """Run the step: time, acceptance, drafting, arrivals of a closed loop. Returns its ms."""
    width = w.row.shape[3]
    w.rep[d, STEP] += 1
    rows, admitted, kv_tokens = n, 0, 0
    for i in range(n):
        admitted += w.batch[TAKEN, i]
        kv_tokens += w.slot[d, CONTEXT, w.batch[ORDER, i]]
    rows += admitted + w.counts[PREFILL_ROWS]
    sampling = n + w.counts[N_PREFILLED]
    prefill = w.counts[PREFILL_ROWS] > 0
    ms = _duration(c, load, prefill, kind, admitted, width * n, kv_tokens, rows)
    if draft and sampling:
        ms += draft_ms(c, sampling)
    w.clock[d] += ms
    emitted = _judge(w, load, t, d, n)
    for i in range(w.counts[N_PREFILLED]):
        slot = w.batch[PREFILLED, i]
        w.times[FIRST_MS, w.slot[d, INSTANCE, slot]] = w.clock[d]
        _emit(w, load, t, d, slot, 1)
    _draft(w, load, t, d, draft)
    _count(w, d, n, admitted, emitted, ms, draft and sampling > 0)
    _retire(w, load, t, d)
    return ms


@inner
def _duration(c: Costs, load: Load, prefill, kind, admitted, full, kv_tokens, rows) -> float:
    """Time of the step without the drafter."""
    if prefill:
        grid = MIXED if c.shape[MIXED, NUM_SIZES] else RAGGED
        return c.overhead_ms + true_ms(c, grid, False, kv_tokens, rows)
    if admitted == 0:
        return c.overhead_ms + true_ms(c, SINGLE, False, kv_tokens, rows)
    if load.policy == FIXED or kind == NATIVE:
        return c.overhead_ms + true_ms(c, UNIFORM, admitted != full, kv_tokens, rows)
    return c.overhead_ms + c.allocation_ms + true_ms(c, RAGGED, False, kv_tokens, rows)


@inner
def _judge(w: World, load: Load, t: Requests, d: int, n: int) -> int:
    """Accept, emit; returns emitted tokens. Fills w.batch[JUDGED] and w.batch[PASSED]."""
    total = 0
    for i in range(n):
        slot = w.batch[ORDER, i]
        drafts = w.batch[TAKEN, i]
        accepted = min(drafts, t.accepted[w.slot[d, RECORD, slot]])
        left = t.request[R_OUTPUT, load.trace[w.slot[d, INSTANCE, slot]]] - w.slot[d, EMITTED, slot]
        emitted = min(accepted + 1, left)
        # Nothing is known of drafts behind the end of a request.
        w.batch[JUDGED, i] = emitted if emitted <= accepted else drafts
        w.batch[PASSED, i] = min(accepted, emitted)
        w.cursor[d, slot] += t.advance[drafts]
        w.windows[drafts + 1] += 1
        w.totals[ACCEPTED] += w.batch[PASSED, i]
        _emit(w, load, t, d, slot, emitted)
        total += emitted
    return total


@inner
def _emit(w: World, load: Load, t: Requests, d: int, slot: int, tokens: int):
    j = w.slot[d, INSTANCE, slot]
    w.slot[d, EMITTED, slot] += tokens
    w.slot[d, CONTEXT, slot] += tokens
    w.totals[TOKENS] += tokens
    if w.slot[d, EMITTED, slot] >= t.request[R_OUTPUT, load.trace[j]]:
        w.times[DONE_MS, j] = w.clock[d]
        w.batch[FINISHED, w.counts[N_FINISHED]] = slot
        w.counts[N_FINISHED] += 1


@inner
def _draft(w: World, load: Load, t: Requests, d: int, draft: bool):
    """The drafter runs for all requests that sampled a token."""
    step = w.rep[d, STEP]
    place = step % HISTORY
    w.row_stamp[d, place] = step if draft else 0
    rows, confidence, width = w.row[d, place], t.confidence, w.row.shape[3]
    for i in range(w.rep[d, NUM_RUNNING]):
        slot = w.slot[d, RUNNING, i]
        if not draft or w.slot[d, PREFILL_LEFT, slot] or not w.slot[d, EMITTED, slot]:
            w.slot[d, STAMP, slot] = 0
            continue
        r = load.trace[w.slot[d, INSTANCE, slot]]
        j = t.request[R_FIRST, r] + int(w.cursor[d, slot]) % t.request[R_COUNT, r]
        w.slot[d, RECORD, slot] = j
        w.slot[d, STAMP, slot] = step
        w.row_owner[d, place, slot] = w.slot[d, INSTANCE, slot] + 1
        for k in range(width):
            rows[slot, k] = confidence[j, k]


@inner
def _retire(w: World, load: Load, t: Requests, d: int):
    """Finished requests leave; in a closed loop each sends its successor."""
    for i in range(w.counts[N_FINISHED]):
        slot = w.batch[FINISHED, i]
        w.slot[d, FREE, w.rep[d, NUM_FREE]] = slot
        w.rep[d, NUM_FREE] += 1
        w.rep[d, OUTSTANDING] -= 1
        w.counts[DONE] += 1
    if w.counts[N_FINISHED]:
        kept = 0
        for i in range(w.rep[d, NUM_RUNNING]):
            slot = w.slot[d, RUNNING, i]
            if (
                w.slot[d, EMITTED, slot]
                < t.request[R_OUTPUT, load.trace[w.slot[d, INSTANCE, slot]]]
            ):
                w.slot[d, RUNNING, kept] = slot
                kept += 1
        w.rep[d, NUM_RUNNING] = kept
    for _ in range(w.counts[N_FINISHED]):
        if load.concurrency and w.counts[ISSUED] < load.trace.size:
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
    if w.counts[PREFILL_ROWS]:
        total[PREFILL_STEPS] += 1
    else:
        total[DECODE_STEPS] += 1
        total[DECODE_MS] += ms
    tokens = emitted + w.counts[N_PREFILLED]
    if w.counts[ISSUED] < w.times.shape[1]:
        total[STEADY_MS] = max(total[STEADY_MS], w.clock[d])
        total[STEADY_TOKENS] += tokens
    _mark(w, w.clock[d], tokens, n, n + admitted)


@inner
def _mark(w: World, now: float, tokens: int, rows: int, windows: int):
    """Add a step to the timeline; when it is full, neighbours merge and buckets double."""
    while now >= w.totals[BUCKET_MS] * TIMELINE:
        for b in range(TIMELINE // 2):
            for column in range(4):
                w.timeline[b, column] = w.timeline[2 * b, column] + w.timeline[2 * b + 1, column]
        w.timeline[TIMELINE // 2 :] = 0.0
        w.totals[BUCKET_MS] *= 2.0
    b = int(now / w.totals[BUCKET_MS])
    w.timeline[b, 0] += 1
    w.timeline[b, 1] += tokens
    w.timeline[b, 2] += rows
    w.timeline[b, 3] += windows


@inner
def is_off(load: Load) -> bool:
    """Whether the drafter never runs."""
    return load.policy == OFF or (load.policy == FIXED and load.knob == 0.0)
