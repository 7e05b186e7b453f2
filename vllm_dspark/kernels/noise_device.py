"""The noise of ``noise.py`` as Triton device functions: same keys, same 32 bits."""

import triton
import triton.language as tl


@triton.jit
def _fmix(h):
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def _absorb(h, seed, position, column, domain):
    h = _fmix(h ^ seed.to(tl.uint32))
    h = _fmix(h ^ (seed >> 32).to(tl.uint32))
    h = _fmix(h ^ position.to(tl.uint32))
    h = _fmix(h ^ (position >> 32).to(tl.uint32))
    h = _fmix(h ^ column)
    return _fmix(h ^ domain)


@triton.jit
def key_words(seed, position, column, DOMAIN: tl.constexpr):
    """Prefix words (lo, hi), uint32; seed and position int64, column int32, equal shapes."""
    zero = (seed & 0).to(tl.uint32)
    column = zero + column.to(tl.uint32)
    domain = zero + DOMAIN
    lo = _absorb(zero + 0x243F6A88, seed, position, column, domain)
    return lo, _absorb(zero + 0x85A308D3, seed, position, column, domain)


@triton.jit
def token_bits(lo, hi, token):
    """32 bits of each (key, token), uint32."""
    h = token.to(tl.uint32) * 0x9E3779B1 + lo
    h = h ^ (h >> 16)
    h = h * 0x85EBCA6B
    h = h ^ hi
    h = h ^ (h >> 13)
    h = h * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def uniform(bits):
    """float32 in [2**-33, 1 - 2**-24]."""
    # Both products are exact, so a fused multiply-add rounds the sum just as once.
    high = (bits >> 16).to(tl.float32) * 1.52587890625e-05
    low = ((bits & 0xFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    return tl.minimum(high + low, 0.999999940395355224609375)


@triton.jit
def gumbel(bits):
    """float32 Gumbel(0, 1)."""
    v = uniform(bits)
    p = v * 0.16666666666666666 + 0.2
    p = v * p + 0.25
    p = v * p + 0.3333333333333333
    p = v * p + 0.5
    series = v * (v * p + 1.0)
    exponential = tl.where(v < 0.0625, series, -tl.log(1.0 - v))
    return -tl.log(exponential)
