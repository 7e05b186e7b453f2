"""Entry point of group `vllm.general_plugins`: runs in every vLLM process.

It must be cheap (every vLLM start pays for it), idempotent, and must not raise: an exception
here would end every vLLM start on the machine, also those that never speculate.
"""

import logging
import sys
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# vLLM configures the "vllm" logger; a child of it inherits level and format without importing vLLM.
logger = logging.getLogger("vllm.vllm_dspark")

_ENTRY_MODULE = "vllm.engine.arg_utils"
_BACKENDS_MODULE = "vllm.v1.attention.backends.registry"
_OUR_BACKEND = "vllm_dspark.integration.attention_backend.RaggedAttentionBackend"


def register() -> None:
    """Make `"method": "dspark"` ours as soon as (and only if) an engine config is built."""
    try:
        if "vllm.platforms" in sys.modules:  # not so where register() is called by hand
            _hook_cpu_platform()
        # Engine-core and worker processes never build a config: spare them the import.
        _when_imported(_ENTRY_MODULE, _install)
        # Every process looks attention backends up.
        _when_imported(_BACKENDS_MODULE, _register_attention_backend)
    except Exception:
        logger.exception("vllm-dspark could not load and stands aside: vLLM runs as it is.")


def _hook_cpu_platform() -> None:
    """On the CPU build every runner, also one without DSpark, must get native kernels: our Triton
    backend makes vLLM believe that it can run Triton ones.
    """
    from vllm_dspark.integration.cpu_kernels import hook_cpu_platform

    hook_cpu_platform()


def _install() -> None:
    from vllm_dspark.integration.compat import install_config_hook

    _hook_cpu_platform()
    install_config_hook()


def _register_attention_backend() -> None:
    """`--attention-backend CUSTOM`, unless another plugin has taken the name."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if not AttentionBackendEnum.CUSTOM.is_overridden():
        register_backend(AttentionBackendEnum.CUSTOM, _OUR_BACKEND)


def _when_imported(module: str, action: Callable[[], None]) -> None:
    """Runs `action` now if `module` is imported, else right after its import; once per process."""
    if module in sys.modules:
        action()
    elif not any(isinstance(f, _InstallOnImport) and f.module == module for f in sys.meta_path):
        sys.meta_path.insert(0, _InstallOnImport(module, action))


class _InstallOnImport(MetaPathFinder):
    """Runs an action right after a module of vLLM is imported, then forgets itself."""

    def __init__(self, module: str, action: Callable[[], None]) -> None:
        self.module = module
        self._action = action

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self.module:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _LoaderThenInstall(spec.loader, self._action)
                return spec
        return None


class _LoaderThenInstall(Loader):
    def __init__(self, inner: Loader, action: Callable[[], None]) -> None:
        self._inner = inner
        self._action = action

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        try:
            self._action()
        except Exception:
            logger.exception("vllm-dspark could not load and stands aside: vLLM runs as it is.")

    def __getattr__(self, name: str) -> Any:  # get_source, is_package, ... of the real loader
        return getattr(self._inner, name)
