"""Ragged verify attention on the device: graph replay checks, then times beside FA3."""

from collections.abc import Iterator

import torch

from benchmarks.kernels.harness import (
    REPLAYS,
    Recorder,
    Row,
    capture,
    num_copies,
    relative_error,
    time_graph,
)
from vllm_dspark.kernels.attention_plan import AttentionShape
from vllm_dspark.kernels.attention_reference import ragged_attention_reference
from vllm_dspark.kernels.launch import AttentionLaunch
from vllm_dspark.kernels.ragged_attention import RaggedAttention

K = 7
PAGE = 16
MODELS = {
    "smollm2-135m": AttentionShape(9, 3, 64),
    "qwen3-8b": AttentionShape(32, 8, 128),
    "qwen3-32b": AttentionShape(64, 8, 128),
}
_MAX_BYTES = 12 << 30


class Inputs:
    """One layer's inputs for R requests of about `context` keys."""

    def __init__(self, shape: AttentionShape, num_reqs: int, context: int, seed: int) -> None:
        torch.manual_seed(seed)
        device = "cuda"
        blocks = -(-(context + K + 1) // PAGE)
        num_blocks = num_reqs * blocks + 1
        cache = torch.randn(
            num_blocks, shape.num_kv_heads, PAGE, 2 * shape.head_dim, device=device
        ).bfloat16()
        self.k, self.v = cache.transpose(1, 2).split(shape.head_dim, -1)
        order = torch.randperm(num_blocks - 1, device=device)[: num_reqs * blocks] + 1
        self.table = order.view(num_reqs, blocks).int()
        tokens = num_reqs * (K + 1)
        self.q = torch.randn(tokens, shape.num_heads, shape.head_dim, device=device).bfloat16()
        self.out = torch.full_like(self.q, float("nan"))


def lengths(
    num_reqs: int, context: int, windows: str, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(query_start_loc, seq_lens) of full or uneven windows."""
    generator = torch.Generator().manual_seed(seed)
    if windows == "full":
        rows = torch.full((num_reqs,), K + 1)
    else:
        # A trimmed step: most requests keep little, some keep everything.
        rows = torch.randint(1, K + 2, (num_reqs,), generator=generator)
        rows = torch.where(torch.rand(num_reqs, generator=generator) < 0.5, 1 + rows // 4, rows)
    starts = torch.cat([torch.zeros(1), rows.cumsum(0)]).int()
    return starts.cuda(), (rows + context - K).int().cuda()


def check(recorder: Recorder) -> None:
    """One captured graph, other windows, lengths and queries at each replay."""
    for name, shape in MODELS.items():
        for num_reqs in (1, 12, 48):
            worst = _replay(name, shape, num_reqs, 900)
            recorder.checks[f"ragged_attention {name} R={num_reqs}"] = (
                f"{REPLAYS} replays, worst error {worst:.1e}"
            )


def _replay(name: str, shape: AttentionShape, num_reqs: int, context: int) -> float:
    data = Inputs(shape, num_reqs, context, 1)
    layer = RaggedAttention(shape, num_reqs, num_reqs * (K + 1), K + 1, torch.device("cuda"))
    starts, lens = lengths(num_reqs, context, "full", 0)

    def launch() -> None:
        layer.plan(starts, lens)
        layer.forward(data.out, data.q, data.k, data.v, data.table)

    graph = capture([launch])
    worst = 0.0
    for seed in range(REPLAYS):
        new_starts, new_lens = lengths(num_reqs, [900, 40, 333][seed % 3], "ragged", seed)
        if seed % 5 == 4:
            new_lens[num_reqs // 4] = 901  # one long request among short ones: the split path
        starts.copy_(new_starts)
        lens.copy_(new_lens)
        data.q.normal_()
        data.out.fill_(float("nan"))
        graph.replay()
        expected = torch.empty_like(data.out)
        ragged_attention_reference(
            expected, data.q, data.k, data.v, data.table, starts, lens, layer.scale, shape
        )
        used = int(starts[-1])
        worst = max(worst, relative_error(data.out[:used], expected[:used]))
        if not worst < 1e-2:
            raise AssertionError(f"{name} R={num_reqs}, replay {seed}: relative error {worst}")
    return worst


def stock_launches(
    shape: AttentionShape,
    sets: list[Inputs],
    starts: torch.Tensor,
    lens: torch.Tensor,
    context: int,
) -> Iterator[list]:
    """FA3 as vLLM calls it in a full graph (32 splits, scheduled ahead), and unconstrained."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata

    for num_splits in (32, 0):
        schedule = get_scheduler_metadata(
            batch_size=len(lens),
            max_seqlen_q=K + 1,
            max_seqlen_k=context + K + 1,
            num_heads_q=shape.num_heads,
            num_heads_kv=shape.num_kv_heads,
            headdim=shape.head_dim,
            cache_seqlens=lens,
            qkv_dtype=torch.bfloat16,
            cu_seqlens_q=starts,
            page_size=PAGE,
            causal=True,
            num_splits=num_splits,
        )
        yield [
            lambda data=data, splits=num_splits, schedule=schedule: flash_attn_varlen_func(
                q=data.q,
                k=data.k,
                v=data.v,
                out=data.out,
                cu_seqlens_q=starts,
                max_seqlen_q=K + 1,
                seqused_k=lens,
                max_seqlen_k=context + K + 1,
                softmax_scale=shape.head_dim**-0.5,
                causal=True,
                block_table=data.table,
                scheduler_metadata=schedule,
                num_splits=splits,
                fa_version=3,
            )
            for data in sets
        ]


def measure(recorder: Recorder) -> None:
    """Every model, context and batch that fits; stock is the better of its two settings."""
    cases = [
        (name, context, num_reqs, windows)
        for windows, contexts in (("ragged", (2048, 512, 8192, 32768)), ("full", (2048,)))
        for context in contexts
        for name in ("qwen3-8b", "smollm2-135m", "qwen3-32b")
        for num_reqs in (1, 8, 32, 128, 256)
    ]
    for name, context, num_reqs, windows in cases:
        if recorder.out_of_time():
            return
        shape = MODELS[name]
        kv_bytes = num_reqs * context * shape.num_kv_heads * shape.head_dim * 4
        copies = num_copies(kv_bytes, 6)
        if kv_bytes * copies > _MAX_BYTES:
            continue
        try:
            _measure_case(recorder, name, context, num_reqs, windows, copies)
        except Exception as error:
            recorder.problem(f"{name} R={num_reqs} ctx={context} {windows}", error)


def _measure_case(
    recorder: Recorder, name: str, context: int, num_reqs: int, windows: str, copies: int
) -> None:
    shape = MODELS[name]
    label = f"{name} R={num_reqs} ctx={context} {windows}"
    sets = [Inputs(shape, num_reqs, context, seed) for seed in range(copies)]
    starts, lens = lengths(num_reqs, context, windows, 5)
    layer = RaggedAttention(shape, num_reqs, num_reqs * (K + 1), K + 1, torch.device("cuda"))
    layer.plan(starts, lens)  # once per step; its own row below
    ours = time_graph([lambda d=d: layer.forward(d.out, d.q, d.k, d.v, d.table) for d in sets])
    stock = None
    try:
        attempts = stock_launches(shape, sets, starts, lens, context)
        stock = min(time_graph(launches)[0] for launches in attempts)
    except Exception as error:  # no FA3 here: the row still counts
        recorder.problem(f"FA3 {label}", error)
    moved = int(lens.sum()) * shape.num_kv_heads * shape.head_dim * 4
    moved += int(starts[-1]) * shape.num_heads * shape.head_dim * 4
    floor = recorder.floor_us(moved)
    recorder.add(Row("ragged_attention", label, ours[0], stock, floor, True, *ours[1:], moved))
    if name == "qwen3-8b" and context == 2048:
        plan = time_graph([lambda: layer.plan(starts, lens)] * 8)
        recorder.add(Row("attention_plan", label, plan[0], None, 0.0, False, *plan[1:]))


def sweep(recorder: Recorder) -> None:
    """Other launches of the decode tile, for the next edition of the table in launch.py."""
    for name in ("qwen3-8b", "qwen3-32b", "smollm2-135m"):
        for num_reqs, context in ((32, 4096), (1, 2048), (4, 8192)):
            shape = MODELS[name]
            sets = [Inputs(shape, num_reqs, context, seed) for seed in range(4)]
            starts, lens = lengths(num_reqs, context, "ragged", 5)
            for block_n, warps, stages, resident in (
                (64, 4, 3, 2), (64, 4, 4, 1), (64, 4, 2, 2), (32, 4, 4, 2), (32, 4, 3, 3),
                (128, 4, 3, 2), (128, 4, 2, 1), (128, 8, 3, 1), (64, 8, 3, 2),
            ):  # fmt: skip
                for overhead, min_chunk in ((2.0, 128), (2.0, 64), (0.5, 128), (6.0, 256)):
                    if recorder.out_of_time():
                        return
                    label = f"{name} R={num_reqs} ctx={context} n{block_n} w{warps} s{stages}"
                    label += f" b{resident} overhead{overhead} chunk{min_chunk}"
                    try:
                        launch = AttentionLaunch(
                            block_n, warps, stages, resident, 4, min_chunk, overhead
                        )
                        layer = RaggedAttention(
                            shape, num_reqs, num_reqs * 8, 8, torch.device("cuda"), launch=launch
                        )
                        layer.plan(starts, lens)
                        ours = time_graph(
                            [
                                lambda d=data, at=layer: at.forward(d.out, d.q, d.k, d.v, d.table)
                                for data in sets
                            ],
                            replays=9,
                        )
                        moved = int(lens.sum()) * shape.num_kv_heads * shape.head_dim * 4
                        floor = recorder.floor_us(moved)
                        recorder.add(Row("sweep", label, ours[0], None, floor, False, *ours[1:]))
                    except Exception as error:
                        recorder.problem(label, error)
