"""The contract with vLLM: it holds on what is installed, and a break is named and survived.

What was checked by hand when this was written, on the wheel vllm 0.33.0 from PyPI (manylinux,
x86_64), by `VLLM_DSPARK_WHEEL_033=WHEEL pytest tests/integration/test_contract.py`: every symbol
of CONTRACT_CHECKED_ON_033 is there with its parameters, fields and bases. A symbol added later
must be checked again: `test_record_of_033_is_complete` says so.
"""

import ast
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.integration.conftest import make_config
from tests.support.engines import dspark, engine, runner_of, scheduler_of, token_lists
from vllm_dspark.integration import settle
from vllm_dspark.integration.contract import CONTRACT, Symbol, installed_source, violations
from vllm_dspark.integration.contract import wheel_source as read_wheel

WHEEL_VARIABLE = "VLLM_DSPARK_WHEEL_033"

CONTRACT_CHECKED_ON_033 = frozenset(
    {
        "engine.arg_utils:EngineArgs",
        "engine.arg_utils:EngineArgs.create_speculative_config",
        "model_executor.models.qwen3_dflash:DFlashQwen3ForCausalLM",
        "model_executor.models.qwen3_dflash:DFlashQwen3Model",
        "v1.attention.backend:AttentionBackend",
        "v1.attention.backend:AttentionMetadataBuilder",
        "v1.attention.backend:AttentionMetadataBuilder.build_for_cudagraph_capture",
        "v1.attention.backend:CommonAttentionMetadata",
        "v1.attention.backend:max_decode_query_len",
        "v1.attention.backends.registry:AttentionBackendEnum",
        "v1.attention.backends.registry:AttentionBackendEnum.is_overridden",
        "v1.attention.backends.registry:register_backend",
        "v1.attention.ops.triton_reshape_and_cache_flash:triton_reshape_and_cache_flash",
        "v1.core.sched.async_scheduler:AsyncScheduler",
        "v1.core.sched.output:SchedulerOutput",
        "v1.core.sched.scheduler:Scheduler",
        "v1.core.sched.scheduler:Scheduler.finish_requests",
        "v1.core.sched.scheduler:Scheduler.make_spec_decoding_stats",
        "v1.core.sched.scheduler:Scheduler.schedule",
        "v1.core.sched.scheduler:Scheduler.update_draft_token_ids",
        "v1.core.sched.scheduler:Scheduler.update_from_output",
        "v1.engine.__init__:EngineCoreOutput",
        "v1.engine.__init__:EngineCoreOutputs",
        "v1.outputs:AsyncModelRunnerOutput.get_output",
        "v1.outputs:DraftTokenIds",
        "v1.outputs:ModelRunnerOutput",
        "v1.request:Request",
        "v1.worker.gpu.async_utils:StepTimingCollector.forward_start",
        "v1.worker.gpu.async_utils:StepTimingCollector.record_batch",
        "v1.worker.gpu.attn_utils:get_query_lens_mismatch_unsupported_backend",
        "v1.worker.gpu.attn_utils:get_varlen_cudagraph_unsupported_backend",
        "v1.worker.gpu.cudagraph_utils:BatchExecutionDescriptor",
        "v1.worker.gpu.cudagraph_utils:CudaGraphManager",
        "v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates",
        "v1.worker.gpu.cudagraph_utils:ModelCudaGraphManager",
        "v1.worker.gpu.model_runner:GPUModelRunner",
        "v1.worker.gpu.model_runner:GPUModelRunner.__init__",
        "v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
        "v1.worker.gpu.model_runner:GPUModelRunner.finish_requests",
        "v1.worker.gpu.model_runner:GPUModelRunner.gather_batch_req_state",
        "v1.worker.gpu.model_runner:GPUModelRunner.initialize_kv_cache",
        "v1.worker.gpu.model_runner:GPUModelRunner.load_model",
        "v1.worker.gpu.model_runner:GPUModelRunner.sample",
        "v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
        "v1.worker.gpu.sample.states:SamplingStates",
        "v1.worker.gpu.spec_decode.dflash.cudagraph:DFlashCudaGraphManager",
        "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator",
        "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._precompute_context_kv",
        "v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.propose",
        "v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator",
        "v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator._sample_sequential",
        "v1.worker.gpu.spec_decode.dspark.speculator:DSparkSpeculator.load_draft_model",
        "v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler",
        "v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify",
        "v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify_in_chunks",
        "v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator",
        "v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator._build_uniform_attn_metadata",
        "v1.worker.gpu_worker:Worker._make_model_runner",
        "v1.worker.gpu_worker:Worker.load_model",
    }
)


def test_contract_holds_on_the_installed_vllm() -> None:
    """Catches a contract that refuses the vLLM it was written for."""
    assert violations() == []


@pytest.mark.skipif(WHEEL_VARIABLE not in os.environ, reason=f"{WHEEL_VARIABLE} names no wheel")
def test_contract_holds_on_the_033_wheel_named_by_environment() -> None:
    """Catches reliance on something that vLLM 0.33 no longer has."""
    assert violations(read_wheel(Path(os.environ[WHEEL_VARIABLE]))) == []


