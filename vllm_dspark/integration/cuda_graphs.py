"""Captured graphs of the target for every kind of step (checked on vLLM 0.32.0).

vLLM captures decode graphs of one family: K + 1 rows for each request, or, for its own adaptive
verification, variable rows. We need three at once: native steps replay uniform K + 1, steps without
drafts uniform 1, and trimmed ones variable rows (1..K+1 each). `WindowGraphs` adds the last two to
what vLLM captures, and finds for each step the smallest graph of the most special family that fits.
"""

import logging
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.attn_utils import (
    get_query_lens_mismatch_unsupported_backend,
    get_varlen_cudagraph_unsupported_backend,
)
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, ModelCudaGraphManager
from vllm.v1.worker.gpu.spec_decode.dflash.cudagraph import DFlashCudaGraphManager

from vllm_dspark.planning.cost import StepShape

logger = logging.getLogger("vllm.vllm_dspark")


class WindowGraphs(ModelCudaGraphManager):
    """`ModelCudaGraphManager` with graphs of one row per request and of variable rows.

    variable: whether the attention backends can replay variable rows.
    """

    def __init__(self, *args: Any, variable: bool, **kwargs: Any) -> None:
        self._variable = variable
        self._forced: BatchExecutionDescriptor | None = None
        super().__init__(*args, **kwargs)

    def _init_candidates(self) -> None:
        super()._init_candidates()
        sizes = self.compilation_config.cudagraph_capture_sizes
        # Graphs of mode FULL without a decode routine of its own take any batch already.
        if not (self.cudagraph_mode.separate_routine() and sizes):
            return
        if self.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL:
            return
        full = self._capture_descs.setdefault(CUDAGraphMode.FULL, [])
        full.extend(desc for desc in self._our_descriptors(sorted(sizes)) if desc not in full)
        # Largest first: later captures fit into the memory that the first one took.
        full.sort(key=lambda desc: desc.num_tokens, reverse=True)
        self._rank_candidates()

    def _our_descriptors(self, sizes: list[int]) -> Iterator[BatchExecutionDescriptor]:
        for loras in self.lora_capture_cases:
            for size in sizes:
                if size <= self.max_num_reqs:
                    yield BatchExecutionDescriptor(
                        cg_mode=CUDAGraphMode.FULL,
                        num_tokens=size,
                        num_reqs=size,
                        uniform_token_count=1,
                        num_active_loras=loras,
                    )
                if self._variable and size <= self.max_num_reqs * self.decode_query_len:
                    yield BatchExecutionDescriptor(
                        cg_mode=CUDAGraphMode.FULL,
                        num_tokens=size,
                        num_reqs=min(size, self.max_num_reqs),
                        max_query_len=self.decode_query_len,
                        num_active_loras=loras,
                    )

    def _rank_candidates(self) -> None:
        """For each token count, the smallest graph of each family, special families first.

        vLLM's own list holds, per count, graphs of one size only, so a family without that very
        size would hide the others.
        """
        families: dict[tuple[Any, ...], list[BatchExecutionDescriptor]] = defaultdict(list)
        for mode in (CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE):
            for desc in reversed(self._capture_descs.get(mode, [])):
                uniform = -(desc.uniform_token_count or 0)
                families[
                    mode.value != CUDAGraphMode.FULL.value,
                    uniform,
                    desc.num_ubatches,
                    desc.num_active_loras,
                ].append(desc)
        candidates: dict[tuple[int, int], list[BatchExecutionDescriptor]] = {}
        for (_, _, _, loras), members in sorted(families.items()):
            start = 0
            for desc in members:  # ascending
                for count in range(start, desc.num_tokens + 1):
                    candidates.setdefault((count, loras), []).append(desc)
                start = max(start, desc.num_tokens + 1)
        self._candidates = candidates

    def dispatch(self, *args: Any, **kwargs: Any) -> BatchExecutionDescriptor:
        """vLLM's choice among the candidates, or the graph that is being timed."""
        if self._forced is not None:
            return self._forced
        desc: BatchExecutionDescriptor = super().dispatch(*args, **kwargs)
        return desc

    @contextmanager
    def forced(self, desc: BatchExecutionDescriptor) -> Iterator[None]:
        """Every step inside runs as `desc` (cost profiling)."""
        self._forced = desc
        try:
            yield
        finally:
            self._forced = None

    def families(self) -> dict[StepShape, list[BatchExecutionDescriptor]]:
        """Captured full decode graphs by shape of step, ascending, without LoRA."""
        found: dict[StepShape, list[BatchExecutionDescriptor]] = {}
        for desc in sorted(self.graphs, key=lambda d: d.num_tokens):
            if desc.num_active_loras or desc.num_ubatches > 1:
                continue
            if desc.uniform_token_count == 1:
                shape = StepShape.SINGLE
            elif desc.uniform_token_count == self.decode_query_len:
                shape = StepShape.NATIVE
            elif desc.uniform_token_count is None and desc.max_query_len is not None:
                shape = StepShape.RAGGED
            else:
                continue
            found.setdefault(shape, []).append(desc)
        return found


