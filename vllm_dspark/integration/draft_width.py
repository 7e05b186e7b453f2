"""Whether draft passes of this engine may be narrower than K, settled when the config is built.

vLLM takes a width per step: the scheduler output says how many drafts per request the step ends
with (`num_spec_tokens_to_schedule`, vLLM's own dynamic speculation sets it by batch size), the
runner cuts drafts to it. Its DSpark drafts K columns all the same; ours drafts a block of that
width (speculator.py). Slots for drafts stay those of K.
"""

from typing import Any

from vllm_dspark.config import DSparkConfig
from vllm_dspark.cpu.build import is_cpu_build
from vllm_dspark.integration import compat


def narrow_refusal(vllm_config: Any, options: DSparkConfig) -> str:
    """Why draft passes keep full width in this engine, "" if they may be narrow.

    | engine                                             | "auto"        |
    |----------------------------------------------------|---------------|
    | CPU build                                          | width by step |
    | CUDA                                               | full          |
    | pipeline or data parallel                          | full          |
    | asynchronous scheduling                            | full          |
    | a worker class of the user's                       | full          |
    | K = 1                                              | full          |

    On CUDA the draft pass is a captured graph of one width; it would take graphs of every width of
    the ladder. Under asynchronous scheduling the scheduler hands out placeholders for drafts before
    the width is known.
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    reasons = {
        'asked for ("draft_width": "full")': options.draft_width == "full",
        "num_speculative_tokens = 1": speculative.num_speculative_tokens == 1,
        "draft passes are captured graphs of one width": not is_cpu_build(),
        "data parallel ranks draft together": parallel.data_parallel_size > 1,
        "pipeline ranks hand on full drafts": parallel.pipeline_parallel_size > 1,
        "asynchronous scheduling": bool(vllm_config.scheduler_config.async_scheduling),
        f"worker_cls = {parallel.worker_cls} was set by the user": (
            parallel.worker_cls != compat.CPU_WORKER
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
