"""Parts of the CUDA path that can be tried without a GPU: which graph a step gets, and chunks."""

import importlib
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from vllm_dspark.kernels.protocols import SamplingState
from vllm_dspark.kernels.reference import ReferenceRejectOps
from vllm_dspark.planning.cost import StepMode, StepShape

pytestmark = pytest.mark.engine  # imports vLLM's worker, which changes kernels for its process

WIDTH, MAX_REQS = 4, 16
SIZES = [1, 2, 4, 8, 16, 24, 32, 64]


@pytest.fixture(scope="module", autouse=True)
def vllm_worker() -> None:
    importlib.import_module("vllm.v1.worker.cpu.shm")


def graphs(variable: bool = True, mode: str = "FULL_AND_PIECEWISE") -> Any:
    """The manager as it is before capture, every graph taken as captured."""
    from vllm.config.compilation import CUDAGraphMode

    from vllm_dspark.integration.cuda_graphs import WindowGraphs

    class Uncaptured(WindowGraphs):
        def __init__(self) -> None:
            self.compilation_config = SimpleNamespace(
                cudagraph_capture_sizes=SIZES, max_cudagraph_capture_size=SIZES[-1]
            )
            self.vllm_config = SimpleNamespace(
                speculative_config=None,
                num_speculative_tokens=WIDTH,
                cache_config=SimpleNamespace(use_kda_recoverssm=False),
            )
            self.max_num_reqs, self.decode_query_len = MAX_REQS, WIDTH + 1
            self.cudagraph_mode = CUDAGraphMode[mode]
            self.varlen_decode, self.lora_capture_cases = False, [0]
            self._variable, self._forced, self.ubatch_runner = variable, None, None
            self._candidates, self._capture_descs = {}, {}
            self._lora_dispatch_map, self._max_lora_case = {}, 0
            self._graphs_captured = True
            self._init_candidates()
            self.graphs = {d: None for found in self._capture_descs.values() for d in found}

    return Uncaptured()


@pytest.mark.parametrize(
    ("step", "requests", "tokens", "uniform", "longest", "graph"),
    [
        # (tokens, requests, rows per request) of the graph; None: no request padding
        ("native", 1, 5, 5, 5, (5, 1, 5)),
        ("native, padded", 3, 15, 5, 5, (20, 4, 5)),
        ("no drafts", 3, 3, 1, 1, (4, 4, 1)),
        ("no drafts, one request", 1, 1, 1, 1, (1, 1, 1)),
        ("trimmed", 3, 9, None, 5, (16, 16, None)),
        ("trimmed, to a native size", 1, 5, None, 5, (8, 8, None)),
        ("trimmed to equal rows", 4, 8, 2, 2, (8, 8, None)),
        ("trimmed, largest", 16, 64, None, 5, (64, 16, None)),
        ("with a prefill", 2, 5, None, None, (8, None, None)),
        ("beyond the ladder", 14, 70, 5, 5, (70, 14, None)),
    ],
)
def test_each_step_gets_its_graph(
    step: str,
    requests: int,
    tokens: int,
    uniform: int | None,
    longest: int | None,
    graph: tuple[int, int | None, int | None],
) -> None:
    """Catches a family that hides another of its size, and prefills in decode graphs."""
    found = graphs().dispatch(requests, tokens, uniform, 0, longest)
    assert (found.num_tokens, found.num_reqs, found.uniform_token_count) == graph, step


def test_backends_of_uniform_rows_keep_ragged_steps_out_of_full_graphs() -> None:
    """Catches FlashAttention 2 replaying a graph of rows it was not captured for."""
    manager = graphs(variable=False)
    ragged = manager.dispatch(3, 9, None, 0, WIDTH + 1)
    assert ragged.cg_mode.name == "PIECEWISE"
    assert manager.dispatch(3, 3, 1, 0, 1).cg_mode.name == "FULL"
    assert StepShape.RAGGED not in manager.families()


