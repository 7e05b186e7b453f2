"""No tenant may teach everybody: weights that cap each one's share of the learning.

What is learned from outcomes (position priors, online calibration) is shared by all
requests, so one client with odd prompts and most of the traffic could bend it for
the rest. Observations are therefore weighted by

    w_t = min(1, CAP * lower_median(trials) / trials_t)

where trials_t are the recent trials of tenant t and the median runs over tenants
seen recently. With m tenants of which one is loud, its share of the learning is at
most CAP / (CAP + m - 1), however much it sends. A lone tenant has weight 1. What a
capped tenant can still do is limited by the bounds of whatever is being learned.
"""

import numpy as np
import numpy.typing as npt

_CAP = 2.0
_NUM_BUCKETS = 1024  # tenants are hashed into these; a collision only merges two caps
_REFRESH = 16  # observations between recomputations of the weights
_KEEP = 0.9  # forgetting per refresh, so a tenant that left stops counting
_SEEN = 1.0  # trials from which on a tenant counts as recently seen


class InfluenceCap:
    """Recent trials per tenant and the weights that follow from them."""

    def __init__(self) -> None:
        self._trials = np.zeros(_NUM_BUCKETS)
        self._weights = np.ones(_NUM_BUCKETS, dtype=np.float32)
        self._until_refresh = _REFRESH

    def weights(
        self, tenant: npt.NDArray[np.integer], trials: npt.NDArray[np.number]
    ) -> npt.NDArray[np.float32]:
        """Weight of each observation, [m]; counts its `trials` towards its tenant."""
        bucket = tenant % _NUM_BUCKETS
        self._trials += np.bincount(bucket, trials, _NUM_BUCKETS)
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._refresh()
        weights: npt.NDArray[np.float32] = self._weights[bucket]
        return weights

    def _refresh(self) -> None:
        self._until_refresh = _REFRESH
        seen = self._trials[self._trials >= _SEEN]
        if seen.size:
            middle = (seen.size - 1) // 2
            limit = _CAP * float(np.partition(seen, middle)[middle])
            ratio = limit / np.maximum(self._trials, limit)
            self._weights = ratio.astype(np.float32)
        self._trials *= _KEEP
