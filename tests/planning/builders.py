"""Cost tables and batches that planning tests start from."""

import numpy as np

from vllm_dspark.planning.cost import CostGrid, CostTable, StepMode, StepShape
from vllm_dspark.planning.facts import StepFacts
from vllm_dspark.planning.survival import RowCounts
from vllm_dspark.planning.table import NO_LIMIT, RequestBatch


def grid(sizes, ms, kv_tokens=(0,), spread=0.0, count=5):
    """A cost grid; `ms` is [sizes] or [kv nodes, sizes]."""
    cells = np.atleast_2d(np.asarray(ms, dtype=np.float64))
    return CostGrid(
        tuple(sizes),
        tuple(kv_tokens),
        cells,
        np.full(cells.shape, spread, dtype=np.float64),
        np.full(cells.shape, count, dtype=np.int64),
    )


def table_from(step_ms, sizes, k, *, draft=(0.3, 0.5), max_requests=256, allocation=0.0):
    """A full-graph table whose forward time is `step_ms(tokens)` for every shape."""
    native = [n * (k + 1) for n in (1, 2, 4, 8, 16, 32, 64, 128, 256)]
    single = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    ragged = sorted(sizes)
    full = StepMode.FULL
    return CostTable(
        {
            (full, StepShape.RAGGED): grid(ragged, [step_ms(s) for s in ragged]),
            (full, StepShape.NATIVE): grid(native, [step_ms(s) for s in native]),
            (full, StepShape.SINGLE): grid(single, [step_ms(s) for s in single]),
        },
        grid((1, max_requests), draft),
        allocation_ms=allocation,
    )


def facts(step_id=1, **changes):
    """A decode-only step in full graphs."""
    values = {"mode": StepMode.FULL, "native_mode": StepMode.FULL, "kv_tokens": 0}
    return StepFacts(step_id=step_id, **(values | changes))


def batch(acceptance, **changes):
    """A batch from conditional acceptances [K, n]; everything else as in plain decoding."""
    acceptance = np.asarray(acceptance, dtype=np.float32)
    k, n = acceptance.shape
    values = {
        "owner": np.arange(1, n + 1, dtype=np.int64),
        "acceptance": acceptance,
        "known": np.ones(n, dtype=bool),
        "num_drafts": np.full(n, k, dtype=np.int32),
        "capacity": np.full(n, k, dtype=np.int32),
        "remaining": np.full(n, NO_LIMIT, dtype=np.int32),
        "reserved": np.zeros(n, dtype=bool),
        "excluded": np.zeros(n, dtype=bool),
        "counts": RowCounts(),
    }
    return RequestBatch(**(values | changes))