def test_families_are_what_profiling_measures() -> None:
    """Catches a family with holes, and piecewise graphs priced as full ones."""
    families = graphs().families()
    sizes = {shape: [d.num_tokens for d in found] for shape, found in families.items()}
    assert sizes[StepShape.RAGGED] == SIZES
    assert sizes[StepShape.SINGLE] == [1, 2, 4, 8, 16]
    assert sizes[StepShape.NATIVE] == [5, 10, 20, 25, 35]
    assert all(d.cg_mode.name == "FULL" for found in families.values() for d in found)


def test_graphs_of_any_batch_are_left_alone() -> None:
    """Catches graphs captured twice where mode FULL already takes every batch."""
    manager = graphs(mode="FULL")
    assert not manager.families()
    assert manager.dispatch(3, 9, None, 0, WIDTH + 1).cg_mode.name == "FULL"


def test_profiling_forces_a_graph_and_gives_it_up() -> None:
    """Catches serving in the graph that was timed last."""
    manager = graphs()
    timed = manager.families()[StepShape.RAGGED][3]
    with manager.forced(timed):
        assert manager.dispatch(1, 1, 1, 0, 1) is timed
    assert manager.dispatch(1, 1, 1, 0, 1).uniform_token_count == 1


def test_coarse_to_fine_visits_every_graph_once_ends_first() -> None:
    """Catches a profile that is cut off with one end of a family unmeasured."""
    from vllm_dspark.integration.cuda_profiling import _coarse_to_fine

    families = graphs().families()
    order = _coarse_to_fine(families)
    assert len(order) == len({id(desc) for _, desc in order}) == sum(map(len, families.values()))
    first = order[: 2 * len(families)]
    for shape, found in families.items():
        assert {d.num_tokens for s, d in first if s is shape} == {
            found[0].num_tokens,
            found[-1].num_tokens,
        }


class _Event:
    """Stands for a CUDA event: marks a place on a time line that steps move on."""

    now = 0.0

    def __init__(self, enable_timing: bool = False) -> None:
        self.at = -1.0

    def record(self) -> None:
        self.at = _Event.now

    def synchronize(self) -> None:
        assert self.at >= 0.0, "waited for an event that nobody recorded"

    def elapsed_time(self, end: "_Event") -> float:
        return end.at - self.at


