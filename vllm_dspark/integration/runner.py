"""Model runner of vLLM (V2) with our drafter, rejection sampler and step reports."""

import importlib
import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dspark.artifacts.freshness import Resolution
from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.artifacts.store import ArtifactStore
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import CostTableError, DSparkError
from vllm_dspark.integration.backends import reject_ops
from vllm_dspark.integration.carrier import options_of
from vllm_dspark.integration.device_windows import DeviceWindows, HostTensorWindows
from vllm_dspark.integration.draft_width import narrow_refusal
from vllm_dspark.integration.preflight import require_hidden_states
from vllm_dspark.integration.profiling import CpuProfiler, profile_cpu
from vllm_dspark.integration.rejection import DSparkRejectionSampler, replace_rejection_sampler
from vllm_dspark.integration.report import StepOrder, attach_report, order_of
from vllm_dspark.integration.reporting import StepReporter
from vllm_dspark.integration.seeded import SeededSampling
from vllm_dspark.integration.speculator import DSparkProposer
from vllm_dspark.integration.startup import live_fingerprint, resolve_scheduling, settle_windows
from vllm_dspark.planning.cost import CostTable, StepMode
from vllm_dspark.planning.draft_cost import ladder
from vllm_dspark.planning.plan import PlanKind

logger = logging.getLogger("vllm.vllm_dspark")


class ReportedOutput(AsyncModelRunnerOutput):
    """A step's output that carries our report; the report is made when the output has arrived."""

    def __init__(self, output: Any, report: Callable[[], Any]) -> None:
        self._output = output
        self._report = report

    def get_output(self) -> Any:
        """Wait for vLLM's output, as vLLM does, and put the report on it."""
        output = self._output.get_output()
        attach_report(output, self._report())
        return output


