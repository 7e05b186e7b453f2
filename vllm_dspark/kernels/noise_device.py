"""The noise of ``noise.py`` as Triton device functions: same keys, same 32 bits."""

import triton
import triton.language as tl

# The interpreter has no inline assembly. Read when kernels are decorated, as triton.jit does.
_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


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
    # 0x4B000000 is 2**23, whose last place is one: a 16-bit integer in the low bits is added to it,
    # and subtracting 2**23 again leaves that integer, without the conversion unit's quarter rate.
    high = ((bits >> 16) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0
    low = ((bits & 0xFFFF) | 0x4B000000).to(tl.float32, bitcast=True) - 8388607.5
    # Both products are exact, so a fused multiply-add rounds the sum just as once.
    value = high * 1.52587890625e-05 + low * 2.3283064365386963e-10
    return tl.minimum(value, 0.999999940395355224609375)


@triton.jit
def fast_log(x):
    """Natural logarithm of a normal positive float32, within 2**-22 absolute or relative."""
    if _COMPILED:
        log2 = tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return log2 * 0.6931471805599453
    return tl.log(x)


@triton.jit
def gumbel(bits):
    """float32 Gumbel(0, 1)."""
    v = uniform(bits)
    p = v * 0.16666666666666666 + 0.2
    p = v * p + 0.25
    p = v * p + 0.3333333333333333
    p = v * p + 0.5
    series = v * (v * p + 1.0)
    exponential = tl.where(v < 0.0625, series, -fast_log(1.0 - v))
    return -fast_log(exponential)