def test_record_of_033_is_complete() -> None:
    """Catches a new symbol in the contract that nobody has looked up in vLLM 0.33."""
    assert {str(symbol) for symbol in CONTRACT} == CONTRACT_CHECKED_ON_033


def _without(symbol: Symbol, change: Callable[[ast.AST], None]) -> Callable[[str], str]:
    """Reader of the installed sources in which `symbol`'s own node was changed."""

    def read(path: str) -> str:
        text = installed_source(path)
        if path != symbol.path:
            return text
        tree = ast.parse(text)
        node: ast.AST = tree
        for part in symbol.name.split("."):
            node = next(
                child
                for child in node.body  # type: ignore[attr-defined]
                if getattr(child, "name", None) == part
            )
        change(node)
        return ast.unparse(tree)

    return read


def _neighbours(symbol: Symbol) -> tuple[Symbol, ...]:
    """The part of the contract that a change of this file could touch."""
    return tuple(other for other in CONTRACT if other.path == symbol.path)


@pytest.mark.parametrize("symbol", CONTRACT, ids=str)
def test_renamed_symbol_is_named(symbol: Symbol) -> None:
    """Catches a rename that goes unnoticed, or a message that blames something else."""

    def rename(node: ast.AST) -> None:
        node.name += "_renamed"  # type: ignore[attr-defined]

    found = violations(_without(symbol, rename), _neighbours(symbol))
    inside = [
        other
        for other in _neighbours(symbol)
        if other.name == symbol.name or other.name.startswith(symbol.name + ".")
    ]
    assert [line.rsplit(": ", 1)[0] for line in found] == [str(other) for other in inside]
    assert symbol.name.split(".")[-1] in found[0]


@pytest.mark.parametrize(
    "symbol, name",
    [(s, name) for s in CONTRACT for name in s.params],
    ids=str,
)
def test_renamed_parameter_is_named(symbol: Symbol, name: str) -> None:
    """Catches a changed signature: one parameter of another name."""

    def rename(node: ast.AST) -> None:
        arguments = node.args  # type: ignore[attr-defined]
        arguments.kwarg = None  # a **kwargs would take any name
        for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if a.arg == name:
                a.arg = name + "_renamed"

    (line,) = violations(_without(symbol, rename), _neighbours(symbol))
    assert line == f"{symbol}: parameters missing: [{name!r}]"


@pytest.mark.parametrize(
    "symbol, name",
    [(s, name) for s in CONTRACT for name in s.fields],
    ids=str,
)
def test_renamed_field_is_named(symbol: Symbol, name: str) -> None:
    """Catches an attribute that is gone from a class, declared or assigned on self."""

    def rename(node: ast.AST) -> None:
        for child in ast.walk(node):
            if isinstance(child, ast.Attribute) and child.attr == name:
                child.attr += "_renamed"
            elif isinstance(child, ast.Name) and child.id == name:
                child.id += "_renamed"
            elif isinstance(child, ast.FunctionDef) and child.name == name:
                child.name += "_renamed"

    found = violations(_without(symbol, rename), _neighbours(symbol))
    assert f"{symbol}: attributes missing: [{name!r}]" in found


def test_missing_file_is_named() -> None:
    """Catches a moved module: every symbol in it is named, and no exception escapes."""
    gone = CONTRACT[-1].path

    def read(path: str) -> str:
        if path == gone:
            raise FileNotFoundError(path)
        return installed_source(path)

    found = violations(read)
    assert found == [f"{s}: file is missing" for s in CONTRACT if s.path == gone]


@pytest.mark.usefixtures("runner_choice")
def test_broken_contract_leaves_stock_classes(
    pair: object, monkeypatch: pytest.MonkeyPatch, plugin_warnings: Callable
) -> None:
    """Catches half a plugin on a vLLM that it does not know, and silence about it."""
    broken = "v1.request:Request: attributes missing: ['spec_token_ids']"
    monkeypatch.setattr(settle, "violations", lambda: [broken])
    config = make_config(pair, {"windows": "host"})
    assert config.parallel_config.worker_cls == "vllm.v1.worker.cpu_worker.CPUWorker"
    assert config.scheduler_config.scheduler_cls is None
    assert not config.additional_config
    (line,) = plugin_warnings()
    assert broken in line
    assert "stands aside" in line


@pytest.mark.engine
def test_stock_dspark_serves_where_the_contract_is_broken(
    pair: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stand-aside that leaves no working engine behind."""
    from vllm import SamplingParams

    monkeypatch.setattr(settle, "violations", lambda: ["something: 'x' is missing"])
    sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompt = [{"prompt_token_ids": [1, 2, 3, 4]}]
    with engine(pair.target) as llm:
        wanted = token_lists(llm.generate(prompt, sampling, use_tqdm=False))
    speculative = dspark(pair.drafter, {}, num_speculative_tokens=7)
    with engine(pair.target, speculative) as llm:
        found = token_lists(llm.generate(prompt, sampling, use_tqdm=False))
        for part in (scheduler_of(llm), runner_of(llm), runner_of(llm).speculator):
            assert type(part).__module__.startswith("vllm."), type(part)
    assert found == wanted
