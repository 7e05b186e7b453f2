"""planning.table.RequestTable with its posterior and online calibration, compiled.

The arithmetic follows planning/posterior.py, influence.py, online.py, calibration.py and table.py
step by step, in the same precision; tests/simulation/test_fast_planner.py compares the plans that
come out. Live quality (a metric) and the correction of the cost table (nothing to correct: the
simulated machine is the table) are left out.
"""

import math

import numpy as np

from vllm_dspark.planning import online, posterior
from vllm_dspark.planning import table as request_table
from vllm_dspark.simulation.core.jit import inner
from vllm_dspark.simulation.core.shared_rates import (
    cap_close,
    cap_count,
    learn_shrinkage,
    refresh_prior,
    teach_shared,
)
from vllm_dspark.simulation.core.state import (
    BIAS,
    BUCKETS,
    DUE,
    IDENTITY,
    L_ACCEPTED,
    L_ADMITTED,
    L_OUTCOME,
    L_OWNER,
    L_REMAINING,
    L_ROW_OWNER,
    L_ROW_STAMP,
    L_SAMPLED,
    NUM_FOLLOWED,
    NUM_OBSERVES,
    NUM_REPEATED,
    OBSERVED,
    OUTCOMES,
    P_OFFSET,
    P_START,
    P_SUMS,
    RESIDUAL,
    SHRINKAGE,
    SLOPE,
    TRIALS,
    UNTIL_REFRESH,
    Learner,
)

_KEEP = np.float32(posterior._KEEP_REQUEST)
_ENOUGH_OBSERVED = posterior._ENOUGH_OBSERVED
_ROW_WEIGHT = np.float32(posterior._ROW_WEIGHT)
_LOWEST, _HIGHEST = posterior._LOWEST, posterior._HIGHEST
_SHARED_ROWS = posterior._SHARED_ROWS
_LEARN_PERIOD, _LEARN_ROWS = request_table._LEARN_PERIOD, request_table._LEARN_ROWS
_BOUND, _STEP, _ENOUGH, _RIDGE = online.BOUND, online._STEP, online._ENOUGH, online._RIDGE
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


# ---- outcomes


@inner
def record_outcomes(x: Learner, d: int, slots, n: int, stamp: int, admitted, accepted, learn: int):
    """RequestTable.record_outcomes for the first n of `slots`."""
    count_emitted(x, d, slots, n, accepted)
    _observe(x, d, slots, n, admitted, accepted)
    scalars, states = x.scalars[d], x.slot[d]
    turns, scalars[NUM_REPEATED] = 1 + scalars[NUM_REPEATED] // _LEARN_PERIOD, 0
    scalars[OUTCOMES] += turns
    if scalars[OUTCOMES] % _LEARN_PERIOD >= turns:
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
def record_repeated(x: Learner, d: int, slots, n: int, admitted, accepted):
    """RequestTable.record_repeated of one step."""
    count_emitted(x, d, slots, n, accepted)
    _follow(x, d, slots, n, admitted, accepted)
    x.scalars[d, NUM_OBSERVES] += 1
    x.scalars[d, NUM_FOLLOWED] += 1
    x.scalars[d, NUM_REPEATED] += 1


@inner
def _follow(x: Learner, d: int, slots, n: int, admitted, accepted) -> int:
    """AcceptancePosterior._follow of one step; the drafts that were judged."""
    num_judged = 0
    own, expected, classes = x.own[d], x.expected[d], x.slot[d, L_SAMPLED]
    for i in range(n):
        slot, group = slots[i], classes[slots[i]]
        trials = min(admitted[i], accepted[i] + 1)
        residual, count = own[RESIDUAL, slot], own[TRIALS, slot]
        if trials > 0:
            residual *= _KEEP
            count *= _KEEP
        gained = np.float32(accepted[i] - np.float64(expected[group, trials]))
        own[RESIDUAL, slot] = np.float32(residual + gained)
        own[TRIALS, slot] = np.float32(np.float64(count) + trials)
        num_judged += trials
    return num_judged


@inner
def _observe(x: Learner, d: int, slots, n: int, admitted, accepted):
    """AcceptancePosterior.observe; all simulated requests are untouched."""
    num_shared = _follow(x, d, slots, n, admitted, accepted)
    x.scalars[d, NUM_OBSERVES] += 1
    unseen, x.scalars[d, NUM_FOLLOWED] = x.scalars[d, NUM_FOLLOWED], 0
    if int(x.scalars[d, NUM_OBSERVES]) % (1 + n // _SHARED_ROWS) > unseen or not num_shared:
        return
    for i in range(n):
        if min(admitted[i], accepted[i] + 1) > 0:
            cap_count(x, d, _POSTERIOR, x.slot[d, L_OWNER, slots[i]])
    x.scalars[d, OBSERVED] += num_shared
    cap_close(x, d, _POSTERIOR)
    teach_shared(x, d, slots, n, admitted, accepted)
    x.scalars[d, UNTIL_REFRESH] -= 1
    if x.scalars[d, UNTIL_REFRESH] <= 0:
        refresh_prior(x, d)
        learn_shrinkage(x, d, slots, n, admitted, accepted)


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
            cap_count(x, d, _ONLINE, x.slot[d, L_OWNER, slot])
    if not verified:
        return
    cap_close(x, d, _ONLINE)
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
