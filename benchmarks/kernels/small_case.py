"""Every kernel once on a small case, for compute-sanitizer.

    compute-sanitizer --tool memcheck python benchmarks/kernels/small_case.py
    compute-sanitizer --tool racecheck python benchmarks/kernels/small_case.py

Odd sizes: tails of every tile are masked, and a request splits so that partial results are merged.
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.kernels import bench_draft, bench_step
from tests.kernels.attention_helpers import paged_case
from vllm_dspark.kernels.attention_plan import AttentionShape
from vllm_dspark.kernels.block_attention import BlockAttention, latent_block_attention
from vllm_dspark.kernels.block_prepare import (
    ContextCaches,
    RotaryEmbedding,
    prepare_block,
    store_context_kv,
)
from vllm_dspark.kernels.markov import TritonDraftOps
from vllm_dspark.kernels.protocols import RejectRule, SamplingState
from vllm_dspark.kernels.ragged_attention import RaggedAttention
from vllm_dspark.kernels.rejection import TritonRejectOps

DEVICE = torch.device("cuda")


def run_attention() -> None:
    for heads, kv_heads, dim in ((9, 3, 64), (8, 2, 128), (16, 2, 128)):
        shape = AttentionShape(heads, kv_heads, dim)
        case = paged_case([1, 8, 0, 3], [1, 700, 0, 65], shape, dtype=torch.bfloat16, device=DEVICE)
        layer = RaggedAttention(shape, 4, 12, 8, DEVICE)
        layer.plan(case.query_start_loc, case.seq_lens)
        layer.forward(
            torch.empty_like(case.q), case.q, case.k_cache, case.v_cache, case.block_table
        )


def run_draft() -> None:
    bench_draft.SLOTS = 16
    for num_reqs, kind in ((3, "vanilla"), (11, "gated"), (3, "rnn")):
        head = bench_draft.make_head(4099, 64, kind, hidden=128)
        batch = bench_draft.make_batch(num_reqs, 4099, 128, 1)
        out = bench_draft.make_output(num_reqs, 4099, True)
        ops = TritonDraftOps(head, num_reqs, bench_draft.K, 4099, DEVICE)
        ops.sample_block(head, batch, bench_draft.make_state(), out)


def run_verification() -> None:
    step = bench_step.WindowStep(37, 7)
    step.refill(3)
    step.launch()
    step.verify()
    for method in ("standard", "block"):
        batch = bench_step.reject_batch(3, 3, 9001, 1)
        temperature = torch.tensor([0.0, 0.7, 1.0], device=DEVICE)
        state = SamplingState(temperature, torch.arange(3, device=DEVICE))
        ops = TritonRejectOps(3, 3, 9001, DEVICE)
        ops.reject(batch, state, RejectRule(3, method))  # type: ignore[arg-type]


def run_block() -> None:
    shape, tokens = AttentionShape(8, 2, 128, causal=False), 14
    cache = torch.zeros(20, 2, 16, 256, device=DEVICE, dtype=torch.bfloat16)
    views = cache.transpose(1, 2).split(128, -1)
    table = torch.arange(20, device=DEVICE).view(2, 10).int()
    lens = torch.tensor([107, 7], dtype=torch.int32, device=DEVICE)
    q = torch.randn(tokens, 8, 128, device=DEVICE).bfloat16()
    qkv = torch.randn(tokens, 12 * 128, device=DEVICE).bfloat16()
    weight = torch.ones(2, 128, device=DEVICE).bfloat16()
    rotary = RotaryEmbedding(torch.randn(64, 128, device=DEVICE))
    index = torch.arange(tokens, device=DEVICE)
    prepare_block(q, *views, qkv, weight[0], weight[1], rotary, index, index, 1e-6)
    states = torch.randn(tokens, 2, 2, 2, 128, device=DEVICE).bfloat16()
    caches = ContextCaches([views[0]] * 2, [views[1]] * 2)
    store_context_kv(caches, states, weight, rotary, index, index, 1e-6)
    layer = BlockAttention(shape, 2, 7, DEVICE)
    layer.plan_block(lens)
    layer.forward(torch.empty_like(q), q, *views, table)
    pages = torch.randn(20, 64, 576, device=DEVICE).bfloat16()
    q = torch.randn(16, 16, 576, device=DEVICE).bfloat16()
    out = torch.empty(16, 16, 512, device=DEVICE, dtype=torch.bfloat16)
    latent_block_attention(out, q, pages, table, lens, 0.04, 128)


def main() -> None:
    for part in (run_attention, run_draft, run_verification, run_block):
        part()
        torch.cuda.synchronize()
        print(part.__name__, "done", flush=True)


if __name__ == "__main__":
    main()
