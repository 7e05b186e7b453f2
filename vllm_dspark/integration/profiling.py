"""Measure what steps cost on this engine, at start-up, with dummy batches through the real runner.

A CPU step has no graphs and no padding: sizes are nodes between which prices are interpolated.
The forward pass, the logits of the verified rows and the rejection are timed together (they are
what a token more in the step costs), the draft pass by itself.
"""

import logging
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dspark.errors import CostTableError
from vllm_dspark.integration.draft_width import narrow_refusal
from vllm_dspark.integration.startup import settle_windows
from vllm_dspark.kernels.protocols import RejectBatch, SamplingState
from vllm_dspark.planning.allocation import allocate
from vllm_dspark.planning.cost import CostTable, StepMode, StepShape, StepTiming, build_cost_table
from vllm_dspark.planning.draft_cost import measured_widths
from vllm_dspark.planning.measuring import Cell
from vllm_dspark.planning.survival import survival

logger = logging.getLogger("vllm.vllm_dspark")

_REPEATS = 3
_WARMUP = 1
_ALLOCATION_REPEATS = 50
_LARGE = 32  # tokens beyond which a step is too long for its first run to stand out
# Median over sizes of spread over median: a quiet two-core machine shows 1 to 5 %.
_MAX_SCATTER = 0.15


@torch.inference_mode()
def profile_cpu(runner: Any, budget_s: float = 20.0) -> CostTable:
    """Cost table of an engine on a CPU. Raises CostTableError when the machine is too noisy.

    budget_s: larger sizes are left out once this much time has gone; prices beyond the last
    measured size continue with the last slope. The KV axis is measured at sizes of up to two full
    windows; what a longer context adds is the same for larger ones, so it is carried over.
    """
    width = runner.num_speculative_steps
    nodes = _kv_nodes(runner.max_model_len, width)
    for requests in {
        1,
        min(2, runner.max_num_reqs),
    }:  # compile and load what runs for the first time
        _draft(runner, _forward(runner, requests, 2 * requests, 8)[1])
    started = time.perf_counter()
    samples: list[StepTiming] = []
    for requests, tokens in _shapes(runner, width):
        if time.perf_counter() - started > budget_s and len(samples) >= 2 * _REPEATS:
            logger.info("vllm-dspark: cost profile stops at %d tokens (time budget)", tokens)
            break
        short = _measure(runner, requests, tokens, nodes[0])
        samples += short
        for kv_tokens in nodes[1:]:
            if tokens <= 2 * (width + 1):
                samples += _measure(runner, requests, tokens, kv_tokens)
            else:
                samples += _carried(short, samples, kv_tokens)
    for requests, tokens, columns in narrow_shapes(runner, {s.num_requests for s in samples}):
        samples += _measure(runner, requests, tokens, nodes[0], columns)
    return _trusted(samples, width)


