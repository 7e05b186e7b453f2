"""Numba primitives of the CPU operations: bit casts, exp, the noise of `kernels/noise.py`, argmax.

Loops over a vocabulary run in blocks of BLOCK tokens whose scratch stays in the L1 cache, and hold
only arithmetic that LLVM vectorises: no libm call, no branch. Numba has no vector libm, so a
straightforward Gumbel argmax costs two scalar logarithms a token. `gumbel_argmax` instead bounds
the noise that a block's best token would need and evaluates only tokens whose hash reaches it; the
result is that of evaluating all of them.
"""

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from vllm_dspark.kernels import noise

BLOCK = 512

NEG_INF = np.float32(-np.inf)
F32_MAX = np.float32(np.finfo(np.float32).max)
# Ordered-integer image of -inf: below every number, what NaN is mapped to
KEY_NEG_INF = np.int32(-2139095041)

_GOLDEN = np.uint32(noise.GOLDEN)
_MUL_A = np.uint32(noise.MUL_A)
_MUL_B = np.uint32(noise.MUL_B)
_INIT_LO = np.uint32(noise.INIT_LO)
_INIT_HI = np.uint32(noise.INIT_HI)
_MAX_UNIFORM = np.float32(noise.MAX_UNIFORM)
_SERIES_LIMIT = np.float32(noise.SERIES_LIMIT)


