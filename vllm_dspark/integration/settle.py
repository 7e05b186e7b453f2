"""Decide, while the engine config is built, what of the plugin runs in this engine.

Everything that cannot be served is found here, before an engine exists, and becomes plain
behaviour with one log line; nothing is discovered in the middle of a step.
"""

import logging
from typing import Any

from vllm_dspark.artifacts.store import why_unwritable
from vllm_dspark.config import RECORDINGS, DSparkConfig
from vllm_dspark.cpu.build import is_cpu_build
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.integration import compat
from vllm_dspark.integration.carrier import KEY, CarriedOptions, MetricsPlace
from vllm_dspark.integration.contract import violations
from vllm_dspark.integration.line_file import unwritable
from vllm_dspark.integration.metrics_collector import provide_place, publish_declined

logger = logging.getLogger("vllm.vllm_dspark")

SCHEDULER = "vllm_dspark.integration.scheduler.make_scheduler"


def settle(
    args: Any,
    target_model: Any,
    target_parallel: Any,
    speculative: Any,
    options: DSparkConfig,
) -> None:
    """Set worker, scheduler and options on the engine arguments; stand aside if they cannot work.

    args: EngineArgs, changed in place; target_parallel: its ParallelConfig, already built.
    """
    place = _metrics_place(args, options)
    name, width = str(target_model.served_model_name), speculative.num_speculative_tokens
    broken = violations()
    if broken:
        logger.warning(
            "vllm-dspark stands aside, vLLM's own DSpark runs: vLLM %s does not keep the "
            "contract: %s",
            compat.vllm_version(),
            "; ".join(broken),
        )
        if place is not None:
            publish_declined(place, name, _engine_of(args), width, ["stood_aside"])
        return
    options = DSparkConfig.from_mapping(options, width)
    _require_writable(options)
    declined = _set_worker(target_parallel) + _set_scheduler(args)
    if place is not None and "foreign_scheduler" in declined:  # nobody else will say so
        publish_declined(place, name, _engine_of(args), width, declined)
    carried = CarriedOptions(options, place, tuple(declined))
    args.additional_config = {**(args.additional_config or {}), KEY: carried}
    logger.info(
        "vllm-dspark: K=%d, %s drafts, options %s",
        speculative.num_speculative_tokens,
        speculative.draft_sample_method,
        options.to_mapping() or "default",
    )


def _require_writable(options: DSparkConfig) -> None:
    """Refuse recordings that could not be opened, before processes are started for them."""
    for name in RECORDINGS:
        path = getattr(options, name)
        if path is not None and (why := why_unwritable(path)):
            raise DSparkConfigError(unwritable(name, path, why))


def _metrics_place(args: Any, options: DSparkConfig) -> MetricsPlace | None:
    """Where the engines of this process publish metrics; None if nothing here reads them.

    With several API servers the parent (rank -1) starts the engines, and each server (rank 0 up)
    builds the config once more, for itself.
    """
    is_one_of_several = args._api_process_count > 1 and args._api_process_rank >= 0
    return provide_place() if options.metrics and not is_one_of_several else None


def _engine_of(args: Any) -> str:
    return str(args.data_parallel_rank or 0)


def _set_worker(target_parallel: Any) -> list[str]:
    """Our worker, unless the user chose one; returns what was declined."""
    stock = ("auto", compat.CPU_WORKER_STOCK, "vllm.v1.worker.gpu_worker.Worker")
    ours = compat.CPU_WORKER if is_cpu_build() else compat.GPU_WORKER
    if target_parallel.worker_cls in stock:
        target_parallel.worker_cls = ours
        return []
    if target_parallel.worker_cls != ours:
        logger.warning(
            "vllm-dspark: worker_cls=%s was set by the user and is kept: own drafter, rejection "
            "sampler and confidences are off unless it derives from %s",
            target_parallel.worker_cls,
            ours,
        )
        return ["foreign_worker"]
    return []


def _set_scheduler(args: Any) -> list[str]:
    """Our scheduler, unless the user chose one; returns what was declined."""
    if args.scheduler_cls is None:
        args.scheduler_cls = SCHEDULER
        return []
    if args.scheduler_cls != SCHEDULER:
        logger.warning(
            "vllm-dspark: scheduler_cls=%s was set by the user and is kept: verification "
            "scheduling and outcome records are off",
            args.scheduler_cls,
        )
        return ["foreign_scheduler"]
    return []
