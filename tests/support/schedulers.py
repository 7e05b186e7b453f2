"""vLLM's scheduler with ours on top, without engine, worker or model; a worker is made up.

Milliseconds instead of an engine's ten seconds, and the same in every run.
"""

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.costs import write_cost_table
from tests.support.engines import DEFAULTS, dspark
from tests.support.pairs import Pair
from vllm_dspark.integration.report import AdmittedDrafts, StepReport, attach_report, order_of
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming
from vllm_dspark.planning.plan import PlanKind, VerifyPlan, owner_id

Accept = Callable[[str, int], int]  # (request, its drafts verified) -> accepted of them

K = 7
DEAR = {"base_ms": 10.0, "per_token_ms": 1.0}  # at 8 requests most drafts are not worth a row
HOPELESS = {"base_ms": 0.1, "per_token_ms": 10.0, "draft_ms": 10.0}  # no draft ever is
CHEAP = {"base_ms": 100.0, "per_token_ms": 0.05, "draft_ms": 0.1}


def bare_scheduler(
    pair: Pair,
    options: dict[str, Any],
    *,
    width: int = 7,
    blocks: int = 200_000,
    asynchronous: bool = False,
    **overrides: Any,
) -> Any:
    """A scheduler; overrides: engine arguments. `{"enabled": False}` gives vLLM's own.

    asynchronous: as on CUDA; the CPU platform turns it off in the config.
    """
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_dspark.integration.scheduler import make_scheduler

    settings = {**DEFAULTS, "enable_prefix_caching": False, **overrides}
    config = EngineArgs(
        model=str(pair.target),
        speculative_config=dspark(pair.drafter, options, num_speculative_tokens=width),
        **settings,
    ).create_engine_config()
    config.cache_config.num_gpu_blocks = blocks
    config.scheduler_config.async_scheduling = asynchronous
    block_size = config.cache_config.block_size
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    make = Scheduler if options.get("enabled") is False else make_scheduler
    return make(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], spec)]),
        structured_output_manager=StructuredOutputManager(config),
        block_size=block_size,
        log_stats=True,
    )


def add_request(scheduler: Any, name: str, prompt: Sequence[int] = (10, 20, 30), **changes: Any):
    """Queue a request; changes: of the Request (`cache_salt`) or its SamplingParams."""
    from vllm import SamplingParams
    from vllm.v1.request import Request

    own = {key: changes.pop(key) for key in ("cache_salt", "lora_request") if key in changes}
    params = {"temperature": 0.0, "max_tokens": 10_000, "ignore_eos": True, **changes}
    scheduler.add_request(Request(name, list(prompt), SamplingParams(**params), None, **own))


