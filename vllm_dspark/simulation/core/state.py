"""Everything a simulation knows, as named tuples of arrays that compiled code changes in place.

Axes: D engine replicas, S slots of a replica, K draft positions, N request instances (a trace
request may be played several times), R requests and P steps of the trace. Columns of like kind
share an array, because every array of a tuple costs compile time in every function it passes.
"""

from typing import Any, NamedTuple

Array = Any  # numpy arrays; dtypes and shapes stand beside each field

# Policies.
OFF, FIXED, ARGMAX, THRESHOLD, EARLY_STOP, OURS = range(6)
# Kinds of plan, in the order of planning's PlanKind.
NATIVE, TRIM, SKIP, PLUGIN_OFF = range(4)

# Grids of Costs. The fallbacks serve where the largest full graph is too small; MIXED steps have
# prefill rows.
RAGGED, UNIFORM, SINGLE, UNIFORM_FALLBACK, SINGLE_FALLBACK, MIXED = range(6)
NUM_GRIDS = 6
# Columns of Costs.shape.
NUM_SIZES, NUM_NODES, QUANTUM = range(3)

# Rows of World.slot.
(
    RUNNING,  # slots in order of admission
    FREE,
    INSTANCE,
    EMITTED,  # output tokens
    CONTEXT,  # computed tokens
    PREFILL_LEFT,
    STAMP,  # pass that made the drafts at hand, 0: none
    RECORD,  # trace step that the drafts at hand stand for
) = range(8)
# Columns of World.rep.
(
    NUM_RUNNING,
    NUM_FREE,
    QUEUE_HEAD,
    QUEUE_TAIL,
    QUEUE_SIZE,
    OUTSTANDING,
    ARRIVED,  # admitted since the previous plan
    STEP,
) = range(8)
# Rows of World.batch: the step's decode requests, and what became of them.
(
    ORDER,  # slots
    NUM_DRAFTS,
    TAKEN,  # drafts admitted
    JUDGED,  # of them, those not behind the end of the request
    PASSED,  # accepted drafts that became output
    STARTED,  # slots admitted in this step
    FINISHED,  # slots that ended in this step
    PREFILLED,  # slots whose prompt ends in this step
) = range(8)
# Rows of World.times, ms.
ARRIVE_MS, FIRST_MS, DONE_MS = range(3)
# World.counts: of this step, then instances that have arrived and ended.
N_STARTED, N_FINISHED, N_PREFILLED, PREFILL_ROWS, ISSUED, DONE = range(6)
# World.totals.
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
    BUCKET_MS,  # width of a timeline bucket
) = range(15)
NUM_TOTALS = 15

# Rows of Learner.slot.
(
    L_OWNER,
    L_ROW_OWNER,
    L_ROW_STAMP,
    L_OUTCOME,
    L_ADMITTED,
    L_ACCEPTED,
    L_REMAINING,
    L_SAMPLED,
) = range(8)
# Rows of Learner.own, of Learner.shared (P_SUMS: three), .taught, .sums, .temper.
RESIDUAL, TRIALS = range(2)
P_TRIALS, P_RATE, P_OFFSET, P_START, P_SUMS = range(5)
NUM_SHARED = 7
KNOWN, HITS = range(2)
SEEN, PULL = range(2)
SLOPE, BIAS = range(2)
# Columns of Learner.scalars (CAP_UNTIL: two).
UNTIL_REFRESH, SHRINKAGE, BETWEEN, WITHIN, OBSERVED, OUTCOMES, IDENTITY, DUE = range(8)
NUM_OBSERVES, NUM_FOLLOWED, NUM_REPEATED, CAP_UNTIL = range(8, 12)
NUM_LEARNER_SCALARS = 13

