"""vLLM's CUSTOM attention backend (`--attention-backend CUSTOM`): ragged verify attention.

One kernel serves decode, verification windows of any mix of lengths and prefill chunks
(``kernels/ragged_attention.py``). Launch geometry follows from what a batch or a captured graph
promises (requests, tokens, longest query); the lengths themselves are read on the device. So host
and device query lengths may differ, and any batch may replay a full graph.

The step's work list is planned by the model, not by `build`: the first layer of each kind (the
leader) launches the plan before its attention, into the graph when one is captured. What `build`
does on later steps can then not disagree with what a graph captured, and windows that are
allocated on the device after `build` are seen.

Cache insertion is the Triton backend's; pages, prefix caching and fp8 caches (per-tensor scales)
are as there.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from vllm.config import VllmConfig
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionLayer,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
    MultipleOf,
    max_decode_query_len,
)
from vllm.v1.attention.ops.triton_reshape_and_cache_flash import triton_reshape_and_cache_flash
from vllm.v1.kv_cache_interface import AttentionSpec

from vllm_dspark.kernels.attention_plan import AttentionShape
from vllm_dspark.kernels.ragged_attention import AttentionScratch, RaggedAttention, shared_scratch

_FP8_TYPES = {
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
    "fp8_e5m2": torch.float8_e5m2,
}
_LARGEST_HEAD = 256


class RaggedLaunches:
    """Geometries and their buffers, by kind of layer and size of batch; made when first needed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scratch: dict[AttentionShape, AttentionScratch] = {}
        self._layers: dict[tuple[AttentionShape, float, tuple[int, int, int]], RaggedAttention] = {}

    def get(
        self, shape: AttentionShape, scale: float, promise: tuple[int, int, int]
    ) -> RaggedAttention:
        """The launch for batches of up to `promise` (requests, tokens, longest query)."""
        key = (shape, scale, promise)
        if key not in self._layers:
            if shape not in self._scratch:
                self._scratch[shape] = shared_scratch(shape, self._device)
            self._layers[key] = RaggedAttention(
                shape, *promise, self._device, scale=scale, scratch=self._scratch[shape]
            )
        return self._layers[key]


@dataclass
class RaggedMetadata(AttentionMetadata):
    """What a forward pass of one layer group reads; lengths stay on the device."""

    # [num_reqs + 1] int32
    query_start_loc: torch.Tensor
    # [num_reqs] int32
    seq_lens: torch.Tensor
    # [num_reqs, max_blocks] int32
    block_table: torch.Tensor
    # [num_tokens] int64
    slot_mapping: torch.Tensor
    num_actual_tokens: int
    causal: bool
    # (requests, tokens, longest query) that the batch, or every replay of its graph, stays within
    promise: tuple[int, int, int]
    launches: RaggedLaunches
    # names of the layers that plan: the first of each kind
    leaders: frozenset[str]