@pytest.fixture
def profiled_runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runner whose steps take 1 ms, 0.01 ms a token and 0.001 ms a token of context."""
    from vllm_dspark.integration import cuda_profiling

    def step(runner: Any, shape: Any, desc: Any, context: int, marks: list[_Event]) -> None:
        runner.steps.append((shape, desc))
        marks[0].record()
        slow = 5.0 if len(runner.steps) % 2 else 0.0  # the first replay of each pair
        _Event.now += 1.0 + 0.01 * desc.num_tokens + 0.001 * context * desc.num_reqs + slow
        marks[1].record()
        _Event.now += 0.2 + 0.005 * desc.num_reqs if shape is StepShape.NATIVE else 0.0
        marks[2].record()

    monkeypatch.setattr(cuda_profiling, "_step", step)
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    return SimpleNamespace(
        cudagraph_manager=graphs(),
        kv_cache_config=SimpleNamespace(num_blocks=1000),
        kernel_block_sizes=[16],
        max_num_reqs=MAX_REQS,
        max_model_len=1024,
        decode_query_len=WIDTH + 1,
        dspark_windows=None,
        speculator=SimpleNamespace(captured_widths=()),
        steps=[],
    )


@pytest.mark.parametrize("full", [False, True])
def test_profile_prices_every_graph(profiled_runner: Any, full: bool) -> None:
    """Catches graphs without a price (steps would be priced as larger ones), times of another
    graph, of the first replay, or of drafting where nothing is drafted."""
    from vllm_dspark.integration.cuda_profiling import CudaProfiler
    from vllm_dspark.planning.measuring import CellSamples

    profiler = CudaProfiler(profiled_runner)
    cells = profiler.cells(full=full)
    families = profiled_runner.cudagraph_manager.families()
    nodes = {cell.kv_tokens for cell in cells}
    assert len(nodes) == 2 + full
    assert len(cells) == len(nodes) * sum(map(len, families.values()))
    samples = CellSamples(cells, repeats=3, max_spread=0.1)
    for _ in range(3):
        samples.add(CudaProfiler(profiled_runner).measure(cell) for cell in cells)
    assert not samples.unsettled()
    table = samples.table(profiler.allocation_ms())
    assert {shape for _, shape in table.grids} == set(families)
    for (_, shape), grid in table.grids.items():
        assert grid.sizes == tuple(sorted(d.num_tokens for d in families[shape]))
        for node, times in zip(grid.kv_tokens, grid.median_ms, strict=True):
            for desc, time in zip(families[shape], times, strict=True):
                context = min(max(node // desc.num_reqs, 1), 1024 - 2 * (WIDTH + 1))
                expected = 1.0 + 0.01 * desc.num_tokens + 0.001 * context * desc.num_reqs
                assert time == pytest.approx(expected)
    requests = [d.num_reqs for d in families[StepShape.NATIVE]]
    assert table.draft.sizes == tuple(requests)
    assert np.allclose(table.draft.median_ms[0], [0.2 + 0.005 * n for n in requests])


@pytest.mark.parametrize("lasting", [False, True])
def test_start_profile_visits_peaks_again(
    profiled_runner: Any, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    """Catches a start whose scheduling is refused for a moment's disturbance, and one that takes a
    disturbed time although the second visit was faster; what stays is the GPU's own."""
    from vllm_dspark.integration import cuda_profiling

    inner, visits = cuda_profiling._step, []

    def step(runner: Any, shape: Any, desc: Any, context: int, marks: list[_Event]) -> None:
        inner(runner, shape, desc, context, marks)
        if shape is StepShape.RAGGED and desc.num_tokens == size:
            visits.append(context)
            if lasting or len(visits) <= 2 * (cuda_profiling._REPEATS + 1):  # the first, both nodes
                _Event.now += ms
                marks[1].record()
                marks[2].record()

    families = profiled_runner.cudagraph_manager.families()
    sizes = [desc.num_tokens for desc in families[StepShape.RAGGED]]
    # A lasting one is within what kernels' selection explains, a passing one is not.
    size, ms = sizes[1], 0.12 if lasting else 5.0
    monkeypatch.setattr(cuda_profiling, "_step", step)
    monkeypatch.setattr(cuda_profiling, "_kv_nodes", lambda runner: (0, 1))
    table = cuda_profiling.profile_cuda(profiled_runner)
    grid = table.grids[StepMode.FULL, StepShape.RAGGED]
    expected = 1.0 + 0.01 * size + 0.001 * families[StepShape.RAGGED][1].num_reqs
    assert grid.median_ms[0, 1] == pytest.approx(expected + (ms if lasting else 0.0))
    assert len(visits) > 2 * (cuda_profiling._REPEATS + 1)


def test_profile_without_graphs_of_trimmed_steps_is_refused(profiled_runner: Any) -> None:
    """Catches a table that would price trimmed steps by native ones, and unknown cells."""
    from vllm_dspark.errors import CostTableError
    from vllm_dspark.integration.cuda_profiling import CudaProfiler
    from vllm_dspark.planning.measuring import Cell

    with pytest.raises(CostTableError, match="no graph was captured"):
        CudaProfiler(profiled_runner).measure(Cell(3, 128, 1, "full", "ragged"))
    for manager in (graphs(variable=False), SimpleNamespace()):
        profiled_runner.cudagraph_manager = manager
        with pytest.raises(CostTableError, match="FLASH_ATTN on Hopper"):
            CudaProfiler(profiled_runner)