@intrinsic
def bits_of(typingctx: Any, x: Any) -> Any:
    """int32 with the bits of a float32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.IntType(32))

    return types.int32(types.float32), codegen


@intrinsic
def float_of(typingctx: Any, x: Any) -> Any:
    """float32 with the bits of an int32."""

    def codegen(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.int32), codegen


@intrinsic
def widen(typingctx: Any, x: Any) -> Any:
    """float32 value of an array element: int16 elements hold bfloat16 bits."""
    if x == types.float32:

        def identity(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return args[0]

        return types.float32(types.float32), identity
    if x == types.int16:

        def shift(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            word = builder.zext(args[0], ir.IntType(32))
            word = builder.shl(word, ir.Constant(ir.IntType(32), 16))
            return builder.bitcast(word, ir.FloatType())

        return types.float32(types.int16), shift
    return None


@njit(inline="always")
def to_bf16(x):  # type: ignore[no-untyped-def]
    """bfloat16 bits (int32) of a float32 that is not NaN, rounded to nearest even."""
    word = bits_of(x)
    return np.int32(word + np.int32(0x7FFF) + ((word >> np.int32(16)) & np.int32(1))) >> np.int32(
        16
    )


@njit(inline="always")
def order_key(x):  # type: ignore[no-untyped-def]
    """int32 that orders as the float32 does, NaN as -inf: integer maxima vectorise."""
    word = bits_of(x)
    key = word ^ ((word >> np.int32(31)) & np.int32(0x7FFFFFFF))
    return KEY_NEG_INF if math.isnan(x) else key


@njit(inline="always")
def key_value(key):  # type: ignore[no-untyped-def]
    """Inverse of `order_key`."""
    return float_of(np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7FFFFFFF))))


@njit(inline="always")
def clean(x):  # type: ignore[no-untyped-def]
    """Logit with NaN as -inf and +inf as the largest float32."""
    x = NEG_INF if math.isnan(x) else x
    return x if x < F32_MAX else F32_MAX


@njit(inline="always")
def exp_nonpositive(x):  # type: ignore[no-untyped-def]
    """exp(x) for x <= 0 to 2e-7 relative; exactly 0 below -87, for -inf and for NaN."""
    keep = x > np.float32(-87.0)
    x = x if keep else np.float32(0.0)
    # Truncation towards zero rounds a non-positive number less 1/2 to the nearest integer.
    n = np.int32(x * np.float32(1.4426950408889634) - np.float32(0.5))
    n_f = np.float32(n)
    # ln 2 in two pieces keeps the reduced argument exact
    y = (x - n_f * np.float32(0.693359375)) - n_f * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * y + np.float32(1.3981999507e-3)
    p = p * y + np.float32(8.3334519073e-3)
    p = p * y + np.float32(4.1665795894e-2)
    p = p * y + np.float32(1.6666665459e-1)
    p = p * y + np.float32(5.0000001201e-1)
    value = (p * y * y + y + np.float32(1.0)) * float_of(np.int32((n + np.int32(127)) << 23))
    return value if keep else np.float32(0.0)


@njit(inline="always")
def _fmix(h):  # type: ignore[no-untyped-def]
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * _MUL_A)
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * _MUL_B)
    return np.uint32(h ^ (h >> np.uint32(16)))


@njit(cache=True)
def key_words(seed, position, column, domain):  # type: ignore[no-untyped-def]
    """Prefix words (lo, hi) of a key, as `noise.key_words`."""
    lo, hi = _INIT_LO, _INIT_HI
    for word in (
        np.uint32(seed & 0xFFFFFFFF),
        np.uint32((seed >> 32) & 0xFFFFFFFF),
        np.uint32(position & 0xFFFFFFFF),
        np.uint32((position >> 32) & 0xFFFFFFFF),
        np.uint32(column & 0xFFFFFFFF),
        np.uint32(domain),
    ):
        lo = _fmix(np.uint32(lo ^ word))
        hi = _fmix(np.uint32(hi ^ word))
    return lo, hi


@njit(inline="always")
def token_bits(lo, hi, token):  # type: ignore[no-untyped-def]
    """32 random bits of a token, as `noise.token_bits`."""
    h = np.uint32(np.uint32(np.uint32(token) * _GOLDEN) + lo)
    h = np.uint32(h ^ (h >> np.uint32(16)))
    h = np.uint32(h * _MUL_A)
    h = np.uint32(h ^ hi)
    h = np.uint32(h ^ (h >> np.uint32(13)))
    h = np.uint32(h * _MUL_B)
    return np.uint32(h ^ (h >> np.uint32(16)))


@njit(inline="always")
def uniform(bits):  # type: ignore[no-untyped-def]
    v = np.float32((np.float64(bits) + 0.5) * 2.0**-32)
    return min(v, _MAX_UNIFORM)


@njit(inline="always")
def gumbel(bits):  # type: ignore[no-untyped-def]
    v = uniform(bits)
    if v < _SERIES_LIMIT:
        p = v * np.float32(1.0 / 6.0) + np.float32(1.0 / 5.0)
        p = v * p + np.float32(1.0 / 4.0)
        p = v * p + np.float32(1.0 / 3.0)
        p = v * p + np.float32(1.0 / 2.0)
        e = v * (v * p + np.float32(1.0))
    else:
        e = -np.float32(math.log(np.float32(np.float32(1.0) - v)))
    return -np.float32(math.log(e))


@njit(inline="always")
def bits_limit(needed):  # type: ignore[no-untyped-def]
    """Bits that a token may have at most for its Gumbel noise to reach `needed`.

    g >= needed  <=>  e <= exp(-needed)  <=>  v <= 1 - exp(-exp(-needed)); a caller lowers
    `needed` by its rounding slack, which covers that of this function too.
    """
    if needed < -2.0:
        return np.uint32(0xFFFFFFFF)
    limit = -math.expm1(-math.exp(-needed)) * 4294967296.0 + 1.0
    return np.uint32(min(limit, 4294967295.0))


@njit(cache=True, nogil=True)
def max_key(block):  # type: ignore[no-untyped-def]
    """Largest `order_key` of a block."""
    top = KEY_NEG_INF
    for t in range(block.size):
        key = order_key(widen(block[t]))
        top = key if key > top else top
    return top


@njit(cache=True, nogil=True)
def argmax(row, size):  # type: ignore[no-untyped-def]
    """First index of the largest entry of row[:size] (NaN is -inf), and whether it is > -inf."""
    best, best_start = KEY_NEG_INF, 0
    for start in range(0, size, BLOCK):
        key = max_key(row[start : min(start + BLOCK, size)])
        if key > best:
            best, best_start = key, start
    if best == KEY_NEG_INF:
        return 0, False
    for t in range(best_start, size):
        if order_key(widen(row[t])) == best:
            return t, True
    return 0, False


@njit(cache=True, nogil=True)
def fewest_bits(lo, hi, start, stop):  # type: ignore[no-untyped-def]
    """Least `token_bits` of the tokens start..stop-1."""
    least = np.uint32(0xFFFFFFFF)
    first = np.uint32(start)
    for i in range(stop - start):
        bits = token_bits(lo, hi, np.uint32(first + np.uint32(i)))
        least = bits if bits < least else least
    return least


@njit(cache=True, nogil=True)
def _best_in_block(scores, start, stop, d2t, lo, hi, limit, best, best_token):  # type: ignore[no-untyped-def]
    """Improve (best, best_token) by the tokens of a block whose bits are within `limit`."""
    for t in range(start, stop):
        target = t + d2t[t] if d2t.size else t
        bits = token_bits(lo, hi, target)
        if bits > limit:
            continue
        value = np.float32(scores[t] + gumbel(bits))
        if value > best or (value == best and t < best_token):
            best, best_token = value, t
    return best, best_token


@njit(cache=True, nogil=True)
def gumbel_argmax(scores, size, d2t, lo, hi, block_keys):  # type: ignore[no-untyped-def]
    """argmax over t < size of scores[t] + Gumbel noise of its target id; lowest t wins ties.

    scores: [>= size] float32, clean. d2t: [size] offsets, or empty. block_keys: [number of
    BLOCKs] int32 scratch. Returns 0 for a row without a finite score.
    """
    num_blocks = (size + BLOCK - 1) // BLOCK
    first, first_key = 0, KEY_NEG_INF
    for b in range(num_blocks):
        key = max_key(scores[b * BLOCK : min((b + 1) * BLOCK, size)])
        block_keys[b] = key
        if key > first_key:
            first, first_key = b, key
    if first_key == KEY_NEG_INF:
        return 0
    start, stop = first * BLOCK, min((first + 1) * BLOCK, size)
    everything = np.uint32(0xFFFFFFFF)
    best, best_token = _best_in_block(scores, start, stop, d2t, lo, hi, everything, NEG_INF, size)
    for b in range(num_blocks):
        if b == first or block_keys[b] == KEY_NEG_INF:
            continue
        top = np.float64(key_value(block_keys[b]))
        # Covers the float32 rounding of score + noise and of the logarithms behind the noise
        slack = 1e-4 + 1e-6 * abs(np.float64(best))
        limit = bits_limit(np.float64(best) - top - slack)
        start, stop = b * BLOCK, min((b + 1) * BLOCK, size)
        if d2t.size == 0 and fewest_bits(lo, hi, start, stop) > limit:
            continue
        best, best_token = _best_in_block(scores, start, stop, d2t, lo, hi, limit, best, best_token)
    return best_token
