"""Launch tables: one frozen record per kernel, architecture and shape class. Nothing is autotuned.

A launch is chosen once, when buffers are made, so that a captured graph and every replay of it run
the same code; two ranks with the same GPU always choose the same. Entries for sm_90 are meant to be
revised from ``benchmarks/kernels``. Entries for sm_100, sm_103 and sm_120 were compiled (shared
memory, registers, instructions: docs/kernels.md) and have NOT run on such a part.
"""

from dataclasses import dataclass
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
        return Device(arch=90, num_sms=4)
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
    waves: int = 2  # work items aimed at, in full waves of resident blocks
    min_chunk: int = 256  # keys below which a KV chunk is not worth its partial result


# (query rows up to, head_dim up to) -> launch. First match in this order wins.
_Table = tuple[tuple[int, int, AttentionLaunch], ...]

# A100: cp.async, mma.sync; 164 KB of shared memory.
_ATTENTION_SM80: Final[_Table] = (
    (32, 64, AttentionLaunch(64, 4, 4, 3)),
    (32, 128, AttentionLaunch(64, 4, 3, 1)),
    (32, 256, AttentionLaunch(32, 4, 3, 1)),
    (64, 128, AttentionLaunch(64, 4, 3, 1)),
    (64, 256, AttentionLaunch(32, 4, 2, 1)),
    (128, 128, AttentionLaunch(64, 8, 2, 1)),
    (128, 256, AttentionLaunch(32, 8, 2, 1)),
)
# H100/H200: two blocks of three stages keep ~128 KB of K and V in flight per SM; Little's law asks
# for 30 KB. 64 rows and more go to wgmma.
_ATTENTION_SM90: Final[_Table] = (
    (32, 64, AttentionLaunch(128, 4, 3, 2)),
    (32, 128, AttentionLaunch(64, 4, 3, 2)),
    (32, 256, AttentionLaunch(32, 4, 3, 2)),
    (64, 64, AttentionLaunch(128, 4, 3, 2)),
    (64, 128, AttentionLaunch(64, 4, 3, 2)),
    (64, 256, AttentionLaunch(64, 8, 2, 1)),
    (128, 128, AttentionLaunch(64, 8, 3, 1)),
    (128, 256, AttentionLaunch(64, 8, 2, 1)),
)
# B200/B300, never run. 8 TB/s over 148 SMs asks for 60 KB in flight per SM, hence larger key tiles
# where mma.sync is used (rows <= 32). tcgen05 wants 64 or 128 rows and keeps its accumulator in
# tensor memory, so registers do not limit the 128-row tile: 4 warps suffice at head_dim <= 128.
_ATTENTION_SM100: Final[_Table] = (
    (32, 64, AttentionLaunch(128, 4, 3, 2)),
    (32, 128, AttentionLaunch(64, 4, 3, 2)),
    (32, 256, AttentionLaunch(32, 4, 3, 2)),
    (64, 128, AttentionLaunch(64, 4, 3, 1)),
    (64, 256, AttentionLaunch(64, 8, 2, 1)),
    (128, 128, AttentionLaunch(64, 4, 3, 1)),
    (128, 256, AttentionLaunch(64, 8, 2, 1)),
)
# RTX PRO 6000 (sm_120), never run: mma.sync as on Ampere and only 99 KB of shared memory, so two
# stages where Ampere has three and narrower key tiles at head_dim 256.
_ATTENTION_SM120: Final[_Table] = (
    (32, 64, AttentionLaunch(64, 4, 3, 1)),
    (32, 128, AttentionLaunch(64, 4, 2, 1)),
    (32, 256, AttentionLaunch(32, 4, 2, 1)),
    (64, 128, AttentionLaunch(32, 4, 2, 1)),
    (64, 256, AttentionLaunch(16, 4, 2, 1)),
    (128, 128, AttentionLaunch(32, 8, 2, 1)),
    (128, 256, AttentionLaunch(16, 8, 2, 1)),
)
_ATTENTION: Final[dict[int, _Table]] = {
    80: _ATTENTION_SM80,
    90: _ATTENTION_SM90,
    100: _ATTENTION_SM100,
    103: _ATTENTION_SM100,  # same tile limits as sm_100; a separate key so that it can diverge
    120: _ATTENTION_SM120,
}


def attention_launch(arch: int, query_rows: int, head_dim: int) -> AttentionLaunch:
    """Launch of the ragged attention kernel for a query tile of `query_rows` rows."""
    for rows, dim, launch in _ATTENTION[arch]:
        if query_rows <= rows and head_dim <= dim:
            return launch
    raise ValueError(
        f"no attention launch for {query_rows} query rows and head_dim {head_dim} on sm_{arch}; "
        "the kernel covers 128 rows and head_dim 256"
    )