def narrow_shares(monkeypatch: pytest.MonkeyPatch, runner: Any) -> dict[tuple[int, int], float]:
    """A runner that captured passes of 1 and 2 columns; what each takes by requests and columns."""
    from vllm_dspark.integration import cuda_profiling

    times: dict[tuple[int, int], float] = {}

    def draft(_: Any, state: Any, columns: int | None = None) -> None:
        assert columns is not None
        took = (0.01 + 0.002 * columns) * state.num_reqs
        times[state.num_reqs, columns] = took
        _Event.now += took

    monkeypatch.setattr(cuda_profiling, "_draft", draft)
    monkeypatch.setattr(cuda_profiling, "_forward", lambda runner, desc, *_: desc)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    runner.speculator.captured_widths = (1, 2)
    runner.kv_connector = SimpleNamespace(set_disabled=lambda _: None)
    return times


def test_start_profile_prices_captured_narrow_passes(
    monkeypatch: pytest.MonkeyPatch, profiled_runner: Any
) -> None:
    """Catches narrow passes without a price, so that all passes would stay full."""
    from vllm_dspark.integration.cuda_profiling import CudaProfiler, profile_cuda
    from vllm_dspark.planning.online_cost import CostModel

    times = narrow_shares(monkeypatch, profiled_runner)
    table = profile_cuda(profiled_runner)
    assert sorted(table.narrow) == [1, 2]
    for columns, grid in table.narrow.items():
        native = profiled_runner.cudagraph_manager.families()[StepShape.NATIVE]
        assert grid.sizes[0] == 1 and grid.sizes[-1] == native[-1].num_reqs
        assert len(grid.sizes) > 2
        expected = [times[size, columns] for size in grid.sizes]
        assert grid.median_ms[0] == pytest.approx(expected)
    assert CostModel(table, num_positions=WIDTH).prices_widths
    profiler = CudaProfiler(profiled_runner)
    narrow = [cell for cell in profiler.cells(full=False) if cell.draft_width]
    assert {cell.draft_width for cell in narrow} == {1, 2}
    sample = profiler.measure(narrow[-1])
    assert sample.draft_ms == pytest.approx(times[narrow[-1].num_requests, narrow[-1].draft_width])
    assert sample.draft_width == narrow[-1].draft_width


