"""Binds the native twins of ``vllm_dspark.cpu`` to vLLM's kernels on the CPU build.

vLLM calls ``CpuPlatform.register_triton_kernel_overrides`` in every worker after the
general plugins are loaded and before any model code. Stock does nothing there once a
Triton backend named ``cpu`` exists, trusting it to run the kernels; ours cannot. So
``hook_cpu_platform`` (called by ``register()``) puts ``register_native_kernels`` in its
place: vLLM's own C++ overrides for the V1 runner as on a host without Triton, then our
twins for the V2 runner (V1 shares one of them), all through
``vllm.triton_utils.dispatcher.register_kernels``.

Private vLLM names relied on: the two named above, ``vllm.triton_utils.HAS_TRITON`` (read by
the platform method at call time) and the kernels of ``vllm_dspark.cpu.twins.TWINS``.
Checked against vLLM 0.32.0. A kernel that is missing, or whose parameters a twin does not
know, keeps its interpreted form, with one warning.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from vllm_dspark.cpu.build import is_cpu_build

# vLLM's sampler launches it under either runner wherever Triton is found.
V1_KERNELS = frozenset({"vllm.v1.sample.ops.topk_topp_triton._topk_topp_kernel"})

_tried: set[str] = set()
_STOCK = "vLLM's own overrides"


def register_native_kernels(only: frozenset[str] | None = None) -> None:
    """Bind the twins (those in ``only``, if given) that are not bound yet in this process."""
    # Patches torch's stream and memory API and must precede everything under worker.gpu.
    importlib.import_module("vllm.v1.worker.cpu.shm")
    from vllm.logger import init_logger
    from vllm.triton_utils.dispatcher import register_kernels

    from vllm_dspark.cpu.twins import load_twins

    logger = init_logger("vllm.vllm_dspark.cpu_kernels")
    overrides: dict[str, Callable[..., Any]] = {}
    for name, twin in load_twins().items():
        if name in _tried or (only is not None and name not in only):
            continue
        _tried.add(name)
        try:
            overrides[name] = _launcher(_kernel(name), twin, _version_constants(name))
        except (ImportError, AttributeError, TypeError) as reason:
            logger.warning("No native CPU kernel for %s: %s", name, reason)
    if overrides:
        with _llvmlite_out_of_sight():
            register_kernels(overrides)


def hook_cpu_platform() -> bool:
    """Make vLLM's CPU platform register our kernels in each worker; False on other builds."""
    if not is_cpu_build():
        return False
    from vllm.platforms.cpu import CpuPlatform

    stock = CpuPlatform.register_triton_kernel_overrides
    if getattr(stock, "by_vllm_dspark", False):
        return True

    def register_triton_kernel_overrides(cls: type[Any]) -> None:
        from vllm import envs

        _register_stock_overrides(stock)
        v1_chosen = envs.VLLM_USE_V2_MODEL_RUNNER is False
        register_native_kernels(V1_KERNELS if v1_chosen else None)

    register_triton_kernel_overrides.by_vllm_dspark = True  # type: ignore[attr-defined]
    hooked = classmethod(register_triton_kernel_overrides)
    CpuPlatform.register_triton_kernel_overrides = hooked  # type: ignore[assignment]
    return True


def _register_stock_overrides(stock: Callable[[], None]) -> None:
    """Let vLLM register its C++ kernels for the V1 runner, once, as where Triton is absent."""
    from vllm import triton_utils

    if _STOCK in _tried:
        return
    _tried.add(_STOCK)
    has_triton = triton_utils.HAS_TRITON
    triton_utils.HAS_TRITON = False
    try:
        with _llvmlite_out_of_sight():
            stock()
    finally:
        triton_utils.HAS_TRITON = has_triton


@contextmanager
def _llvmlite_out_of_sight() -> Iterator[None]:
    """Keep vLLM's dispatcher off llvmlite while it looks through ``sys.modules``.

    It calls ``vars(value).get`` on every module attribute that has a ``__dict__`` (0.32.0,
    0.33.0); llvmlite's library handle answers ``__dict__`` with a C function, which ends the
    registration with an AttributeError wherever numba was imported first.
    """
    names = [name for name in sys.modules if name.split(".")[0] == "llvmlite"]
    hidden = {name: sys.modules.pop(name) for name in names}
    try:
        yield
    finally:
        sys.modules.update(hidden)


def _kernel(name: str) -> Any:
    """The kernel object behind a dotted name."""
    module, attribute = name.rsplit(".", 1)
    return getattr(importlib.import_module(module), attribute)


def _version_constants(name: str) -> dict[str, Any]:
    """Keyword arguments that tell a twin which version's behaviour to take on."""
    if name.endswith(("._gumbel_sample_kernel", "._rejection_kernel")):
        gumbel = importlib.import_module("vllm.v1.worker.gpu.sample.gumbel")
        return {"STEP_SEEDS": hasattr(gumbel, "spec_step_seed")}
    return {}


def _launcher(
    kernel: Any, twin: Callable[..., Any], constants: dict[str, Any]
) -> Callable[..., Any]:
    """``twin`` behind the kernel's own signature; raises TypeError if the two do not fit."""
    from vllm_dspark.cpu.twins import UNUSED_PARAMETERS

    names = tuple(kernel.arg_names)
    parameters = inspect.signature(twin).parameters
    unknown = set(names) - set(parameters) - UNUSED_PARAMETERS
    if unknown:
        raise TypeError(f"its twin does not know the parameters {sorted(unknown)}")
    wanted = {p.name for p in parameters.values() if p.default is inspect.Parameter.empty}
    if missing := wanted - set(names):
        raise TypeError(f"its twin needs the parameters {sorted(missing)}")
    accepted = frozenset(names) & frozenset(parameters)

    def launch(*args: Any, **kwargs: Any) -> None:
        bound = dict(zip(names, args, strict=False))
        bound.update(kwargs)
        twin(**{name: bound[name] for name in accepted if name in bound}, **constants)

    # vLLM forwards keyword launches only to functions whose parameters match the kernel's.
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    launch.__signature__ = signature  # type: ignore[attr-defined]
    launch.__name__ = f"native{kernel.__name__}"
    return launch
