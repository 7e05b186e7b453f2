"""planning.table.RequestTable with its posterior and online calibration, compiled.

The arithmetic follows planning/posterior.py, influence.py, online.py, calibration.py and table.py
step by step, in the same precision; tests/simulation/test_fast_planner.py compares the plans that
come out. Live quality (a metric) and the correction of the cost table (nothing to correct: the
simulated machine is the table) are left out.
"""

import math

import numpy as np

from vllm_dspark.planning import influence, online, posterior
from vllm_dspark.planning import table as request_table
from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.state import (
    BETWEEN,
    BIAS,
    BUCKETS,
    CAP_UNTIL,
    DUE,
    HITS,
    IDENTITY,
    KNOWN,
    L_ACCEPTED,
    L_ADMITTED,
    L_OUTCOME,
    L_OWNER,
    L_REMAINING,
    L_ROW_OWNER,
    L_ROW_STAMP,
    L_SAMPLED,
    NUM_OBSERVES,
    OBSERVED,
    OUTCOMES,
    P_OFFSET,
    P_RATE,
    P_START,
    P_SUMS,
    P_TRIALS,
    PULL,
    RESIDUAL,
    SEEN,
    SHRINKAGE,
    SLOPE,
    TRIALS,
    UNTIL_REFRESH,
    WITHIN,
    Learner,
)

_KEEP = np.float32(posterior._KEEP_REQUEST)
_REFRESH = posterior._REFRESH
_ENOUGH_OBSERVED = posterior._ENOUGH_OBSERVED
_SEASONED = posterior._SEASONED
_SHRINKAGE_RATE = posterior._SHRINKAGE_RATE
_LEAST_SHRINKAGE, _MOST_SHRINKAGE = posterior._LEAST_SHRINKAGE, posterior._MOST_SHRINKAGE
_FORGET = posterior._FORGET_SHARED
_ROW_WEIGHT = np.float32(posterior._ROW_WEIGHT)
_LOWEST, _HIGHEST = posterior._LOWEST, posterior._HIGHEST
_LUCK = np.float32(1.0 + posterior._KEEP_REQUEST)
_SHARED_ROWS = posterior._SHARED_ROWS
_LEARN_PERIOD, _LEARN_ROWS = request_table._LEARN_PERIOD, request_table._LEARN_ROWS
_BOUND, _STEP, _ENOUGH, _RIDGE = online.BOUND, online._STEP, online._ENOUGH, online._RIDGE
_CAP_REFRESH, _CAP_KEEP, _LOUD = influence._REFRESH, influence._KEEP, influence._LOUD
_KEEP_TAUGHT = posterior._KEEP_REQUEST
_CLIP, _PRUDENCE = posterior._CLIP, posterior._PRUDENCE
_EDGE = np.float32(1e-6)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_MAX_ROW_AGE = 4
_POSTERIOR, _ONLINE = 0, 1


@inner
def add(x: Learner, d: int, slot: int, owner: int, sampled: bool, limit: int):
    """RequestTable.add."""
    x.slot[d, L_OWNER, slot] = owner
    x.slot[d, L_ROW_OWNER, slot] = x.slot[d, L_ROW_STAMP, slot] = x.slot[d, L_OUTCOME, slot] = 0
    x.slot[d, L_ADMITTED, slot] = x.slot[d, L_ACCEPTED, slot] = 0
    x.slot[d, L_REMAINING, slot] = limit
    x.slot[d, L_SAMPLED, slot] = sampled
    x.own[d, RESIDUAL, slot] = x.own[d, TRIALS, slot] = _ZERO
    x.taught[d, :, :, slot] = 0.0


@inner
def calibrate(x: Learner, d: int, group: int, k: int, confidence):
    """Calibration.apply for one confidence in [0, 1], float32."""
    if x.scalars[d, IDENTITY]:
        return np.float32(confidence)
    p = min(max(np.float32(confidence), _EDGE), _ONE - _EDGE)
    z = np.float32(math.log(p / (_ONE - p)))
    z = np.float32(z * x.temper[d, SLOPE, group, k]) + x.temper[d, BIAS, group, k]
    return np.float32(_ONE / np.float32(np.float32(math.exp(np.float32(z))) + _ONE))


# ---- the influence cap


@inner
def _cap_count(x: Learner, d: int, which: int, owner: int):
    x.cap_rows[d, 4 + which, owner % BUCKETS] += 1.0


