r"""Running acceptance, per position for everybody and per request on top.

A plan made on the host sees confidence rows that are mostly about tokens emitted
since (DESIGN.md, "host windows"), so it ranks by what each request has been
accepting. For class q (greedy or sampled) and position k the shared prior p_qk is
the discounted share of accepted among observed drafts; a draft is observed if it
was verified and everything before it was accepted. Request r adds its own residual,
shrunk towards zero:

    c_rk = p_qk + (S_r - E_r + L_r) / (kappa + N_r + M_r)

with S_r its accepted drafts, E_r what the priors had expected of the same drafts and
N_r their number, all with exponential forgetting. How much to believe in a residual
is learned too (empirical Bayes): kappa = v / sigma^2, v the Bernoulli variance of one
draft and sigma^2 how much requests really differ, which is what the spread of their
residuals exceeds sampling noise by. Where requests are alike, kappa grows and they
are ranked alike instead of by luck. The newest usable confidence row
counts as M_r = lambda K further trials with L_r = lambda sum_k (c_k - p_qk): a weak
opinion about the text's current difficulty. Everything here is about drafts already
verified, hence independent of the drafts the plan will admit, as long as redrafted
positions get fresh noise (DESIGN.md, trap 2).

No request may teach everybody whatever it likes. The prior is no mean, which one
client could take anywhere with enough requests, but a robust location: every observed
draft of request r moves p_k by

    w_r psi(m_rk) / T_k,    m_rk = (S_rk - N_rk p_k) / (N_rk + PRUDENCE)
    psi(m) = m  if |m| <= CLIP,  else  sign(m) CLIP (CLIP / |m|)^(1/2)

with S_rk and N_rk the accepted and observed drafts of that request at that position,
w_r the cap of its tenant (influence.py) and T_k the discounted number of all drafts
that taught. What all requests agree on is followed in full, the slower the further it
is. Requests that disagree pull by at most CLIP each, and by less the further they are
off; so where at most half of what is observed at a position is hostile, whatever it
claims to be, honest requests known for long hold a p_k that is theirs within

    INFLUENCE_BOUND = CLIP (1 + PRUDENCE (1 - keep))

of where it would be without (noise of the honest ones aside), and with it everything
estimated for them; a mean would go half of the way to where the hostile ones are. A
hostile majority cannot be told from a change of all traffic, and is followed; nor can
half of the traffic that was there from the start, when nothing was known. Where a
robust location settles does not depend on how fast it moves: until a position has been
seen `_YOUNG` times, drafts pull `_HASTE` times as hard, so that what all agree on is
known after dozens of drafts rather than hundreds.
"""

import numpy as np
import numpy.typing as npt

from vllm_dspark.planning.influence import InfluenceCap

BoolArray = npt.NDArray[np.bool_]
FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.integer]

_START_RATE = 0.8  # of a draft nobody has seen verified yet
_START_TRIALS = 8.0
_ENOUGH_OBSERVED = 256  # drafts after which the shared priors speak for newcomers
_FORGET_SHARED = 1.0 / 4096.0  # per observed draft, shared priors
_KEEP_REQUEST = 0.95  # forgetting per verified step, one request: ~20 steps
_YOUNG, _HASTE = 256.0, 3.0  # trials of a position's prior, and how much faster it moves below
_SHARED_ROWS = 32  # a batch of n requests teaches the shared priors in 1 of 1 + n / 32 steps
_REFRESH = 4  # observed steps per update of the shared priors
# kappa: trials a request needs before its residual counts half. Learned (see
# _learn_shrinkage) between these bounds, from this start.
_SHRINKAGE = 8.0
_LEAST_SHRINKAGE, _MOST_SHRINKAGE = 3.0, 200.0
_SHRINKAGE_RATE = 0.02  # per refresh
_SEASONED = 12.0  # trials from which on a request's residual says something about spread
_ROW_WEIGHT = 0.15  # lambda: trials that one confidence is worth
_CLIP = 0.15  # pull of one observed draft at most; below it requests differ honestly
_PRUDENCE = 8.0  # drafts of a request that weigh as much as knowing nothing about it
INFLUENCE_BOUND = _CLIP * (1.0 + _PRUDENCE * (1.0 - _KEEP_REQUEST))  # of requests known for long
_LOWEST, _HIGHEST = np.float32(0.02), np.float32(0.995)


