"""Everything a simulation knows, as named tuples of arrays that compiled code changes in place.

Axes: D engine replicas, S slots of a replica, K draft positions, N request instances (a trace
request may be played several times), R requests and P steps of the trace.
"""

from typing import Any, NamedTuple

Array = Any  # numpy arrays; dtypes and shapes stand beside each field

# Policies.
OFF, FIXED, ARGMAX, THRESHOLD, EARLY_STOP, OURS = range(6)
# Kinds of plan, in the order of planning's PlanKind.
NATIVE, TRIM, SKIP, PLUGIN_OFF = range(4)

# Columns of Planner.state.
KIND, WANTED, STREAK, LARGEST, SINCE_DRAFT, PROBING, NATIVE_STREAK, UNJUDGED = range(8)
LAST_SIZE, LAST_REASON = 8, 9
NUM_PLANNER_STATES = 10

# Columns of Learner.scalars.
UNTIL_REFRESH, SHRINKAGE, BETWEEN, WITHIN, OBSERVED, PAIRINGS = range(6)
NUM_LEARNER_SCALARS = 6

# Columns of World.totals.
(
    STEPS,
    ROWS,  # verification rows: requests, step by step
    TOKENS,  # emitted, first tokens included
    VERIFY_TOKENS,  # of them from verification rows
    ADMITTED,
    ACCEPTED,
    DRAFT_PASSES,
    STEP_MS,
    PREFILL_STEPS,
    DECODE_STEPS,
    DECODE_MS,  # of steps without prefill rows
    STEADY_MS,  # until no further request came
    STEADY_TOKENS,
    IDLE_MS,
) = range(14)
NUM_TOTALS = 14

BUCKETS = 1024  # of the influence cap
HISTORY = 4  # draft passes whose rows are kept, so the largest lag is 3
TIMELINE = 256  # buckets over time; they double in width when they run out


class Grid(NamedTuple):
    """One grid of the cost table; `exists` is 0 for a placeholder."""

    sizes: Array  # [sizes] int64
    kv: Array  # [nodes] int64
    cells: Array  # [nodes, sizes] float64, not falling along sizes
    quantum: int
    exists: int


class Costs(NamedTuple):
    """The cost table as planner and world price steps with it."""

    ragged: Grid
    native: Grid
    single: Grid
    native_fallback: Grid  # where the largest full graph is too small
    single_fallback: Grid
    mixed: Grid  # steps with prefill rows; a placeholder continues `ragged`
    draft_sizes: Array  # int64
    draft_ms: Array  # float64
    overhead_ms: float
    allocation_ms: float
    padded: int


class Options(NamedTuple):
    """PlannerOptions as numbers."""

    min_gain: float
    hysteresis: int
    drain_guard: int
    skip_draft: int
    probe_interval: int
    floor: int
    device: int
    lazy: int


class Requests(NamedTuple):
    """The trace: steps of all requests behind one another, by output position."""

    first: Array  # [R + 1] int64 first step of each request
    position: Array  # [P] int32 tokens emitted before the step
    confidence: Array  # [P, K] float32
    accepted: Array  # [P] int32 drafts that would be accepted if all were verified
    last: Array  # [P] bool, the last step of its request
    prompt: Array  # [R] int32
    output: Array  # [R] int32 tokens
    limit: Array  # [R] int32 max_tokens
    sampled: Array  # [R] bool


class Load(NamedTuple):
    """Who comes when, and how the engine is set up."""

    trace: Array  # [N] int64 trace request of each instance
    owner: Array  # [N] int64 its owner id
    arrival_ms: Array  # [N] float64; not used by a closed loop
    concurrency: int  # of a closed loop, all replicas together; 0: by arrival_ms
    max_seqs: int
    max_batched: int
    policy: int
    knob: float  # K' of FIXED, the threshold of THRESHOLD
    lag: int  # draft passes between a row and its use; 0: the rows of the drafts at hand
    by_posterior: int  # rank by running acceptance (host windows)
    learn: int  # online calibration