class DSparkRunnerMixin(SeededSampling):
    """Replaces parts of vLLM's runner right after vLLM has built its own.

    `super()` builds the stock object first; that costs a moment at start-up and keeps every
    other part of the runner (sizes, capture, profiling) as vLLM made it.
    """

    # of vLLM's GPUModelRunner, which every user of this mixin derives from
    vllm_config: Any
    speculative_config: Any
    device: torch.device
    max_num_reqs: int
    num_speculative_steps: int
    vocab_size: int
    req_states: Any
    execute_model_state: Any
    speculator: Any
    rejection_sampler: Any
    adaptive_verification: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dspark_options = options_of(self.vllm_config) or DSparkConfig()
        self.dspark_reporter = StepReporter(self.device, self.num_speculative_steps)
        self._order: StepOrder | None = None
        self._resolution: Resolution | None = None  # found with the KV cache
        self._windows: DeviceWindows | None = None  # set with the KV cache, if windows are "device"
        self.dspark_batch_ids: list[str] = []
        if self.speculator is not None:  # last pipeline rank only
            self.speculator = None  # free the stock buffers before ours are allocated
            self.speculator = DSparkProposer(self.vllm_config, self.device, self.dspark_options)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's load, then our rejection sampler in place of its own."""
        if self.speculative_config is not None:
            require_hidden_states(self.vllm_config.model_config)
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self.rejection_sampler is not None:
            self.rejection_sampler = replace_rejection_sampler(
                self.rejection_sampler,
                self.speculative_config,
                self.device,
                reject_ops(
                    self.dspark_options,
                    max_requests=self.max_num_reqs,
                    width=self.num_speculative_steps,
                    vocab=self.vocab_size,
                    device=self.device,
                ),
            )

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's initialisation, then the executor of device windows where they are settled on."""
        super().initialize_kv_cache(*args, **kwargs)  # type: ignore[misc]
        resolution = resolve_scheduling(self.vllm_config, self.dspark_options)
        self._resolution = resolution
        mode, _ = settle_windows(self.vllm_config, self.dspark_options)
        given = self.dspark_options.test_windows is not None
        if resolution.scheduling or given:
            self._windows = self.make_windows(mode == "device")

    @property
    def dspark_windows(self) -> DeviceWindows | None:
        """The executor of trim plans, if windows are set on this worker."""
        return self._windows

    def make_windows(self, on_device: bool) -> DeviceWindows | None:
        """Prepare for steps that are not native; the executor, if windows are set on the device."""
        return HostTensorWindows(self, get_tp_group()) if on_device else None

    def gather_batch_req_state(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's gathering; remembers the order of requests in the batch."""
        state, uniform = super().gather_batch_req_state(*args, **kwargs)  # type: ignore[misc]
        if state is not None:
            self.dspark_batch_ids = state.req_ids
        return state, uniform

    def add_requests(self, scheduler_output: Any) -> None:
        """vLLM's; rows of slots that change hands are forgotten."""
        super().add_requests(scheduler_output)  # type: ignore[misc]
        if self._windows is not None:
            for request in scheduler_output.scheduled_new_reqs:
                self._windows.add_request(self.req_states.req_id_to_index[request.req_id])

    def provide_cost_table(self) -> None:
        """Take the cached cost table of this engine, or measure and cache one.

        Called once, after warm-up. Every rank runs the same dummy steps; the output rank's table
        reaches the engine core with its first report.
        """
        resolution = self._resolution
        if resolution is None or not resolution.scheduling or self.speculator is None:
            return
        if self.vllm_config.parallel_config.pipeline_parallel_size > 1 and resolution.needs_profile:
            # Ranks without a drafter have left already: dummy steps would wait for them for ever.
            logger.warning(
                "vllm-dspark: full windows in this run: a pipeline's step times are not measured "
                "at start-up; give one with dspark.cost_table"
            )
            return
        if self.dspark_reporter.refused:  # nothing will be planned
            return
        measured = get_tp_group().broadcast_object(resolution.needs_profile, src=0)
        if not measured:
            return
        try:
            table = self.profile_costs()
        except CostTableError as error:
            logger.warning("vllm-dspark: full windows in this run: %s", error)
            return
        record = CostTableRecord.from_table(table, live_fingerprint(self.vllm_config))
        self.dspark_reporter.cost_table = record.model_dump_json()
        path = ArtifactStore(self.dspark_options.resolved_cache_dir()).save(record)
        logger.info("vllm-dspark: cost table measured and kept in %s", path)

    def profile_costs(self) -> CostTable:
        """Measured step times of this engine; raises CostTableError if they cannot be trusted."""
        raise NotImplementedError

    def step_profiler(self) -> Any:
        """What `vllm-dspark profile` measures with (profiling.CpuProfiler's methods)."""
        raise CostTableError("incomplete", "`profile` has no way to measure on this device yet")

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's step; keeps the engine core's order for the draft pass that follows."""
        self._order = order_of(scheduler_output)
        if self._order is None:  # dummy runs, foreign schedulers
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self.dspark_reporter.owners.update(scheduler_output)
        trims = self._trims(scheduler_output)
        self.adaptive_verification = self._windows if trims else None
        if isinstance(self.rejection_sampler, DSparkRejectionSampler):
            exact = self._windows is None or self._windows.exact_on_host
            self.rejection_sampler.device_offsets = trims and not exact
        if self.dspark_reporter.clock is not None:
            self.dspark_reporter.clock.reset()
        with self.dspark_reporter.clock or nullcontext():
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _trims(self, scheduler_output: Any) -> bool:
        """Whether device windows execute this step's plan."""
        windows, order = self._windows, self._order
        if windows is None or order is None:
            return False
        if order.plan is None or order.plan.kind is not PlanKind.TRIM:
            windows.stand_aside()
            return False
        ids = [name for name, d in scheduler_output.scheduled_spec_decode_tokens.items() if d]
        return bool(ids) and windows.accept(order, self.dspark_reporter.owners.of(ids))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's sampling and drafting, then the step's report on its output."""
        order, self._order = self._order, None
        state = self.execute_model_state
        if order is None or state is None or self.speculator is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        self.speculator.draft_next = order.draft_next
        self.speculator.draft_width = order.draft_width
        with self.dspark_reporter.clock or nullcontext():
            output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        return self._reported(order, state.input_batch, output)

    def _reported(self, order: StepOrder, input_batch: Any, output: Any) -> Any:
        """The output of a step that was just launched, with the step's report."""
        speculator, reporter = self.speculator, self.dspark_reporter
        if order.draft_next and speculator.has_confidence:
            logits = speculator.confidence_logits[: input_batch.num_reqs, : order.draft_width]
            if not order.at_rest:
                reporter.record_rows(order, input_batch, logits)
            if self._windows is not None:
                self._windows.record(order.step_id, input_batch.idx_mapping_np, logits)
        windows = self._windows if self.adaptive_verification is not None else None  # it trimmed
        if order.at_rest and windows is None and not reporter.has_news:
            return output
        if reporter.clock is not None:
            reporter.clock.draft_ms = speculator.draft_ms
            reporter.clock.draft_width = order.draft_width
        admitted = windows.admitted() if windows is not None else None
        timings = reporter.timings(input_batch)
        if isinstance(output, AsyncModelRunnerOutput):
            return ReportedOutput(output, lambda: reporter.report(timings, admitted))
        attach_report(output, reporter.report(timings, admitted))
        return output


class DSparkGPUModelRunner(DSparkRunnerMixin, GPUModelRunner):
    """V2 runner on CUDA."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from vllm_dspark.integration.cuda_clock import CudaClock

        has_pieces = self.compilation_config.cudagraph_mode.requires_piecewise_compilation()
        ungraphed = StepMode.PIECEWISE if has_pieces else StepMode.EAGER
        self.step_timing = self.dspark_clock = CudaClock(self.num_speculative_steps, ungraphed)
        self.dspark_reporter.late_timings = self.dspark_clock.take
        if self.speculator is not None:
            self.speculator.clock = self.dspark_clock

    def make_windows(self, on_device: bool) -> DeviceWindows | None:
        """Graphs for steps without drafts and for ragged ones; the executor, if it can work here.

        What the config promised is checked against the attention backends that were built.
        """
        from vllm_dspark.integration.cuda_graphs import install_graphs, refusal_of_backends
        from vllm_dspark.integration.cuda_windows import CudaWindows

        if self.speculator is None:
            return None
        if self.fast_prefill is not None:
            if on_device:
                self._refuse("kv_sharing_fast_prefill keeps vLLM's own graphs")
            return None
        graphs, lengths = refusal_of_backends(self, self._target_layers())
        install_graphs(self, variable=not graphs)
        self.speculator.capture_context = True
        if not narrow_refusal(self.vllm_config, self.dspark_options):
            self.speculator.narrow_widths = ladder(self.num_speculative_steps)[:-1]
        if not on_device:
            return None
        if graphs or lengths:
            self._refuse(graphs or lengths)
            return None
        return CudaWindows(self, get_tp_group())

    def _target_layers(self) -> set[str]:
        names = {name for g in self.kv_cache_config.kv_cache_groups for name in g.layer_names}
        layers: set[str] = names - self.speculator.draft_attn_layer_names
        return layers

    def _refuse(self, reason: str) -> None:
        """Run native from now on; the engine core learns why with the first step's report."""
        logger.warning("vllm-dspark: windows are not set on this device: %s", reason)
        self._windows = None
        self.dspark_reporter.refused = reason

    def check_device(self) -> None:
        """Compile and try our kernels before anything is served; called once, after capture.

        A kernel that does not do what it should here costs its feature, not the engine.
        """
        from vllm_dspark.integration.cuda_warmup import warm_up_rejection

        if isinstance(self.rejection_sampler, DSparkRejectionSampler):
            warm_up_rejection(self)
        if self._windows is None:
            return
        try:
            with torch.inference_mode():
                self._windows.check()
        except (DSparkError, RuntimeError) as error:
            self._refuse(str(error))

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The mixin's; steps that an engine core ordered are timed now and then."""
        order = order_of(scheduler_output)
        self.dspark_clock.armed = order is not None and not order.at_rest
        return super().execute_model(scheduler_output, *args, **kwargs)

    def profile_costs(self) -> CostTable:
        """Measured at start-up with dummy batches in the captured graphs."""
        from vllm_dspark.integration.cuda_profiling import profile_cuda

        table: CostTable = profile_cuda(self)
        return table

    def step_profiler(self) -> Any:
        """What `vllm-dspark profile` measures with: the captured graphs."""
        from vllm_dspark.integration.cuda_profiling import CudaProfiler

        return CudaProfiler(self)


if current_platform.is_cpu():
    # Imported by name: the module patches torch on import and exists for the CPU build only.
    _cpu = importlib.import_module("vllm.v1.worker.cpu.model_runner")

    class DSparkCPUModelRunner(DSparkRunnerMixin, _cpu.CPUModelRunner):  # type: ignore[name-defined,misc]
        """V2 runner on the CPU build."""

        def profile_costs(self) -> CostTable:
            table: CostTable = profile_cpu(self)
            return table

        def step_profiler(self) -> CpuProfiler:
            return CpuProfiler(self)
