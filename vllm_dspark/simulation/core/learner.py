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
from vllm_dspark.simulation.core.state import (
    BETWEEN,
    BUCKETS,
    OBSERVED,
    PAIRINGS,
    SHRINKAGE,
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
_LEARN_PERIOD, _LEARN_ROWS = request_table._LEARN_PERIOD, request_table._LEARN_ROWS
_BOUND, _STEP, _ENOUGH, _RIDGE = online.BOUND, online._STEP, online._ENOUGH, online._RIDGE
_CAP_REFRESH, _CAP_KEEP = 16, 0.9
_EDGE = np.float32(1e-6)
_ONE, _ZERO = np.float32(1.0), np.float32(0.0)
_MAX_ROW_AGE = 4
_POSTERIOR, _ONLINE = 0, 1


@inner
def add(x: Learner, d: int, slot: int, owner: int, sampled: bool, limit: int):
    """RequestTable.add."""
    x.owner[d, slot] = owner
    x.row_owner[d, slot] = x.row_stamp[d, slot] = x.outcome_stamp[d, slot] = 0
    x.admitted[d, slot] = x.accepted[d, slot] = 0
    x.remaining[d, slot] = limit
    x.sampled[d, slot] = sampled
    x.residual[d, slot] = x.trials[d, slot] = _ZERO


@inner
def calibrate(x: Learner, d: int, group: int, k: int, confidence):
    """Calibration.apply for one confidence in [0, 1], float32."""
    if x.identity[d]:
        return np.float32(confidence)
    p = min(max(np.float32(confidence), _EDGE), _ONE - _EDGE)
    z = np.float32(math.log(p / (_ONE - p)))
    z = np.float32(z * x.slope[group, k]) + x.bias[d, group, k]
    return np.float32(_ONE / np.float32(np.float32(math.exp(np.float32(z))) + _ONE))


# ---- the influence cap


@inner
def _cap_count(x: Learner, d: int, which: int, owner: int):
    x.cap_rows[d, which, owner % BUCKETS] += 1.0


@inner
def _cap_close(x: Learner, d: int, which: int):
    """After all rows of a call were counted: refresh the weights when it is time."""
    x.cap_until[d, which] -= 1
    if x.cap_until[d, which] > 0:
        return
    x.cap_until[d, which] = _CAP_REFRESH
    rows = x.cap_rows[d, which]
    seen = rows[rows >= 1.0]
    if seen.size:
        seen.sort()
        limit = seen[(seen.size - 1) // 2]
        for j in range(BUCKETS):
            x.cap_weight[d, which, j] = np.float32(limit / max(rows[j], limit))
    for j in range(BUCKETS):
        rows[j] *= _CAP_KEEP


# ---- outcomes


@inner
def record_outcomes(x: Learner, d: int, slots, n: int, stamp: int, admitted, accepted, learn: int):
    """RequestTable.record_outcomes for the first n of `slots`."""
    for i in range(n):
        slot = slots[i]
        x.outcome_stamp[d, slot] = stamp
        x.admitted[d, slot] = admitted[i]
        x.accepted[d, slot] = accepted[i]
        x.remaining[d, slot] = max(x.remaining[d, slot] - accepted[i] - 1, 0)
    _observe(x, d, slots, n, admitted, accepted)
    pair(x, d, slots, n, learn)


@inner
def _observe(x: Learner, d: int, slots, n: int, admitted, accepted):
    """AcceptancePosterior.observe; all simulated requests are untouched."""
    num_shared = 0
    for i in range(n):
        slot, group = slots[i], int(x.sampled[d, slots[i]])
        trials = min(admitted[i], accepted[i] + 1)
        residual, count = x.residual[d, slot], x.trials[d, slot]
        if trials > 0:
            residual *= _KEEP
            count *= _KEEP
        gained = accepted[i] - np.float64(x.expected[d, group, trials])
        x.residual[d, slot] = np.float32(np.float64(residual) + gained)
        x.trials[d, slot] = np.float32(np.float64(count) + trials)
        num_shared += trials
        if trials > 0:
            _cap_count(x, d, _POSTERIOR, x.owner[d, slot])
    if not num_shared:
        return
    x.scalars[d, OBSERVED] += num_shared
    _cap_close(x, d, _POSTERIOR)
    for i in range(n):
        slot, group = slots[i], int(x.sampled[d, slots[i]])
        trials = min(admitted[i], accepted[i] + 1)
        weight = _ZERO
        if trials > 0:
            weight = x.cap_weight[d, _POSTERIOR, x.owner[d, slot] % BUCKETS]
        x.seen[d, group, trials] += weight
        x.hits[d, group, accepted[i]] += weight
    x.scalars[d, UNTIL_REFRESH] -= 1
    if x.scalars[d, UNTIL_REFRESH] <= 0:
        _refresh_prior(x, d)
        _learn_shrinkage(x, d, slots, n, admitted, accepted)


@inner
def _refresh_prior(x: Learner, d: int):
    """Fold the histograms into the priors."""
    x.scalars[d, UNTIL_REFRESH] = _REFRESH
    width = x.prior.shape[2]
    for group in range(2):
        trials = hits = 0.0
        for k in range(width - 1, -1, -1):
            trials += x.seen[d, group, k + 1]
            hits += x.hits[d, group, k + 1]
            keep = math.exp(-_FORGET * trials)
            x.prior_trials[d, group, k] = keep * x.prior_trials[d, group, k] + trials
            x.prior_accepted[d, group, k] = keep * x.prior_accepted[d, group, k] + hits
        for k in range(width + 1):
            x.seen[d, group, k] = x.hits[d, group, k] = 0.0
    set_prior(x, d)


@inner
def set_prior(x: Learner, d: int):
    """Priors and their running sums from trials and acceptances."""
    for group in range(2):
        total = _ZERO
        for k in range(x.prior.shape[2]):
            share = np.float32(x.prior_accepted[d, group, k] / x.prior_trials[d, group, k])
            x.prior[d, group, k] = share
            total = np.float32(total + share)
            x.expected[d, group, k + 1] = total


@inner
def _learn_shrinkage(x: Learner, d: int, slots, n: int, admitted, accepted):
    total = squares = 0.0
    rate = np.float32(x.prior[d].mean())
    variance = np.float32(rate * np.float32(_ONE - rate))
    for i in range(n):
        slot = slots[i]
        trials = x.trials[d, slot]
        if trials < _SEASONED or min(admitted[i], accepted[i] + 1) == 0:
            continue
        weight = x.cap_weight[d, _POSTERIOR, x.owner[d, slot] % BUCKETS]
        luck = np.float32(variance / np.float32(trials * _LUCK))
        share = np.float32(x.residual[d, slot] / trials)
        total += weight
        squares += np.float32(weight * np.float32(np.float32(share * share) - luck))
    if total < 2.0:
        return
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
    x.scalars[d, PAIRINGS] += 1
    pairings = int(x.scalars[d, PAIRINGS])
    if learn and pairings % _LEARN_PERIOD == 0:
        _learn(x, d, slots, n, matched, pairings)
    for i in range(n):
        if _matches(x, d, slots[i]):
            x.outcome_stamp[d, slots[i]] = 0


@inner
def _matches(x: Learner, d: int, slot: int) -> bool:
    stamp = x.outcome_stamp[d, slot]
    same_pass = stamp > 0 and stamp == x.row_stamp[d, slot]
    return same_pass and x.row_owner[d, slot] == x.owner[d, slot]


@inner
def _learn(x: Learner, d: int, slots, n: int, matched: int, pairings: int):
    """OnlineCalibration.observe on some of the matched rows."""
    width = x.row.shape[2]
    # np.roll(matched rows, 7 * pairings)[:limit] without the array
    shift = 7 * pairings % matched
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
            _cap_count(x, d, _ONLINE, x.owner[d, slot])
    if not verified:
        return
    _cap_close(x, d, _ONLINE)
    for i in range(n):
        if not chosen[i]:
            continue
        slot = slots[i]
        group = int(x.sampled[d, slot])
        weight = np.float64(x.cap_weight[d, _ONLINE, x.owner[d, slot] % BUCKETS])
        for k in range(min(width, x.admitted[d, slot], x.accepted[d, slot] + 1)):
            confidence = x.row[d, slot, k]
            if not 0.0 <= confidence <= 1.0:
                continue
            predicted = calibrate(x, d, group, k, confidence)
            hit = _ONE if k < x.accepted[d, slot] else _ZERO
            x.sums[d, 0, group, k] += weight
            x.sums[d, 1, group, k] += weight * np.float32(hit - predicted)
            x.sums[d, 2, group, k] += weight * np.float32(predicted * (_ONE - predicted))
    _move_offsets(x, d)


@inner
def _reaches(x: Learner, d: int, slot: int) -> bool:
    """Whether any draft of the row teaches."""
    for k in range(min(x.row.shape[2], x.admitted[d, slot], x.accepted[d, slot] + 1)):
        if 0.0 <= x.row[d, slot, k] <= 1.0:
            return True
    return False


@inner
def _move_offsets(x: Learner, d: int):
    """OnlineCalibration._update."""
    moved = False
    for group in range(2):
        for k in range(x.prior.shape[2]):
            if x.sums[d, 0, group, k] < _ENOUGH:
                continue
            moved = True
            step = x.sums[d, 1, group, k] / (x.sums[d, 2, group, k] + _RIDGE)
            offset = x.offset[d, group, k] + min(max(step, -_STEP), _STEP)
            start = x.start[group, k]
            x.offset[d, group, k] = min(max(offset, start - _BOUND), start + _BOUND)
            for part in range(3):
                x.sums[d, part, group, k] = 0.0
    if not moved:
        return
    identity = True
    for group in range(2):
        for k in range(x.prior.shape[2]):
            x.bias[d, group, k] = -np.float32(x.offset[d, group, k])
            if x.bias[d, group, k] != _ZERO or x.slope[group, k] != -_ONE:
                identity = False
    x.identity[d] = identity


# ---- what is known about a step's requests


@inner
def gather(x: Learner, d: int, slots, n: int, draft_stamp: int, by_posterior: int, out, known):
    """RequestTable.batch: fill out[k * n + i] with conditional acceptances, and `known`."""
    width = x.prior.shape[2]
    everybody = x.scalars[d, OBSERVED] >= _ENOUGH_OBSERVED
    for i in range(n):
        slot = slots[i]
        group = int(x.sampled[d, slot])
        age = draft_stamp - x.row_stamp[d, slot]
        usable = (
            x.row_owner[d, slot] == x.owner[d, slot]
            and x.row_stamp[d, slot] > 0
            and draft_stamp > 0
            and 0 <= age <= _MAX_ROW_AGE
        )
        current = usable and age == 0
        if current and group:
            usable = current = False
        known[i] = usable or everybody or x.trials[d, slot] > 0.0
        residual = x.residual[d, slot]
        trials = x.trials[d, slot] + np.float32(x.scalars[d, SHRINKAGE])
        own = residual / trials
        for k in range(width):
            base = x.prior[d, group, k]
            estimate = min(max(np.float32(base + own), _LOWEST), _HIGHEST)
            if usable:
                confidence = x.row[d, slot, k]
                if 0.0 <= confidence <= 1.0:
                    estimate = calibrate(x, d, group, k, confidence)
            out[k * n + i] = estimate
        if usable and by_posterior and not current:
            _blend(x, d, slot, group, n, i, out)


@inner
def _blend(x: Learner, d: int, slot: int, group: int, n: int, i: int, out):
    """AcceptancePosterior.estimate with the row as a weak opinion; `out` holds the row."""
    width = x.prior.shape[2]
    said = base = _ZERO
    for k in range(width):
        said = np.float32(said + out[k * n + i])
        base = np.float32(base + x.prior[d, group, k])
    opinion = np.float32(said - base)
    residual = np.float32(x.residual[d, slot] + np.float32(_ROW_WEIGHT * opinion))
    trials = x.trials[d, slot] + np.float32(x.scalars[d, SHRINKAGE])
    trials = np.float32(trials + np.float32(_ROW_WEIGHT * np.float32(width)))
    own = np.float32(residual / trials)
    for k in range(width):
        estimate = np.float32(x.prior[d, group, k] + own)
        out[k * n + i] = min(max(estimate, _LOWEST), _HIGHEST)
