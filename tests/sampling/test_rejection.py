"""The vectorised torch sampler never asks the device for a value (equality: tests/cpu)."""

import dataclasses

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.support import blocks
from vllm_dspark.kernels.protocols import RejectRule
from vllm_dspark.kernels.reference import ReferenceRejectOps
from vllm_dspark.sampling.rejection import TorchRejectOps

SHAPE = blocks.Shape(rows=6, width=3, vocab=40, slots=8)


def moved(record, move):
    """A frozen dataclass of tensors with every tensor passed through `move`."""
    fields = {f.name: getattr(record, f.name) for f in dataclasses.fields(record)}
    return dataclasses.replace(
        record, **{n: move(v) for n, v in fields.items() if isinstance(v, torch.Tensor)}
    )


def case(seed, cache):
    gen = torch.Generator().manual_seed(seed)
    state = blocks.sampling_state(SHAPE, gen)
    return blocks.reject_batch(SHAPE, gen, state, cache), state


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("cache", [None, torch.bfloat16])
def test_no_value_is_read_back(method, cache):
    """Fake tensors have no values: any .item(), bool() or nonzero() would raise here."""
    batch, state = case(0, cache)
    with FakeTensorMode() as mode:
        fake_batch, fake_state = moved(batch, mode.from_tensor), moved(state, mode.from_tensor)
        outcome = TorchRejectOps().reject(fake_batch, fake_state, RejectRule(SHAPE.width, method))
        assert outcome.sampled.shape == (SHAPE.rows, SHAPE.width + 1)
        # and the detector works: the reference does read values
        with pytest.raises(DataDependentOutputException):
            ReferenceRejectOps().reject(fake_batch, fake_state, RejectRule(SHAPE.width, method))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize("cache", [None, torch.bfloat16])
def test_on_a_gpu_in_a_captured_graph(method, cache):
    """Synchronisations are errors, the sampler is captured, replays agree with the reference."""
    rule = RejectRule(SHAPE.width, method)
    batch, state = case(1, cache)
    gpu_batch, gpu_state = moved(batch, torch.Tensor.cuda), moved(state, torch.Tensor.cuda)
    torch.cuda.set_sync_debug_mode("error")
    try:
        TorchRejectOps().reject(gpu_batch, gpu_state, rule)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outcome = TorchRejectOps().reject(gpu_batch, gpu_state, rule)
    for seed in range(4):
        gpu_state.seeds.copy_(torch.arange(SHAPE.slots) + seed)
        graph.replay()
        expected = ReferenceRejectOps().reject(
            batch, dataclasses.replace(state, seeds=gpu_state.seeds.cpu()), rule
        )
        blocks.assert_same_outcome(moved(outcome, torch.Tensor.cpu), expected)
