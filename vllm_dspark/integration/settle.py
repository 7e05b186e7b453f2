"""Decide, while the engine config is built, what of the plugin runs in this engine.

Everything that cannot be served is found here, before an engine exists, and becomes plain
behaviour with one log line; nothing is discovered in the middle of a step.
"""

import logging
from typing import Any

from vllm_dspark.config import DSparkConfig
from vllm_dspark.cpu.build import is_cpu_build
from vllm_dspark.integration import compat
from vllm_dspark.integration.carrier import KEY, CarriedOptions
from vllm_dspark.integration.contract import violations

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
    broken = violations()
    if broken:
        logger.warning(
            "vllm-dspark stands aside, vLLM's own DSpark runs: vLLM %s does not keep the "
            "contract: %s",
            compat.vllm_version(),
            "; ".join(broken),
        )
        return
    options = DSparkConfig.from_mapping(options, speculative.num_speculative_tokens)
    _set_worker(target_parallel)
    _set_scheduler(args)
    args.additional_config = {**(args.additional_config or {}), KEY: CarriedOptions(options)}
    logger.info(
        "vllm-dspark: K=%d, %s drafts, options %s",
        speculative.num_speculative_tokens,
        speculative.draft_sample_method,
        options.to_mapping() or "default",
    )


def _set_worker(target_parallel: Any) -> None:
    stock = ("auto", compat.CPU_WORKER_STOCK, "vllm.v1.worker.gpu_worker.Worker")
    ours = compat.CPU_WORKER if is_cpu_build() else compat.GPU_WORKER
    if target_parallel.worker_cls in stock:
        target_parallel.worker_cls = ours
    elif target_parallel.worker_cls != ours:
        logger.warning(
            "vllm-dspark: worker_cls=%s was set by the user and is kept: own drafter, rejection "
            "sampler and confidences are off unless it derives from %s",
            target_parallel.worker_cls,
            ours,
        )


def _set_scheduler(args: Any) -> None:
    if args.scheduler_cls is None:
        args.scheduler_cls = SCHEDULER
    elif args.scheduler_cls != SCHEDULER:
        logger.warning(
            "vllm-dspark: scheduler_cls=%s was set by the user and is kept: verification "
            "scheduling and outcome records are off",
            args.scheduler_cls,
        )
