"""Measure what steps cost on a GPU, at start-up, by replaying the captured graphs.

Each graph family is one grid: variable rows (trimmed steps), K + 1 rows (native), one row (steps
without drafts). A dummy step is forced into a graph, with a KV load spread over its requests, then
its logits are computed and verified and a block is drafted; events between the parts give the times
(the very ones that `CudaClock` takes while serving). Steps queue up behind each other and are read
once per size, so the host is not part of the times where the GPU is the slower one.

Sizes are visited coarse to fine until the time is over; sizes that were left out are interpolated
between their neighbours, so the table covers the whole ladder.
"""

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput

from vllm_dspark.errors import CostTableError
from vllm_dspark.integration.cuda_graphs import WindowGraphs
from vllm_dspark.integration.cuda_warmup import verify
from vllm_dspark.planning.cost import (
    DIP_TOLERANCE,
    CostTable,
    StepMode,
    StepShape,
    StepTiming,
    build_cost_table,
)
from vllm_dspark.planning.measuring import Cell

logger = logging.getLogger("vllm.vllm_dspark")

_REPEATS = 3
_WARMUP = 1
BUDGET_S = 8.0
_ALLOCATION_REPEATS = 20
# For cells that look dearer than larger ones: a moment's disturbance ends, a real dip stays.
_AGAIN_S = 1.0
_AGAIN_ROUNDS = 3
_NARROW_NODES = 6  # request counts at which narrow draft passes are timed

Measured = dict[tuple[StepShape, int, int], list[StepTiming]]


@torch.inference_mode()
def profile_cuda(runner: Any, budget_s: float = BUDGET_S) -> CostTable:
    """Cost table of an engine on CUDA; raises CostTableError if there is nothing to measure."""
    families = _families(runner)
    started = time.perf_counter()
    nodes = _kv_nodes(runner)
    measured: Measured = {}
    plan = _coarse_to_fine(families)
    for count, (shape, desc) in enumerate(plan):
        ends = count < 2 * len(families)  # the ends of every family come first
        if not ends and time.perf_counter() - started > budget_s:
            logger.info(
                "vllm-dspark: cost profile: %d of %d graphs measured, the others interpolated",
                count,
                len(plan),
            )
            break
        for kv_tokens in nodes:
            measured[shape, desc.num_tokens, kv_tokens] = _measure(runner, shape, desc, kv_tokens)
    _visit_peaks_again(runner, families, measured, started + budget_s + _AGAIN_S)
    samples = [sample for found in measured.values() for sample in found]
    samples += _interpolated(families, nodes, measured)
    widths = _narrow_widths(runner)
    for desc in _of_narrow_passes(families) if widths else ():
        samples += _measure_narrow(runner, desc, nodes[0], widths, _REPEATS)
    return build_cost_table(samples, allocation_ms=_allocation_ms(runner))


def _visit_peaks_again(
    runner: Any, families: dict[StepShape, list[Any]], measured: Measured, deadline: float
) -> None:
    """Measures cells again that cost more than a larger size; the faster visit is kept.

    Whatever disturbs a GPU only adds time.
    """
    descs = {(shape, desc.num_tokens): desc for shape, found in families.items() for desc in found}
    for _ in range(_AGAIN_ROUNDS):
        peaks = _peaks(measured)
        for shape, tokens, kv_tokens in peaks:
            if time.perf_counter() > deadline:
                return
            again = _measure(runner, shape, descs[shape, tokens], kv_tokens)
            key = (shape, tokens, kv_tokens)
            measured[key] = min(measured[key], again, key=lambda visit: sum(_medians_ms(visit)))
        if not peaks:
            return


def _medians_ms(samples: list[StepTiming]) -> tuple[float, float]:
    """Of target and verification, and of drafting (0 where nothing is drafted)."""
    times = [(sample.forward_ms, sample.draft_ms or 0.0) for sample in samples]
    forward, draft = np.median(times, axis=0)
    return float(forward), float(draft)


def _peaks(measured: Measured) -> list[tuple[StepShape, int, int]]:
    """Cells that cost more than DIP_TOLERANCE above a larger size of their shape and KV node."""
    found = []
    for shape, kv_tokens in dict.fromkeys((shape, kv) for shape, _, kv in measured):
        sizes = sorted(n for s, n, kv in measured if (s, kv) == (shape, kv_tokens))
        ms = np.array([_medians_ms(measured[shape, n, kv_tokens]) for n in sizes])
        least_above = np.minimum.accumulate(ms[::-1], axis=0)[::-1]
        high = (ms > (1.0 + DIP_TOLERANCE) * least_above).any(axis=1)
        found += [(shape, sizes[i], kv_tokens) for i in np.flatnonzero(high)]
    return found


