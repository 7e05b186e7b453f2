"""The policies that ours is compared with.

off          no speculation: one row per request, no drafter
fixed K'     every request verifies its first K' drafts in every step
argmax       as stock vLLM 0.32 does it: the budget of highest predicted goodput from raw, lagged
             confidences and times at one context length; spread by current confidences; no
             calibration, margin, hysteresis or pause of drafting
threshold    every request verifies the drafts whose calibrated survival reaches a threshold
early stop   of the DSpark paper: drafts in order of calibrated survival, as long as each one raises
             the predicted throughput
"""

import numpy as np

from vllm_dspark.simulation.core.costs import between, cell, draft_ms, place, rounded
from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.learner import calibrate
from vllm_dspark.simulation.core.ranking import admit, rank, survive
from vllm_dspark.simulation.core.state import (
    ALIVE,
    ASCENDING,
    HISTORY,
    INSTANCE,
    L_SAMPLED,
    NATIVE,
    NUM_SIZES,
    ORDER,
    P_CAPACITY,
    RAGGED,
    SKIP,
    STAMP,
    TRIM,
    Costs,
    Decision,
    Learner,
    Planner,
    World,
)


@inner
def rows_at_hand(w: World, x: Learner, p: Planner, d, n, width, calibrated):
    """p.floats[ALIVE]: survival by the confidences of the drafts that are about to be verified."""
    order, slots, rows, alive = w.batch[ORDER], w.slot[d], w.row[d], p.floats[ALIVE]
    prior, classes = x.prior[d], x.slot[d, L_SAMPLED]
    for i in range(n):
        slot = order[i]
        group = classes[slot]
        pass_ = slots[STAMP, slot] % HISTORY
        for k in range(width):
            value = rows[pass_, slot, k]
            if not 0.0 <= value <= 1.0:
                value = prior[group, k]
            elif calibrated:
                value = calibrate(x, d, group, k, value)
            alive[k * n + i] = value
    survive(p.floats[ALIVE], n, width)


@inner
def lagged_rows(w: World, p: Planner, d, n, width, lag):
    """p.floats[ALIVE]: survival by raw confidences `lag` passes old; 1 where there are none."""
    for i in range(n):
        slot = w.batch[ORDER, i]
        stamp = w.slot[d, STAMP, slot] - lag
        pass_ = stamp % HISTORY
        known = stamp > 0 and w.row_stamp[d, pass_] == stamp
        known = known and w.row_owner[d, pass_, slot] == w.slot[d, INSTANCE, slot] + 1
        for k in range(width):
            value = w.row[d, pass_, slot, k] if known else np.float32(1.0)
            p.floats[ALIVE, k * n + i] = value if 0.0 <= value <= 1.0 else 0.0
    survive(p.floats[ALIVE], n, width)


@inner
def fixed(n: int, drafts: int, width: int, draft_next: bool, out):
    """Windows of equal size."""
    out[:n] = drafts
    kind = NATIVE if drafts == width else TRIM
    if drafts == 0:
        kind = SKIP
    return Decision(kind, 0, n * drafts, draft_next, 0.0, 0.0)


@inner
def argmax(w: World, x: Learner, p: Planner, c: Costs, d, n, width, lag, kv_tokens, out):
    """Budget from lagged rows, windows from current ones."""
    lagged_rows(w, p, d, n, width, lag)
    p.ints[P_CAPACITY, :n] = width
    r = rank(p, n, width, 0)
    fixed_ms = c.overhead_ms + c.allocation_ms + draft_ms(c, n)
    best, best_goodput, tokens = 0, 0.0, float(n)
    for budget in range(r.most + 1):
        if budget:
            tokens += p.floats[ASCENDING, r.size - budget]
        ms = fixed_ms + _one_axis(c, n + budget)
        if tokens / ms > best_goodput:
            best, best_goodput = budget, tokens / ms
    rows_at_hand(w, x, p, d, n, width, False)
    admit(p, rank(p, n, width, 0), n, best, out)
    return Decision(TRIM, 0, best, True, 0.0, 0.0)


@inner
def _one_axis(c: Costs, num_tokens: int) -> float:
    """Price at the first context node: a step function up to the largest size, a line beyond."""
    if c.padded:
        j = place(c, RAGGED, num_tokens)
        if j < c.shape[RAGGED, NUM_SIZES]:
            return cell(c, RAGGED, 0, j)
    return between(c, RAGGED, 0, num_tokens, False)


@inner
def threshold(w: World, x: Learner, p: Planner, d, n, width, least, out):
    """Drafts whose survival is at least `least`."""
    rows_at_hand(w, x, p, d, n, width, True)
    budget = 0
    for i in range(n):
        out[i] = 0
        while out[i] < width and p.floats[ALIVE, out[i] * n + i] >= least:
            out[i] += 1
        budget += out[i]
    return Decision(TRIM, 0, budget, True, 0.0, 0.0)


@inner
def early_stop(w: World, x: Learner, p: Planner, c: Costs, d, n, width, kv_tokens, out):
    """Admit by survival until the next draft would lower tokens per second."""
    rows_at_hand(w, x, p, d, n, width, True)
    p.ints[P_CAPACITY, :n] = width
    r = rank(p, n, width, 0)
    fixed_ms = c.overhead_ms + c.allocation_ms + draft_ms(c, n)
    kv = rounded(c, RAGGED, kv_tokens)
    budget, tokens = 0, float(n)
    goodput = tokens / (fixed_ms + between(c, RAGGED, kv, n, False))
    while budget < r.most:
        tokens += p.floats[ASCENDING, r.size - budget - 1]
        following = tokens / (fixed_ms + between(c, RAGGED, kv, n + budget + 1, False))
        if following < goodput:
            break
        goodput = following
        budget += 1
    admit(p, r, n, budget, out)
    return Decision(TRIM, 0, budget, True, 0.0, 0.0)
