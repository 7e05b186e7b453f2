"""Model runner of vLLM (V2) with our drafter, rejection sampler and step reports."""

import importlib
import logging
from contextlib import nullcontext
from typing import Any

from vllm.distributed.parallel_state import get_tp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner

from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.artifacts.store import ArtifactStore
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import CostTableError
from vllm_dspark.integration.backends import reject_ops
from vllm_dspark.integration.carrier import options_of
from vllm_dspark.integration.profiling import profile_cpu
from vllm_dspark.integration.rejection import replace_rejection_sampler
from vllm_dspark.integration.report import StepOrder, attach_report, order_of
from vllm_dspark.integration.reporting import StepReporter
from vllm_dspark.integration.speculator import DSparkProposer
from vllm_dspark.integration.startup import live_fingerprint, resolve_scheduling
from vllm_dspark.planning.cost import CostTable

logger = logging.getLogger("vllm.vllm_dspark")


class DSparkRunnerMixin:
    """Replaces parts of vLLM's runner right after vLLM has built its own.

    `super()` builds the stock object first; that costs a moment at start-up and keeps every
    other part of the runner (sizes, capture, profiling) as vLLM made it.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.dspark_options = options_of(self.vllm_config) or DSparkConfig()
        self.dspark_reporter = StepReporter(self.device, self.num_speculative_steps)
        self._order: StepOrder | None = None
        if self.speculator is not None:  # last pipeline rank only
            self.speculator = None  # free the stock buffers before ours are allocated
            self.speculator = DSparkProposer(self.vllm_config, self.device, self.dspark_options)

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """vLLM's load, then our rejection sampler in place of its own."""
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

    def provide_cost_table(self) -> None:
        """Take the cached cost table of this engine, or measure and cache one.

        Called once, after warm-up. Every rank runs the same dummy steps; the output rank's table
        reaches the engine core with its first report.
        """
        resolution = resolve_scheduling(self.vllm_config, self.dspark_options)
        if not resolution.scheduling or self.speculator is None:
            return
        measured = get_tp_group().broadcast_object(resolution.needs_profile, src=0)
        if not measured:
            return
        try:
            table = self.profile_costs()
        except CostTableError as error:
            logger.warning("vllm-dspark: full windows in this run: %s", error)
            return
        record = CostTableRecord.from_table(
            table, live_fingerprint(self.vllm_config)
        )
        self.dspark_reporter.cost_table = record.model_dump_json()
        path = ArtifactStore(self.dspark_options.resolved_cache_dir()).save(record)
        logger.info("vllm-dspark: cost table measured and kept in %s", path)

    def profile_costs(self) -> CostTable:
        """Measured step times of this engine; raises CostTableError if they cannot be trusted."""
        raise NotImplementedError

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """vLLM's step; keeps the engine core's order for the draft pass that follows."""
        self._order = order_of(scheduler_output)
        if self._order is None:  # dummy runs, foreign schedulers
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self.dspark_reporter.owners.update(scheduler_output)
        if self.dspark_reporter.clock is not None:
            self.dspark_reporter.clock.reset()
        with self.dspark_reporter.clock or nullcontext():
            return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, grammar_output: Any) -> Any:
        """vLLM's sampling and drafting, then the step's report on its output."""
        order, self._order = self._order, None
        state = self.execute_model_state
        if order is None or state is None or self.speculator is None:
            return super().sample_tokens(grammar_output)  # type: ignore[misc]
        self.speculator.draft_next = order.draft_next
        with self.dspark_reporter.clock or nullcontext():
            output = super().sample_tokens(grammar_output)  # type: ignore[misc]
        self._report(order, state.input_batch, output)
        return output

    def _report(self, order: StepOrder, input_batch: Any, output: Any) -> None:
        speculator, reporter = self.speculator, self.dspark_reporter
        if reporter.clock is not None:
            reporter.clock.draft_ms = speculator.draft_ms
        if order.draft_next and speculator.has_confidence:
            reporter.record_rows(order, input_batch, speculator.confidence_logits)
        report = reporter.report(input_batch)
        attach_report(getattr(output, "model_runner_output", output), report)


class DSparkGPUModelRunner(DSparkRunnerMixin, GPUModelRunner):
    """V2 runner on CUDA."""

    def profile_costs(self) -> CostTable:
        raise CostTableError("incomplete", "profiling on a GPU comes with the GPU executor")


if current_platform.is_cpu():
    # Imported by name: the module patches torch on import and exists for the CPU build only.
    _cpu = importlib.import_module("vllm.v1.worker.cpu.model_runner")

    class DSparkCPUModelRunner(DSparkRunnerMixin, _cpu.CPUModelRunner):
        """V2 runner on the CPU build."""

        def profile_costs(self) -> CostTable:
            return profile_cpu(self)
