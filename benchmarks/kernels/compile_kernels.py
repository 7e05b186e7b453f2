"""Compiles kernel launches for GPUs that are not there and reports what the hardware would run.

    python benchmarks/kernels/compile_kernels.py --archs 90,100 --only ragged --json OUT

Each case calls a public wrapper on small CPU tensors with `JITFunction.run` replaced by a recorder,
so what is compiled is exactly what the wrapper would launch. Needs no GPU; must not be imported
under TRITON_INTERPRET=1.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# All of them now: `pretend_device` replaces what is imported.
from vllm_dspark.kernels import (  # noqa: F401
    block_attention,
    block_prepare,
    launch,
    markov,
    ragged_attention,
    rejection,
    windows,
)

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
    torch.int32: "i32",
    torch.int64: "i64",
}
_LAUNCH_OPTIONS = {"num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "grid", "warmup"}
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True)
class Launch:
    """One recorded kernel launch."""

    case: str
    kernel: JITFunction
    args: dict[str, Any]
    options: dict[str, Any]


@dataclass(frozen=True)
class Report:
    """What the compiler made of a launch."""

    case: str
    kernel: str
    arch: int
    num_warps: int
    registers: int
    shared_bytes: int
    shared_limit: int
    stack_bytes: int  # local memory: spills or run-time indexed registers
    instructions: str  # wgmma, tcgen05, mma.sync or none
    seconds: float


@contextmanager
def recording(case: str, launches: list[Launch]) -> Iterator[None]:
    """Collects launches instead of running them."""

    def run(self: JITFunction, *args: Any, **kwargs: Any) -> None:
        options = {key: kwargs.pop(key) for key in list(kwargs) if key in _LAUNCH_OPTIONS}
        bound = dict(zip(self.arg_names, args, strict=False)) | kwargs
        options.pop("grid", None)
        options.pop("warmup", None)
        launches.append(Launch(case, self, bound, options))

    original = JITFunction.run
    JITFunction.run = run
    try:
        yield
    finally:
        JITFunction.run = original


@contextmanager
def pretend_device(arch: int) -> Iterator[None]:
    """Makes every wrapper choose its launch for `arch`."""
    stand_ins: dict[str, Callable[[torch.device], Any]] = {
        "describe_device": lambda device: launch.typical_device(arch),
        "dependent_launches": lambda device: arch >= 90,
    }
    replaced = [
        (module, name, getattr(module, name))
        for module_name, module in sys.modules.items()
        if module_name.startswith("vllm_dspark.kernels")
        for name in stand_ins
        if hasattr(module, name)
    ]
    for module, name, _ in replaced:
        setattr(module, name, stand_ins[name])
    try:
        yield
    finally:
        for module, name, original in replaced:
            setattr(module, name, original)


def _source(entry: Launch) -> ASTSource:
    # The specialisation the JIT would pick: 16-byte aligned pointers, integers divisible by 16 and
    # integers equal to 1 (the last become constants).
    signature, constants, attributes = {}, {}, {}
    declared = {param.name: param.is_constexpr for param in entry.kernel.params}
    for index, name in enumerate(entry.kernel.arg_names):
        value = entry.args[name]
        if declared[name] or value is None:
            signature[name], constants[name] = "constexpr", value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[name] = "fp32"
        elif value == 1:
            signature[name], constants[name] = "constexpr", 1
        else:
            signature[name] = "i64" if abs(value) >= 2**31 else "i32"
            if value % 16 == 0:
                attributes[(index,)] = [["tt.divisibility", 16]]
    return ASTSource(entry.kernel, signature, constants, attributes)


def compile_launch(entry: Launch, arch: int) -> Report:
    """Compiles one recorded launch for one architecture."""
    begin = time.monotonic()
    options = {key: value for key, value in entry.options.items() if value is not None}
    compiled = triton.compile(_source(entry), target=GPUTarget("cuda", arch, 32), options=options)
    ptx = compiled.asm["ptx"]
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    found = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    names = ("tcgen05.mma", "wgmma.mma_async", "mma.sync")
    used = [name.split(".mma")[0].replace("mma.sync", "mma.sync") for name in names if name in ptx]
    return Report(
        case=entry.case,
        kernel=entry.kernel.__name__,
        arch=arch,
        num_warps=compiled.metadata.num_warps,
        registers=int(found["REG"]),
        shared_bytes=compiled.metadata.shared,
        shared_limit=launch.SHARED_MEMORY_LIMIT[arch],
        stack_bytes=int(found["STACK"]) + int(found.get("LOCAL", 0)),
        instructions="+".join(used) or "none",
        seconds=round(time.monotonic() - begin, 2),
    )


def attention_case(
    heads: int, kv_heads: int, head_dim: int, max_query: int, cache: torch.dtype, **options: Any
) -> None:
    """One plan, attention and merge launch."""
    from vllm_dspark.kernels.attention_plan import AttentionShape
    from vllm_dspark.kernels.ragged_attention import RaggedAttention

    shape = AttentionShape(heads, kv_heads, head_dim, cache_bytes=cache.itemsize, **options)
    layer = RaggedAttention(shape, 32, 32 * max_query, max_query, torch.device("cpu"))
    q = torch.empty(4, heads, head_dim, dtype=torch.bfloat16)
    kv = torch.empty(2, kv_heads, 16, 2 * head_dim, dtype=cache)
    k_cache, v_cache = kv.transpose(1, 2).split(head_dim, -1)
    scale = torch.ones(1) if cache.itemsize == 1 else None
    sinks = torch.empty(heads) if shape.has_sinks else None
    lens = torch.zeros(33, dtype=torch.int32)
    layer.plan(lens, lens[:32])
    table = torch.zeros(32, 64, dtype=torch.int32)
    layer.forward(q, q, k_cache, v_cache, table, sinks, scale, scale)


def draft_case(
    num_reqs: int, kind: str | None, rank: int, vocab: int, cached: bool, d2t: bool = False
) -> None:
    """The launches of one drafted block (columns 0..2: first, odd, even)."""
    from vllm_dspark.kernels.markov import TritonDraftOps
    from vllm_dspark.kernels.protocols import (
        ConfidenceHead,
        DraftBatch,
        DraftHead,
        DraftOutput,
        MarkovHead,
        SamplingState,
    )

    hidden, columns = 1024, 3
    cells = {"gated": (rank, hidden + rank), "rnn": (3 * rank, 2 * rank + hidden)}
    markov_head = None
    if kind is not None:
        proj = torch.empty(cells[kind], dtype=BF16) if kind in cells else None
        w1, w2 = torch.empty(64, rank, dtype=BF16), torch.empty(64, rank, dtype=BF16)
        markov_head = MarkovHead(kind, w1, w2, proj, None)  # type: ignore[arg-type]
    confidence = ConfidenceHead(torch.empty(hidden + rank), torch.zeros(1), True)
    index = torch.zeros(num_reqs, dtype=torch.int64)
    head = DraftHead(markov_head, confidence, index if d2t else None)
    base = torch.empty(num_reqs, columns, vocab, dtype=BF16)
    positions = torch.zeros(num_reqs, columns, dtype=torch.int64)
    batch = DraftBatch(
        base, torch.zeros(num_reqs, columns, hidden, dtype=BF16), index, index, positions
    )
    out = DraftOutput(positions, torch.zeros(num_reqs, columns), base.clone() if cached else None)
    ops = TritonDraftOps(head, num_reqs, columns, vocab, torch.device("cpu"))
    ops.sample_block(head, batch, SamplingState(torch.zeros(1), index), out)


def windows_case(num_reqs: int, width: int, calibrate: bool) -> None:
    """Allocation and row maps of one step."""
    from vllm_dspark.kernels.windows import (
        WindowBuffers,
        WindowCalibration,
        WindowRequests,
        allocate_windows,
    )

    out = WindowBuffers.empty(num_reqs, 64, 64, torch.device("cpu"))
    ints = torch.zeros(num_reqs, dtype=torch.int32)
    table = torch.zeros(num_reqs, width)
    requests = WindowRequests(ints.long(), ints, ints, ints, ints, ints)
    calibration = WindowCalibration(table, table, table) if calibrate else None
    allocate_windows(out, table, table, requests, ints[:1], calibration)


def reject_case(num_reqs: int, vocab: int, method: str, cache: torch.dtype | None) -> None:
    """All launches of one verification."""
    from vllm_dspark.kernels.protocols import RejectBatch, RejectRule, SamplingState
    from vllm_dspark.kernels.rejection import TritonRejectOps

    ops = TritonRejectOps(num_reqs, 7, vocab, torch.device("cpu"))
    ints = torch.zeros(num_reqs + 1, dtype=torch.int64)
    draft = None if cache is None else torch.empty(1, 7, vocab, dtype=cache)
    batch = RejectBatch(torch.empty(2, vocab), draft, ints, ints.int(), ints, ints[:num_reqs])
    ops.reject(batch, SamplingState(torch.ones(1), ints), RejectRule(7, method))  # type: ignore


def block_case(heads: int, kv_heads: int, head_dim: int, cache: torch.dtype) -> None:
    """Preparation, context insertion and attention of a drafted block of 7."""
    from vllm_dspark.kernels.attention_plan import AttentionShape
    from vllm_dspark.kernels.block_attention import BlockAttention
    from vllm_dspark.kernels.block_prepare import (
        ContextCaches,
        RotaryEmbedding,
        prepare_block,
        store_context_kv,
    )

    shape = AttentionShape(heads, kv_heads, head_dim, causal=False, cache_bytes=cache.itemsize)
    layer = BlockAttention(shape, 32, 7, torch.device("cpu"))
    q = torch.empty(4, heads, head_dim, dtype=BF16)
    kv = torch.empty(2, kv_heads, 16, 2 * head_dim, dtype=cache)
    k_cache, v_cache = kv.transpose(1, 2).split(head_dim, -1)
    scale = torch.ones(2) if cache.itemsize == 1 else None
    rotary = RotaryEmbedding(torch.empty(64, head_dim))
    weight, index = torch.empty(2, head_dim, dtype=BF16), torch.zeros(4, dtype=torch.int64)
    qkv = torch.empty(4, (heads + 2 * kv_heads) * head_dim, dtype=BF16)
    prepare_block(
        q,
        k_cache,
        v_cache,
        qkv,
        weight[0],
        weight[1],
        rotary,
        index,
        index,
        1e-6,
        1.0,
        scale,
        scale,
    )
    caches = ContextCaches([k_cache] * 2, [v_cache] * 2, scale, scale)
    states = torch.empty(4, 2, 2, kv_heads, head_dim, dtype=BF16)
    store_context_kv(caches, states, weight, rotary, index, index, 1e-6)
    layer.plan_block(torch.zeros(32, dtype=torch.int32))
    table = torch.zeros(32, 64, dtype=torch.int32)
    layer.forward(q, q, k_cache, v_cache, table, None, scale, scale)


def latent_case(heads: int, latent: int, rope: int, cache: torch.dtype) -> None:
    """The windowed latent attention of a block of 8."""
    from vllm_dspark.kernels.block_attention import latent_block_attention

    out = torch.empty(16, heads, latent, dtype=BF16)
    q = torch.empty(16, heads, latent + rope, dtype=BF16)
    pages = torch.empty(2, 64, latent + rope, dtype=cache)
    table, lens = torch.zeros(2, 16, dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    scale = torch.ones(1) if cache.itemsize == 1 else None
    latent_block_attention(out, q, pages, table, lens, 0.1, 128, torch.empty(heads), scale)


BF16, FP8 = torch.bfloat16, torch.float8_e4m3fn
CASES: dict[str, Callable[[], None]] = {
    "ragged smollm2 K=7 (24 rows, d64)": lambda: attention_case(9, 3, 64, 8, BF16),
    "ragged qwen3-8b K=7 (32 rows, d128)": lambda: attention_case(32, 8, 128, 8, BF16),
    "ragged qwen3-32b K=7 (64 rows, d128)": lambda: attention_case(64, 8, 128, 8, BF16),
    "ragged qwen3-8b prefill (128 rows, d128)": lambda: attention_case(32, 8, 128, 2048, BF16),
    "ragged decode fp8 (16 rows, d128)": lambda: attention_case(32, 8, 128, 1, FP8),
    "ragged fp8 K=7 (64 rows, d128)": lambda: attention_case(64, 8, 128, 8, FP8),
    "ragged d256 K=7, window, cap, sinks (32 rows)": lambda: attention_case(
        16, 4, 256, 8, BF16, sliding_window=1024, soft_cap=50.0, has_sinks=True
    ),
    "ragged d256 prefill (128 rows)": lambda: attention_case(16, 4, 256, 2048, BF16),
    "draft vanilla r256 R=1 greedy": lambda: draft_case(1, "vanilla", 256, 151936, False),
    "draft vanilla r256 R=16": lambda: draft_case(16, "vanilla", 256, 151936, True),
    "draft vanilla r256 R=64": lambda: draft_case(64, "vanilla", 256, 151936, True),
    "draft gated r64 R=32 d2t": lambda: draft_case(32, "gated", 64, 32000, True, True),
    "draft rnn r512 R=64": lambda: draft_case(64, "rnn", 512, 32000, True),
    "draft without head R=64": lambda: draft_case(64, None, 0, 32000, True),
    "windows R=512 K=8": lambda: windows_case(512, 8, True),
    "windows R=32 K=7": lambda: windows_case(32, 7, False),
    "reject standard R=64 bf16 cache": lambda: reject_case(64, 151936, "standard", BF16),
    "reject block R=8 f32 cache": lambda: reject_case(8, 32000, "block", torch.float32),
    "reject standard R=8 greedy drafts": lambda: reject_case(8, 32000, "standard", None),
    "block qwen3-8b K=7": lambda: block_case(32, 8, 128, BF16),
    "block smollm2 K=7 fp8": lambda: block_case(9, 3, 64, FP8),
    "latent 512+64, 16 heads, K=8": lambda: latent_case(16, 512, 64, BF16),
    "latent 512+0, 64 heads, K=8, fp8": lambda: latent_case(64, 512, 0, FP8),
}


def reports(archs: list[int], names: tuple[str, ...]) -> Iterator[Report]:
    """Compiles the named cases, each distinct launch once per architecture."""
    for arch in archs:
        seen = set()
        for name in names:
            if arch < 89 and "fp8" in name:
                continue  # Triton has no fp8e4nv before sm_89
            case = CASES[name]
            launches: list[Launch] = []
            with pretend_device(arch), recording(name, launches):
                case()
            for entry in launches:
                source = _source(entry)
                key = (source.hash(), repr(sorted(entry.options.items())))
                if key not in seen:
                    seen.add(key)
                    yield compile_launch(entry, arch)


# What the test-suite compiles: every kernel, and every kind of dot.
REPRESENTATIVE = (
    "ragged qwen3-8b K=7 (32 rows, d128)",
    "ragged qwen3-32b K=7 (64 rows, d128)",
    "ragged qwen3-8b prefill (128 rows, d128)",
    "ragged d256 K=7, window, cap, sinks (32 rows)",
    "draft vanilla r256 R=64",
    "windows R=32 K=7",
    "reject block R=8 f32 cache",
    "block qwen3-8b K=7",
    "block smollm2 K=7 fp8",
    "latent 512+64, 16 heads, K=8",
)
_MARK = "<!-- compiled by benchmarks/kernels/compile_kernels.py -->"


def write_docs(path: Path, rows: list[Report]) -> None:
    """Replaces the table between the two marks of a document."""
    before, _, after = path.read_text().split(_MARK)
    cells: dict[tuple[str, str], dict[int, Report]] = {}
    for row in rows:
        # Columns of a drafted block compile alike; the largest is shown.
        known = cells.setdefault((row.kernel.lstrip("_"), row.case), {})
        if row.arch not in known or row.registers > known[row.arch].registers:
            known[row.arch] = row
    archs = sorted({row.arch for row in rows})
    lines = ["| kernel | case | " + " | ".join(f"sm_{arch}" for arch in archs) + " |"]
    lines.append("|---|---|" + "---|" * len(archs))
    for (kernel, case), found in cells.items():
        texts = []
        for arch in archs:
            row = found.get(arch)
            text = "-" if row is None else f"{row.registers} / {row.shared_bytes}"
            if row is not None and row.instructions != "none":
                text += f" {row.instructions}"
            if row is not None and row.stack_bytes:
                text += f" **{row.stack_bytes} B local**"
            texts.append(text)
        if any(arch in found for arch in archs):
            lines.append(f"| {kernel} | {case} | " + " | ".join(texts) + " |")
    path.write_text(f"{before}{_MARK}\n\n" + "\n".join(lines) + f"\n\n{_MARK}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--archs", default=",".join(map(str, launch.ARCHITECTURES)))
    parser.add_argument("--only", default="")
    parser.add_argument("--representative", action="store_true", help="the test-suite's cases")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", type=Path, help="rewrite the table of this document")
    arguments = parser.parse_args()
    rows: list[Report] = []
    names = REPRESENTATIVE if arguments.representative else tuple(CASES)
    names = tuple(name for name in names if arguments.only in name)
    for report in reports([int(arch) for arch in arguments.archs.split(",")], names):
        rows.append(report)
        print(
            f"sm_{report.arch} {report.kernel:28} {report.case:48} w{report.num_warps} "
            f"reg {report.registers:3} shared {report.shared_bytes:6} stack {report.stack_bytes:4} "
            f"{report.instructions} {report.seconds}s",
            flush=True,
        )
        if report.shared_bytes > report.shared_limit or report.stack_bytes:
            print("   ^^^ over a limit", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    if arguments.docs:
        write_docs(arguments.docs, rows)


if __name__ == "__main__":
    main()
