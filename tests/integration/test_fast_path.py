"""The parts that run are ours, native on a CPU; and stock ones where we are switched off."""

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from tests.integration.scenarios import SCENARIOS, Stage, generate, make_prompts, params
from tests.integration.test_equality import MARKOV, SYMBOLS
from tests.support.engines import dspark, engine, runner_of, scheduler_of

pytestmark = pytest.mark.engine

RANDOM_WINDOWS = {"test_windows": "random", "test_windows_seed": 51}


def _count_calls(monkeypatch: pytest.MonkeyPatch, owner: Any, names: list[str]) -> Counter[str]:
    """Count calls of methods of an object."""
    calls: Counter[str] = Counter()

    def counted(name: str, method: Callable) -> Callable:
        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return method(*args, **kwargs)

        return call

    for name in names:
        monkeypatch.setattr(owner, name, counted(name, getattr(owner, name)))
    return calls


@pytest.mark.parametrize("drafts", ["greedy", "probabilistic"])
def test_our_parts_run(build: Callable, monkeypatch: pytest.MonkeyPatch, drafts: str) -> None:
    """Catches a silent fall-back: right tokens from stock code would pass every equality test."""
    from vllm_dspark.cpu.draft_ops import CpuDraftOps
    from vllm_dspark.cpu.reject_ops import CpuRejectOps
    from vllm_dspark.integration.rejection import DSparkRejectionSampler
    from vllm_dspark.integration.runner import DSparkCPUModelRunner
    from vllm_dspark.integration.scheduler import DSparkSchedulerMixin
    from vllm_dspark.integration.speculator import DSparkProposer

    pair = build(MARKOV)
    speculative = dspark(
        pair.drafter, RANDOM_WINDOWS, num_speculative_tokens=7, draft_sample_method=drafts
    )
    with engine(pair.target, speculative) as llm:
        runner, scheduler = runner_of(llm), scheduler_of(llm)
        assert isinstance(runner, DSparkCPUModelRunner)
        assert isinstance(scheduler, DSparkSchedulerMixin)
        assert type(runner.speculator) is DSparkProposer
        assert type(runner.speculator.model).__module__.startswith("vllm_dspark.")
        assert type(runner.rejection_sampler) is DSparkRejectionSampler
        assert type(runner.speculator.ops) is CpuDraftOps
        assert type(runner.rejection_sampler.ops) is CpuRejectOps
        drafting = _count_calls(monkeypatch, runner.speculator.ops, ["sample_block"])
        rejecting = _count_calls(monkeypatch, runner.rejection_sampler.ops, ["reject"])
        passes = runner.speculator.draft_pass
        generate(llm, make_prompts(SYMBOLS)[:4], params(30))
        steps = scheduler.dspark_totals.steps
        passes = runner.speculator.draft_pass - passes
    assert steps > 4
    # one draft pass for every step that samples: those that verify, and those that end a prompt
    assert drafting["sample_block"] == passes
    assert drafting["sample_block"] >= steps
    assert rejecting["reject"] >= steps


def test_no_step_reaches_tritons_interpreter(build: Callable) -> None:
    """Catches a kernel without native twin under any sampling parameter, mixed batch or window."""
    from vllm import SamplingParams

    from vllm_dspark.cpu.interpreter_guard import count_interpreted

    pair = build(MARKOV)
    sampled = [
        SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, **changes)
        for changes in (
            {},
            {"seed": 3},
            {"top_k": 5},
            {"top_p": 0.8},
            {"top_k": 7, "top_p": 0.9, "seed": 1},
            {"presence_penalty": 0.5, "logprobs": 2},
        )
    ]
    speculative = dspark(
        pair.drafter,
        RANDOM_WINDOWS,
        num_speculative_tokens=7,
        draft_sample_method="probabilistic",
    )
    prompts = make_prompts(SYMBOLS)
    with engine(pair.target, speculative) as llm:
        free = generate(llm, prompts, params(60))
        stage = Stage(llm, prompts, [a.tokens for a in free], [a.text for a in free])
        with count_interpreted() as launches:
            generate(llm, prompts[: len(sampled)], sampled)
            for run in SCENARIOS.values():
                run(stage)
    assert not launches, dict(launches)


def test_the_guard_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a guard that counts nothing: an interpreted kernel launched by hand is seen."""
    import torch
    import triton
    import triton.language as tl

    from vllm_dspark.cpu.interpreter_guard import count_interpreted

    @triton.jit
    def _add_one_kernel(pointer, N: tl.constexpr):
        offsets = tl.arange(0, N)
        tl.store(pointer + offsets, tl.load(pointer + offsets) + 1)

    values = torch.zeros(4)
    with count_interpreted() as launches:
        _add_one_kernel[(1,)](values, N=4)
    assert values.tolist() == [1.0] * 4
    assert sum(launches.values()) == 1


def test_disabled_runs_stock_parts_only(build: Callable) -> None:
    """Catches `{"enabled": false}` that still leaves a part of ours in the engine."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.worker.cpu.model_runner import CPUModelRunner
    from vllm.v1.worker.gpu.spec_decode.dspark.speculator import DSparkSpeculator
    from vllm.v1.worker.gpu.spec_decode.rejection_sampler import RejectionSampler

    pair = build(MARKOV)
    speculative = dspark(pair.drafter, {"enabled": False}, num_speculative_tokens=7)
    with engine(pair.target, speculative) as llm:
        runner, scheduler = runner_of(llm), scheduler_of(llm)
        assert type(runner) is CPUModelRunner
        assert type(scheduler) is Scheduler
        assert type(runner.speculator) is DSparkSpeculator
        assert type(runner.rejection_sampler) is RejectionSampler
        assert type(runner.speculator.model).__module__.startswith("vllm.")
        assert not llm.llm_engine.vllm_config.additional_config
        found = generate(llm, make_prompts(SYMBOLS)[:2], params(10))
    with engine(pair.target) as llm:
        assert generate(llm, make_prompts(SYMBOLS)[:2], params(10)) == found
