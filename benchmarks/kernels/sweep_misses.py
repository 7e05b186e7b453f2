"""Other launches for the shapes that miss a goal in docs/benchmarks/h200-kernels.md, in 3 minutes.

    python benchmarks/kernels/sweep_misses.py --out $OUT/sweep.json --budget-s 170   # on the GPU
    python benchmarks/kernels/sweep_misses.py --compile-only --json OUT              # without one

On the GPU all candidates are compiled first, by several processes side by side, into Triton's
cache; then every case times stock, today's launch and the candidates, in turns over the cases so
that a cut-off leaves something of each. Today's launch is timed first and last: what a candidate
gains must be more than what these two differ. Nothing is changed by this script; a winner goes by
hand into `vllm_dspark/kernels/launch.py`. Without a GPU (and with TRITON_INTERPRET=0 and
TRITON_BACKENDS_IN_TREE=1) the candidates are compiled for sm_90, to know beforehand which do not
fit in shared memory or spill.
"""

import argparse
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from vllm_dspark.kernels import attention_plan  # noqa: E402
from vllm_dspark.kernels.attention_plan import AttentionShape  # noqa: E402
from vllm_dspark.kernels.launch import AttentionLaunch, DraftLaunch  # noqa: E402

SHAPES = {"qwen3-8b": AttentionShape(32, 8, 128), "smollm2-135m": AttentionShape(9, 3, 64)}
_WORKERS = 12  # that compile side by side


@dataclass(frozen=True)
class Tile:
    """What makes an attention kernel another one; rows: fewest query rows of a tile."""

    block_n: int
    warps: int
    stages: int
    resident: int
    rows: int | None = None  # None: what the table says


@dataclass(frozen=True)
class Split:
    """How the plan cuts keys: what an item costs besides its keys, and the least chunk."""

    overhead: float
    min_chunk: int


# Heads of 128 with 32-row tiles (today 64 keys, 4 warps, 3 stages, 2 resident): 8 requests leave
# half of the SMs without a tile, so either chunks are cut (many small items: more resident blocks,
# less in flight each) or each tile streams faster (deeper pipelines, 8 warps). 128 keys spill.
_TILES_128 = (
    Tile(64, 4, 4, 1), Tile(64, 4, 4, 2), Tile(64, 8, 3, 2), Tile(64, 8, 4, 1), Tile(64, 4, 2, 3),
    Tile(32, 4, 4, 3), Tile(32, 4, 6, 2), Tile(64, 4, 3, 1), Tile(64, 4, 5, 1),
    Tile(64, 4, 3, 2, 64), Tile(64, 8, 3, 1, 64),
)  # fmt: skip
# Heads of 64 (today 64 rows by wgmma, 64 keys, 4 warps, 3 stages, 3 resident). 72 % of the copy
# bandwidth: pages are 128-byte rows, so more bytes in flight (stages, keys) and fewer address
# instructions per byte (wider key tiles over more warps). 32 rows of mma.sync do less padding work.
_TILES_64 = (
    Tile(64, 4, 4, 3), Tile(64, 4, 5, 3), Tile(64, 4, 3, 4), Tile(64, 4, 6, 2), Tile(128, 4, 3, 2),
    Tile(128, 4, 4, 2), Tile(128, 8, 3, 2), Tile(128, 8, 4, 2), Tile(128, 8, 4, 1),
    Tile(256, 8, 2, 1), Tile(64, 4, 4, 4, 32), Tile(128, 4, 3, 3, 32), Tile(32, 4, 5, 4, 32),
)  # fmt: skip
# Fewer, longer chunks save partial results and merges; more, shorter ones fill the SMs. Today 2 and
# 64. An overhead of 1000 never splits.
_SPLITS = (
    Split(1.0, 64), Split(4.0, 64), Split(4.0, 128), Split(8.0, 256), Split(0.5, 64),
    Split(1000.0, 64),
)  # fmt: skip
_NOW = Split(2.0, 64)

# (shape, requests, context): the misses, and one that must not get worse.
ATTENTION = (
    ("qwen3-8b", 8, 512), ("qwen3-8b", 8, 2048), ("smollm2-135m", 32, 512),
    ("smollm2-135m", 1, 32768), ("smollm2-135m", 32, 8192), ("qwen3-8b", 1, 32768),
    ("qwen3-8b", 32, 2048),
)  # fmt: skip