# Columns of Planner.state.
KIND, WANTED, STREAK, LARGEST, SINCE_DRAFT, PROBING, NATIVE_STREAK, UNJUDGED = range(8)
LAST_SIZE, LAST_REASON, LAST_KIND, REPEATABLE, FRESH, DOUBLINGS = range(8, 14)
DECIDED_SIZE, DECIDED_BUDGET = 14, 15  # of a decision that served more steps; 0 requests: none
REPEATED = 16  # the last plan repeats the one before it
NUM_PLANNER_STATES = 17
# Rows of Planner.floats and Planner.ints.
ALIVE, KEYS, ASCENDING = range(3)
P_CAPACITY, P_FLOOR, P_FULL, P_KEPT, P_KNOWN = range(5)

# Rows of Requests.request.
R_FIRST, R_COUNT, R_PROMPT, R_OUTPUT, R_LIMIT, R_SAMPLED = range(6)

BUCKETS = 1024  # of the influence cap
HISTORY = 4  # draft passes whose rows are kept, so the largest lag is 3
TIMELINE = 256  # buckets over time; they double in width when they run out


class Costs(NamedTuple):
    """The cost table as planner and world price steps with it."""

    shape: Array  # [NUM_GRIDS, 3] int64; no sizes: the grid is not there
    sizes: Array  # [NUM_GRIDS, sizes] int64
    kv: Array  # [NUM_GRIDS, nodes] int64
    cells: Array  # [NUM_GRIDS, nodes, sizes] float64, not falling along sizes
    draft: Array  # [2, request counts] float64: counts, ms
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

    accepted: Array  # [P] int64 drafts accepted if all are verified
    confidence: Array  # [P, K] float32
    request: Array  # [6, R] int64: first step, steps, prompt, output, largest output, sampled
    advance: Array  # [K + 1] float64: tokens that so many drafts give on average, over all drafts'


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
    rep: Array  # [D, 8] int64
    slot: Array  # [D, 8, S] int64
    cursor: Array  # [D, S] float64 place in the steps of the slot's request
    batch: Array  # [8, S] int64
    counts: Array  # [6] int64
    queue_next: Array  # [N] int64
    times: Array  # [3, N] float64
    row: Array  # [D, HISTORY, S, K] float32 confidences by draft pass
    row_owner: Array  # [D, HISTORY, S] int64
    row_stamp: Array  # [D, HISTORY] int64
    totals: Array  # [NUM_TOTALS] float64
    windows: Array  # [K + 2] int64 rows by window
    kinds: Array  # [4, reasons] int64 steps
    timeline: Array  # [TIMELINE, 4] float64: steps, tokens, rows, windows


class Learner(NamedTuple):
    """RequestTable, AcceptancePosterior and OnlineCalibration of each replica."""

    slot: Array  # [D, 8, S] int64
    own: Array  # [D, 2, S] float32
    row: Array  # [D, S, K] float32
    shared: Array  # [D, NUM_SHARED, 2, K] float64
    taught: Array  # [D, 2, K, S] float64: drafts of a request that taught, and accepted ones
    sums: Array  # [D, 2, 2, K] float64, since the priors last moved
    prior: Array  # [D, 2, K] float32
    expected: Array  # [D, 2, K + 1] float32
    temper: Array  # [D, 2, 2, K] float32: -1 / temperature, -offset
    scalars: Array  # [D, NUM_LEARNER_SCALARS] float64
    # Of the posterior, of the calibration: rows, steps with rows, rows of this call.
    cap_rows: Array  # [D, 6, BUCKETS] float64
    cap_weight: Array  # [D, 2, BUCKETS] float32


class Planner(NamedTuple):
    """Planner state of each replica and working space of a step."""

    state: Array  # [D, NUM_PLANNER_STATES] int64
    floats: Array  # [3, K * S] float32, position-major
    ints: Array  # [5, S] int64
    last: Array  # [D, 2, S] int64: owners and drafts of a trimmed plan that may serve once more
    counts: Array  # [K * S + 3] int64: buckets of the ranking's sort


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
