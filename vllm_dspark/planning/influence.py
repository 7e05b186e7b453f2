"""No tenant may teach everybody: weights that cap each one's share of the learning.

What is learned from outcomes (position priors, online calibration) is shared by all
requests, so one client with odd prompts and most of the traffic could bend it for
the rest. Rows are therefore weighted by

    w_t = min(1, lower_median(rows) / rows_t)

where rows_t are the recent verified rows of tenant t and the median runs over the
tenants seen recently. Of m tenants one loud one gets at most a share of about 1 / m,
however much it sends; a lone tenant has weight 1. Rows are counted, not drafts: a
tenant whose first drafts are always rejected puts all its trials into position 1.
What a capped tenant can still do is limited by the bounds of what is being learned.
"""

import numpy as np
import numpy.typing as npt

_NUM_BUCKETS = 1024  # tenants are hashed into these; a collision only merges two caps
_REFRESH = 16  # observations between recomputations of the weights
_KEEP = 0.9  # forgetting per refresh, so a tenant that left stops counting
_SEEN = 1.0  # rows from which on a tenant counts as recently seen


class InfluenceCap:
    """Recent rows per tenant and the weights that follow from them."""

    def __init__(self) -> None:
        self._rows = np.zeros(_NUM_BUCKETS)
        self._weights = np.ones(_NUM_BUCKETS, dtype=np.float32)
        self._until_refresh = 1  # the very first rows are capped already

    def weights(
        self, tenant: npt.NDArray[np.integer], verified: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float32]:
        """Weight of each row, [m], 0 unless `verified`; counts verified rows."""
        bucket = tenant % _NUM_BUCKETS
        self._rows += np.bincount(bucket, verified, _NUM_BUCKETS)
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._refresh()
        weights: npt.NDArray[np.float32] = self._weights.take(bucket) * verified
        return weights

    def _refresh(self) -> None:
        self._until_refresh = _REFRESH
        seen = self._rows[self._rows >= _SEEN]
        if seen.size:
            middle = (seen.size - 1) // 2
            limit = float(np.partition(seen, middle)[middle])
            ratio = limit / np.maximum(self._rows, limit)
            self._weights = ratio.astype(np.float32)
        self._rows *= _KEEP