class AcceptancePosterior:
    """Shared priors [2, K] and per-slot residuals; slots belong to the request table."""

    def __init__(self, num_positions: int, num_slots: int) -> None:
        self._positions = np.arange(num_positions, dtype=np.int32)[:, None]
        self._trials = np.full((2, num_positions), _START_TRIALS)
        self._rate = np.full((2, num_positions), _START_RATE)
        self._seen, self._pull = np.zeros((2, num_positions)), np.zeros((2, num_positions))
        self._until_refresh = _REFRESH
        self._shrinkage = _SHRINKAGE
        self._between = self._within = 0.0  # running sigma^2 and v, kappa = v / sigma^2
        self._set_prior()
        self._cap = InfluenceCap()
        self._residual: FloatArray = np.zeros(num_slots, dtype=np.float32)  # by slot: S - E
        self._count: FloatArray = np.zeros(num_slots, dtype=np.float32)  # by slot: N
        self._own = np.zeros((2, num_positions, num_slots))  # N and S by position and slot
        self._num_steps = self._num_followed = 0  # the latter since the last `observe`
        self.num_observed = 0  # drafts that ever taught the shared priors

    def grow(self, num_slots: int) -> None:
        """Make room for more slots."""
        blank = np.zeros(num_slots - self._count.size, dtype=np.float32)
        self._residual = np.append(self._residual, blank)
        self._count = np.append(self._count, blank)
        self._own = np.pad(self._own, ((0, 0), (0, 0), (0, blank.size)))

    def reset(self, slot: int) -> None:
        """Forget a slot's request."""
        self._own[:, :, slot] = 0.0
        self._residual[slot] = self._count[slot] = 0.0

    @property
    def priors(self) -> FloatArray:
        """Shared conditional acceptance of both classes, [2, K]; new ones are a new array."""
        return self._prior

    def prior(self, sampled: bool) -> FloatArray:
        """Shared conditional acceptance per position, [K], of one request class."""
        prior: FloatArray = self._prior[int(sampled)]
        return prior

    def known(self, slots: IntArray) -> BoolArray | None:
        """Requests that outcomes say something about, [n]; None: all, as others did enough."""
        if self.num_observed >= _ENOUGH_OBSERVED:
            return None
        own: BoolArray = self._count[slots] > 0.0
        return own

    def estimate(
        self,
        slots: IntArray,  # [n]
        sampled: BoolArray,  # [n]
        row: FloatArray | None = None,  # [K, n] calibrated confidences
        row_usable: BoolArray | None = None,  # [n]
        row_width: IntArray | None = None,  # [n] columns that rows have; None: all K
    ) -> FloatArray:
        """Conditional acceptance per position and request, [K, n]."""
        base = self._class_prior(sampled)
        residual, trials = self._residual.take(slots), self._count.take(slots)
        trials += np.float32(self._shrinkage)
        if row is not None and row_usable is not None:
            weight = row_usable * np.float32(_ROW_WEIGHT)
            if row_width is None:
                opinion = np.add.reduce(row, axis=0) - np.add.reduce(base, axis=0)
                trials += weight * np.float32(len(self._positions))
            else:
                drafted = self._positions < row_width
                opinion = np.add.reduce(np.where(drafted, row - base, 0), axis=0)
                trials += weight * row_width
            residual += weight * opinion
        residual /= trials
        estimate: FloatArray = base + residual
        np.maximum(estimate, _LOWEST, out=estimate)
        np.minimum(estimate, _HIGHEST, out=estimate)
        return estimate

    def observe(
        self,
        slots: IntArray,  # [m], each at most once
        admitted: IntArray,  # [m] drafts verified
        accepted: IntArray,  # [m] of them accepted
        sampled: BoolArray,  # [m]
        untouched: BoolArray,  # [m] target distribution as the model gave it
        tenant: IntArray,  # [m]
    ) -> None:
        """Learn from one step's outcomes; only untouched requests teach the shared priors."""
        trials, residual, count = self._follow(slots, admitted, accepted[None], sampled)
        self._num_steps += 1
        unseen, self._num_followed = self._num_followed, 0
        # The shared priors are statistics: of large batches, some steps say as much as all.
        if self._num_steps % (1 + slots.size // _SHARED_ROWS) > unseen:
            return
        shared = trials[0] * untouched
        num_shared = int(np.add.reduce(shared))
        if num_shared:
            self.num_observed += num_shared
            weight = self._cap.weights(tenant, shared > 0)
            self._teach_shared(slots, shared, accepted, sampled, weight)
            if self._until_refresh == _REFRESH:
                self._learn_shrinkage(residual, count, weight)

    def follow(
        self,
        slots: IntArray,  # [m], each at most once
        admitted: IntArray,  # [m] drafts verified in each step
        accepted: IntArray,  # [steps, m] of them accepted, oldest first
        sampled: BoolArray,  # [m]
    ) -> None:
        """Learn about the requests alone, from steps that all verified the same drafts."""
        self._follow(slots, admitted, accepted, sampled)
        self._num_steps += len(accepted)
        self._num_followed += len(accepted)

    def _follow(
        self, slots: IntArray, admitted: IntArray, accepted: IntArray, sampled: BoolArray
    ) -> tuple[IntArray, FloatArray, FloatArray]:
        """Trials [steps, m]; residual and count, [m], after them."""
        # Past the first rejection, and past the window, nothing was observed. With
        # cumulative priors P_j = p_1 + ... + p_j, what was expected of j drafts is P_j.
        trials = accepted + 1
        np.minimum(trials, admitted, out=trials)
        expected = self._expected.take(trials + sampled * np.int64(len(self._positions) + 1))
        keep: np.float32 | FloatArray = np.float32(_KEEP_REQUEST)
        if np.count_nonzero(admitted) < admitted.size:  # who had none verified forgets nothing
            keep = np.where(admitted > 0, np.float32(_KEEP_REQUEST), np.float32(1.0))
        news = np.empty((len(trials), 2, slots.size), dtype=np.float32)
        gained, tried = news[:, 0], news[:, 1]
        gained[:] = accepted
        gained -= expected
        tried[:] = trials
        state = np.empty((2, slots.size), dtype=np.float32)
        state[0], state[1] = self._residual.take(slots), self._count.take(slots)
        for step in news:
            state *= keep
            state += step
        self._residual[slots], self._count[slots] = state[0], state[1]
        return trials, state[0], state[1]

    def _learn_shrinkage(
        self, residual: FloatArray, trials: FloatArray, weight: FloatArray
    ) -> None:
        """Compare the spread of residuals with what luck alone would give.

        With weights keep^age, N trials carry the noise of N (1 + keep) independent ones.
        """
        seasoned = (trials >= _SEASONED) * weight
        total = float(np.add.reduce(seasoned))
        if total < 2.0:
            return
        rate = self._prior.mean()
        variance = float(rate * (1.0 - rate))
        trials = np.maximum(trials, np.float32(1.0))  # the unseasoned weigh nothing
        luck = variance / (trials * np.float32(1.0 + _KEEP_REQUEST))
        rates = residual / trials
        # About their mean: what all have in common is an error of the prior, which is slower.
        mean = np.float32(np.add.reduce(seasoned * rates) / total)
        squared = (rates - mean) ** 2 - luck
        between = float(np.add.reduce(seasoned * squared)) / total
        self._between += _SHRINKAGE_RATE * (between - self._between)
        self._within += _SHRINKAGE_RATE * (variance - self._within)
        floor = self._within / _MOST_SHRINKAGE
        kappa = self._within / max(self._between, floor, 1e-9)
        self._shrinkage = max(_LEAST_SHRINKAGE, kappa)

    def _teach_shared(
        self,
        slots: IntArray,
        observed: IntArray,  # [m] drafts; 0 of requests that do not teach
        accepted: IntArray,
        sampled: BoolArray,
        weight: FloatArray,
    ) -> None:
        """Let every observed draft pull at the prior of its position (see above)."""
        reached = (self._positions < observed).astype(np.float64)  # [K, m]
        own = self._own[:, :, slots]
        if np.count_nonzero(observed) < observed.size:
            own *= np.where(observed > 0, _KEEP_REQUEST, 1.0)
        else:
            own *= _KEEP_REQUEST
        own[0] += reached
        own[1] += reached * (self._positions < accepted)
        self._own[:, :, slots] = own
        known, hits = own
        gap = hits - known * self._class_prior(sampled)
        gap /= known + _PRUDENCE
        gap *= reached
        beyond = np.maximum(np.abs(gap), _CLIP)
        np.clip(gap, -_CLIP, _CLIP, out=gap)
        gap *= np.sqrt(_CLIP / beyond)
        num_sampled = np.count_nonzero(sampled)
        for group in (0, 1):
            size = num_sampled if group else sampled.size - num_sampled
            if size == 0:
                continue
            share = weight.astype(np.float64)
            if size < sampled.size:
                share *= sampled == bool(group)
            self._seen[group] += reached @ share
            self._pull[group] += gap @ share
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._refresh()

    def _refresh(self) -> None:
        """Move the priors."""
        self._until_refresh = _REFRESH
        self._pull[self._trials < _YOUNG] *= _HASTE
        self._trials = np.exp(-_FORGET_SHARED * self._seen) * self._trials + self._seen
        self._rate = np.clip(self._rate + self._pull / self._trials, 0.0, 1.0)
        self._seen[:] = self._pull[:] = 0.0
        self._set_prior()

    def _class_prior(self, sampled: BoolArray) -> FloatArray:
        """[K, 1] if all requests are of one class, else [K, n]."""
        num_sampled = int(np.count_nonzero(sampled))
        if num_sampled in (0, sampled.size):
            column: FloatArray = self._prior[int(num_sampled > 0)][:, None]
            return column
        return np.where(sampled, self._prior[1][:, None], self._prior[0][:, None])

    def _set_prior(self) -> None:
        self._prior: FloatArray = self._rate.astype(np.float32)
        expected = np.zeros((2, len(self._positions) + 1), dtype=np.float32)
        np.cumsum(self._prior, axis=1, out=expected[:, 1:])
        self._expected = expected.ravel()  # P_j of class q at q (K + 1) + j
