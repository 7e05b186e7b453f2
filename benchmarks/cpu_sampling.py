"""Time the CPU's drafting head and rejection at SmolLM2's sizes, one thread.

    python benchmarks/cpu_sampling.py [--rows 1 16] [--repeats 40]

V = 49152, H = 576, Markov rank 32, K = 7, bfloat16 weights and logits, full windows. Milliseconds
of one call: the minimum and median of wall time, and the median of process CPU time, which a busy
machine inflates less.
"""

import argparse
import time
from collections.abc import Callable
from statistics import median

import torch

from vllm_dspark.cpu.draft_ops import CpuDraftOps
from vllm_dspark.cpu.reject_ops import CpuRejectOps
from vllm_dspark.kernels.protocols import (
    ConfidenceHead,
    DraftBatch,
    DraftHead,
    DraftOutput,
    MarkovHead,
    RejectBatch,
    RejectMethod,
    RejectRule,
    SamplingState,
)

VOCAB, HIDDEN, RANK, WIDTH = 49152, 576, 32, 7


def timed(call: Callable[[], object], repeats: int) -> str:
    call()
    wall, cpu = [], []
    for _ in range(repeats):
        cpu_start, start = time.process_time(), time.perf_counter()
        call()
        wall.append((time.perf_counter() - start) * 1e3)
        cpu.append((time.process_time() - cpu_start) * 1e3)
    return f"{min(wall):8.2f} {median(wall):8.2f} {median(cpu):8.2f}"


def draft_case(rows: int, temperature: float, cached: bool) -> Callable[[], object]:
    """A drafted block of `rows` requests."""
    markov = MarkovHead(
        "vanilla", torch.randn(VOCAB, RANK).bfloat16() * 0.5, torch.randn(VOCAB, RANK).bfloat16()
    )
    head = DraftHead(markov, ConfidenceHead(torch.randn(HIDDEN + RANK), torch.tensor(0.3), True))
    batch = DraftBatch(
        base_logits=(torch.randn(rows, WIDTH, VOCAB) * 3).bfloat16(),
        hidden=torch.randn(rows, WIDTH, HIDDEN).bfloat16(),
        anchor=torch.randint(0, VOCAB, (rows,)),
        req_index=torch.arange(rows),
        position=torch.arange(rows * WIDTH).view(rows, WIDTH),
    )
    state = SamplingState(torch.full((rows,), temperature), torch.arange(rows) * 12345678901)
    shape = (rows, WIDTH, VOCAB)
    cache = torch.full(shape, float("-inf"), dtype=torch.bfloat16) if cached else None
    out = DraftOutput(torch.zeros(rows, WIDTH, dtype=torch.int64), torch.zeros(rows, WIDTH), cache)
    ops = CpuDraftOps()
    return lambda: ops.sample_block(head, batch, state, out)


def reject_case(
    rows: int, temperature: float, cached: bool, method: RejectMethod
) -> Callable[[], object]:
    """Full windows whose drafts come from a q near p."""
    heat = temperature or 1.0
    target = torch.randn(rows, WIDTH + 1, VOCAB) * 2
    cache = (target[:, :WIDTH] * heat + torch.randn(rows, WIDTH, VOCAB) * 0.5).bfloat16()
    drafts = target[:, :WIDTH].argmax(dim=-1)
    if cached:
        q = torch.softmax(cache.float() / heat, dim=-1)
        drafts = torch.multinomial(q.view(-1, VOCAB), 1).view(rows, WIDTH)
    batch = RejectBatch(
        target_logits=target.view(-1, VOCAB),
        draft_logits=cache if cached else None,
        draft_tokens=torch.cat([torch.zeros(rows, 1, dtype=torch.int64), drafts], 1).flatten(),
        cu_num_logits=torch.arange(rows + 1, dtype=torch.int32) * (WIDTH + 1),
        pos=torch.arange(rows * (WIDTH + 1)),
        idx_mapping=torch.arange(rows),
    )
    state = SamplingState(torch.full((rows,), temperature), torch.arange(rows) * 12345678901)
    ops, rule = CpuRejectOps(), RejectRule(WIDTH, method)
    return lambda: ops.reject(batch, state, rule)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    print(f"{'case':44} {'wall min':>8} {'median':>8} {'cpu med':>8}  (ms)")
    for rows in options.rows:
        for temperature, cached in ((0.0, False), (0.8, True)):
            kind = "probabilistic" if cached else "greedy"
            call = draft_case(rows, temperature, cached)
            print(f"{f'draft, {kind}, R={rows}':44} {timed(call, options.repeats)}")
        cases: list[tuple[float, bool, RejectMethod]] = [
            (0.0, False, "standard"),
            (0.8, False, "standard"),
            (0.8, True, "standard"),
            (0.8, True, "block"),
        ]
        for temperature, cached, method in cases:
            kind = f"T={temperature}, {'cached q' if cached else 'greedy drafts'}, {method}"
            call = reject_case(rows, temperature, cached, method)
            print(f"{f'reject, {kind}, R={rows}':44} {timed(call, options.repeats)}")


if __name__ == "__main__":
    main()