def test_graphs_of_narrow_passes_fit_every_request_count() -> None:
    """Catches a count without a graph (a pass without one takes milliseconds of host time)."""
    from vllm.config.compilation import CUDAGraphMode

    from vllm_dspark.integration.cuda_graphs import NarrowDraftGraphs

    class Uncaptured(NarrowDraftGraphs):
        def __init__(self, rows: int, most: int) -> None:
            self.compilation_config = SimpleNamespace(cudagraph_capture_sizes=[8, 512, 64])
            self.max_num_reqs, self.decode_query_len = most, rows
            self.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            self._candidates, self._capture_descs = {}, {}
            self._lora_dispatch_map, self._max_lora_case = {}, 0
            self._graphs_captured = True
            self._init_candidates()

    for rows, most in ((1, 7), (2, 100), (3, 256), (5, 1)):
        manager = Uncaptured(rows, most)
        fitting = min(most, 512 // rows)
        for requests in range(1, fitting + 1):
            desc = manager.dispatch(requests, requests * rows, rows, 0)
            assert desc.cg_mode is CUDAGraphMode.FULL
            assert desc.num_tokens == desc.num_reqs * rows >= requests * rows
            assert desc.num_reqs <= max(requests + 8, 1.25 * requests)
            assert desc in manager._capture_descs[CUDAGraphMode.FULL]
        beyond = manager.dispatch(fitting + 1, (fitting + 1) * rows, rows, 0)
        assert beyond.cg_mode is CUDAGraphMode.NONE


def rejection(ops: Any, vocab: int, requests: int) -> Any:
    from vllm_dspark.integration.rejection import DSparkRejectionSampler

    states = SimpleNamespace(
        temperature=SimpleNamespace(gpu=torch.full((requests,), 0.8)),
        seeds=SimpleNamespace(gpu=torch.arange(requests)),
    )
    sampler = SimpleNamespace(
        sampling_states=states,
        apply_sampling_params=lambda logits, *_: logits,
        logprobs_mode="raw_logprobs",
        logprob_token_ids_state=SimpleNamespace(max_num_token_ids=lambda _: 0),
        return_sampling_mask=False,
    )
    speculative = SimpleNamespace(
        num_speculative_tokens=WIDTH,
        enable_adaptive_verification=False,
        rejection_sample_method="standard",
    )
    return DSparkRejectionSampler(sampler, speculative, torch.device("cpu"), ops)


@pytest.mark.parametrize("most", [5, 7, 11, 1000])
def test_chunks_need_no_host_lengths(most: int) -> None:
    """Catches a budget that one chunk of logits caps, or rows that end up with the wrong request.

    The host knows what was scheduled, the device what was admitted.
    """
    from vllm_dspark.integration.rejection import request_chunks

    generator = torch.Generator().manual_seed(most)
    requests, vocab = 6, 9
    windows = torch.tensor([5, 1, 3, 2, 5, 4], dtype=torch.int32)
    scheduled = np.array([5, 5, 4, 5, 5, 5])
    bounds = torch.cat((torch.zeros(1, dtype=torch.int32), windows.cumsum(0, dtype=torch.int32)))
    rows = int(bounds[-1])
    logits = torch.randn(rows, vocab, generator=generator)
    drafts = torch.randint(0, vocab, (rows,), generator=generator, dtype=torch.int32)
    position = torch.arange(rows)
    batch = SimpleNamespace(
        cu_num_logits=bounds,
        cu_num_logits_np=np.append(0, np.cumsum(scheduled)).astype(np.int32),
        num_reqs=requests,
        idx_mapping=torch.arange(requests),
        idx_mapping_np=np.arange(requests),
        expanded_idx_mapping=torch.arange(requests).repeat_interleave(windows),
        expanded_local_pos=torch.zeros(rows, dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.zeros(requests, dtype=torch.int32),
    )
    sampler = rejection(ReferenceRejectOps(), vocab, requests)
    sampler.device_offsets = True
    sampled, counts, logprobs, masks = sampler._verify_in_chunks(
        logits, batch, None, drafts, position, most, -1, drafts
    )
    whole = sampler._verify(
        logits, None, drafts, position, bounds, batch.idx_mapping, batch.idx_mapping_np,
        batch.expanded_idx_mapping, batch.expanded_local_pos, np.zeros(requests), drafts,
    )  # fmt: skip
    assert torch.equal(sampled, whole[1]) and torch.equal(counts, whole[2])
    assert logprobs is None and masks is None
    ranges = list(request_chunks(batch.cu_num_logits_np, most))
    assert [start for start, _ in ranges] == [0, *[end for _, end in ranges[:-1]]]
    assert ranges[-1][1] == requests
    lengths = [int(scheduled[a:b].sum()) for a, b in ranges]
    assert all(n <= most or b - a == 1 for n, (a, b) in zip(lengths, ranges, strict=True))


def test_sampling_state_is_the_samplers() -> None:
    """Catches seeds or temperatures taken from somewhere else than vLLM's own states."""
    seen: list[SamplingState] = []

    class Spy(ReferenceRejectOps):
        def reject(self, batch: Any, state: SamplingState, rule: Any) -> Any:
            seen.append(state)
            return super().reject(batch, state, rule)

    sampler = rejection(Spy(), 5, 2)
    sampler._verify(
        torch.zeros(2, 5), None, torch.zeros(2, dtype=torch.int32), torch.arange(2),
        torch.tensor([0, 1, 2], dtype=torch.int32), torch.arange(2), np.arange(2),
        torch.arange(2), torch.zeros(2, dtype=torch.int32), np.zeros(2), torch.zeros(2),
    )  # fmt: skip
    states = sampler.sampler.sampling_states
    assert seen[0].temperature is states.temperature.gpu
    assert seen[0].seeds is states.seeds.gpu