# (rows, columns, warps, stages, blocks per SM). One request with cached logits is at 86 % of its
# floor: what is left is the tail of a wave and the reduction, so smaller or deeper tiles. 64
# requests are bound by noise and cached rows beside one block of 8 warps: two smaller blocks per SM
# overlap one's arithmetic with the other's copies, and 16 warps share one tile.
DRAFT = {
    1: (
        DraftLaunch(8, 64, 4, 3, 2), DraftLaunch(8, 64, 4, 4, 2), DraftLaunch(8, 64, 8, 4, 1),
        DraftLaunch(8, 64, 8, 6, 1), DraftLaunch(8, 128, 4, 3, 1), DraftLaunch(8, 128, 8, 2, 1),
        DraftLaunch(8, 32, 4, 4, 3), DraftLaunch(8, 32, 4, 6, 2), DraftLaunch(16, 128, 8, 3, 1),
    ),
    64: (
        DraftLaunch(64, 64, 16, 2, 1), DraftLaunch(64, 64, 8, 2, 1),
        DraftLaunch(64, 64, 16, 3, 1), DraftLaunch(64, 32, 8, 2, 2),
        DraftLaunch(64, 32, 8, 4, 1), DraftLaunch(64, 32, 4, 3, 2),
        DraftLaunch(32, 64, 8, 3, 1), DraftLaunch(32, 128, 8, 2, 1), DraftLaunch(32, 32, 4, 4, 3),
        DraftLaunch(16, 64, 8, 3, 2), DraftLaunch(16, 64, 4, 2, 3),
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Candidate:
    """One launch of one case; `launch` None is today's."""

    case: tuple[str, int, int]
    launch: AttentionLaunch | None
    rows: int | None

    @property
    def label(self) -> str:
        name, requests, context = self.case
        text = f"{name} R={requests} ctx={context}"
        if self.launch is None:
            return f"{text} today"
        a = self.launch
        rows = f" rows{self.rows}" if self.rows else ""
        return (
            f"{text} n{a.block_n} w{a.num_warps} s{a.num_stages} b{a.blocks_per_sm}{rows}"
            f" overhead{a.overhead_blocks:g} chunk{a.min_chunk}"
        )


def attention_candidates(case: tuple[str, int, int]) -> list[Candidate]:
    """Every tile with today's split, then every other split with every tile; today's first."""
    tiles = _TILES_128 if SHAPES[case[0]].head_dim == 128 else _TILES_64
    found = [Candidate(case, None, None)]
    for split, tile in itertools.product((_NOW, *_SPLITS), tiles):
        launch = AttentionLaunch(
            tile.block_n,
            tile.warps,
            tile.stages,
            tile.resident,
            min_chunk=max(split.min_chunk, tile.block_n),
            overhead_blocks=split.overhead,
        )
        found.append(Candidate(case, launch, tile.rows))
    return [*dict.fromkeys(found), Candidate(case, None, None)]


@contextmanager
def least_rows(rows: int | None) -> Iterator[None]:
    """Geometries made inside have tiles of so many query rows at least."""
    kept = attention_plan.min_query_rows
    if rows is not None:
        attention_plan.min_query_rows = lambda *_: rows
    try:
        yield
    finally:
        attention_plan.min_query_rows = kept


# ---- on the GPU


class AttentionBench:
    """Inputs of one case, made once."""

    def __init__(self, case: tuple[str, int, int]) -> None:
        from benchmarks.kernels import bench_attention as bench
        from benchmarks.kernels.harness import num_copies

        name, requests, context = case
        self.case, self.shape = case, SHAPES[name]
        self.starts, self.lens = bench.lengths(requests, context, "ragged", 5)
        row = self.shape.num_kv_heads * self.shape.head_dim * 4
        self.moved = int(self.lens.sum()) * row
        self.moved += int(self.starts[-1]) * self.shape.num_heads * self.shape.head_dim * 4
        copies = num_copies(requests * context * row, 4)
        self.sets = [bench.Inputs(self.shape, requests, context, seed) for seed in range(copies)]

    def launches(self, candidate: Candidate) -> list[Any]:
        """One call per input set; the plan is made here, once, as a step would."""
        from benchmarks.kernels.bench_attention import K
        from vllm_dspark.kernels.ragged_attention import RaggedAttention

        requests = self.case[1]
        with least_rows(candidate.rows):
            layer = RaggedAttention(
                self.shape, requests, requests * (K + 1), K + 1, torch.device("cuda"),
                launch=candidate.launch,
            )  # fmt: skip
        layer.plan(self.starts, self.lens)
        return [lambda d=data: layer.forward(d.out, d.q, d.k, d.v, d.table) for data in self.sets]

    def stock_us(self, recorder: Any) -> float | None:
        """FA3, the better of its two settings; None where it cannot run."""
        from benchmarks.kernels.bench_attention import stock_launches
        from benchmarks.kernels.harness import time_graph

        try:
            attempts = stock_launches(self.shape, self.sets, self.starts, self.lens, self.case[2])
            return min(time_graph(found)[0] for found in attempts)
        except Exception as error:  # the candidates still count beside today's launch
            recorder.problem(f"FA3 {self.case}", error)
            return None


def draft_launches(requests: int, launch: DraftLaunch | None) -> list[Any]:
    """Blocks of sampled requests with cached logits, on two sets of inputs."""
    from benchmarks.kernels import bench_draft as bench
    from vllm_dspark.kernels.markov import TritonDraftOps

    head, state = bench.make_head(bench.VOCAB, bench.RANK), bench.make_state()
    ops = TritonDraftOps(head, requests, bench.K, bench.VOCAB, torch.device("cuda"), launch)
    pairs = [
        (
            bench.make_batch(requests, bench.VOCAB, bench.HIDDEN, seed),
            bench.make_output(requests, bench.VOCAB, True),
        )
        for seed in range(2)
    ]
    return [lambda b=b, o=o: ops.sample_block(head, b, state, o) for b, o in pairs]


def run_share(index: int, count: int) -> None:
    """Run every count-th candidate once: its kernels are in Triton's cache afterwards."""
    jobs: list[Any] = [c for case in ATTENTION for c in attention_candidates(case)]
    jobs += [(r, launch) for r, found in DRAFT.items() for launch in (None, *found)]
    for job in jobs[index::count]:
        try:
            if isinstance(job, Candidate):
                launches = AttentionBench((job.case[0], job.case[1], 256)).launches(job)
            else:
                launches = draft_launches(*job)
            launches[0]()
            torch.cuda.synchronize()
        except Exception as error:  # said again, and kept, when it is timed
            print("compile", job, repr(error)[:200], flush=True)


def compile_all() -> None:
    """All candidates, by several processes side by side."""
    command = [sys.executable, __file__, "--share"]
    shares = [subprocess.Popen([*command, f"{i}/{_WORKERS}"]) for i in range(_WORKERS)]
    for process in shares:
        process.wait()


def time_all(out: Path, budget_s: float) -> int:
    """Compile, then time; rows are saved one by one."""
    from benchmarks.kernels.harness import Recorder, copy_bandwidth

    begin = time.monotonic()
    compile_all()
    recorder = Recorder(out, begin + budget_s)
    recorder.copy_gbps = copy_bandwidth()
    print(f"compiled after {time.monotonic() - begin:.0f} s", flush=True)
    cases = [time_attention(recorder, case) for case in ATTENTION]
    cases += [time_draft(recorder, requests) for requests in DRAFT]
    while cases and not recorder.out_of_time():  # in turns
        cases = [case for case in cases if not recorder.out_of_time() and next(case, None)]
    recorder.save()
    return 1 if recorder.problems else 0


def time_attention(recorder: Any, case: tuple[str, int, int]) -> Iterator[bool]:
    """Times a portion of a case's candidates at each `next`."""
    from benchmarks.kernels.harness import Row, time_graph

    bench = AttentionBench(case)
    stock = bench.stock_us(recorder)
    floor = recorder.floor_us(bench.moved)
    for number, candidate in enumerate(attention_candidates(case)):
        try:
            found = time_graph(bench.launches(candidate), replays=9)
            recorder.add(Row("sweep", candidate.label, found[0], stock, floor, False, *found[1:]))
        except Exception as error:
            recorder.problem(candidate.label, error)
        if number % 8 == 7:
            yield True


def time_draft(recorder: Any, requests: int) -> Iterator[bool]:
    """As `time_attention`, of the drafting head."""
    from benchmarks.kernels.bench_draft import RANK, VOCAB, K
    from benchmarks.kernels.harness import Row, time_graph

    floor = recorder.floor_us(K * VOCAB * 2 * (RANK + 2 * requests))
    for number, launch in enumerate((None, *DRAFT[requests], None)):
        label = f"head R={requests} "
        label += "today" if launch is None else " ".join(map(str, asdict(launch).values()))
        try:
            found = time_graph(draft_launches(requests, launch), replays=9)
            recorder.add(Row("sweep head", label, found[0], None, floor, False, *found[1:]))
        except Exception as error:
            recorder.problem(label, error)
        if number % 4 == 3:
            yield True


# ---- without a GPU


def compile_for_hopper(out: Path | None) -> int:
    """Registers, shared memory and spills of every distinct kernel on sm_90; 1 if one is unfit."""
    from benchmarks.kernels import compile_kernels as compiler

    rows: list[Any] = []
    seen: set[Any] = set()
    for case in _compile_cases():
        launches: list[compiler.Launch] = []
        with compiler.pretend_device(90), compiler.recording(case[0], launches):
            case[1]()
        for entry in launches:
            source = compiler._source(entry)
            key = (source.hash(), repr(sorted(entry.options.items())))
            if key in seen or "plan" in entry.kernel.__name__:
                continue
            seen.add(key)
            try:
                rows.append(asdict(compiler.compile_launch(entry, 90)))
            except Exception as error:
                rows.append({"case": case[0], "kernel": entry.kernel.__name__, "error": str(error)})
            row = rows[-1]
            unfit = (
                "error" in row or row["stack_bytes"] or row["shared_bytes"] > row["shared_limit"]
            )
            row["fits"] = not unfit
            print(json.dumps(row), flush=True)
    if out is not None:
        out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(any(not row["fits"] for row in rows))


def _compile_cases() -> Iterator[tuple[str, Any]]:
    from vllm_dspark.kernels.ragged_attention import RaggedAttention

    def attention(candidate: Candidate) -> None:
        shape = SHAPES[candidate.case[0]]
        with least_rows(candidate.rows):
            layer = RaggedAttention(shape, 32, 256, 8, torch.device("cpu"), launch=candidate.launch)
        q = torch.empty(4, shape.num_heads, shape.head_dim, dtype=torch.bfloat16)
        kv = torch.empty(2, shape.num_kv_heads, 16, 2 * shape.head_dim, dtype=torch.bfloat16)
        k_cache, v_cache = kv.transpose(1, 2).split(shape.head_dim, -1)
        table = torch.zeros(32, 64, dtype=torch.int32)
        layer.forward(q, q, k_cache, v_cache, table)

    for name in SHAPES:
        done = set()
        for candidate in attention_candidates((name, 32, 2048)):
            a = candidate.launch
            tile = None if a is None else (a.block_n, a.num_warps, a.num_stages, candidate.rows)
            if tile not in done:
                done.add(tile)
                yield candidate.label, lambda c=candidate: attention(c)
    for requests, found in DRAFT.items():
        for launch in (None, *found):
            yield f"head R={requests} {launch}", lambda r=requests, d=launch: _draft(r, d)


def _draft(requests: int, launch: DraftLaunch | None) -> None:
    from vllm_dspark.kernels.markov import TritonDraftOps
    from vllm_dspark.kernels.protocols import (
        ConfidenceHead,
        DraftBatch,
        DraftHead,
        DraftOutput,
        MarkovHead,
        SamplingState,
    )

    rank, hidden, columns, vocab = 256, 1024, 3, 4096
    weights = [torch.empty(64, rank, dtype=torch.bfloat16) for _ in range(2)]
    confidence = ConfidenceHead(torch.empty(hidden + rank), torch.zeros(1), True)
    head = DraftHead(MarkovHead("vanilla", *weights, None, None), confidence, None)
    index = torch.zeros(requests, dtype=torch.int64)
    base = torch.empty(requests, columns, vocab, dtype=torch.bfloat16)
    positions = torch.zeros(requests, columns, dtype=torch.int64)
    states = torch.zeros(requests, columns, hidden, dtype=torch.bfloat16)
    batch = DraftBatch(base, states, index, index, positions)
    out = DraftOutput(positions, torch.zeros(requests, columns), base.clone())
    ops = TritonDraftOps(head, requests, columns, vocab, torch.device("cpu"), launch)
    ops.sample_block(head, batch, SamplingState(torch.zeros(1), index), out)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--budget-s", type=float, default=170.0)
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--share", help=argparse.SUPPRESS)  # I/N, of this script's own processes
    arguments = parser.parse_args()
    if arguments.share:
        run_share(*map(int, arguments.share.split("/")))
        return 0
    if arguments.compile_only:
        return compile_for_hopper(arguments.json)
    if arguments.out is None:
        parser.error("--out FILE says where the rows go")
    return time_all(arguments.out, arguments.budget_s)


if __name__ == "__main__":
    raise SystemExit(main())