class CpuProfiler:
    """Measures for `vllm-dspark profile`, step by step; a GPU has a twin with these methods."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    @torch.inference_mode()
    def cells(self, *, full: bool) -> list[Cell]:
        """Kinds of step, ascending, each run once so that it is warm.

        full: three KV nodes instead of two, and request counts between the powers of two.
        """
        runner = self._runner
        width = runner.num_speculative_steps
        nodes = _kv_nodes(runner.max_model_len, width)
        shapes = list(_shapes(runner, width))
        if full:
            nodes = tuple(sorted({*nodes, (nodes[0] + nodes[-1]) // 2}))
            limit = min(runner.max_num_reqs * (width + 1), runner.max_num_tokens)
            between = [3 * 2**n for n in range(16)]
            more = [(r, r * (width + 1)) for r in between if r * (width + 1) <= limit]
            shapes = sorted({*shapes, *more}, key=lambda shape: shape[1])
        for requests, tokens in shapes:
            measure_once(runner, requests, tokens, nodes[0])
        cells = [Cell(tokens, kv, requests) for requests, tokens in shapes for kv in nodes]
        for requests, tokens, columns in narrow_shapes(runner, {r for r, _ in shapes}):
            measure_once(runner, requests, tokens, nodes[0], columns)
            cells.append(Cell(tokens, nodes[0], requests, draft_width=columns))
        return cells

    def measure(self, cell: Cell) -> StepTiming:
        """One sample of a cell."""
        return measure_once(
            self._runner,
            cell.num_requests,
            cell.num_tokens,
            cell.kv_tokens,
            cell.draft_width or None,
        )

    def allocation_ms(self) -> float:
        """Time of ranking and handing out half of all drafts of a full batch; 0 on the host."""
        runner = self._runner
        if settle_windows(runner.vllm_config, runner.dspark_options)[0] != "device":
            return 0.0
        width, requests = runner.num_speculative_steps, runner.max_num_reqs
        confidence = np.random.default_rng(0).random((width, requests), dtype=np.float32)
        capacity = np.full(requests, width, dtype=np.int32)
        times = []
        for _ in range(_ALLOCATION_REPEATS):
            started = time.perf_counter()
            allocate(survival(confidence), capacity, np.zeros_like(capacity), requests * width // 2)
            times.append((time.perf_counter() - started) * 1e3)
        return float(np.median(times))


def _carried(
    short: list[StepTiming], samples: list[StepTiming], kv_tokens: int
) -> list[StepTiming]:
    """`short`, as slow as the longest steps measured at `kv_tokens` were against short contexts."""
    size = max(s.num_tokens for s in samples if s.kv_tokens == kv_tokens and s not in short)

    def median(kv: int) -> float:
        chosen = [s.forward_ms for s in samples if s.num_tokens == size and s.kv_tokens == kv]
        return float(np.median(chosen))

    added = max(0.0, median(kv_tokens) - median(short[0].kv_tokens))
    return [replace(s, kv_tokens=kv_tokens, forward_ms=s.forward_ms + added) for s in short]


def _trusted(samples: list[StepTiming], width: int) -> CostTable:
    """The table, or CostTableError where it would mislead: too few sizes, or a busy machine.

    A table that ends below a full window prices everything beyond by its last slope, and times
    that scatter rank budgets by chance; both are worse than verifying full windows.
    """
    largest = max((sample.num_tokens for sample in samples), default=0)
    if largest < width + 1:
        raise CostTableError(
            "incomplete",
            f"only steps of up to {largest} tokens were measured in the time there was, a full "
            f"window has {width + 1}; the machine is too busy, start the engine again when it is "
            "not",
        )
    table = build_cost_table(samples)
    for (mode, shape), grid in table.grids.items():
        scatter = float(np.median(grid.spread_ms / grid.median_ms))
        if scatter > _MAX_SCATTER:
            raise CostTableError(
                "noisy",
                f"{mode.value}/{shape.value} times scatter by {scatter:.0%} (at most "
                f"{_MAX_SCATTER:.0%} is usable); the machine is busy with something else",
            )
    return table


def _shapes(runner: Any, width: int) -> Iterator[tuple[int, int]]:
    """(requests, tokens) of ascending size: alone and full windows for 1, 2, 4, ... requests."""
    limit = min(runner.max_num_reqs * (width + 1), runner.max_num_tokens)
    sizes = [(1, n) for n in range(1, width + 2)]
    requests = 2
    while requests <= runner.max_num_reqs:
        sizes.append((requests, requests * (width + 1)))
        requests *= 2
    yield from ((r, n) for r, n in sizes if n <= limit)


def _kv_nodes(max_model_len: int, width: int) -> tuple[int, ...]:
    """KV tokens of a whole step; two nodes give the slope of the axis."""
    longest = max(max_model_len - 2 * (width + 1), 1)
    return (128, min(4096, longest)) if longest >= 512 else (min(128, longest),)


def narrow_shapes(runner: Any, measured: Iterable[int]) -> list[tuple[int, int, int]]:
    """(requests, tokens, columns) of draft passes narrower than K, behind full windows of theirs.

    Few are enough: their share of a full pass changes slowly with the number of requests. None
    where the engine drafts full width only. measured: request counts whose full passes are known.
    """
    if narrow_refusal(runner.vllm_config, runner.dspark_options):
        return []
    counts = sorted(measured)
    chosen = sorted({counts[0], counts[len(counts) // 2], counts[-1]})
    return [
        (requests, requests * (columns + 1), columns)
        for columns in measured_widths(runner.num_speculative_steps)
        for requests in chosen
    ]


def _measure(
    runner: Any, requests: int, tokens: int, kv_tokens: int, columns: int | None = None
) -> list[StepTiming]:
    warmup = _WARMUP if tokens <= _LARGE else 0
    timings = [
        measure_once(runner, requests, tokens, kv_tokens, columns) for _ in range(warmup + _REPEATS)
    ]
    return timings[warmup:]


def measure_once(
    runner: Any, requests: int, tokens: int, kv_tokens: int, columns: int | None = None
) -> StepTiming:
    """Time one target step and the draft pass after it, of some columns (None: all K)."""
    forward_ms, state = _forward(runner, requests, tokens, max(1, kv_tokens // requests))
    started = time.perf_counter()
    _draft(runner, state, columns)
    draft_ms = (time.perf_counter() - started) * 1e3
    return StepTiming(
        StepMode.EAGER,
        StepShape.RAGGED,
        num_requests=requests,
        num_tokens=tokens,
        kv_tokens=kv_tokens,
        forward_ms=forward_ms,
        draft_ms=draft_ms,
        draft_width=columns,
    )


def _forward(runner: Any, requests: int, tokens: int, context: int) -> tuple[float, Any]:
    """Time of a target step in ms, and the runner's state after it, for the draft pass."""
    output = SchedulerOutput.make_empty()
    lengths = [tokens // requests + (i < tokens % requests) for i in range(requests)]
    output.num_scheduled_tokens = {f"_profile_{i}": n for i, n in enumerate(lengths)}
    output.total_num_scheduled_tokens = tokens
    started = time.perf_counter()
    runner.execute_model(output, dummy_run=True, context_len=context)
    state, runner.execute_model_state = runner.execute_model_state, None
    _verify(runner, requests, state.hidden_states[:tokens])
    return (time.perf_counter() - started) * 1e3, state


def _verify(runner: Any, requests: int, hidden: torch.Tensor) -> None:
    """Logits of every row and a greedy verification of them."""
    sampler = runner.rejection_sampler
    logits = runner.model.compute_logits(hidden).float()
    num_rows = hidden.shape[0]
    bounds = torch.linspace(0, num_rows, requests + 1).to(torch.int32)
    sampler.ops.reject(
        RejectBatch(
            target_logits=logits,
            draft_logits=None,
            draft_tokens=torch.zeros(num_rows, dtype=torch.int64),
            cu_num_logits=bounds,
            pos=torch.zeros(num_rows, dtype=torch.int64),
            idx_mapping=torch.arange(requests),
        ),
        SamplingState(torch.zeros(requests), torch.zeros(requests, dtype=torch.int64)),
        sampler.rule,
    )


def _draft(runner: Any, state: Any, columns: int | None = None) -> None:
    batch = state.input_batch
    runner.speculator.draft_width = columns
    sampling = runner.sampler.sampling_states
    runner.speculator.propose(
        input_batch=batch,
        attn_metadata=state.attn_metadata,
        slot_mappings=state.slot_mappings_by_layer,
        last_hidden_states=state.hidden_states,
        aux_hidden_states=state.aux_hidden_states,
        num_sampled=torch.ones(batch.num_reqs, dtype=torch.int32),
        num_rejected=torch.zeros(batch.num_reqs, dtype=torch.int32),
        last_sampled=runner.req_states.last_sampled_tokens,
        next_prefill_tokens=runner.req_states.next_prefill_tokens,
        temperature=sampling.temperature.gpu,
        seeds=sampling.seeds.gpu,
        dummy_run=True,
    )
