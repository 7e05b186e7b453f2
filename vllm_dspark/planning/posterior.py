r"""Running acceptance, per position for everybody and per request on top.

A plan made on the host sees confidence rows that are mostly about tokens emitted
since (DESIGN.md, "host windows"), so it ranks by what each request has been
accepting. For class q (greedy or sampled) and position k the shared prior p_qk is
the discounted share of accepted among observed drafts; a draft is observed if it
was verified and everything before it was accepted. Request r adds its own residual,
shrunk towards zero:

    c_rk = p_qk + (S_r - E_r + L_r) / (kappa + N_r + M_r)

with S_r its accepted drafts, E_r what the priors had expected of the same drafts and
N_r their number, all with exponential forgetting. The newest usable confidence row
counts as M_r = lambda K further trials with L_r = lambda sum_k (c_k - p_qk): a weak
opinion about the text's current difficulty. Everything here is about drafts already
verified, hence independent of the drafts the plan will admit, as long as redrafted
positions get fresh noise (DESIGN.md, trap 2).
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
_SHRINKAGE = 6.0  # kappa: trials a request needs before its residual counts half
_ROW_WEIGHT = 0.15  # lambda: trials that one confidence is worth
_LOWEST, _HIGHEST = np.float32(0.02), np.float32(0.995)


class AcceptancePosterior:
    """Shared priors [2, K] and per-slot residuals; slots belong to the request table."""

    def __init__(self, num_positions: int, num_slots: int) -> None:
        self._positions = np.arange(num_positions, dtype=np.int32)[:, None]
        self._trials = np.full((2, num_positions), _START_TRIALS)
        self._accepted = self._trials * _START_RATE
        self._prior = self._rates()
        self._cap = InfluenceCap()
        self._slot_residual = np.zeros(num_slots, dtype=np.float32)  # S - E
        self._slot_trials = np.zeros(num_slots, dtype=np.float32)  # N
        self.num_observed = 0  # drafts that ever taught the shared priors

    def grow(self, num_slots: int) -> None:
        """Make room for more slots."""
        extra = np.zeros(num_slots - len(self._slot_trials), dtype=np.float32)
        self._slot_residual = np.concatenate((self._slot_residual, extra))
        self._slot_trials = np.concatenate((self._slot_trials, extra))

    def reset(self, slot: int) -> None:
        """Forget a slot's request."""
        self._slot_residual[slot] = 0.0
        self._slot_trials[slot] = 0.0

    def prior(self, sampled: bool) -> FloatArray:
        """Shared conditional acceptance per position, [K], of one request class."""
        prior: FloatArray = self._prior[int(sampled)]
        return prior

    def known(self, slots: IntArray) -> BoolArray:
        """Requests that outcomes say something about: their own, or enough of others, [n]."""
        if self.num_observed >= _ENOUGH_OBSERVED:
            return np.ones(len(slots), dtype=np.bool_)
        return self._slot_trials[slots] > 0.0

    def estimate(
        self,
        slots: IntArray,  # [n]
        sampled: BoolArray,  # [n]
        row: FloatArray | None = None,  # [K, n] calibrated confidences
        row_usable: BoolArray | None = None,  # [n]
    ) -> FloatArray:
        """Conditional acceptance per position and request, [K, n]."""
        base = self._class_prior(sampled)
        residual = self._slot_residual[slots]
        trials = self._slot_trials[slots] + np.float32(_SHRINKAGE)
        if row is not None and row_usable is not None:
            opinion = np.add.reduce(row, axis=0) - np.add.reduce(base, axis=0)
            weight = row_usable * np.float32(_ROW_WEIGHT)
            residual += weight * opinion
            trials += weight * np.float32(len(self._positions))
        residual /= trials
        estimate = base + residual
        return np.clip(estimate, _LOWEST, _HIGHEST, out=estimate)

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
        # Past the first rejection, and past the window, nothing was observed.
        seen = self._positions < np.minimum(admitted, accepted + 1)  # [K, m]
        trials = np.add.reduce(seen, axis=0, dtype=np.float32)
        expected = np.add.reduce(np.where(seen, self._class_prior(sampled), 0), axis=0)
        verified = trials > 0
        keep = np.where(verified, np.float32(_KEEP_REQUEST), np.float32(1.0))
        surprise = np.where(verified, accepted - expected, 0)
        self._slot_residual[slots] = keep * self._slot_residual[slots] + surprise
        self._slot_trials[slots] = keep * self._slot_trials[slots] + trials
        self._teach_shared(seen, accepted, trials * untouched, sampled, tenant)

    def _teach_shared(
        self,
        seen: BoolArray,
        accepted: IntArray,
        trials: FloatArray,
        sampled: BoolArray,
        tenant: IntArray,
    ) -> None:
        if not trials.any():
            return
        self.num_observed += int(trials.sum())
        weight = self._cap.weights(tenant, trials) * (trials > 0)
        hit = seen & (self._positions < accepted)
        for group in (0, 1):
            share = weight * (sampled == bool(group))
            if not share.any():
                continue
            trial_mass, hit_mass = seen @ share, hit @ share
            keep = np.exp(-_FORGET_SHARED * trial_mass)
            self._trials[group] = keep * self._trials[group] + trial_mass
            self._accepted[group] = keep * self._accepted[group] + hit_mass
        self._prior = self._rates()

    def _class_prior(self, sampled: BoolArray) -> FloatArray:
        """[K, 1] if all requests are of one class, else [K, n]."""
        num_sampled = int(np.count_nonzero(sampled))
        if num_sampled in (0, sampled.size):
            column: FloatArray = self._prior[int(num_sampled > 0)][:, None]
            return column
        return np.where(sampled, self._prior[1][:, None], self._prior[0][:, None])

    def _rates(self) -> FloatArray:
        rates: FloatArray = (self._accepted / self._trials).astype(np.float32)
        return rates
