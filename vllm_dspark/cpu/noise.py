"""The random streams of vLLM's V2 sampler, bit for bit.

Two generators: a murmur3 hash of (seed, position, token) feeds the Gumbel noise of
``gpu/sample/gumbel.py``; Triton's Philox4x32-10 (``tl.rand``) feeds the acceptance test of
``gpu/spec_decode/rejection_sampler_utils.py``. Integer work is compiled; logarithms go
through numpy, because the Triton interpreter's do, and numba's differ in the last bit.
Checked against vLLM 0.32.0 and Triton 3.9.0.
"""

import numpy as np

from vllm_dspark.cpu.arrays import Array
from vllm_dspark.cpu.jit import lazy_njit

# Draft noise lives at positions shifted by this, disjoint from the target's (gumbel.py).
DRAFT_POSITION_SALT = 1 << 30
# Domain of the second hash when 64 bits are wanted (gumbel.py::murmur3_uniform64).
SECOND_WORD_DOMAIN = 0x9E3779B9
# tl.rand's smallest positive value; vLLM lifts zeros to it before taking a logarithm.
SMALLEST_RAND = np.float32(4.6566127342e-10)
# Tokens whose noise is made at a time: its three buffers stay in a core's L1/L2 cache.
CHUNK = 4096


def _mix(state: int, key: int) -> int:
    """One murmur3 round over 32-bit words."""
    mask = 0xFFFFFFFF
    key = key * 0xCC9E2D51 & mask
    key = (key << 15 | key >> 17) & mask
    state ^= key * 0x1B873593 & mask
    state = (state << 13 | state >> 19) & mask
    return (state * 5 + 0xE6546B64) & mask


def stream_prefix(seed: int, position: int, domain: int = 0) -> int:
    """Hash state of (seed, position), shared by all tokens of a row."""
    mask = 0xFFFFFFFF
    state = _mix(domain, seed & mask)
    state = _mix(state, seed >> 32 & mask)
    return _mix(state, position & mask)


@lazy_njit("void(uint32, uint32, uint32[::1])")
def _hash_tokens(prefix, first, words):  # type: ignore[no-untyped-def]
    """Set words[t] to murmur3 of (prefix, token first + t)."""
    for token in range(words.shape[0]):
        key = np.uint32((first + np.uint32(token)) * np.uint32(0xCC9E2D51))
        key = np.uint32((key << np.uint32(15)) | (key >> np.uint32(17)))
        h = np.uint32(prefix ^ np.uint32(key * np.uint32(0x1B873593)))
        h = np.uint32((h << np.uint32(13)) | (h >> np.uint32(19)))
        h = np.uint32(h * np.uint32(5) + np.uint32(0xE6546B64))
        h = np.uint32(h ^ np.uint32(16))
        h = np.uint32(h ^ (h >> np.uint32(16)))
        h = np.uint32(h * np.uint32(0x85EBCA6B))
        h = np.uint32(h ^ (h >> np.uint32(13)))
        h = np.uint32(h * np.uint32(0xC2B2AE35))
        words[token] = np.uint32(h ^ (h >> np.uint32(16)))


@lazy_njit("void(uint32[::1], float32[::1], float32[::1])")
def _split_uniforms(words, series, rest):  # type: ignore[no-untyped-def]
    """Uniform u of each word: series = -log(1-u) where u < 1/4 (else 0), rest = 1 - u."""
    f = np.float32
    for i in range(words.shape[0]):
        high = f(words[i] >> np.uint32(16)) * f(1.52587890625e-05)
        low = (f(words[i] & np.uint32(0xFFFF)) + f(0.5)) * f(2.3283064365386963e-10)
        u = f(high + low)
        p = f(0.125)
        p = f(1.0 / 7.0) + f(u * p)
        p = f(1.0 / 6.0) + f(u * p)
        p = f(1.0 / 5.0) + f(u * p)
        p = f(1.0 / 4.0) + f(u * p)
        p = f(1.0 / 3.0) + f(u * p)
        p = f(0.5) + f(u * p)
        p = f(1.0) + f(u * p)
        series[i] = f(u * p) if u < f(0.25) else f(0.0)
        rest[i] = max(f(f(1.0) - u), f(5.960464477539063e-08))


