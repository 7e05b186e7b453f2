"""Device noise must be the specification's bits: rejection re-derives what drafting drew."""

import torch
import triton
import triton.language as tl

from vllm_dspark.kernels import noise, noise_device


@triton.jit
def _noise_kernel(bits_ptr, gumbel_ptr, seed_ptr, position_ptr, column_ptr, V, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    seed, position = tl.load(seed_ptr + row), tl.load(position_ptr + row)
    lo, hi = noise_device.key_words(seed, position, tl.load(column_ptr + row), 2)
    token = tl.arange(0, BLOCK)
    bits = noise_device.token_bits(lo, hi, token)
    tl.store(bits_ptr + row * V + token, bits.to(tl.int64), mask=token < V)
    tl.store(gumbel_ptr + row * V + token, noise_device.gumbel(bits), mask=token < V)


def test_bits_equal_the_specification(device):
    seed = torch.tensor([0, 1, -1, 2**40 + 5, -(2**63)], device=device)
    position = torch.tensor([0, 7, 2**33 + 1, 131_071, 5], device=device)
    column = torch.tensor([0, 3, 15, 7, 1], dtype=torch.int32, device=device)
    vocab = 5000
    bits = torch.empty(5, vocab, dtype=torch.int64, device=device)
    gumbel = torch.empty(5, vocab, device=device)
    _noise_kernel[(5,)](bits, gumbel, seed, position, column, vocab, BLOCK=8192)
    tokens = torch.arange(vocab, device=device)
    lo, hi = noise.key_words(seed, position, column.long(), noise.RESAMPLE)
    expected = noise.token_bits(lo[:, None], hi[:, None], tokens[None, :])
    assert torch.equal(bits, expected)
    # The device's log is an approximation; absolute error, since g crosses zero.
    limit = 2e-6 if device.type == "cpu" else 2e-5
    assert (gumbel - noise.gumbel(expected)).abs().max() < limit