class World(NamedTuple):
    """The replicas and their requests."""

    clock: Array  # [D] float64 ms
    step: Array  # [D] int64
    running: Array  # [D, S] int64 slots in order of admission
    num_running: Array  # [D] int64
    free: Array  # [D, S] int64
    num_free: Array  # [D] int64
    instance: Array  # [D, S] int64
    emitted: Array  # [D, S] int64 output tokens
    context: Array  # [D, S] int64 computed tokens
    prefill_left: Array  # [D, S] int64
    stamp: Array  # [D, S] int64 pass that made the drafts at hand, 0: none
    record: Array  # [D, S] int64 trace step that the drafts at hand stand for
    queue_next: Array  # [N] int64
    queue_head: Array  # [D] int64
    queue_tail: Array  # [D] int64
    queue_size: Array  # [D] int64
    outstanding: Array  # [D] int64
    issued: Array  # [1] int64 instances that have arrived
    done: Array  # [1] int64
    arrived: Array  # [D] int64 admitted since the previous plan
    arrive_ms: Array  # [N] float64
    first_ms: Array  # [N] float64 first token
    done_ms: Array  # [N] float64
    order: Array  # [S] int64 slots of the step's decode requests
    num_drafts: Array  # [S] int64
    admitted: Array  # [S] int64
    judged: Array  # [S] int64 admitted, without drafts behind the end of the request
    passed: Array  # [S] int64 accepted drafts that became output
    started: Array  # [S] int64 slots admitted in this step
    finished: Array  # [S] int64 slots that ended in this step
    prefilled: Array  # [S] int64 slots whose prompt ends in this step
    counts: Array  # [4] int64: started, finished, prefilled, prefill rows
    row: Array  # [D, HISTORY, S, K] float32 confidences by draft pass
    row_owner: Array  # [D, HISTORY, S] int64
    row_stamp: Array  # [D, HISTORY] int64
    totals: Array  # [NUM_TOTALS] float64
    windows: Array  # [K + 2] int64 rows by window
    kinds: Array  # [4, reasons] int64 steps
    timeline: Array  # [TIMELINE, 4] float64: steps, tokens, rows, windows
    bucket_ms: Array  # [1] float64


class Learner(NamedTuple):
    """RequestTable, AcceptancePosterior and OnlineCalibration of each replica."""

    owner: Array  # [D, S] int64
    row_owner: Array  # [D, S] int64
    row_stamp: Array  # [D, S] int64
    row: Array  # [D, S, K] float32
    outcome_stamp: Array  # [D, S] int64
    admitted: Array  # [D, S] int64
    accepted: Array  # [D, S] int64
    remaining: Array  # [D, S] int64
    sampled: Array  # [D, S] bool
    residual: Array  # [D, S] float32
    trials: Array  # [D, S] float32
    prior_trials: Array  # [D, 2, K] float64
    prior_accepted: Array  # [D, 2, K] float64
    prior: Array  # [D, 2, K] float32
    expected: Array  # [D, 2, K + 1] float32
    seen: Array  # [D, 2, K + 1] float64
    hits: Array  # [D, 2, K + 1] float64
    scalars: Array  # [D, NUM_LEARNER_SCALARS] float64
    cap_rows: Array  # [D, 2, BUCKETS] float64: of the posterior, of the calibration
    cap_weight: Array  # [D, 2, BUCKETS] float32
    cap_until: Array  # [D, 2] int64
    slope: Array  # [2, K] float32, -1 / temperature
    bias: Array  # [D, 2, K] float32, -offset
    offset: Array  # [D, 2, K] float64
    start: Array  # [2, K] float64 offsets to begin with
    sums: Array  # [D, 3, 2, K] float64: trials, residual, curvature
    identity: Array  # [D] bool


class Planner(NamedTuple):
    """Planner state of each replica and working space of a step."""

    state: Array  # [D, NUM_PLANNER_STATES] int64
    alive: Array  # [K * S] float32, position-major
    keys: Array  # [K * S] float32
    ascending: Array  # [K * S] float32
    capacity: Array  # [S] int64
    floor: Array  # [S] int64
    full: Array  # [S] int64
    kept: Array  # [S] int64
    times: Array  # [sizes] float64
    known: Array  # [S] bool


class Ranked(NamedTuple):
    """What planning.allocation.Ranking holds besides keys."""

    least: int
    most: int
    forced: float
    size: int  # n * K


class Decision(NamedTuple):
    """A plan: kind, index of the reason, budget, whether to draft, prediction."""

    kind: int
    reason: int
    budget: int
    draft_next: bool
    ms: float
    tokens: float