@lazy_njit("void(float32[::1], float32[::1])")
def _choose_branch(series, rest):  # type: ignore[no-untyped-def]
    """Set rest to -log(1-u) from whichever of the two branches applies."""
    for i in range(series.shape[0]):
        rest[i] = series[i] if series[i] != np.float32(0.0) else -rest[i]


def _words(prefix: int, first: int, words: Array) -> Array:
    """Hashes of tokens first, first + 1, ... of one stream."""
    _hash_tokens(np.uint32(prefix), np.uint32(first), words)
    return words


def gumbel_noise(seed: int, position: int, vocab_size: int) -> Array:
    """Float32 Gumbel noise of tokens 0..vocab_size-1 at one position of a request's stream."""
    prefix = stream_prefix(seed, position)
    noise = np.empty(vocab_size, dtype=np.float32)
    scratch = np.empty(min(CHUNK, vocab_size), dtype=np.uint32)
    branch = np.empty(scratch.shape[0], dtype=np.float32)
    for first in range(0, vocab_size, CHUNK):
        rest = noise[first : first + CHUNK]
        size = rest.shape[0]
        _split_uniforms(_words(prefix, first, scratch[:size]), branch[:size], rest)
        np.log(rest, out=rest)
        _choose_branch(branch[:size], rest)
        np.log(rest, out=rest)
        np.negative(rest, out=rest)
    return noise


def gumbel_noise64(seed: int, position: int, vocab_size: int) -> Array:
    """Float64 Gumbel noise of the same tokens (vLLM's ``use_fp64_gumbel``)."""
    low = _words(stream_prefix(seed, position), 0, np.empty(vocab_size, dtype=np.uint32))
    second = stream_prefix(seed, position, SECOND_WORD_DOMAIN)
    high = _words(second, 0, np.empty(vocab_size, dtype=np.uint32))
    bits = (high.astype(np.uint64) << np.uint64(32) | low) >> np.uint64(11)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-53
    uniform[uniform == 1.0] -= 2.0**-53
    noise: Array = -np.log(-np.log(uniform))
    return noise


@lazy_njit("void(int64[::1], int64[::1], float32[::1])")
def _philox_uniforms(seeds, offsets, uniforms):  # type: ignore[no-untyped-def]
    """Set uniforms[i] to tl.rand(seeds[i], offsets[i]) for 64-bit offsets."""
    low = np.uint64(0xFFFFFFFF)
    shift = np.uint64(32)
    for i in range(seeds.shape[0]):
        k0 = np.uint64(seeds[i]) & low
        k1 = np.uint64(seeds[i]) >> shift
        c0 = np.uint64(offsets[i]) & low
        c1 = np.uint64(offsets[i]) >> shift
        c2 = np.uint64(0)
        c3 = np.uint64(0)
        for _ in range(10):
            b = np.uint64(0xCD9E8D57) * c2
            a = np.uint64(0xD2511F53) * c0
            c0 = (b >> shift) ^ c1 ^ k0
            c2 = (a >> shift) ^ c3 ^ k1
            c1 = b & low
            c3 = a & low
            k0 = (k0 + np.uint64(0x9E3779B9)) & low
            k1 = (k1 + np.uint64(0xBB67AE85)) & low
        signed = np.int32(np.uint32(c0))
        if signed < 0:
            signed = np.int32(-signed - np.int32(1))
        uniforms[i] = np.float32(signed) * np.float32(4.6566127342e-10)


def philox_uniforms(seeds: Array, offsets: Array) -> Array:
    """``tl.rand`` of each (seed, offset), lifted off zero as vLLM's acceptance test does."""
    uniforms = np.empty(seeds.shape[0], dtype=np.float32)
    _philox_uniforms(
        np.ascontiguousarray(seeds, dtype=np.int64),
        np.ascontiguousarray(offsets, dtype=np.int64),
        uniforms,
    )
    return np.maximum(uniforms, SMALLEST_RAND, out=uniforms)
