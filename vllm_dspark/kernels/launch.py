"""Launch tables: one frozen record per kernel, architecture and shape class. Nothing is autotuned.

A launch is chosen once, when buffers are made, so that a captured graph and every replay of it run
the same code; two ranks with the same GPU always choose the same. Entries for sm_90 are meant to be
revised from ``benchmarks/kernels``. Entries for sm_100, sm_103 and sm_120 were compiled (shared
memory, registers, instructions: docs/kernels.md) and have NOT run on such a part.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch

# Shared memory one block may use, bytes (CUDA programming guide, compute capabilities).
SHARED_MEMORY_LIMIT: Final = {80: 166_912, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
ARCHITECTURES: Final = tuple(SHARED_MEMORY_LIMIT)
# Streaming multiprocessors assumed when the device is not there to be asked (A100, H100/H200,
# B200, B300, RTX PRO 6000).
_TYPICAL_SMS: Final = {80: 108, 90: 132, 100: 148, 103: 148, 120: 188}


@dataclass(frozen=True, slots=True)
class Device:
    """What a launch table needs to know about the device."""

    arch: int  # one of ARCHITECTURES
    num_sms: int


def describe_device(device: torch.device) -> Device:
    """The device's table key; a CPU (Triton's interpreter) is treated as a small sm_90."""
    if device.type != "cuda":
        return Device(arch=90, num_sms=2)
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major * 10 + properties.minor
    # An unlisted part uses the newest listed one that is not newer than itself.
    known = [arch for arch in ARCHITECTURES if arch <= capability]
    if not known:
        raise ValueError(
            f"compute capability {capability / 10:.1f} is below 8.0, the oldest these kernels are "
            "compiled for; use kernels='reference'"
        )
    return Device(arch=max(known), num_sms=properties.multi_processor_count)


def typical_device(arch: int) -> Device:
    """A stand-in for a part that is not present (cross-compilation)."""
    return Device(arch=arch, num_sms=_TYPICAL_SMS[arch])


@dataclass(frozen=True, slots=True)
class AttentionLaunch:
    """Tile and pipeline of the paged attention kernels."""

    block_n: int  # keys per step
    num_warps: int
    num_stages: int
    blocks_per_sm: int  # resident blocks the tile is sized for
    waves: int = 4  # partial results there is room for, in full waves of resident blocks
    min_chunk: int = 64  # keys below which a KV chunk is not worth its partial result
    overhead_blocks: float = 2.0  # cost of a work item besides its keys, in key blocks


# (query rows up to, head_dim up to) -> launch. First match in this order wins.
_Table = tuple[tuple[int, int, AttentionLaunch], ...]

# A100: cp.async, mma.sync; 164 KB of shared memory. At head_dim 256 a tile of 128 query rows does
# not fit the registers (the queries are mma.sync's register operand), so there is no such entry.
_ATTENTION_SM80: Final[_Table] = (
    (32, 64, AttentionLaunch(64, 4, 4, 3)),
    (32, 128, AttentionLaunch(64, 4, 3, 1)),
    (32, 256, AttentionLaunch(32, 4, 3, 1)),
    (64, 128, AttentionLaunch(64, 4, 3, 1)),
    (64, 256, AttentionLaunch(32, 4, 2, 1)),
    (128, 128, AttentionLaunch(32, 8, 3, 1)),
)
# H100/H200, measured (docs/benchmarks/h200-kernels.md). n stages keep n - 1 key tiles in flight. At
# head_dim 64 a tile has 64 rows or more (`min_query_rows`): wgmma reads K and V from shared memory
# and the sums and maxima of a row stay inside a warp, 63 us against 71 for 32 rows of mma.sync
# (SmolLM2, 128 requests, 2048 keys). At 128, 32 rows of mma.sync were even or ahead, and for 64
# rows four stages of 32 keys. fp8 keys are widened in registers, for which mma.sync tiles do.
_ATTENTION_SM90: Final[_Table] = (
    (32, 64, AttentionLaunch(64, 4, 3, 3)),
    (32, 128, AttentionLaunch(64, 4, 3, 2)),
    (32, 256, AttentionLaunch(32, 4, 3, 2)),
    (64, 64, AttentionLaunch(64, 4, 3, 3)),
    (64, 128, AttentionLaunch(32, 4, 4, 2)),
    (64, 256, AttentionLaunch(64, 8, 2, 1)),
    (128, 128, AttentionLaunch(64, 8, 3, 1)),
    (128, 256, AttentionLaunch(64, 8, 2, 1)),
)
# B200/B300, never run. 8 TB/s over 148 SMs asks for 60 KB in flight per SM, which the Hopper tiles
# already hold. tcgen05 wants 64 or 128 rows; its accumulator lives in tensor memory but is rescaled
# through registers, and 4 warps spilled at 128 rows, hence 8; at head_dim 256, 64 keys spilled too.
_ATTENTION_SM100: Final[_Table] = (
    (32, 64, AttentionLaunch(64, 4, 5, 3)),
    (32, 128, AttentionLaunch(64, 4, 5, 2)),
    (32, 256, AttentionLaunch(32, 4, 5, 2)),
    (64, 128, AttentionLaunch(64, 4, 3, 1)),
    (64, 256, AttentionLaunch(64, 8, 2, 1)),
    (128, 128, AttentionLaunch(64, 8, 3, 1)),
    (128, 256, AttentionLaunch(32, 8, 2, 1)),
)
# RTX PRO 6000 (sm_120), never run: mma.sync as on Ampere and only 99 KB of shared memory, so two
# stages where Ampere has three and narrower key tiles at head_dim 256. 128 rows of 256 spilled 192
# to 950 bytes in every variant tried.
_ATTENTION_SM120: Final[_Table] = (
    (32, 64, AttentionLaunch(64, 4, 3, 1)),
    (32, 128, AttentionLaunch(32, 4, 2, 1)),
    (32, 256, AttentionLaunch(32, 4, 2, 1)),
    (64, 128, AttentionLaunch(32, 4, 2, 1)),
    (64, 256, AttentionLaunch(16, 4, 2, 1)),
    (128, 128, AttentionLaunch(32, 8, 2, 1)),
)
_ATTENTION: Final[dict[int, _Table]] = {
    80: _ATTENTION_SM80,
    90: _ATTENTION_SM90,
    100: _ATTENTION_SM100,
    103: _ATTENTION_SM100,  # same tile limits as sm_100; a separate key so that it can diverge
    120: _ATTENTION_SM120,
}


def max_query_rows(arch: int, head_dim: int) -> int:
    """Most query rows a tile may have; longer query chunks take several tiles."""
    return max((rows for rows, dim, _ in _ATTENTION[arch] if head_dim <= dim), default=0)


def min_query_rows(arch: int, head_dim: int, cache_bytes: int) -> int:
    """Fewest query rows of a tile: a wgmma's where sm_90's table says so, else an mma.sync's."""
    return 64 if arch == 90 and head_dim <= 64 and cache_bytes > 1 else 16