class RaggedMetadataBuilder(AttentionMetadataBuilder[RaggedMetadata]):
    """Passes the runner's device tensors on; nothing is read from the device."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    # A draft step's metadata are the runner's persistent buffers.
    supports_draft_decode_metadata_update = True

    def __init__(
        self,
        kv_cache_spec: AttentionSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.launches = RaggedLaunches(device)
        self.window = max_decode_query_len(vllm_config)
        layers = vllm_config.compilation_config.static_forward_context
        first: dict[Any, str] = {}
        for name in layer_names:
            first.setdefault(layers[name].impl.kind, name)
        self.leaders = frozenset(first.values())

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> RaggedMetadata:
        common = common_attn_metadata
        # Rounded up, so that eager steps need few geometries. On the device a window may be longer
        # than on the host, where trimmed drafts are spread evenly, but not longer than K + 1.
        promise = (
            _power_of_two(common.num_reqs),
            _power_of_two(common.num_actual_tokens),
            max(self.window, _power_of_two(common.max_query_len)),
        )
        return self._metadata(common, promise)

    def build_for_cudagraph_capture(
        self, common_attn_metadata: CommonAttentionMetadata
    ) -> RaggedMetadata:
        """Makes the buffers too: a tensor that is first allocated in a graph belongs to it."""
        common = common_attn_metadata
        longest = max(common.max_query_len, min(self.window, common.num_actual_tokens))
        metadata = self._metadata(common, (common.num_reqs, common.num_actual_tokens, longest))
        layers = self.vllm_config.compilation_config.static_forward_context
        for name in self.leaders:
            layers[name].impl.attention(metadata)
        return metadata

    def update_draft_decode_metadata(self, metadata: RaggedMetadata) -> None:
        """Nothing to refresh: the leader plans from the device tensors in every pass."""

    def _metadata(
        self, common: CommonAttentionMetadata, promise: tuple[int, int, int]
    ) -> RaggedMetadata:
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(
                "attention backend CUSTOM (vllm-dspark) takes one causality per batch, got one per "
                "request; use --attention-backend TRITON_ATTN"
            )
        return RaggedMetadata(
            query_start_loc=common.query_start_loc[: common.num_reqs + 1],
            seq_lens=common.seq_lens[: common.num_reqs],
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            num_actual_tokens=common.num_actual_tokens,
            causal=common.causal,
            promise=promise,
            launches=self.launches,
            leaders=self.leaders,
        )


class RaggedAttentionImpl(AttentionImpl[RaggedMetadata]):
    """One layer's attention."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if alibi_slopes is not None:
            raise NotImplementedError(
                "attention backend CUSTOM (vllm-dspark) has no ALiBi; "
                "use --attention-backend TRITON_ATTN"
            )
        if attn_type != AttentionType.DECODER:
            raise NotImplementedError(
                f"attention backend CUSTOM (vllm-dspark) serves decoders, not {attn_type!r}; "
                "use --attention-backend FLASH_ATTN"
            )
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        self.sinks = sinks
        self._fp8 = _FP8_TYPES.get(kv_cache_dtype)
        old = current_platform.is_cuda() and not current_platform.has_device_capability(89)
        if self._fp8 is torch.float8_e4m3fn and old:
            raise ValueError(
                f"kv_cache_dtype {kv_cache_dtype} needs compute capability 8.9 in attention "
                "backend CUSTOM; use fp8_e5m2, or bfloat16"
            )
        self._shapes = {
            causal: AttentionShape(
                num_heads,
                self.num_kv_heads,
                head_size,
                causal=causal,
                sliding_window=sliding_window or 0,
                soft_cap=float(logits_soft_cap or 0.0),
                has_sinks=sinks is not None,
                cache_bytes=2 if self._fp8 is None else 1,
            )
            for causal in (True, False)
        }
        # Layers of one kind share a plan.
        self.kind = (self._shapes[True], self.scale)

    def attention(self, metadata: RaggedMetadata) -> RaggedAttention:
        """The launch of this layer for a batch like `metadata`'s."""
        return metadata.launches.get(self._shapes[metadata.causal], self.scale, metadata.promise)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: RaggedMetadata,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of [num_tokens, num_heads, head_size] queries into `output`."""
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("attention backend CUSTOM (vllm-dspark) quantises no output")
        if attn_metadata is None:
            return output.fill_(0)  # the run that measures memory
        attention = self.attention(attn_metadata)
        if layer.layer_name in attn_metadata.leaders:  # type: ignore[attr-defined]
            attention.plan(attn_metadata.query_start_loc, attn_metadata.seq_lens)
        keys, values = self._views(kv_cache)
        scales = (None, None) if self._fp8 is None else (layer._k_scale, layer._v_scale)
        shape = (-1, self.num_heads, self.head_size)
        attention.forward(
            output.view(shape),
            query.view(shape),
            keys,
            values,
            attn_metadata.block_table,
            self.sinks,
            *scales,
        )
        return output

    def do_kv_cache_update(
        self,
        layer: AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores the step's keys and values at their slots."""
        keys, values = self._views(kv_cache)
        triton_reshape_and_cache_flash(
            key,
            value,
            keys,
            values,
            slot_mapping,
            self.kv_cache_dtype,
            layer._k_scale,
            layer._v_scale,
        )

    def _views(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, [blocks, page, kv heads, head_size], of vLLM's [blocks, kv heads, page, 2 x]."""
        if self._fp8 is not None:
            kv_cache = kv_cache.view(self._fp8)
        keys, values = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return keys, values


class RaggedAttentionBackend(AttentionBackend):
    """What vLLM asks before it chooses a backend."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", "float16", "bfloat16", *_FP8_TYPES]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        """The enum member's name: vLLM looks the backend up by it."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[RaggedAttentionImpl]:
        return RaggedAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[RaggedMetadataBuilder]:
        return RaggedMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return 32 <= head_size <= _LARGEST_HEAD and head_size % 8 == 0

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return True

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        return bool(capability.major >= 8)


def _power_of_two(value: int) -> int:
    return 1 << max(int(value) - 1, 0).bit_length()
