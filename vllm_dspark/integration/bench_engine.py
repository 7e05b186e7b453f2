"""A vLLM engine in this process (or right behind it) for the benchmark's load generator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from prometheus_client import REGISTRY

from vllm_dspark.errors import DSparkError
from vllm_dspark.integration.replay import request_mark

# Counters and sums of these families say what became of drafts and steps.
_COUNTED = ("vllm:spec_decode_", "vllm:dspark_", "vllm:num_preemptions", "vllm:prompt_tokens")


class DrivenEngine:
    """`LLM(...)` driven request by request, as `vllm_dspark.bench.drive.Engine` wants it."""

    def __init__(self, arguments: dict[str, Any]) -> None:
        """Start the engine. arguments: of `vllm.LLM`; the environment must stand already."""
        _hook_kernels()
        from vllm import LLM

        self._llm = LLM(**arguments)
        self._engine = self._llm.llm_engine
        self._encoded: dict[str, list[int]] = {}
        self._round = 0
        self._planner: Any = None  # of `ours`, while its scheduling is switched off
        self._names: dict[int, str] = {}  # of the requests of this round
        self._replays = False

    def replay(self, trace: str) -> None:
        """Take acceptance and confidences from a recorded trace from now on (replay.py).

        The engine was started with bench.replay_worker as `worker_extension_cls`; all its workers
        read the file, wherever they run.
        """
        self._llm.collective_rpc("dspark_replay", args=(trace,))
        self._replays = True

    def add(self, request: int, ids: list[int], max_tokens: int, temperature: float) -> None:
        """Take one request; unseeded, since seeded requests keep full windows by design.

        Its tokens are not made into text: a server does that in another process, here it would
        hold the engine up.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=temperature,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"{self._round}-{request}"
        if self._replays:
            name += request_mark(f"{request}/{ids}", sampled=temperature > 0)
        self._names[request] = name
        self._engine.add_request(name, {"prompt_token_ids": ids}, params)

    def encode(self, prompt: str | list[int]) -> list[int]:
        """Tokens of a user's message in the chat template, if there is one; tokens as they are."""
        if not isinstance(prompt, str):
            return prompt
        if prompt not in self._encoded:
            self._encoded[prompt] = self._token_ids(prompt)
        return self._encoded[prompt]

    def _token_ids(self, prompt: str) -> list[int]:
        tokenizer = self._llm.get_tokenizer()
        if getattr(tokenizer, "chat_template", None) is None:
            return list(tokenizer.encode(prompt))
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    def step(self) -> list[tuple[int, int, bool]]:
        """One engine step: (request, new tokens, finished) of those that got any."""
        prefix = f"{self._round}-"
        return [
            (int(o.request_id.split("-")[1]), len(o.outputs[0].token_ids), o.finished)
            for o in self._engine.step()
            if o.request_id.startswith(prefix)
        ]

    def cancel(self, requests: Sequence[int]) -> None:
        """Abort requests and run the engine until it is idle."""
        self._engine.abort_request([self._names[request] for request in requests])
        while self._engine.has_unfinished_requests():
            self._engine.step()
        # An aborted request leaves the workers with the next step that there is.
        self._round += 1
        self._names.clear()
        # A core of its own may still be in the last step of what is aborted by now.
        self.pause()
        self.resume()

    def pause(self) -> None:
        """Let no step run until `resume`; returns when the last one is done.

        An engine core in this process runs in `step` only, so it stands still by itself. One in a
        process of its own would go on, at the expense of the engine whose turn it is.
        """
        if self._own_core is None:
            self._engine.engine_core.call_utility("pause_scheduler", "keep", False)

    def resume(self) -> None:
        """Go on with the requests that there were."""
        if self._own_core is None:
            self._engine.engine_core.call_utility("resume_scheduler")

    def counters(self) -> dict[str, float]:
        """Running sums by name, labels but the engine's own in braces."""
        metrics = getattr(self._own_scheduler, "dspark_metrics", None)
        if metrics is not None:
            metrics.publish()  # which it does a few times a second by itself; cells may be shorter
        self._engine.do_log_stats()
        return registry_counters()

    def verified(self) -> tuple[int, int] | None:
        """Requests that verified so far and the sum of their windows, where ours counts them."""
        totals = getattr(self._own_scheduler, "dspark_totals", None)
        return None if totals is None else (totals.request_steps, int(totals.windows[-1]))

    def set_scheduling(self, enabled: bool) -> None:
        """Switch the planner of `ours`: without it every step is native, as `scheduling: false`."""
        conductor = self.scheduler.conductor
        if enabled and self._planner is not None:
            conductor.planner, self._planner = self._planner, None
        elif not enabled and conductor.planner is not None:
            conductor.planner, self._planner = None, conductor.planner

    @property
    def config(self) -> Any:
        """The engine's VllmConfig."""
        return self._engine.vllm_config

    @property
    def scheduler(self) -> Any:
        """The scheduler, where the engine core is in this process."""
        return self._core.scheduler

    @property
    def runner(self) -> Any:
        """The model runner, where engine core and worker are in this process."""
        return self._core.model_executor.driver_worker.worker.model_runner

    @property
    def _own_scheduler(self) -> Any:
        """The scheduler, or None where the engine core runs in a process of its own."""
        return getattr(self._own_core, "scheduler", None)

    @property
    def _own_core(self) -> Any:
        """The engine core, or None where it runs in a process of its own."""
        return getattr(self._engine.engine_core, "engine_core", None)

    @property
    def _core(self) -> Any:
        core = self._own_core
        if core is None:
            raise DSparkError(
                "this engine's core runs in a process of its own, so nothing can be switched in "
                "it; start it with VLLM_ENABLE_V1_MULTIPROCESSING=0, or without shared modes"
            )
        return core

    def describe(self) -> dict[str, Any]:
        """Facts about the started engine for the report."""
        config = self.config
        facts: dict[str, Any] = {
            "cudagraph_mode": str(config.compilation_config.cudagraph_mode),
            "async_scheduling": bool(config.scheduler_config.async_scheduling),
            "core_in_own_process": self._own_core is None,
            "scheduler": str(config.scheduler_config.scheduler_cls),
        }
        if torch.cuda.is_initialized():  # else there is no GPU, or it is another process's
            facts["gpu_gib"] = round(torch.cuda.max_memory_reserved() / 2**30, 3)
        return facts

    def shutdown(self) -> None:
        """Stop the engine."""
        self._engine.engine_core.shutdown()


def _hook_kernels() -> None:
    """On the CPU build with our Triton backend registered, any V2 runner needs native kernels."""
    import vllm.platforms  # noqa: F401 - the plugin's hook expects it


def registry_counters() -> dict[str, float]:
    """Counters and histogram sums of this process's Prometheus registry."""
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        if not family.name.startswith(_COUNTED) or family.type not in ("counter", "histogram"):
            continue
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            text = ",".join(f"{k}={v}" for k, v in sorted(labels.items()))
            key = f"{sample.name}{{{text}}}" if text else sample.name
            found[key] = found.get(key, 0.0) + float(sample.value)
    return found