def attention_launch(
    arch: int, query_rows: int, head_dim: int, cache_bytes: int = 2
) -> AttentionLaunch:
    """Launch of the ragged attention kernel for a query tile of `query_rows` rows."""
    for rows, dim, launch in _ATTENTION[arch]:
        if query_rows <= rows and head_dim <= dim:
            # Widening fp8 keys takes registers; a deeper pipeline than 3 spilled 8 to 24 bytes.
            stages = launch.num_stages if cache_bytes > 1 else min(launch.num_stages, 3)
            return replace(launch, num_stages=stages)
    raise ValueError(
        f"no attention launch for {query_rows} query rows and head_dim {head_dim} on sm_{arch}; "
        f"the kernel covers {max_query_rows(arch, head_dim)} rows there, and head_dim up to 256"
    )


@dataclass(frozen=True, slots=True)
class DraftLaunch:
    """Tile of the fused drafting head: `block_rows` requests x `block_v` vocabulary columns."""

    block_rows: int
    block_v: int
    num_warps: int
    num_stages: int
    blocks_per_sm: int

    def num_parts(self, num_reqs: int, vocab: int, device: Device) -> int:
        """Programs that share the vocabulary of one row block; all run in one wave."""
        row_blocks = -(-num_reqs // self.block_rows)
        resident = max(1, device.num_sms * self.blocks_per_sm // row_blocks)
        tiles = -(-vocab // self.block_v)
        # Equal parts: the fewest tiles per program that one wave allows, then no idle programs.
        per_part = -(-tiles // resident)
        return -(-tiles // per_part)


# Bytes of W2 a pipeline stage should hold: 32 KB, of which three stages leave room for a second
# block in 227 KB; sm_120 (never run) has 99 KB.
_W2_STAGE_BYTES: Final = {80: 32_768, 90: 32_768, 100: 32_768, 103: 32_768, 120: 16_384}


# H100/H200, ranks up to 256 in 16 bits, measured at V = 151936 and rank 256.
_DRAFT_SM90: Final = {
    8: DraftLaunch(8, 128, 8, 3, 1),
    16: DraftLaunch(16, 64, 8, 3, 2),
    32: DraftLaunch(32, 64, 8, 2, 2),
    64: DraftLaunch(64, 64, 8, 3, 1),
}


def draft_launch(arch: int, num_reqs: int, rank: int, element_size: int) -> DraftLaunch:
    """Launch of the fused drafting head.

    Rows: 8 is the narrowest matrix instruction; noise is drawn for padded rows too, so few are
    wanted. Columns: what one stage of W2 allows, 64 (one wgmma) to 128; 16 to 32 scores per thread.
    """
    rows = 8 if num_reqs <= 8 else 16 if num_reqs <= 16 else 32 if num_reqs <= 32 else 64
    width = 1 << (max(rank, 16) - 1).bit_length()
    if arch == 90 and width * element_size <= 512:
        return _DRAFT_SM90[rows]
    block_v = min(max(_W2_STAGE_BYTES[arch] // (width * element_size), 32), 128)
    if arch in (90, 100, 103):
        block_v = max(block_v, 64)
    if rows > 16:
        block_v = min(block_v, 64)
    stages = 3
    if arch == 120 or width * element_size > 512:
        stages = 2
    blocks_per_sm = 1 if arch in (80, 120) or rows > 16 else 2
    return DraftLaunch(rows, block_v, 8 if rows == 64 else 4, stages, blocks_per_sm)


def rejection_parts(device: Device, num_reqs: int, num_columns: int, vocab: int) -> int:
    """Programs that share one row: 16 or more per SM, slices of 4096 or more."""
    wanted = -(-device.num_sms * 16 // max(num_reqs * num_columns, 1))
    parts = 1
    while parts < wanted and parts < 32 and vocab // (parts * 2) >= 4096:
        parts *= 2
    return parts


@dataclass(frozen=True, slots=True)
class LatentLaunch:
    """Tile of the windowed latent attention."""

    block_m: int  # rows: tokens x heads
    block_n: int
    num_warps: int
    num_stages: int


def latent_launch(arch: int, num_rows: int) -> LatentLaunch:
    """Launch of the windowed latent attention.

    A row tile keeps 512 float32 accumulators per row in registers and a 512-wide key tile in shared
    memory, used as K and, transposed, as V. sm_120 (never run) has room for 16 keys in two stages;
    sm_100 and sm_103 (never run) use the Hopper tile, whose 32 rows are below tcgen05's 64.
    """
    block_m = 16 if num_rows <= 16 else 32
    warps = 4 if block_m == 16 else 8
    if arch == 120:
        return LatentLaunch(block_m, 16, warps, 2)
    return LatentLaunch(block_m, 32, warps, 2)