class NarrowDraftGraphs(DFlashCudaGraphManager):
    """Graphs of draft passes of blocks of few rows, for request counts of growing distance.

    Narrow passes are for many requests; to have them at each size that vLLM captures would double
    the time of capturing, and here a padded row costs little beside what the step saves.
    """

    def _init_candidates(self) -> None:
        sizes = self.compilation_config.cudagraph_capture_sizes
        if self.cudagraph_mode.decode_mode() != CUDAGraphMode.FULL or not sizes:
            return
        rows = self.decode_query_len
        most = min(self.max_num_reqs, max(sizes) // rows)
        descs = [
            BatchExecutionDescriptor(
                cg_mode=CUDAGraphMode.FULL,
                num_tokens=count * rows,
                num_reqs=count,
                uniform_token_count=rows,
            )
            for count in spaced_counts(most)
        ]
        self._capture_descs[CUDAGraphMode.FULL] = descs[::-1]
        start = 0
        for desc in descs:
            for tokens in range(start, desc.num_tokens + 1):
                self._candidates[tokens, 0] = [desc]
            start = desc.num_tokens + 1


def spaced_counts(most: int) -> list[int]:
    """Request counts up to `most`, which is among them, a quarter of their size apart or 8."""
    counts, count = [], 1
    while count < most:
        counts.append(count)
        count += count if count < 8 else max(8, count // 4 // 8 * 8)
    return [*counts, most] if most > 0 else []


def refusal_of_backends(runner: Any, target_layers: set[str] | None) -> tuple[str, str]:
    """Why the built attention backends cannot run (variable rows in a graph, lengths that only
    the device knows); "" where they can."""
    width = runner.decode_query_len
    found = get_varlen_cudagraph_unsupported_backend(
        runner.attn_groups, runner.vllm_config, width, checked_layer_names=target_layers
    )
    graphs = f"{found[0]} replays uniform batches only" if found is not None else ""
    name = get_query_lens_mismatch_unsupported_backend(
        runner.attn_groups, checked_layer_names=target_layers
    )
    lengths = f"{name} plans on the host's lengths" if name is not None else ""
    return graphs, lengths


def install_graphs(runner: Any, variable: bool) -> None:
    """Put `WindowGraphs` in place of the runner's manager, before anything is captured."""
    stock = runner.cudagraph_manager
    if not stock.cudagraph_mode.has_full_cudagraphs():
        return
    runner.cudagraph_manager = WindowGraphs(
        runner.vllm_config,
        runner.device,
        stock.cudagraph_mode,
        decode_query_len=runner.decode_query_len,
        lora_capture_cases=runner.lora_capture_cases,
        ubatch_runner=runner.ubatch_runner,
        variable=variable,
    )
