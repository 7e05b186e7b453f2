"""vLLM's DSpark speculator with our drafter model and sequential sampling.

vLLM's class keeps what is about its own buffers: context KV, block inputs, attention metadata and
graph capture. Everything after the backbone's forward pass is `DraftOps` (kernels/protocols.py).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from vllm.compilation.cudagraph_pool import capture_pool
from vllm.config.compilation import CUDAGraphMode
from vllm.distributed.parallel_state import graph_capture
from vllm.utils.torch_utils import current_stream
from vllm.v1.attention.backends.utils import PAD_SLOT_ID
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator as StockSpeculator
from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration.backends import draft_ops
from vllm_dspark.integration.contract import EMBEDDED_CONTRACT, violations
from vllm_dspark.integration.cuda_graphs import NarrowDraftGraphs
from vllm_dspark.integration.models import drafter_architecture, register_drafters
from vllm_dspark.integration.models.foreign import head_of_model
from vllm_dspark.kernels.protocols import (
    DraftBatch,
    DraftHead,
    DraftOps,
    DraftOutput,
    SamplingState,
)
from vllm_dspark.proposer.embedded import MODEL_TYPES as EMBEDDED_MODEL_TYPES

logger = logging.getLogger("vllm.vllm_dspark")

# On a CPU, passes of up to so many columns run the backbone on a block of their own; wider ones on
# the block of K that the drafter was trained on, of which they use the first columns. Acceptance at
# positions from 2 on is lower in smaller blocks (non-causal attention), which outweighs a cheaper
# backbone from 3 columns on: docs/how-it-decides.md has the figures. On CUDA, where narrow passes
# are for loads at which the backbone's rows are paid for, every width has a block of its own.
_LARGEST_OWN_BLOCK = 2


class DSparkProposer(StockSpeculator):
    """Drafts blocks of K tokens with one confidence logit each.

    confidence_logits: [max_num_reqs, K] float32 by batch row of the last pass, before the sigmoid.
    draft_next: whether the coming `propose` drafts; draft_width: how many columns (None: K). The
    runner sets both from the step's order.
    draft_pass: blocks drafted for real batches so far.
    draft_ms: host time of the last draft pass, None when it was skipped (a CPU's step time).
    clock: the device's step clock, if the runner has one.
    """

    # of vLLM's speculator
    num_speculative_steps: int
    num_query_per_req: int
    query_cudagraph_manager: Any
    _anchor_idx: torch.Tensor

    def __init__(self, vllm_config: Any, device: torch.device, options: DSparkConfig) -> None:
        super().__init__(vllm_config, device)
        self.options = options
        self.ops: DraftOps | None = None  # made when the head is loaded
        self.confidence_logits = torch.zeros(
            self.max_num_reqs, self.num_speculative_steps, dtype=torch.float32, device=device
        )
        self.draft_head: DraftHead | None = None
        self.draft_next = True
        self.draft_width: int | None = None
        self.capture_context = False  # set by the runner where passes may be skipped
        self.narrow_widths: tuple[int, ...] = ()  # to be captured; set by the runner on CUDA
        self.draft_pass = 0
        self.draft_ms: float | None = None
        self.clock: Any = None
        self._anchors: dict[int, torch.Tensor] = {}  # of small blocks, by rows per request
        self._narrow_graphs: dict[int, NarrowDraftGraphs] = {}  # by columns
        self._context_graphs: dict[int, torch.cuda.CUDAGraph] = {}  # by context rows
        self._context_size = np.zeros(1, dtype=np.int64)  # rows -> size of the graph that fits

    @property
    def has_confidence(self) -> bool:
        """Whether the loaded drafter predicts acceptance."""
        return self.draft_head is not None and self.draft_head.confidence is not None

    @property
    def captured_widths(self) -> tuple[int, ...]:
        """Columns of the draft passes narrower than K that have graphs."""
        return tuple(sorted(self._narrow_graphs))

    def draft_logits_spec(self, vllm_config: Any) -> tuple[torch.dtype, float]:
        """Dtype and fill of the cached draft logits: columns no draft maps to must stay -inf."""
        dtype, fill = super().draft_logits_spec(vllm_config)
        draft_vocab = getattr(self.draft_model_config.hf_config, "draft_vocab_size", None)
        reduced = draft_vocab is not None and draft_vocab < self.vocab_size
        return dtype, float("-inf") if reduced else fill

    def load_draft_model(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """Load the drafter as our class where we have one, else as vLLM's."""
        config = self.draft_model_config.hf_config
        stock = list(config.architectures)
        ours = drafter_architecture(stock)
        if ours is None:
            return self._load_stock(target_model, target_attn_layer_names)
        register_drafters()
        config.architectures = [ours]
        try:
            model: torch.nn.Module = load_dspark_model(target_model, self.vllm_config)
        finally:
            config.architectures = stock
        model.tie_head()
        self._use_head(model.draft_head)
        return model

    def _load_stock(
        self, target_model: torch.nn.Module, target_attn_layer_names: set[str]
    ) -> torch.nn.Module:
        """vLLM's own class; with our heads where it keeps plain weights of theirs."""
        model: torch.nn.Module = super().load_draft_model(target_model, target_attn_layer_names)
        config = self.draft_model_config.hf_config
        head, why = None, "its heads are not known here"
        if config.model_type in EMBEDDED_MODEL_TYPES:
            broken = violations(contract=EMBEDDED_CONTRACT)
            why = "; ".join(broken)
            if not broken:
                head, why = head_of_model(model, self._draft_vocab, self.vocab_size)
        if head is None:
            logger.warning(
                "vllm-dspark: vLLM's class and sequential sampling serve the drafter %s, without "
                "confidences: %s",
                list(config.architectures),
                why,
            )
        else:
            self._use_head(head)
        return model

    @property
    def _draft_vocab(self) -> int:
        """Ids that can be drafted; a drafter may know more than the target."""
        config = self.draft_model_config.hf_config
        known = int(getattr(config, "draft_vocab_size", None) or config.vocab_size)
        return min(known, int(self.vocab_size))

    def _use_head(self, head: DraftHead) -> None:
        """Draft with this head from now on."""
        self.draft_head = head
        self.ops = draft_ops(
            self.options,
            head,
            max_requests=self.max_num_reqs,
            width=self.num_speculative_steps,
            draft_vocab=self._draft_vocab,
            device=self.device,
        )

    def init_cudagraph_manager(self, cudagraph_mode: CUDAGraphMode) -> None:
        """vLLM's, but the reference cannot be captured: it looks at values on the host."""
        if self.options.kernels == "reference":
            cudagraph_mode = CUDAGraphMode.NONE
        self._context_graphs.clear()
        self._narrow_graphs.clear()
        self._context_size = np.zeros(1, dtype=np.int64)
        super().init_cudagraph_manager(cudagraph_mode)

    def capture(self) -> None:
        """vLLM's draft graphs, those of narrow passes, and of what is left of a skipped pass."""
        super().capture()
        manager = self.query_cudagraph_manager
        if manager is None or not manager.graphs:
            return
        for width in self.narrow_widths if self.draft_head is not None else ():
            self._capture_narrow(width, manager.cudagraph_mode)
        if self.capture_context:
            self._capture_context(manager)

    def _capture_narrow(self, width: int, mode: CUDAGraphMode) -> None:
        """Graphs of draft passes of `width` columns, in blocks of their own."""
        rows = width if self.sample_from_anchor else width + 1
        self._narrow_graphs[width] = NarrowDraftGraphs(
            self.vllm_config, self.device, mode, decode_query_len=rows
        )
        self.draft_width = width
        with self._own_block(width):
            super().capture()
        self.draft_width = None

    def _capture_context(self, manager: CudaGraphManager) -> None:
        sizes = manager.compilation_config.cudagraph_capture_sizes or ()
        fitting = sorted(size for size in sizes if size <= self.max_num_reqs)
        # The slots are padding during capture: nothing is written.
        with torch.inference_mode(), graph_capture(device=self.device):
            for size in reversed(fitting):
                super()._precompute_context_kv(0, size)
                graph = torch.cuda.CUDAGraph()
                with (
                    capture_pool(manager.pool, self.vllm_config) as pool,
                    torch.cuda.graph(graph, pool, stream=current_stream()),
                ):
                    super()._precompute_context_kv(0, size)
                self._context_graphs[size] = graph
        if fitting:
            counts = np.arange(fitting[-1] + 1)
            self._context_size = np.array(fitting)[np.searchsorted(fitting, counts)]

    def _precompute_context_kv(self, start: int, end: int, dummy_run: bool = False) -> None:
        """Store the drafter's context KV of rows start..end, in a skipped pass by a graph."""
        if self.draft_next or start or dummy_run or not 0 < end < self._context_size.size:
            super()._precompute_context_kv(start, end, dummy_run)
            return
        size = int(self._context_size[end])
        self._context_slot_mappings[:, end:size].fill_(PAD_SLOT_ID)
        self._context_graphs[size].replay()

    def _build_uniform_attn_metadata(self, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
        """vLLM's; a skipped pass attends to nothing."""
        if not self.draft_next:
            return None
        metadata: dict[str, Any] | None = super()._build_uniform_attn_metadata(*args, **kwargs)
        return metadata

    def _sample_sequential(self, num_reqs: int, head_hidden: torch.Tensor) -> None:
        """Draft tokens and confidences of `num_reqs` rows from the backbone's hidden states.

        Of the first `draft_width` columns: vocabulary and sequential head, most of a pass's time
        on a CPU, are left out for the others.
        """
        if self.draft_head is None or self.ops is None:
            super()._sample_sequential(num_reqs, head_hidden)
            return
        width, confidence = self.num_speculative_steps, self.confidence_logits
        columns = slice(self.draft_width)

        def drafted(flat: torch.Tensor) -> torch.Tensor:
            """[num_reqs, n] of a buffer of K entries per request."""
            return flat[: num_reqs * width].view(num_reqs, width)[:, columns]

        hidden = head_hidden[drafted(self.sample_indices)]
        base_logits = self.model.compute_draft_logits(hidden.flatten(0, 1))
        batch = DraftBatch(
            base_logits=base_logits.view(*hidden.shape[:2], -1),
            hidden=hidden,
            anchor=self.input_buffers.input_ids[self._anchor_idx[:num_reqs]].long(),
            req_index=drafted(self.sample_idx_mapping)[:, 0],
            position=drafted(self.sample_pos),
        )
        out = DraftOutput(
            tokens=self.draft_tokens[:num_reqs],
            confidence_logits=confidence[:num_reqs, columns] if self.has_confidence else None,
            logits_cache=self.draft_logits,
        )
        self.ops.sample_block(
            self.draft_head, batch, SamplingState(self.temperature, self.seeds), out
        )

    def _generate_draft(self, *args: Any, **kwargs: Any) -> None:
        """Backbone and head; nothing when this step was ordered not to draft."""
        if self.draft_next:
            super()._generate_draft(*args, **kwargs)

    @contextmanager
    def _own_block(self, width: int) -> Iterator[None]:
        """A block of `width` < K columns within: vLLM's code reads its sizes from attributes.

        Buffers keep their K columns. Graphs are those that were captured for the width.
        """
        full = self.num_speculative_steps, self.num_query_per_req, self._anchor_idx
        manager = self.query_cudagraph_manager
        rows = width if self.sample_from_anchor else width + 1
        self.num_speculative_steps, self.num_query_per_req = width, rows
        self._anchor_idx = self._anchor_rows(rows)
        self.query_cudagraph_manager = self._narrow_graphs.get(width, manager)
        try:
            yield
        finally:
            self.num_speculative_steps, self.num_query_per_req, self._anchor_idx = full
            self.query_cudagraph_manager = manager

    def _has_own_block(self, width: int) -> bool:
        on_cpu = self.device.type == "cpu"
        return width < self.num_speculative_steps and (not on_cpu or width <= _LARGEST_OWN_BLOCK)

    def _anchor_rows(self, rows_per_request: int) -> torch.Tensor:
        """[max_num_reqs] first row of each request in a flat batch of blocks."""
        found = self._anchors.get(rows_per_request)
        if found is None:
            requests = torch.arange(self.max_num_reqs, dtype=torch.int64, device=self.device)
            found = self._anchors[rows_per_request] = requests * rows_per_request
        return found

    def propose(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Store the context KV of the verified tokens and, unless skipped, draft a block.

        Returns [num_reqs, K] draft tokens, of which the first `draft_width` columns are new; -1
        throughout when drafting is skipped.
        """
        started = time.perf_counter()
        if self.clock is not None:
            self.clock.draft_start()
        if not self.draft_next:
            # Any graph holds the whole draft step, so a skipped one runs without.
            kwargs["is_profile"] = True
        width = self.draft_width
        smaller = self.draft_next and width is not None and self._has_own_block(width)
        with self._own_block(width) if smaller and width else nullcontext():
            drafts: torch.Tensor = super().propose(*args, **kwargs)
        self.draft_width = None
        if self.clock is not None:
            self.clock.draft_end(self.draft_next, width)
        if self.draft_next:
            self.draft_pass += not kwargs.get("dummy_run", False)
            self.draft_ms = (time.perf_counter() - started) * 1e3
            return drafts
        self.draft_ms, self.draft_next = None, True
        return torch.full_like(drafts, -1)