@inner
def _cap_close(x: Learner, d: int, which: int):
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


# ---- outcomes


@inner
def record_outcomes(x: Learner, d: int, slots, n: int, stamp: int, admitted, accepted, learn: int):
    """RequestTable.record_outcomes for the first n of `slots`."""
    count_emitted(x, d, slots, n, accepted)
    _observe(x, d, slots, n, admitted, accepted)
    scalars, states = x.scalars[d], x.slot[d]
    scalars[OUTCOMES] += 1
    if scalars[OUTCOMES] % _LEARN_PERIOD:
        return
    if scalars[DUE]:
        states[L_OUTCOME] = 0
    for i in range(n):
        slot = slots[i]
        states[L_OUTCOME, slot] = stamp
        states[L_ADMITTED, slot] = admitted[i]
        states[L_ACCEPTED, slot] = accepted[i]
    scalars[DUE] = 1
    pair(x, d, slots, n, learn)


@inner
def count_emitted(x: Learner, d: int, slots, n: int, accepted):
    """RequestTable.count_emitted."""
    left = x.slot[d, L_REMAINING]
    for i in range(n):
        left[slots[i]] = max(left[slots[i]] - accepted[i] - 1, 0)


@inner
def _observe(x: Learner, d: int, slots, n: int, admitted, accepted):
    """AcceptancePosterior.observe; all simulated requests are untouched."""
    num_shared = 0
    own, expected, classes = x.own[d], x.expected[d], x.slot[d, L_SAMPLED]
    for i in range(n):
        slot, group = slots[i], classes[slots[i]]
        trials = min(admitted[i], accepted[i] + 1)
        residual, count = own[RESIDUAL, slot], own[TRIALS, slot]
        if trials > 0:
            residual *= _KEEP
            count *= _KEEP
        residual = np.float32(np.float64(residual) + accepted[i])
        own[RESIDUAL, slot] = np.float32(residual - expected[group, trials])
        own[TRIALS, slot] = np.float32(np.float64(count) + trials)
        num_shared += trials
    x.scalars[d, NUM_OBSERVES] += 1
    if int(x.scalars[d, NUM_OBSERVES]) % (1 + n // _SHARED_ROWS) or not num_shared:
        return
    for i in range(n):
        if min(admitted[i], accepted[i] + 1) > 0:
            _cap_count(x, d, _POSTERIOR, x.slot[d, L_OWNER, slots[i]])
    x.scalars[d, OBSERVED] += num_shared
    _cap_close(x, d, _POSTERIOR)
    _teach_shared(x, d, slots, n, admitted, accepted)
    x.scalars[d, UNTIL_REFRESH] -= 1
    if x.scalars[d, UNTIL_REFRESH] <= 0:
        _refresh_prior(x, d)
        _learn_shrinkage(x, d, slots, n, admitted, accepted)


@inner
def _teach_shared(x: Learner, d: int, slots, n: int, admitted, accepted):
    """AcceptancePosterior._teach_shared."""
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
def _refresh_prior(x: Learner, d: int):
    """AcceptancePosterior._refresh."""
    x.scalars[d, UNTIL_REFRESH] = _REFRESH
    for group in range(2):
        for k in range(x.prior.shape[2]):
            seen = x.sums[d, SEEN, group, k]
            trials = math.exp(-_FORGET * seen) * x.shared[d, P_TRIALS, group, k] + seen
            rate = x.shared[d, P_RATE, group, k] + x.sums[d, PULL, group, k] / trials
            x.shared[d, P_TRIALS, group, k] = trials
            x.shared[d, P_RATE, group, k] = min(max(rate, 0.0), 1.0)
            x.sums[d, SEEN, group, k] = x.sums[d, PULL, group, k] = 0.0
    set_prior(x, d)


@inner
def set_prior(x: Learner, d: int):
    """Priors and their running sums from trials and acceptances."""
    for group in range(2):
        total = _ZERO
        for k in range(x.prior.shape[2]):
            share = np.float32(x.shared[d, P_RATE, group, k])
            x.prior[d, group, k] = share
            total = np.float32(total + share)
            x.expected[d, group, k + 1] = total


@inner
def _learn_shrinkage(x: Learner, d: int, slots, n: int, admitted, accepted):
    total = pulls = squares = 0.0
    rate = np.float32(x.prior[d].mean())
    variance = np.float32(rate * np.float32(_ONE - rate))
    for i in range(n):
        slot = slots[i]
        trials = x.own[d, TRIALS, slot]
        if trials < _SEASONED or min(admitted[i], accepted[i] + 1) == 0:
            continue
        weight = x.cap_weight[d, _POSTERIOR, x.slot[d, L_OWNER, slot] % BUCKETS]
        total += weight
        pulls += np.float32(weight * np.float32(x.own[d, RESIDUAL, slot] / trials))
    if total < 2.0:
        return
    mean = np.float32(pulls / total)
    for i in range(n):
        slot = slots[i]
        trials = x.own[d, TRIALS, slot]
        if trials < _SEASONED or min(admitted[i], accepted[i] + 1) == 0:
            continue
        weight = x.cap_weight[d, _POSTERIOR, x.slot[d, L_OWNER, slot] % BUCKETS]
        luck = np.float32(variance / np.float32(trials * _LUCK))
        share = np.float32(np.float32(x.own[d, RESIDUAL, slot] / trials) - mean)
        squares += np.float32(weight * np.float32(np.float32(share * share) - luck))
    s = x.scalars[d]
    s[BETWEEN] += _SHRINKAGE_RATE * (squares / total - s[BETWEEN])
    s[WITHIN] += _SHRINKAGE_RATE * (np.float64(variance) - s[WITHIN])
    floor = s[WITHIN] / _MOST_SHRINKAGE
    s[SHRINKAGE] = max(_LEAST_SHRINKAGE, s[WITHIN] / max(s[BETWEEN], floor, 1e-9))


# ---- rows and calibration


@inner
def pair(x: Learner, d: int, slots, n: int, learn: int):
    """RequestTable._pair: rows and outcomes of the same draft pass teach the calibration."""
    matched = 0
    for i in range(n):
        if _matches(x, d, slots[i]):
            matched += 1
    if not matched:
        return
    if learn:
        _learn(x, d, slots, n, matched, int(x.scalars[d, OUTCOMES]))
    outcomes = x.slot[d, L_OUTCOME]
    for i in range(n):
        if _matches(x, d, slots[i]):
            outcomes[slots[i]] = 0
    x.scalars[d, DUE] = 1.0 if outcomes.any() else 0.0


@inner
def _matches(x: Learner, d: int, slot: int) -> bool:
    stamp = x.slot[d, L_OUTCOME, slot]
    same_pass = stamp > 0 and stamp == x.slot[d, L_ROW_STAMP, slot]
    return same_pass and x.slot[d, L_ROW_OWNER, slot] == x.slot[d, L_OWNER, slot]


@inner
def _learn(x: Learner, d: int, slots, n: int, matched: int, turn: int):
    """OnlineCalibration.observe on some of the matched rows."""
    width = x.row.shape[2]
    # np.roll(matched rows, 7 * turn)[:limit] without the array
    shift = 7 * turn % matched if matched > _LEARN_ROWS else 0
    chosen = np.zeros(n, dtype=np.bool_)
    place = 0
    for i in range(n):
        if _matches(x, d, slots[i]):
            chosen[i] = (place + shift) % matched < _LEARN_ROWS
            place += 1
    verified = 0
    for i in range(n):
        slot = slots[i]
        chosen[i] = chosen[i] and _reaches(x, d, slot)
        if chosen[i]:
            verified += 1
            _cap_count(x, d, _ONLINE, x.slot[d, L_OWNER, slot])
    if not verified:
        return
    _cap_close(x, d, _ONLINE)
    for i in range(n):
        if not chosen[i]:
            continue
        slot = slots[i]
        group = int(x.slot[d, L_SAMPLED, slot])
        weight = np.float64(x.cap_weight[d, _ONLINE, x.slot[d, L_OWNER, slot] % BUCKETS])
        for k in range(min(width, x.slot[d, L_ADMITTED, slot], x.slot[d, L_ACCEPTED, slot] + 1)):
            confidence = x.row[d, slot, k]
            if not 0.0 <= confidence <= 1.0:
                continue
            predicted = calibrate(x, d, group, k, confidence)
            hit = _ONE if k < x.slot[d, L_ACCEPTED, slot] else _ZERO
            x.shared[d, P_SUMS + 0, group, k] += weight
            x.shared[d, P_SUMS + 1, group, k] += weight * np.float32(hit - predicted)
            x.shared[d, P_SUMS + 2, group, k] += weight * np.float32(predicted * (_ONE - predicted))
    _move_offsets(x, d)


@inner
def _reaches(x: Learner, d: int, slot: int) -> bool:
    """Whether any draft of the row teaches."""
    for k in range(
        min(x.row.shape[2], x.slot[d, L_ADMITTED, slot], x.slot[d, L_ACCEPTED, slot] + 1)
    ):
        if 0.0 <= x.row[d, slot, k] <= 1.0:
            return True
    return False


@inner
def _move_offsets(x: Learner, d: int):
    """OnlineCalibration._update."""
    moved = False
    for group in range(2):
        for k in range(x.prior.shape[2]):
            if x.shared[d, P_SUMS + 0, group, k] < _ENOUGH:
                continue
            moved = True
            step = x.shared[d, P_SUMS + 1, group, k] / (x.shared[d, P_SUMS + 2, group, k] + _RIDGE)
            offset = x.shared[d, P_OFFSET, group, k] + min(max(step, -_STEP), _STEP)
            start = x.shared[d, P_START, group, k]
            x.shared[d, P_OFFSET, group, k] = min(max(offset, start - _BOUND), start + _BOUND)
            for part in range(3):
                x.shared[d, P_SUMS + part, group, k] = 0.0
    if not moved:
        return
    identity = True
    for group in range(2):
        for k in range(x.prior.shape[2]):
            x.temper[d, BIAS, group, k] = -np.float32(x.shared[d, P_OFFSET, group, k])
            if x.temper[d, BIAS, group, k] != _ZERO or x.temper[d, SLOPE, group, k] != -_ONE:
                identity = False
    x.scalars[d, IDENTITY] = identity


# ---- what is known about a step's requests


@inner
def gather(x: Learner, d: int, slots, n: int, draft_stamp: int, by_posterior: int, out, known):
    """RequestTable.batch: fill out[k * n + i] with conditional acceptances, and `known`.

    Returns whether some rows are about the very drafts to be verified.
    """
    width = x.prior.shape[2]
    everybody = x.scalars[d, OBSERVED] >= _ENOUGH_OBSERVED
    states, own_sums, rows, priors = x.slot[d], x.own[d], x.row[d], x.prior[d]
    shrinkage, fresh = np.float32(x.scalars[d, SHRINKAGE]), False
    for i in range(n):
        slot = slots[i]
        group = states[L_SAMPLED, slot]
        age = draft_stamp - states[L_ROW_STAMP, slot]
        usable = (
            states[L_ROW_OWNER, slot] == states[L_OWNER, slot]
            and states[L_ROW_STAMP, slot] > 0
            and draft_stamp > 0
            and 0 <= age <= _MAX_ROW_AGE
        )
        current = usable and age == 0
        if current and group:
            usable = current = False
        fresh = fresh or current
        known[i] = usable or everybody or own_sums[TRIALS, slot] > 0.0
        own = own_sums[RESIDUAL, slot] / (own_sums[TRIALS, slot] + shrinkage)
        for k in range(width):
            base = priors[group, k]
            estimate = min(max(np.float32(base + own), _LOWEST), _HIGHEST)
            if usable:
                confidence = rows[slot, k]
                if 0.0 <= confidence <= 1.0:
                    estimate = calibrate(x, d, group, k, confidence)
            out[k * n + i] = estimate
        if usable and by_posterior and not current:
            _blend(x, d, slot, group, n, i, out)
    return fresh


@inner
def _blend(x: Learner, d: int, slot: int, group: int, n: int, i: int, out):
    """AcceptancePosterior.estimate with the row as a weak opinion; `out` holds the row."""
    width = x.prior.shape[2]
    said = base = _ZERO
    for k in range(width):
        said = np.float32(said + out[k * n + i])
        base = np.float32(base + x.prior[d, group, k])
    opinion = np.float32(said - base)
    residual = np.float32(x.own[d, RESIDUAL, slot] + np.float32(_ROW_WEIGHT * opinion))
    trials = x.own[d, TRIALS, slot] + np.float32(x.scalars[d, SHRINKAGE])
    trials = np.float32(trials + np.float32(_ROW_WEIGHT * np.float32(width)))
    own = np.float32(residual / trials)
    for k in range(width):
        estimate = np.float32(x.prior[d, group, k] + own)
        out[k * n + i] = min(max(estimate, _LOWEST), _HIGHEST)
