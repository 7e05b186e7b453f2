"""Windows, rejection and the block's preparation on the device: replay checks and times."""

import numpy as np
import torch

from benchmarks.kernels.harness import REPLAYS, Recorder, Row, capture, time_graph
from vllm_dspark.kernels.attention_plan import AttentionShape
from vllm_dspark.kernels.block_attention import BlockAttention, latent_block_attention
from vllm_dspark.kernels.block_prepare import (
    ContextCaches,
    RotaryEmbedding,
    prepare_block,
    store_context_kv,
)
from vllm_dspark.kernels.protocols import RejectBatch, RejectRule, SamplingState
from vllm_dspark.kernels.reference import ReferenceRejectOps
from vllm_dspark.kernels.rejection import TritonRejectOps
from vllm_dspark.kernels.windows import WindowBuffers, WindowRequests, allocate_windows
from vllm_dspark.planning.allocation import allocate, ragged_layout
from vllm_dspark.planning.survival import survival


class WindowStep:
    """Random allocation inputs on the device, refillable in place."""

    def __init__(self, num_reqs: int, width: int) -> None:
        def ints() -> torch.Tensor:
            return torch.zeros(num_reqs, dtype=torch.int32, device="cuda")

        self.num_reqs, self.width = num_reqs, width
        self.confidence = torch.zeros(num_reqs, width, device="cuda")
        self.prior = torch.full((num_reqs, width), 0.5, device="cuda")
        mapping = torch.arange(num_reqs, device="cuda")
        self.requests = WindowRequests(mapping, ints() + 1, ints(), ints(), ints(), ints())
        self.budget = torch.zeros(1, dtype=torch.int32, device="cuda")
        rows = num_reqs * (width + 1)
        self.out = WindowBuffers.empty(num_reqs, rows, rows, torch.device("cuda"))

    def refill(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        size = (self.num_reqs, self.width)
        confidence = np.round(rng.random(size) * 50).astype(np.float32) / np.float32(50)
        confidence[rng.random(size) < 0.02] = np.nan
        self.confidence.copy_(torch.from_numpy(confidence))
        drafts = rng.integers(0, self.width + 1, self.num_reqs).astype(np.int32)
        capacity = rng.integers(0, drafts + 1).astype(np.int32)
        for name, values in (
            ("num_drafts", drafts), ("num_rows", drafts + 1), ("capacity", capacity),
            ("floor", capacity * (rng.random(self.num_reqs) < 0.1)),
        ):  # fmt: skip
            getattr(self.requests, name).copy_(torch.from_numpy(values.astype(np.int32)))
        least, most = int(self.requests.floor.sum()), int(capacity.sum())
        self.budget.fill_(int(rng.integers(least, most + 1)))

    def launch(self) -> None:
        allocate_windows(self.out, self.confidence, self.prior, self.requests, self.budget)

    def verify(self) -> None:
        names = ("capacity", "floor", "num_drafts", "num_rows")
        host = {name: getattr(self.requests, name).cpu().numpy() for name in names}
        confidence = self.confidence.cpu().numpy()
        conditional = np.where(np.isnan(confidence), np.float32(0.5), confidence).T.copy()
        admitted = allocate(
            survival(conditional), host["capacity"], host["floor"], int(self.budget)
        )
        layout = ragged_layout(admitted, host["num_drafts"], host["num_rows"])
        np.testing.assert_array_equal(self.out.admitted.cpu().numpy(), admitted)
        for name in ("windows", "query_start_loc", "cu_num_logits", "source_rows", "logits_rows"):
            expected = getattr(layout, name)
            np.testing.assert_array_equal(
                getattr(self.out, name).cpu().numpy()[: expected.size], expected
            )


def check_windows(recorder: Recorder) -> None:
    for num_reqs, width in ((512, 8), (64, 7), (37, 7), (1, 1)):
        step = WindowStep(num_reqs, width)
        step.refill(0)
        graph = capture([step.launch])
        for seed in range(REPLAYS):
            step.refill(seed)
            graph.replay()
            step.verify()
        recorder.checks[f"windows R={num_reqs} K={width}"] = (
            f"{REPLAYS} replays equal to the oracle"
        )


def measure_windows(recorder: Recorder) -> None:
    for num_reqs, width in ((512, 8), (256, 7), (64, 7), (8, 7)):
        step = WindowStep(num_reqs, width)
        step.refill(1)
        step.requests.num_drafts.fill_(width)
        step.requests.num_rows.fill_(width + 1)
        step.requests.capacity.fill_(width)
        step.requests.floor.zero_()
        budget = num_reqs * width // 2
        step.budget.fill_(budget)
        stock = None
        try:
            from vllm.v1.worker.gpu.spec_decode import adaptive_verification as adaptive

            capacity = step.requests.capacity.clone()
            starts = torch.zeros(2, num_reqs + 1, dtype=torch.int32, device="cuda")

            def stock_launch(capacity=capacity, starts=starts, step=step, budget=budget) -> None:
                capacity.copy_(step.requests.capacity)
                adaptive._assign_draft_token_budget_compiled(
                    step.confidence, step.requests.idx_mapping, capacity, budget, step.width
                )
                torch.cumsum(capacity + 1, 0, out=starts[0, 1:])
                torch.cumsum(capacity + 1, 0, out=starts[1, 1:])

            stock = time_graph([stock_launch] * 8)[0]
        except Exception as error:
            recorder.problem("stock allocation", error)
        ours = time_graph([step.launch] * 8)
        label = f"R={num_reqs} K={width} (goal 15 us at R=512)"
        recorder.add(Row("windows", label, ours[0], stock, 0.0, num_reqs == 512, *ours[1:]))


def reject_batch(num_reqs: int, num_drafts: int, vocab: int, seed: int) -> tuple:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    windows = torch.randint(1, num_drafts + 2, (num_reqs,), generator=generator, device="cuda")
    cu = torch.cat([windows.new_zeros(1), windows.cumsum(0)]).int()
    rows = num_reqs * (num_drafts + 1)
    target = torch.randn(rows, vocab, generator=generator, device="cuda") * 3
    draft = torch.randn(num_reqs, num_drafts, vocab, generator=generator, device="cuda").bfloat16()
    tokens = torch.randint(0, vocab, (rows,), generator=generator, device="cuda")
    likely = target.argmax(-1).roll(1)
    tokens = torch.where(torch.rand(rows, generator=generator, device="cuda") < 0.7, likely, tokens)
    pos = torch.arange(rows, device="cuda")
    mapping = torch.arange(num_reqs, device="cuda")
    return RejectBatch(target, draft, tokens, cu, pos, mapping)


def check_rejection(recorder: Recorder) -> None:
    """Every window of each replay against the reference; near ties are counted, not hidden."""
    num_reqs, num_drafts, vocab = 12, 7, 9001  # two parts a row: the last of them writes
    for method in ("standard", "block"):
        batch = reject_batch(num_reqs, num_drafts, vocab, 0)
        temperature = torch.rand(num_reqs, device="cuda") + 0.5
        temperature[::4] = 0.0
        state = SamplingState(temperature, torch.zeros(num_reqs, dtype=torch.int64, device="cuda"))
        rule = RejectRule(num_drafts, method)  # type: ignore[arg-type]
        ops = TritonRejectOps(num_reqs, num_drafts, vocab, torch.device("cuda"))
        graph = capture([lambda: ops.reject(batch, state, rule)])
        differing = 0
        for seed in range(REPLAYS):
            fresh = reject_batch(num_reqs, num_drafts, vocab, seed + 1)
            for name in ("target_logits", "draft_logits", "draft_tokens", "cu_num_logits"):
                getattr(batch, name).copy_(getattr(fresh, name))
            state.seeds.random_()
            graph.replay()
            found = ops._sampled[: num_reqs * (num_drafts + 1)].view(num_reqs, -1).cpu()
            host = [
                type(x)(**{k: v.cpu() if torch.is_tensor(v) else v for k, v in vars(x).items()})
                for x in (batch, state)
            ]
            expected = ReferenceRejectOps().reject(host[0], host[1], rule)
            differing += int((found != expected.sampled).any(1).sum())
        if differing > 4:
            raise AssertionError(f"{method}: {differing} of {REPLAYS * num_reqs} windows differ")
        recorder.checks[f"rejection {method}"] = (
            f"{REPLAYS} replays, {differing} windows at a near tie"
        )


def measure_rejection(recorder: Recorder) -> None:
    vocab, num_drafts = 151_936, 7
    for num_reqs in (64, 8, 1):
        for method in ("standard", "block"):
            if recorder.out_of_time():
                return
            label = f"V={vocab} K={num_drafts} R={num_reqs} {method}"
            try:
                batch = reject_batch(num_reqs, num_drafts, vocab, 3)
                seeds = torch.randint(0, 2**62, (num_reqs,), device="cuda")
                state = SamplingState(torch.ones(num_reqs, device="cuda"), seeds)
                rule = RejectRule(num_drafts, method)  # type: ignore[arg-type]
                ops = TritonRejectOps(num_reqs, num_drafts, vocab, torch.device("cuda"))
                ours = time_graph([lambda: ops.reject(batch, state, rule)])
                rows = int(batch.cu_num_logits[-1])
                # Each target row and draft row once; the resampled rows once more.
                moved = rows * vocab * 4 + (rows - num_reqs) * vocab * 2 + num_reqs * vocab * 6
                stock = _stock_rejection(recorder, batch, state, rule, rows)
                floor = recorder.floor_us(moved)
                recorder.add(
                    Row("rejection", label, ours[0], stock, floor, False, *ours[1:], moved)
                )
            except Exception as error:
                recorder.problem(label, error)


def _stock_rejection(recorder, batch, state, rule, rows) -> float | None:
    try:
        from vllm.v1.worker.gpu.spec_decode.rejection_sampler_utils import rejection_sample

        lens = batch.cu_num_logits.diff().long()
        mapping = torch.repeat_interleave(batch.idx_mapping, lens)
        local = torch.arange(rows, device="cuda") - torch.repeat_interleave(
            batch.cu_num_logits[:-1].long(), lens
        )
        target, tokens, pos = (
            batch.target_logits[:rows],
            batch.draft_tokens[:rows],
            batch.pos[:rows],
        )
        launch = lambda: rejection_sample(
            target,
            batch.draft_logits,
            tokens,
            batch.cu_num_logits,
            pos,
            batch.idx_mapping.int(),
            mapping.int(),
            local.int(),
            state.temperature,
            state.seeds,
            rule.num_drafts,
            use_block_verification=rule.method == "block",
        )
        return time_graph([launch])[0]
    except Exception as error:
        recorder.problem(f"stock rejection {rule.method}", error)
        return None


def measure_block(recorder: Recorder) -> None:
    """The drafter's block: preparation, context insertion, attention, latent attention."""
    heads, kv_heads, dim, layers, page = 32, 8, 128, 5, 16
    shape = AttentionShape(heads, kv_heads, dim, causal=False)
    for num_reqs, context in ((1, 2048), (32, 2048), (128, 2048)):
        if recorder.out_of_time():
            return
        label = f"qwen3-8b R={num_reqs} ctx={context} K=7"
        try:
            tokens, blocks = num_reqs * 7, context // page + 2
            pages = num_reqs * blocks
            caches = [
                torch.randn(pages, kv_heads, page, 2 * dim, device="cuda").bfloat16()
                for _ in range(layers)
            ]
            views = [cache.transpose(1, 2).split(dim, -1) for cache in caches]
            table = torch.arange(pages, device="cuda").view(num_reqs, blocks).int()
            lens = torch.full((num_reqs,), context + 7, dtype=torch.int32, device="cuda")
            q = torch.randn(tokens, heads, dim, device="cuda").bfloat16()
            out = torch.empty_like(q)
            layer = BlockAttention(shape, num_reqs, 7, torch.device("cuda"))
            layer.plan_block(lens)
            ours = time_graph([lambda v=v: layer.forward(out, q, *v, table) for v in views])
            moved = int(lens.sum()) * kv_heads * dim * 4 + q.numel() * 4
            floor = recorder.floor_us(moved)
            recorder.add(
                Row("block_attention", label, ours[0], None, floor, False, *ours[1:], moved)
            )

            qkv = torch.randn(tokens, (heads + 2 * kv_heads) * dim, device="cuda").bfloat16()
            weight = torch.ones(layers, dim, device="cuda").bfloat16()
            rotary = RotaryEmbedding(torch.randn(4096, dim, device="cuda"))
            positions = torch.arange(tokens, device="cuda") % 4096
            slots = torch.randperm(pages * page, device="cuda")[:tokens]
            ours = time_graph(
                [
                    lambda v=v: prepare_block(
                        out, *v, qkv, weight[0], weight[1], rotary, positions, slots, 1e-6
                    )
                    for v in views
                ]
            )
            moved = qkv.numel() * 4
            floor = recorder.floor_us(moved)
            recorder.add(Row("prepare_block", label, ours[0], None, floor, False, *ours[1:], moved))
            states = torch.randn(tokens, layers, 2, kv_heads, dim, device="cuda").bfloat16()
            context_caches = ContextCaches([k for k, _ in views], [v for _, v in views])
            ours = time_graph(
                [
                    lambda: store_context_kv(
                        context_caches, states, weight, rotary, positions, slots, 1e-6
                    )
                ]
            )
            moved = states.numel() * 4
            floor = recorder.floor_us(moved)
            recorder.add(
                Row("store_context_kv", label, ours[0], None, floor, False, *ours[1:], moved)
            )
            latent = torch.randn(pages, 64, 576, device="cuda").bfloat16()
            q = torch.randn(num_reqs * 8, 16, 576, device="cuda").bfloat16()
            out = torch.empty(num_reqs * 8, 16, 512, device="cuda").bfloat16()
            ours = time_graph(
                [lambda: latent_block_attention(out, q, latent, table, lens, 0.04, 128)]
            )
            moved = num_reqs * 136 * 576 * 2 + (q.numel() + out.numel()) * 2
            floor = recorder.floor_us(moved)
            label = f"latent 512+64 16 heads R={num_reqs} K=8"
            recorder.add(Row("latent_block", label, ours[0], None, floor, False, *ours[1:], moved))
        except Exception as error:
            recorder.problem(label, error)
