"""The fused drafting head on the device: graph replay checks, then times beside vLLM's loop."""

import torch
import torch.nn.functional as F

from benchmarks.kernels.harness import REPLAYS, Recorder, Row, capture, num_copies, time_graph
from vllm_dspark.kernels import noise
from vllm_dspark.kernels.launch import DraftLaunch
from vllm_dspark.kernels.markov import TritonDraftOps
from vllm_dspark.kernels.protocols import (
    ConfidenceHead,
    DraftBatch,
    DraftHead,
    DraftOutput,
    MarkovHead,
    SamplingState,
)

VOCAB, RANK, K, HIDDEN = 151_936, 256, 7, 4096
SLOTS = 512


def make_head(vocab: int, rank: int, kind: str = "vanilla", hidden: int = HIDDEN) -> DraftHead:
    """Random weights of a head on the device."""
    torch.manual_seed(0)

    def normal(*size: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(*size, device="cuda") * scale).bfloat16()

    size = {"vanilla": None, "gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}[
        kind
    ]
    markov = MarkovHead(
        kind,  # type: ignore[arg-type]
        normal(vocab, rank),
        normal(vocab, rank, scale=rank**-0.5),
        None if size is None else normal(*size, scale=hidden**-0.5),
    )
    weight = torch.randn(hidden + rank, device="cuda") * hidden**-0.5
    return DraftHead(markov, ConfidenceHead(weight, torch.zeros(1, device="cuda"), True))


def make_batch(num_reqs: int, vocab: int, hidden: int, seed: int) -> DraftBatch:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    base = torch.randn(num_reqs, K, vocab, generator=generator, device="cuda").bfloat16() * 3
    states = torch.randn(num_reqs, K, hidden, generator=generator, device="cuda").bfloat16()
    return DraftBatch(
        base,
        states,
        torch.randint(0, vocab, (num_reqs,), generator=generator, device="cuda"),
        torch.randperm(SLOTS, generator=generator, device="cuda")[:num_reqs],
        torch.randint(0, 100_000, (num_reqs, K), generator=generator, device="cuda"),
    )


def make_output(num_reqs: int, vocab: int, cached: bool) -> DraftOutput:
    cache = None
    if cached:
        cache = torch.full((SLOTS, K, vocab), float("-inf"), dtype=torch.bfloat16, device="cuda")
    return DraftOutput(
        torch.zeros(num_reqs, K, dtype=torch.int64, device="cuda"),
        torch.zeros(num_reqs, K, device="cuda"),
        cache,
    )


def make_state() -> SamplingState:
    temperature = torch.rand(SLOTS, device="cuda") + 0.5
    temperature[::5] = 0.0
    return SamplingState(temperature, torch.randint(-(2**62), 2**62, (SLOTS,), device="cuda"))


def verify_block(
    head: DraftHead, batch: DraftBatch, state: SamplingState, out: DraftOutput
) -> None:
    """Redoes each column from the tokens drawn before it (a near tie must not cascade)."""
    assert head.markov is not None and out.logits_cache is not None, "a cached vanilla head"
    ids = torch.arange(batch.base_logits.shape[2], device="cuda")
    previous = batch.anchor
    for column in range(K):
        embed = head.markov.w1[previous].float()
        logits = batch.base_logits[:, column].float() + embed @ head.markov.w2.float().T
        slots = batch.req_index
        hot = state.temperature[slots] > 0
        stored = out.logits_cache[slots, column].float()
        # Greedy rows cache nothing; a batch may have no other.
        error = torch.where(hot[:, None], (stored - logits).abs(), 0.0).max()
        if not error < 0.1:  # bf16 rounding of logits up to ~20
            raise AssertionError(f"column {column}: stored logits off by {error}")
        gumbel = noise.gumbel_rows(
            state.seeds[slots], batch.position[:, column], column, noise.DRAFT, ids
        )
        scaled = stored / torch.where(hot, state.temperature[slots], 1.0)[:, None]
        scores = torch.where(hot[:, None], scaled + gumbel, logits)
        previous = out.tokens[:, column]
        gap = scores.max(-1).values - scores.gather(1, previous[:, None])[:, 0]
        if not gap.max() < 1e-3:
            raise AssertionError(f"column {column}: drew a token {gap.max()} below the best")


def check(recorder: Recorder) -> None:
    """Fused and separate reduction under replay, other inputs each time."""
    vocab, hidden = 32_003, 512
    torch.backends.cuda.matmul.allow_tf32 = False
    for num_reqs in (1, 8, 12, 40, 70):
        head, state = make_head(vocab, 64, hidden=hidden), make_state()
        batch, out = make_batch(num_reqs, vocab, hidden, 0), make_output(num_reqs, vocab, True)
        ops = TritonDraftOps(head, num_reqs, K, vocab, torch.device("cuda"))
        graph = capture([lambda: ops.sample_block(head, batch, state, out)])
        for seed in range(1, REPLAYS + 1):
            fresh = make_batch(num_reqs, vocab, hidden, seed)
            for name in ("base_logits", "hidden", "anchor", "req_index", "position"):
                getattr(batch, name).copy_(getattr(fresh, name))
            state.seeds.random_()
            out.tokens.fill_(-1)
            graph.replay()
            verify_block(head, batch, state, out)
        recorder.checks[f"markov R={num_reqs}"] = f"{REPLAYS} replays, every draw reproduced"


