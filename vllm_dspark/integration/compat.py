"""The single place that patches vLLM. Checked on vLLM 0.32.0 and 0.33.0.

One method is wrapped: `EngineArgs.create_speculative_config` (0.32.0, 0.33.0). It is the one
place that sees the user's speculative config after the `--spec-*` flags, before vLLM validates
it, and from which the worker class, the scheduler class and the additional config can be set.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any

from vllm_dspark.config import DSparkConfig
from vllm_dspark.cpu.build import is_cpu_build
from vllm_dspark.errors import DSparkConfigError

logger = logging.getLogger("vllm.vllm_dspark")

_HOOK_MARK = "_vllm_dspark_hook"
_V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"

CreateSpeculativeConfig = Callable[..., Any]


def install_config_hook() -> None:
    """Wrap `EngineArgs.create_speculative_config` once; later calls do nothing."""
    from vllm.engine.arg_utils import EngineArgs

    stock = EngineArgs.create_speculative_config
    if getattr(stock, _HOOK_MARK, False):
        return

    @functools.wraps(stock)
    def create_speculative_config(
        self: Any, target_model_config: Any, target_parallel_config: Any
    ) -> Any:
        return _create(stock, self, target_model_config, target_parallel_config)

    setattr(create_speculative_config, _HOOK_MARK, True)
    EngineArgs.create_speculative_config = create_speculative_config


def _create(
    stock: CreateSpeculativeConfig, args: Any, target_model: Any, target_parallel: Any
) -> Any:
    """Take our options out, let vLLM build its config, then settle what runs.

    `args.speculative_config` is given back as it was: vLLM builds several configs from one
    EngineArgs, and each must find the user's own words.
    """
    given = args.speculative_config
    options = _take_options(args)
    off = options is not None and not options.enabled
    named, checked = _names_dspark(args), None
    try:
        if named and not off:
            from vllm_dspark.integration import preflight

            checked = preflight.check_request(args, target_model)
        speculative = stock(args, target_model, target_parallel)
    finally:
        args.speculative_config = given
    is_dspark = speculative is not None and speculative.use_dspark()
    _keep_runner_choice(is_dspark, target_parallel)
    if off:
        return speculative
    if not is_dspark:
        if options is not None:
            method = getattr(speculative, "method", None)
            raise DSparkConfigError(
                f'"dspark" options were given, but the speculative method is {method!r}; '
                'set "method": "dspark" or drop the "dspark" object'
            )
        return speculative
    from vllm_dspark.integration import preflight, settle

    if not named:  # vLLM recognised the drafter by itself
        checked = preflight.check_request(args, target_model)
        args.speculative_config = given
    preflight.adjust(checked, speculative, target_model)
    settle.settle(args, target_model, target_parallel, speculative, options or DSparkConfig())
    return speculative


def _take_options(args: Any) -> DSparkConfig | None:
    """Move `"dspark": {...}` out of a copy of the user's dict; None when absent."""
    given = args.speculative_config
    if not isinstance(given, dict) or "dspark" not in given:
        return None
    remaining = dict(given)
    options = DSparkConfig.from_mapping(remaining.pop("dspark"))
    args.speculative_config = remaining
    return options


def _names_dspark(args: Any) -> bool:
    given = args.speculative_config or {}
    return "dspark" in (given.get("method"), args.spec_method)


_pinned_runner = False  # whether the runner switch in the environment is ours


def _keep_runner_choice(is_dspark: bool, target_parallel: Any) -> None:
    """Leave the choice of runner as it was before our Triton entry point made V2 possible.

    On vLLM's CPU build V2 needs a Triton backend named "cpu", which we supply for DSpark. A start
    without DSpark must not change runner because of that; one that asks for V2 by environment
    gets it with native kernels, through our worker class. A later start with DSpark in the same
    process takes the pin away again.
    """
    global _pinned_runner  # noqa: PLW0603 - the environment is as global as this note about it
    if not is_cpu_build():
        return
    asked = os.environ.get(_V2_SWITCH)
    if is_dspark:
        if _pinned_runner and asked == "0":
            del os.environ[_V2_SWITCH]
        _pinned_runner = False
    elif asked is None:
        os.environ[_V2_SWITCH] = "0"
        _pinned_runner = True
    elif asked == "1" and target_parallel.worker_cls in ("auto", CPU_WORKER_STOCK):
        target_parallel.worker_cls = CPU_WORKER


CPU_WORKER_STOCK = "vllm.v1.worker.cpu_worker.CPUWorker"
CPU_WORKER = "vllm_dspark.integration.cpu_worker.DSparkCPUWorker"
GPU_WORKER = "vllm_dspark.integration.gpu_worker.DSparkGPUWorker"


def vllm_version() -> str:
    """Version of the installed vLLM, whichever its distribution is called."""
    import vllm

    return str(vllm.__version__)
