"""No tenant may teach everybody: weights that cap each one's share of the learning.

What is learned from outcomes (position priors, online calibration) is shared by all
requests, so one client with odd prompts and most of the traffic could bend it for
the rest. Rows are therefore weighted by

    w_t = min(1, median(at once) / at_once_t)
    w_t = min(w_t, median(rows) / rows_t)     where at_once_t > 2 median(at once)

with at_once_t the verified rows that tenant t has in a step it takes part in, rows_t
its rows altogether, both recent, and lower medians over the tenants seen recently. Of
m tenants one loud one gets at most a share of about 1 / m, however much it sends; a
lone tenant has weight 1. Whoever sends little at a time counts in full, for however
long: requests without a tenant, each one of its own, weigh the same whether they are
long or short, so a stream of short ones does not take the weight off long ones. Rows
are counted, not drafts: a tenant whose first drafts are always rejected puts all its
trials into position 1. What a capped tenant can still do, or many that are really one,
is limited by what is being learned (posterior.py, online.py).
"""

import numpy as np
import numpy.typing as npt

_NUM_BUCKETS = 1024  # tenants are hashed into these; a collision only merges two caps
_REFRESH = 16  # observations between recomputations of the weights
_KEEP = 0.9  # forgetting per refresh, so a tenant that left stops counting
_LOUD = 2.0  # times the median of rows at once from which on all recent rows count
_SEEN = 1.0  # rows from which on a tenant counts as recently seen


class InfluenceCap:
    """Recent rows per tenant and the weights that follow from them."""

    def __init__(self) -> None:
        self._rows = np.zeros(_NUM_BUCKETS)
        self._steps = np.zeros(_NUM_BUCKETS)  # in which a tenant had any
        self._weights = np.ones(_NUM_BUCKETS, dtype=np.float32)
        self._until_refresh = 1  # the very first rows are capped already

    def weights(
        self, tenant: npt.NDArray[np.integer], verified: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float32]:
        """Weight of each row, [m], 0 unless `verified`; counts verified rows."""
        bucket = tenant % _NUM_BUCKETS
        rows = np.bincount(bucket, verified, _NUM_BUCKETS)
        self._rows += rows
        self._steps += rows > 0
        self._until_refresh -= 1
        if self._until_refresh <= 0:
            self._refresh()
        weights: npt.NDArray[np.float32] = self._weights.take(bucket) * verified
        return weights

    def _refresh(self) -> None:
        self._until_refresh = _REFRESH
        seen = self._rows >= _SEEN
        if np.count_nonzero(seen):
            at_once = self._rows / np.maximum(self._steps, 1e-9)
            usual, total = _lower_median(at_once[seen]), _lower_median(self._rows[seen])
            ratio = usual / np.maximum(at_once, usual)
            capped = np.minimum(ratio, total / np.maximum(self._rows, total))
            loud = at_once > _LOUD * usual
            self._weights = np.where(loud, capped, ratio).astype(np.float32)
        self._rows *= _KEEP
        self._steps *= _KEEP


def _lower_median(values: npt.NDArray[np.float64]) -> float:
    middle = (values.size - 1) // 2
    return float(np.partition(values, middle)[middle])