def stock_block(head, batch, state, out, gumbel_sample) -> None:
    """vLLM 0.32's sequence of operations for a block (dspark/speculator.py), written anew."""
    markov, confidence = head.markov, head.confidence
    previous, embeds = batch.anchor, []
    steps = torch.arange(K, dtype=torch.int32, device="cuda")
    for column in range(K):
        embed = F.embedding(previous, markov.w1)
        embeds.append(embed)
        logits = batch.base_logits[:, column] + F.linear(embed, markov.w2)
        if out.logits_cache is None:
            previous = logits.argmax(-1)
        else:
            previous = gumbel_sample(
                logits,
                batch.req_index,
                state.temperature,
                state.seeds,
                batch.position[:, column] - 1,
                apply_temperature=True,
                is_drafting=True,
                logits_cache=out.logits_cache,
                logits_cache_col=steps[column],
            )
        out.tokens[:, column] = previous
    x = torch.cat([batch.hidden, torch.stack(embeds, 1)], -1).float()
    out.confidence_logits.copy_(torch.sigmoid(F.linear(x, confidence.weight[None])[..., 0]))


def measure(recorder: Recorder) -> None:
    """R=1..64 at the goal's shape, greedy and probabilistic."""
    head, state = make_head(VOCAB, RANK), make_state()
    try:
        from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
    except Exception as error:
        recorder.problem("vLLM's gumbel_sample", error)
        gumbel_sample = None
    for cached in (True, False):
        for num_reqs in (1, 64, 8, 16, 32, 4, 2):
            if recorder.out_of_time():
                return
            label = f"V={VOCAB} r={RANK} K={K} R={num_reqs} {'cached' if cached else 'greedy'}"
            try:
                row_bytes = num_reqs * VOCAB * 2
                hot = float((state.temperature > 0).float().mean()) if cached else 0.0
                moved = K * int(VOCAB * RANK * 2 + row_bytes * (1 + hot))
                copies = min(num_copies(K * row_bytes), 3)
                batches = [make_batch(num_reqs, VOCAB, HIDDEN, seed) for seed in range(copies)]
                outs = [make_output(num_reqs, VOCAB, cached) for _ in range(copies)]
                pairs = list(zip(batches, outs, strict=True))
                ops = TritonDraftOps(head, num_reqs, K, VOCAB, torch.device("cuda"))
                ours = time_graph(
                    [lambda b=b, o=o: ops.sample_block(head, b, state, o) for b, o in pairs]
                )
                stock = None
                if gumbel_sample is not None or not cached:
                    stock = time_graph(
                        [
                            lambda b=b, o=o: stock_block(head, b, state, o, gumbel_sample)
                            for b, o in pairs
                        ]
                    )[0]
                floor = recorder.floor_us(moved)
                recorder.add(Row("markov", label, ours[0], stock, floor, True, *ours[1:], moved))
            except Exception as error:
                recorder.problem(label, error)
    for kind in ("gated", "rnn"):
        if recorder.out_of_time():
            return
        head = make_head(VOCAB, RANK, kind)
        batch, out = make_batch(32, VOCAB, HIDDEN, 0), make_output(32, VOCAB, True)
        ops = TritonDraftOps(head, 32, K, VOCAB, torch.device("cuda"))
        try:
            ours = time_graph([lambda: ops.sample_block(head, batch, state, out)])
            moved = K * (VOCAB * RANK * 2 + 32 * VOCAB * 4)
            label = f"V={VOCAB} r={RANK} K={K} R=32 cached {kind}"
            floor = recorder.floor_us(moved)
            recorder.add(Row("markov", label, ours[0], None, floor, False, *ours[1:], moved))
        except Exception as error:
            recorder.problem(kind, error)


# Requests -> (rows, columns, warps, stages, blocks per SM).
SWEEP = {
    1: ((8, 64, 4, 3, 2), (8, 128, 4, 3, 1), (8, 128, 8, 3, 1), (8, 64, 4, 4, 1)),
    16: ((16, 64, 4, 3, 2), (16, 128, 4, 3, 1), (16, 128, 8, 3, 1)),
    64: ((64, 64, 4, 2, 2), (64, 64, 8, 3, 1), (64, 128, 8, 2, 1), (32, 64, 4, 2, 2)),
}


def sweep(recorder: Recorder) -> None:
    """Other launches of the drafting head, for the next edition of the table in launch.py."""
    head, state = make_head(VOCAB, RANK), make_state()
    for num_reqs, variants in SWEEP.items():
        batches = [make_batch(num_reqs, VOCAB, HIDDEN, seed) for seed in range(2)]
        outs = [make_output(num_reqs, VOCAB, True) for _ in range(2)]
        pairs = list(zip(batches, outs, strict=True))
        for rows, block_v, warps, stages, resident in variants:
            if recorder.out_of_time():
                return
            label = f"R={num_reqs} rows{rows} v{block_v} w{warps} s{stages} b{resident}"
            try:
                launch = DraftLaunch(rows, block_v, warps, stages, resident)
                ops = TritonDraftOps(head, num_reqs, K, VOCAB, torch.device("cuda"), launch)
                ours = time_graph(
                    [lambda b=b, o=o, at=ops: at.sample_block(head, b, state, o) for b, o in pairs],
                    replays=9,
                )
                floor = recorder.floor_us(K * VOCAB * 2 * (RANK + 2 * num_reqs))
                recorder.add(Row("sweep markov", label, ours[0], None, floor, False, *ours[1:]))
            except Exception as error:
                recorder.problem(label, error)
