"""Entry point of group `vllm.general_plugins`: runs in every vLLM process.

It must be cheap (every vLLM start pays for it), idempotent, and must not raise: an exception
here would end every vLLM start on the machine, also those that never speculate.
"""

import logging
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# vLLM configures the "vllm" logger; a child of it inherits level and format without importing vLLM.
logger = logging.getLogger("vllm.vllm_dspark")

_ENTRY_MODULE = "vllm.engine.arg_utils"


def register() -> None:
    """Make `"method": "dspark"` ours as soon as (and only if) an engine config is built."""
    try:
        if "vllm.platforms" in sys.modules:  # not so where register() is called by hand
            _hook_cpu_platform()
        if _ENTRY_MODULE in sys.modules:
            _install()
        elif not any(isinstance(finder, _InstallOnImport) for finder in sys.meta_path):
            # Engine-core and worker processes never build a config: spare them the import.
            sys.meta_path.insert(0, _InstallOnImport())
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


class _InstallOnImport(MetaPathFinder):
    """Runs `_install` right after vLLM's argument module is imported, then forgets itself."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != _ENTRY_MODULE:
            return None
        sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find is not None else None
            if spec is not None and spec.loader is not None:
                spec.loader = _LoaderThenInstall(spec.loader)
                return spec
        return None


class _LoaderThenInstall(Loader):
    def __init__(self, inner: Loader) -> None:
        self._inner = inner

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        try:
            _install()
        except Exception:
            logger.exception("vllm-dspark could not load and stands aside: vLLM runs as it is.")

    def __getattr__(self, name: str) -> Any:  # get_source, is_package, ... of the real loader
        return getattr(self._inner, name)
