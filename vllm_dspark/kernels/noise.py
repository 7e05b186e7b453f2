"""Counter-based noise: each random number of drafting and rejection is a pure function of its key.

No generator state exists, so a request's draws do not depend on its batch, on padding or on what
was scheduled beside it. Every implementation (this torch one, numba in ``cpu/``, Triton) produces
the same 32 bits for a key; the floating-point functions of those bits may differ by a few ulp, or
by 2**-21 where their value is near zero (the device's fast logarithm).

Key
    seed      int64, the request's seed
    position  int64, DRAFT: position of the token being drawn;
              ACCEPT, RESAMPLE: position of the *input* token of the verified row (one less)
    column    int32, DRAFT: column c in 0..K-1 of the block being drafted;
              ACCEPT, RESAMPLE: the row's index in the request's window, 0..K
    domain    DRAFT = 0, ACCEPT = 1, RESAMPLE = 2
    token     uint32, id in the TARGET vocabulary (ACCEPT draws use token 0)

The column is what makes a redrafted position fresh: each emitting step moves the anchor, so the
same position lands in another column (DESIGN.md, losslessness trap 2).

Bits (all arithmetic modulo 2**32, shifts logical)
    fmix(h):  h ^= h >> 16;  h *= 0x85EBCA6B;  h ^= h >> 13;  h *= 0xC2B2AE35;  h ^= h >> 16
    words  =  seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF,
              position & 0xFFFFFFFF, (position >> 32) & 0xFFFFFFFF,
              column & 0xFFFFFFFF, domain
    lo: h = 0x243F6A88;  for w in words: h = fmix(h ^ w)
    hi: h = 0x85A308D3;  for w in words: h = fmix(h ^ w)
    bits(token):
        h  = token * 0x9E3779B1 + lo
        h ^= h >> 16;  h *= 0x85EBCA6B
        h ^= hi
        h ^= h >> 13;  h *= 0xC2B2AE35
        h ^= h >> 16
The two prefix words are computed once per row; only ``bits`` runs per token.

Numbers (float32)
    v = min(fl32((bits + 0.5) * 2**-32), 1 - 2**-24)
        fl32 rounds once, to nearest even. Without a 64-bit float:
        (bits >> 16) * 2**-16 + ((bits & 0xFFFF) + 0.5) * 2**-32, where only the sum rounds.
    u = v                                     the acceptance draw, in (0, 1)
    e = -log1p(-v), exponential(1):
        v <  2**-4:  v * (1 + v*(1/2 + v*(1/3 + v*(1/4 + v*(1/5 + v*(1/6))))))
        v >= 2**-4:  -log(1 - v)
    g = -log(e), Gumbel(0, 1)
A large g, which decides an argmax, comes from v -> 0, where float32 keeps all 32 source bits; g
lies in [-2.82, 22.88].
"""

import torch

DRAFT = 0
ACCEPT = 1
RESAMPLE = 2

MASK32 = 0xFFFFFFFF
# First words of pi's fraction: two unrelated starting states, so that two keys which collide in
# `lo` do not also collide in `hi`.
INIT_LO = 0x243F6A88
INIT_HI = 0x85A308D3
GOLDEN = 0x9E3779B1  # odd, so token -> token * GOLDEN is a bijection of uint32
MUL_A = 0x85EBCA6B  # murmur3's finaliser
MUL_B = 0xC2B2AE35

MAX_UNIFORM = 1.0 - 2.0**-24  # largest float32 below 1
SERIES_LIMIT = 2.0**-4  # below it 1 - v would cancel; the truncated series is exact to 1e-8


def _fmix(h: torch.Tensor) -> torch.Tensor:
    h = h ^ (h >> 16)
    h = (h * MUL_A) & MASK32
    h = h ^ (h >> 13)
    h = (h * MUL_B) & MASK32
    return h ^ (h >> 16)


def key_words(
    # int64, broadcastable against each other
    seed: torch.Tensor,
    position: torch.Tensor,
    column: torch.Tensor | int,
    domain: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prefix words (lo, hi) of each key, as int64 tensors that hold uint32 values."""
    # Python integers stay Python integers: a tensor made of one would be a blocking copy on a GPU.
    words: tuple[torch.Tensor | int, ...] = (
        seed & MASK32,
        (seed >> 32) & MASK32,
        position & MASK32,
        (position >> 32) & MASK32,
        column & MASK32,
        domain,
    )
    prefixes = []
    for init in (INIT_LO, INIT_HI):
        h = torch.full((), init, dtype=torch.int64, device=seed.device)
        for word in words:
            h = _fmix(h ^ word)
        prefixes.append(h)
    return prefixes[0], prefixes[1]


def token_bits(lo: torch.Tensor, hi: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """32 random bits of each (key, token), int64 holding uint32; arguments broadcast."""
    # Products wrap in int64; their low 32 bits are those of the unsigned product.
    h = (token * GOLDEN + lo) & MASK32
    h = h ^ (h >> 16)
    h = (h * MUL_A) & MASK32
    h = h ^ hi
    h = h ^ (h >> 13)
    h = (h * MUL_B) & MASK32
    return h ^ (h >> 16)


def uniform(bits: torch.Tensor) -> torch.Tensor:
    """float32 in [2**-33, 1 - 2**-24] from 32 bits."""
    v = ((bits.to(torch.float64) + 0.5) * 2.0**-32).to(torch.float32)
    return v.clamp_max(MAX_UNIFORM)


def exponential(v: torch.Tensor) -> torch.Tensor:
    """Exponential(1) from `uniform`, increasing in v, accurate as v -> 0."""
    p = v * (1.0 / 6.0) + 1.0 / 5.0
    for divisor in (4.0, 3.0, 2.0):
        p = v * p + 1.0 / divisor
    series = v * (v * p + 1.0)
    return torch.where(v < SERIES_LIMIT, series, -torch.log(1.0 - v))


def gumbel(bits: torch.Tensor) -> torch.Tensor:
    """float32 Gumbel(0, 1) from 32 bits."""
    return -torch.log(exponential(uniform(bits)))


def accept_uniform(
    # int64, broadcastable
    seed: torch.Tensor,
    position: torch.Tensor,
    column: torch.Tensor | int,
) -> torch.Tensor:
    """The acceptance draw u of each verified row."""
    lo, hi = key_words(seed, position, column, ACCEPT)
    return uniform(token_bits(lo, hi, torch.zeros_like(lo)))


def gumbel_rows(
    # [N] int64
    seed: torch.Tensor,
    # [N] int64
    position: torch.Tensor,
    # [N] int64, or one column for all rows
    column: torch.Tensor | int,
    domain: int,
    # [V] int64, target ids
    tokens: torch.Tensor,
) -> torch.Tensor:
    """Gumbel noise [N, V] of N keys over V tokens."""
    lo, hi = key_words(seed, position, column, domain)
    return gumbel(token_bits(lo[:, None], hi[:, None], tokens[None, :]))