class CudaProfiler:
    """Measures for `vllm-dspark profile`, graph by graph; `profiling.CpuProfiler`'s twin."""

    def __init__(self, runner: Any) -> None:
        """Raises CostTableError if there is nothing to measure."""
        self._runner = runner
        self._graphs = {
            (shape, desc.num_tokens, desc.num_reqs): desc
            for shape, descs in _families(runner).items()
            for desc in descs
        }

    @torch.inference_mode()
    def cells(self, *, full: bool) -> list[Cell]:
        """Captured graphs at each KV node, ascending, each run once so that it is warm.

        Every graph is there: a step pads to the next one, so a price for each is needed. full:
        three KV nodes instead of two.
        """
        nodes = _kv_nodes(self._runner)
        if full:
            nodes = tuple(sorted({*nodes, (nodes[0] + nodes[-1]) // 2}))
        mode = StepMode.FULL.value
        cells = [
            Cell(tokens, kv_tokens, requests, mode, shape.value)
            for shape, tokens, requests in self._graphs
            for kv_tokens in nodes
        ]
        native = [desc for key, desc in self._graphs.items() if key[0] is StepShape.NATIVE]
        cells += [
            Cell(desc.num_tokens, nodes[0], desc.num_reqs, mode, StepShape.NATIVE.value, columns)
            for desc in _of_narrow_passes({StepShape.NATIVE: native})
            for columns in _narrow_widths(self._runner)
        ]
        for cell in cells:
            self.measure(cell)
        return sorted(cells)

    @torch.inference_mode()
    def measure(self, cell: Cell) -> StepTiming:
        """One sample of a cell, from the second of two replays: the host is ahead by then."""
        key = (StepShape(cell.shape), cell.num_tokens, cell.num_requests)
        desc = self._graphs.get(key)
        if desc is None:
            raise CostTableError("incomplete", f"no graph was captured for {cell}")
        shape, kv_tokens = key[0], cell.kv_tokens
        if cell.draft_width:
            return _measure_narrow(self._runner, desc, kv_tokens, (cell.draft_width,), 1)[0]
        return _measure(self._runner, shape, desc, kv_tokens, repeats=1)[0]

    @torch.inference_mode()
    def allocation_ms(self) -> float:
        """Time of ranking and layout on the device in a trimmed step; 0 with host windows."""
        return _allocation_ms(self._runner)


def _families(runner: Any) -> dict[StepShape, list[Any]]:
    """Captured graphs by shape; raises CostTableError if those of trimmed steps are not there."""
    manager = runner.cudagraph_manager
    families = manager.families() if isinstance(manager, WindowGraphs) else {}
    if StepShape.RAGGED not in families:
        raise CostTableError(
            "incomplete",
            "no graphs of variable rows were captured, so trimmed steps have no price; steps run "
            "native (the attention backend decides: FLASH_ATTN on Hopper has them)",
        )
    return families


def _coarse_to_fine(families: dict[StepShape, list[Any]]) -> list[tuple[StepShape, Any]]:
    """All graphs: the largest and smallest of each family first, then ever finer in between."""
    rounds: list[tuple[int, StepShape, Any]] = []
    for shape, descs in families.items():
        last = len(descs) - 1
        rank = {last: -2, 0: -1}
        level, step = 0, max(last, 1)
        while len(rank) <= last:
            step = max(step // 2, 1)
            for index in range(0, last, step):
                rank.setdefault(index, level)
            level += 1
        rounds += [(rank[i], shape, desc) for i, desc in enumerate(descs)]
    ordered = sorted(rounds, key=lambda item: item[0])
    return [(shape, desc) for _, shape, desc in ordered]


def _kv_nodes(runner: Any) -> tuple[int, ...]:
    """KV tokens of a whole step; two nodes give the slope of the axis."""
    room = runner.kv_cache_config.num_blocks * runner.kernel_block_sizes[0]
    longest = runner.max_num_reqs * (runner.max_model_len - 2 * runner.decode_query_len)
    far = min(room // 2, longest, 262_144)
    near = min(256 * runner.max_num_reqs // 8 + 128, far // 4)
    return (near, far) if near > 0 else (max(far, 1),)


def _measure(
    runner: Any, shape: StepShape, desc: Any, kv_tokens: int, repeats: int = _REPEATS
) -> list[StepTiming]:
    """Timed replays of one graph at one KV load."""
    num_reqs = desc.num_reqs
    context = min(max(kv_tokens // num_reqs, 1), _longest(runner))
    events = []
    for _ in range(_WARMUP + repeats):
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        _step(runner, shape, desc, context, marks)
        events.append(marks)
    events[-1][-1].synchronize()
    return [
        StepTiming(
            StepMode.FULL,
            shape,
            num_requests=num_reqs,
            num_tokens=desc.num_tokens,
            kv_tokens=kv_tokens,
            forward_ms=start.elapsed_time(middle),
            # of every family, requests determine it: the native one has each count once
            draft_ms=middle.elapsed_time(end) if shape is StepShape.NATIVE else None,
        )
        for start, middle, end in events[_WARMUP:]
    ]


def _narrow_widths(runner: Any) -> tuple[int, ...]:
    """Columns of the draft passes narrower than K that were captured."""
    widths: tuple[int, ...] = runner.speculator.captured_widths
    return widths


def _of_narrow_passes(families: dict[StepShape, list[Any]]) -> list[Any]:
    """Native steps behind which narrow passes are timed: the share of a full pass that they take
    goes from all of it to that of their columns as requests become many."""
    descs = sorted(families.get(StepShape.NATIVE, []), key=lambda desc: desc.num_tokens)
    places = (
        np.unique(np.rint(np.geomspace(1, len(descs), _NARROW_NODES)).astype(int)) if descs else ()
    )
    return [descs[place - 1] for place in places]


def _measure_narrow(
    runner: Any, desc: Any, kv_tokens: int, widths: Sequence[int], repeats: int
) -> list[StepTiming]:
    """Timed draft passes of each width behind one native step; of the step itself, no time."""
    context = max(kv_tokens // desc.num_reqs, 1)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
    state = _forward(runner, desc, min(context, _longest(runner)), marks)
    timed = []
    for columns in widths:
        for _ in range(_WARMUP + repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            _draft(runner, state, columns)
            end.record()
            timed.append((columns, start, end))
    torch.cuda.synchronize()
    runner.kv_connector.set_disabled(False)
    per_width = _WARMUP + repeats
    return [
        StepTiming(
            StepMode.FULL,
            StepShape.NATIVE,
            num_requests=desc.num_reqs,
            num_tokens=desc.num_tokens,
            kv_tokens=kv_tokens,
            forward_ms=0.0,
            draft_ms=start.elapsed_time(end),
            draft_width=columns,
        )
        for index, (columns, start, end) in enumerate(timed)
        if index % per_width >= _WARMUP
    ]


def _longest(runner: Any) -> int:
    longest: int = runner.max_model_len - 2 * runner.decode_query_len
    return longest


def _step(
    runner: Any, shape: StepShape, desc: Any, context: int, marks: Sequence[torch.cuda.Event]
) -> None:
    """One dummy step in a given graph: target, verification and, in native steps, drafting."""
    state = _forward(runner, desc, context, marks)
    if shape is StepShape.NATIVE:
        _draft(runner, state)
    marks[2].record()
    runner.kv_connector.set_disabled(False)


def _forward(runner: Any, desc: Any, context: int, marks: Sequence[torch.cuda.Event]) -> Any:
    """Target and verification, between the first two marks; the runner's state for drafting."""
    output = SchedulerOutput.make_empty()
    num_reqs, num_tokens = desc.num_reqs, desc.num_tokens
    lengths = [num_tokens // num_reqs + (i < num_tokens % num_reqs) for i in range(num_reqs)]
    output.num_scheduled_tokens = {f"_profile_{i}": n for i, n in enumerate(lengths)}
    output.total_num_scheduled_tokens = num_tokens
    runner.kv_connector.set_disabled(True)
    clock = runner.dspark_clock
    clock.next_start = marks[0]
    with runner.cudagraph_manager.forced(desc):
        runner.execute_model(output, dummy_run=True, context_len=context)
    state, runner.execute_model_state = runner.execute_model_state, None
    verify(runner, state.hidden_states[:num_tokens], num_reqs)
    marks[1].record()
    return state


def _draft(runner: Any, state: Any, columns: int | None = None) -> None:
    """A draft pass of some columns (None: all K)."""
    runner.speculator.draft_width = columns
    batch = state.input_batch
    sampling = runner.sampler.sampling_states
    device = runner.device
    runner.speculator.propose(
        input_batch=batch,
        attn_metadata=state.attn_metadata,
        slot_mappings=state.slot_mappings_by_layer,
        last_hidden_states=state.hidden_states,
        aux_hidden_states=state.aux_hidden_states,
        num_sampled=torch.ones(batch.num_reqs, dtype=torch.int32, device=device),
        num_rejected=torch.zeros(batch.num_reqs, dtype=torch.int32, device=device),
        last_sampled=runner.req_states.last_sampled_tokens,
        next_prefill_tokens=runner.req_states.next_prefill_tokens,
        temperature=sampling.temperature.gpu,
        seeds=sampling.seeds.gpu,
        dp_sync_state=state.dp_sync_state,
        dummy_run=True,
    )


def _interpolated(
    families: dict[StepShape, list[Any]],
    nodes: Sequence[int],
    measured: Measured,
) -> list[StepTiming]:
    """Samples of the graphs that were left out, on the line between measured neighbours."""
    found = []
    for shape, descs in families.items():
        known = [d.num_tokens for d in descs if (shape, d.num_tokens, nodes[0]) in measured]
        for kv_tokens in nodes:
            rows = [measured[shape, size, kv_tokens] for size in known]
            times = np.array([[sample.forward_ms for sample in row] for row in rows])
            for desc in descs:
                if desc.num_tokens in known:
                    continue
                for repeat in range(times.shape[1]):
                    forward_ms = float(np.interp(desc.num_tokens, known, times[:, repeat]))
                    found.append(
                        StepTiming(
                            StepMode.FULL,
                            shape,
                            desc.num_reqs,
                            desc.num_tokens,
                            kv_tokens,
                            forward_ms,
                        )
                    )
    return found


def _allocation_ms(runner: Any) -> float:
    """Time of ranking and layout on the device in a trimmed step."""
    windows = runner.dspark_windows
    if windows is None:
        return 0.0
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_ALLOCATION_REPEATS):
        windows.launch_for_timing()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / _ALLOCATION_REPEATS