class MadeUpWorker:
    """Runs a scheduler's steps: accepts by `accept`, drafts what the scheduler output asks for.

    lag: steps by which confidence rows come late; 0 on a CPU, at least 1 under async scheduling.
    backwards: the worker's order of requests is not the scheduler's.
    """

    def __init__(
        self,
        scheduler: Any,
        accept: Accept,
        confidence: float = 0.8,
        lag: int = 0,
        *,
        backwards: bool = False,
    ) -> None:
        self.scheduler = scheduler
        self._backwards = backwards
        self.width: int = scheduler.num_spec_tokens
        self.plans: list[VerifyPlan] = []
        self._accept = accept
        self._confidence = confidence
        self._owners: dict[str, int] = {}
        none = (0, (), self.width)  # stamp, requests and columns of a pass
        self._passes: deque[tuple[int, tuple[str, ...], int]] = deque([none] * lag, lag + 1)

    def step(self) -> Any:
        """One step; what was scheduled."""
        output = self.scheduler.schedule()
        ran = self.run(output)
        self.scheduler.update_from_output(output, ran)
        self.draft(output)
        return output

    def run(self, output: Any) -> Any:
        """What the worker returns for a step."""
        from vllm.v1.outputs import ModelRunnerOutput

        ids = list(output.num_scheduled_tokens)
        if self._backwards:
            ids.reverse()
        order = order_of(output)
        if order is not None and order.plan is not None:
            self.plans.append(order.plan)
        drafts = {name: len(output.scheduled_spec_decode_tokens.get(name, ())) for name in ids}
        admitted = _spread(drafts, order) if _trims_on_device(order) else None
        verified = drafts if admitted is None else admitted.by_name()
        tokens = []
        for name in ids:
            chunk = self.scheduler.requests[name].is_prefill_chunk
            tokens.append([] if chunk else [7] * (1 + self._accept(name, verified[name])))
        index = {name: i for i, name in enumerate(ids)}
        ran = ModelRunnerOutput(req_ids=ids, req_id_to_index=index, sampled_token_ids=tokens)
        if order is not None and not order.at_rest:
            attach_report(ran, self._report(output, order, ids, admitted))
        elif admitted is not None:
            nobody, none = np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.float32)
            attach_report(ran, StepReport(0, (), nobody, none, (), admitted))
        return ran

    def draft(self, output: Any) -> None:
        """Hand drafts to the scheduler, placeholders where none were made."""
        from vllm.v1.outputs import DraftTokenIds

        ids, width = list(output.num_scheduled_tokens), output.num_spec_tokens_to_schedule
        self.scheduler.update_draft_token_ids(DraftTokenIds(ids, [[7] * width for _ in ids]))

    def _report(
        self, output: Any, order: Any, ids: list[str], admitted: AdmittedDrafts | None
    ) -> StepReport:
        for name in ids:
            self._owners.setdefault(name, owner_id(name))
        trims = order.plan is not None and order.plan.kind is PlanKind.TRIM
        timing = StepTiming(
            StepMode.EAGER,
            StepShape.RAGGED if trims else StepShape.NATIVE,
            len(ids),
            output.total_num_scheduled_tokens,
            100 * len(ids),
            20.0,
            1.0,
            order.draft_width,
        )
        drafted = order.step_id if order.draft_next else 0
        self._passes.append((drafted, tuple(ids), output.num_spec_tokens_to_schedule))
        stamp, names, columns = self._passes[0]
        return StepReport(
            stamp,
            names,
            np.array([self._owners[name] for name in names], dtype=np.int64),
            np.full((len(names), columns), self._confidence, dtype=np.float32),
            (timing,),
            admitted,
        )


def _trims_on_device(order: Any) -> bool:
    """Whether the worker would spread the budget of a step."""
    plan = order.plan if order is not None else None
    return plan is not None and plan.kind is PlanKind.TRIM and not plan.windows


def _spread(drafts: dict[str, int], order: Any) -> AdmittedDrafts:
    """The budget of a step, spread evenly over those that have drafts."""
    with_drafts = sum(map(bool, drafts.values()))
    share, more = divmod(order.plan.budget, max(with_drafts, 1))
    counts = []
    for count in drafts.values():
        counts.append(min(share + (more > 0), count) if count else 0)
        more -= bool(count)
    return AdmittedDrafts(list(drafts), np.array(counts, dtype=np.int32))


def options(folder: Path, table: dict[str, float], **changes: Any) -> dict[str, Any]:
    path = write_cost_table(folder / "table.json", **table)
    return {
        "scheduling": "auto",
        "cost_table": str(path),
        "online_cost": False,
        "hysteresis_steps": 0,
        "metrics": False,
        "log_interval_s": 0.0,
        **changes,
    }


def half(_: str, drafts: int) -> int:
    return drafts // 2


def settled(scheduler: Any, count: int = 8, steps: int = 12, **request: Any) -> MadeUpWorker:
    """`count` requests that have been decoding for a while."""
    for i in range(count):
        add_request(scheduler, f"r{i}", **request)
    worker = MadeUpWorker(scheduler, half)
    for _ in range(steps):
        worker.step()
    worker.plans.clear()
    return worker
