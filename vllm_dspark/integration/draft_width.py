"""Whether draft passes of this engine may be narrower than K, settled when the config is built.

vLLM takes a width per step: the scheduler output says how many drafts per request the step ends
with (`num_spec_tokens_to_schedule`, vLLM's own dynamic speculation sets it by batch size), the
runner cuts drafts to it. Its DSpark drafts K columns all the same; ours drafts a block of that
width (speculator.py). Slots for drafts stay those of K. Under asynchronous scheduling, where the
next step is scheduled before its drafts exist, the width is known with the step that drafts, and
the scheduler hands out that many placeholders (scheduler.py).
"""

from typing import Any

from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration import compat


def narrow_refusal(vllm_config: Any, options: DSparkConfig) -> str:
    """Why draft passes keep full width in this engine, "" if they may be narrow.

    | engine                      | "auto"        |
    |-----------------------------|---------------|
    | CPU build                   | width by step |
    | CUDA                        | width by step |
    | pipeline or data parallel   | full          |
    | a worker class of the user's | full         |
    | K = 1                       | full          |

    On CUDA narrow passes replay graphs of their own (cuda_graphs.NarrowDraftGraphs).
    """
    speculative, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    reasons = {
        'asked for ("draft_width": "full")': options.draft_width == "full",
        "num_speculative_tokens = 1": speculative.num_speculative_tokens == 1,
        "data parallel ranks draft together": parallel.data_parallel_size > 1,
        "pipeline ranks hand on full drafts": parallel.pipeline_parallel_size > 1,
        f"worker_cls = {parallel.worker_cls} was set by the user": (
            parallel.worker_cls not in (compat.CPU_WORKER, compat.GPU_WORKER)
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), "")
