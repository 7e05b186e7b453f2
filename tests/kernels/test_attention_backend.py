"""The CUSTOM attention backend without an engine: metadata, leaders, and the layer's output."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.attention_helpers import paged_case, relative_error
from vllm_dspark.kernels.attention_reference import ragged_attention_reference

pytest.importorskip("vllm", reason="the backend is vLLM's: needs vLLM")

from vllm.v1.attention.backend import AttentionCGSupport, CommonAttentionMetadata
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from vllm_dspark.integration.attention_backend import (
    RaggedAttentionBackend,
    RaggedAttentionImpl,
    RaggedMetadataBuilder,
)
from vllm_dspark.integration.register import register

HEADS, KV_HEADS, DIM, K = 6, 2, 64, 3


def make_layers(device, **options):
    """Two layers of one kind and one with a sliding window, as the runner registers them."""
    layers = {}
    for name, window in (("layers.0", None), ("layers.1", 40), ("layers.2", None)):
        impl = RaggedAttentionImpl(HEADS, DIM, 0.2, KV_HEADS, None, window, **options)
        scale = torch.tensor([0.7], device=device), torch.tensor([1.3], device=device)
        layers[name] = SimpleNamespace(
            layer_name=name, impl=impl, _k_scale=scale[0], _v_scale=scale[1]
        )
    return layers


def make_builder(layers, device):
    config = SimpleNamespace(
        compilation_config=SimpleNamespace(static_forward_context=layers),
        speculative_config=SimpleNamespace(num_speculative_tokens=K, parallel_drafting=False),
        use_v2_model_runner=True,
    )
    return RaggedMetadataBuilder(None, list(layers), config, device)


def make_common(case, *, host_lens=None, causal=True):
    starts = case.query_start_loc
    lens = starts.diff() if host_lens is None else torch.tensor(host_lens)
    host = torch.cat([torch.zeros(1), lens.cpu().cumsum(0)]).int()
    return CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=host,
        seq_lens=case.seq_lens,
        num_reqs=len(case.seq_lens),
        num_actual_tokens=case.q.shape[0],
        max_query_len=int(lens.max()),
        max_seq_len=int(case.seq_lens.max()),
        block_table_tensor=case.block_table,
        slot_mapping=torch.zeros(case.q.shape[0], dtype=torch.int64, device=starts.device),
        causal=causal,
    )


def packed_cache(case, dtype):
    """vLLM's one tensor [blocks, kv heads, page, 2 * head size] of a case's views."""
    cache = torch.cat([case.k_cache, case.v_cache], dim=-1).transpose(1, 2)
    return cache.view(torch.uint8) if dtype.itemsize == 1 else cache


def check_layers(case, layers, metadata, causal=True):
    """Runs the layers in order and compares each with the reference."""
    cache = packed_cache(case, case.k_cache.dtype)
    used = int(case.query_start_loc[-1])
    for layer in layers.values():
        out = torch.full_like(case.q, float("nan"))
        layer.impl.forward(layer, case.q, case.q, case.q, cache, metadata, out)
        expected = torch.full_like(case.q, float("nan"))
        quantized = case.k_cache.dtype.itemsize == 1
        ragged_attention_reference(
            expected,
            case.q,
            case.k_cache,
            case.v_cache,
            case.block_table,
            case.query_start_loc,
            case.seq_lens,
            0.2,
            layer.impl._shapes[causal],
            None,
            layer._k_scale if quantized else None,
            layer._v_scale if quantized else None,
        )
        assert relative_error(out[:used], expected[:used]) < 1e-2, layer.layer_name


def paged(query, seq, device, **options):
    from vllm_dspark.kernels.attention_plan import AttentionShape

    shape = AttentionShape(HEADS, KV_HEADS, DIM)
    return paged_case(query, seq, shape, dtype=torch.bfloat16, device=device, **options)


def test_one_leader_for_each_kind(device):
    layers = make_layers(device)
    assert make_builder(layers, device).leaders == {"layers.0", "layers.1"}


@pytest.mark.parametrize("causal", [True, False])
def test_mixed_batch(causal, device):
    """A prefill chunk beside windows and a padded request."""
    case = paged([1, 4, 37, 0], [90, 200, 37, 0], device, padded_tokens=3)
    layers = make_layers(device)
    metadata = make_builder(layers, device).build(0, make_common(case, causal=causal))
    check_layers(case, layers, metadata, causal)


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_fp8_cache(dtype, device):
    types = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
    case = paged([1, 4, 9], [90, 200, 37], device, cache_dtype=types[dtype])
    layers = make_layers(device, kv_cache_dtype=dtype)
    metadata = make_builder(layers, device).build(0, make_common(case))
    check_layers(case, layers, metadata)


def test_device_lengths_win(device):
    """The host spread 8 tokens evenly; on the device one request has 4 of them and one has 1."""
    case = paged([4, 1, 2, 1], [90, 65, 33, 8], device)
    layers = make_layers(device)
    metadata = make_builder(layers, device).build(0, make_common(case, host_lens=[2, 2, 2, 2]))
    check_layers(case, layers, metadata)


def test_graph_serves_later_lengths(device):
    """One capture's metadata, other lengths at each pass, and nothing allocated after `build`."""
    case = paged([4, 4, 4], [300, 64, 17], device)
    layers = make_layers(device)
    builder = make_builder(layers, device)
    metadata = builder.build_for_cudagraph_capture(make_common(case))
    made = set(builder.launches._layers)
    check_layers(case, layers, metadata)
    for windows, lens in (([1, 2, 4], [297, 62, 17]), ([3, 0, 1], [40, 0, 9])):
        case.query_start_loc.copy_(torch.tensor([0, *windows]).cumsum(0))
        case.seq_lens.copy_(torch.tensor(lens))
        check_layers(case, layers, metadata)
    assert set(builder.launches._layers) == made, "a forward pass made buffers"


def test_what_vllm_is_told():
    register()
    assert AttentionBackendEnum.CUSTOM.get_class() is RaggedAttentionBackend
    assert AttentionBackendEnum[RaggedAttentionBackend.get_name()] is AttentionBackendEnum.CUSTOM
    support = RaggedMetadataBuilder.get_cudagraph_support(None, None)
    assert support is AttentionCGSupport.ALWAYS
    assert RaggedAttentionBackend.supports_device_cpu_query_lens_mismatch()
    assert RaggedAttentionBackend.supports_kv_cache_dtype("fp8")
    assert not RaggedAttentionBackend.supports_kv_cache_dtype("int8_per_token_head")
    assert not RaggedAttentionBackend.supports_head_size(512)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alibi_slopes": [0.5] * HEADS}, "ALiBi"),
        ({"attn_type": "encoder_only"}, "encoder_only"),
    ],
)
def test_refuses_by_name(options, message):
    with pytest.raises(NotImplementedError, match=message):
        RaggedAttentionImpl(HEADS, DIM, 0.2, KV_HEADS, **options)
