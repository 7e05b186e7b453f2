"""What all requests share: priors per position, their spread and the cap of one tenant's influence.

The arithmetic follows planning/posterior.py and influence.py step by step, in the same precision.
"""

import math

import numpy as np

from vllm_dspark.planning import influence, posterior
from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.state import (
    BETWEEN,
    BUCKETS,
    CAP_UNTIL,
    HITS,
    KNOWN,
    L_OWNER,
    L_SAMPLED,
    P_RATE,
    P_TRIALS,
    PULL,
    RESIDUAL,
    SEEN,
    SHRINKAGE,
    TRIALS,
    UNTIL_REFRESH,
    WITHIN,
    Learner,
)

_REFRESH = posterior._REFRESH
_SEASONED = posterior._SEASONED
_SHRINKAGE_RATE = posterior._SHRINKAGE_RATE
_LEAST_SHRINKAGE, _MOST_SHRINKAGE = posterior._LEAST_SHRINKAGE, posterior._MOST_SHRINKAGE
_FORGET = posterior._FORGET_SHARED
_LUCK = np.float32(1.0 + posterior._KEEP_REQUEST)
_CAP_REFRESH, _CAP_KEEP, _LOUD = influence._REFRESH, influence._KEEP, influence._LOUD
_KEEP_TAUGHT = posterior._KEEP_REQUEST
_CLIP, _PRUDENCE = posterior._CLIP, posterior._PRUDENCE
_YOUNG, _HASTE = posterior._YOUNG, posterior._HASTE
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_POSTERIOR = 0


# ---- the influence cap


@inner
def cap_count(x: Learner, d: int, which: int, owner: int):
    x.cap_rows[d, 4 + which, owner % BUCKETS] += 1.0


@inner
def cap_close(x: Learner, d: int, which: int):
    """After all rows of a call were counted: refresh the weights when it is time."""
    rows, steps, new = x.cap_rows[d, which], x.cap_rows[d, 2 + which], x.cap_rows[d, 4 + which]
    for j in range(BUCKETS):
        if new[j] > 0.0:
            rows[j] += new[j]
            steps[j] += 1.0
            new[j] = 0.0
    x.scalars[d, CAP_UNTIL + which] -= 1
    if x.scalars[d, CAP_UNTIL + which] > 0:
        return
    x.scalars[d, CAP_UNTIL + which] = _CAP_REFRESH
    weights = x.cap_weight[d, which]
    at_once = rows / np.maximum(steps, 1e-9)
    seen = rows >= 1.0
    if seen.any():
        usual, total = _lower_median(at_once[seen]), _lower_median(rows[seen])
        for j in range(BUCKETS):
            ratio = usual / max(at_once[j], usual)
            if at_once[j] > _LOUD * usual:
                ratio = min(ratio, total / max(rows[j], total))
            weights[j] = np.float32(ratio)
    for j in range(BUCKETS):
        rows[j] *= _CAP_KEEP
        steps[j] *= _CAP_KEEP


@inner
def _lower_median(values) -> float:
    values.sort()
    return values[(values.size - 1) // 2]


@inner
def teach_shared(x: Learner, d: int, slots, n: int, admitted, accepted):
    """AcceptancePosterior.teach_shared."""
    known, hits, sums = x.taught[d, KNOWN], x.taught[d, HITS], x.sums[d]
    for i in range(n):
        slot = slots[i]
        observed = min(admitted[i], accepted[i] + 1)
        if observed == 0:
            continue
        group = int(x.slot[d, L_SAMPLED, slot])
        weight = np.float64(x.cap_weight[d, _POSTERIOR, x.slot[d, L_OWNER, slot] % BUCKETS])
        for k in range(x.prior.shape[2]):
            known[k, slot] *= _KEEP_TAUGHT
            hits[k, slot] *= _KEEP_TAUGHT
            if k >= observed:
                continue
            known[k, slot] += 1.0
            if k < accepted[i]:
                hits[k, slot] += 1.0
            gap = hits[k, slot] - known[k, slot] * np.float64(x.prior[d, group, k])
            gap /= known[k, slot] + _PRUDENCE
            size = max(abs(gap), _CLIP)
            gap = min(max(gap, -_CLIP), _CLIP) * math.sqrt(_CLIP / size)
            sums[SEEN, group, k] += weight
            sums[PULL, group, k] += weight * gap


@inner
def refresh_prior(x: Learner, d: int):
    """AcceptancePosterior._refresh."""
    x.scalars[d, UNTIL_REFRESH] = _REFRESH
    for group in range(2):
        for k in range(x.prior.shape[2]):
            seen, pull = x.sums[d, SEEN, group, k], x.sums[d, PULL, group, k]
            if x.shared[d, P_TRIALS, group, k] < _YOUNG:
                pull *= _HASTE
            trials = math.exp(-_FORGET * seen) * x.shared[d, P_TRIALS, group, k] + seen
            rate = x.shared[d, P_RATE, group, k] + pull / trials
            x.shared[d, P_TRIALS, group, k] = trials
            x.shared[d, P_RATE, group, k] = min(max(rate, 0.0), 1.0)
            x.sums[d, SEEN, group, k] = x.sums[d, PULL, group, k] = 0.0
    set_prior(x, d)


@inner
def set_prior(x: Learner, d: int):
    """Priors and their running sums from the shared rates."""
    for group in range(2):
        total = _ZERO
        for k in range(x.prior.shape[2]):
            share = np.float32(x.shared[d, P_RATE, group, k])
            x.prior[d, group, k] = share
            total = np.float32(total + share)
            x.expected[d, group, k + 1] = total


@inner
def _seasoned_weight(x: Learner, d: int, slot: int, admitted: int, accepted: int):
    """What a request's residual weighs in the spread; 0 if it says nothing, or had no draft."""
    if x.own[d, TRIALS, slot] < _SEASONED or min(admitted, accepted + 1) == 0:
        return _ZERO
    return x.cap_weight[d, _POSTERIOR, x.slot[d, L_OWNER, slot] % BUCKETS]


@inner
def learn_shrinkage(x: Learner, d: int, slots, n: int, admitted, accepted):
    total = pulls = squares = 0.0
    rate = np.float32(x.prior[d].mean())
    variance = np.float32(rate * np.float32(_ONE - rate))
    for i in range(n):
        slot = slots[i]
        weight = np.float32(_seasoned_weight(x, d, slot, admitted[i], accepted[i]))
        if weight > _ZERO:
            total += weight
            pulls += np.float32(
                weight * np.float32(x.own[d, RESIDUAL, slot] / x.own[d, TRIALS, slot])
            )
    if total < 2.0:
        return
    mean = np.float32(pulls / total)
    for i in range(n):
        slot = slots[i]
        weight = np.float32(_seasoned_weight(x, d, slot, admitted[i], accepted[i]))
        if weight > _ZERO:
            trials = x.own[d, TRIALS, slot]
            luck = np.float32(variance / np.float32(trials * _LUCK))
            share = np.float32(np.float32(x.own[d, RESIDUAL, slot] / trials) - mean)
            squares += np.float32(weight * np.float32(np.float32(share * share) - luck))
    s = x.scalars[d]
    s[BETWEEN] += _SHRINKAGE_RATE * (squares / total - s[BETWEEN])
    s[WITHIN] += _SHRINKAGE_RATE * (np.float64(variance) - s[WITHIN])
    floor = s[WITHIN] / _MOST_SHRINKAGE
    s[SHRINKAGE] = max(_LEAST_SHRINKAGE, s[WITHIN] / max(s[BETWEEN], floor, 1e-9))
