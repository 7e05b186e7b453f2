"""The entry point: cheap, idempotent, harmless to vLLM starts that do not ask for DSpark."""

import json
import logging
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

import pytest

from vllm_dspark.integration import register as register_module
from vllm_dspark.integration.register import register

# Parts of the plugin that a start without DSpark has no use for.
HEAVY = (
    "vllm_dspark.kernels",
    "vllm_dspark.planning",
    "vllm_dspark.proposer",
    "vllm_dspark.sampling",
    "vllm_dspark.artifacts",
    "vllm_dspark.integration.runner",
    "vllm_dspark.integration.scheduler",
    "vllm_dspark.integration.speculator",
)


def _run(code: str, **environment: str) -> dict[str, Any]:
    """Last stdout line of a fresh interpreter, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_register_alone_imports_almost_nothing() -> None:
    """Catches an import at module level: every vLLM process of the machine would pay for it."""
    found = _run(
        """
        import json, sys, time
        before = set(sys.modules)
        start = time.perf_counter()
        from vllm_dspark.integration.register import register
        register(); register()
        ms = 1e3 * (time.perf_counter() - start)
        print(json.dumps({"ms": ms, "new": sorted(set(sys.modules) - before)}))
        """
    )
    print(f"register(), called twice in a fresh interpreter: {found['ms']:.1f} ms")
    roots = {name.split(".")[0] for name in found["new"]}
    assert not roots & {"vllm", "torch", "triton", "numba", "numpy", "pydantic"}, roots
    ours = {name for name in found["new"] if name.startswith("vllm_dspark")}
    assert ours <= {
        "vllm_dspark",
        "vllm_dspark.integration",
        "vllm_dspark.integration.register",
    }, ours


def test_start_without_dspark_gains_few_modules(pair: Any) -> None:
    """Catches kernels, planner or a second runner being imported into plain vLLM starts.

    Counts modules of two fresh processes, with the plugin and (VLLM_PLUGINS) without; the
    milliseconds are the plugin's own and are stated, not asserted: they vary with the machine.
    """
    code = f"""
        import json, sys, time
        from vllm.engine.arg_utils import EngineArgs
        settings = dict(model={str(pair.target)!r}, enforce_eager=True, max_model_len=64,
                        kv_cache_memory_bytes=1 << 20)
        EngineArgs(**settings).create_engine_config()
        method = EngineArgs.create_speculative_config
        stock = getattr(method, "__wrapped__", None)
        spent = []
        for function in (method, stock or method):
            args = EngineArgs(**settings)
            EngineArgs.create_speculative_config = function
            start = time.perf_counter()
            args.create_engine_config()
            spent.append(1e3 * (time.perf_counter() - start))
        print(json.dumps({{"hooked": stock is not None, "ms": spent[0] - spent[1],
                          "modules": sorted(sys.modules)}}))
    """
    _run(code)  # vLLM looks into model classes at their first start, and keeps what it found
    with_plugin = _run(code)
    others = [e.name for e in entry_points(group="vllm.general_plugins") if e.name != "dspark"]
    without = _run(code, VLLM_PLUGINS=",".join(others))
    assert with_plugin["hooked"]
    assert not without["hooked"]
    gained = set(with_plugin["modules"]) - set(without["modules"])
    print(f"create_engine_config with the hook costs {with_plugin['ms']:+.1f} ms")
    print(f"modules gained by a start without DSpark: {sorted(gained)}")
    assert all(name.startswith("vllm_dspark.") for name in gained), gained
    assert not [name for name in with_plugin["modules"] if name.startswith(HEAVY)]
    assert "vllm.v1.worker.gpu.model_runner" not in with_plugin["modules"]


def test_register_twice_wraps_once() -> None:
    """Catches hooks piling up: vLLM loads plugins several times in one process."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms.cpu import CpuPlatform

    register()
    once = EngineArgs.create_speculative_config
    hooked = CpuPlatform.register_triton_kernel_overrides.__func__
    register()
    register()
    assert EngineArgs.create_speculative_config is once
    assert CpuPlatform.register_triton_kernel_overrides.__func__ is hooked
    assert not hasattr(once.__wrapped__, "__wrapped__")


@pytest.mark.parametrize("kind", [RuntimeError, ImportError, AttributeError])
def test_register_never_raises(
    monkeypatch: pytest.MonkeyPatch, plugin_warnings: Callable, kind: type[Exception]
) -> None:
    """Catches an exception that would end every vLLM start on the machine."""
    import vllm.engine.arg_utils  # noqa: F401 - else the hook would wait for this import

    def broken() -> None:
        raise kind("what a changed vLLM might do")

    monkeypatch.setattr(register_module, "_install", broken)
    register()
    (line,) = plugin_warnings()
    assert "stands aside" in line


def test_broken_vllm_does_not_break_its_own_import() -> None:
    """Catches the late hook raising out of `import vllm.engine.arg_utils`."""
    found = _run(
        """
        import json, sys
        from vllm_dspark.integration import register
        def broken():
            raise RuntimeError("changed")
        register._install = broken
        register.register()
        assert any(type(f).__name__ == "_InstallOnImport" for f in sys.meta_path)
        import vllm.engine.arg_utils as arg_utils
        left = [f for f in sys.meta_path if type(f).__name__ == "_InstallOnImport"]
        print(json.dumps({"left": len(left), "has": hasattr(arg_utils, "EngineArgs")}))
        """,
        VLLM_PLUGINS="none-of-them",
    )
    assert found == {"left": 0, "has": True}


def test_late_hook_leaves_the_loader_as_it_was() -> None:
    """Catches a module whose source tools (inspect, tracebacks) no longer work after the hook."""
    found = _run(
        """
        import inspect, json
        from vllm_dspark.integration.register import register
        register()
        import vllm.engine.arg_utils as arg_utils
        source = inspect.getsource(arg_utils.EngineArgs.create_model_config)
        hooked = hasattr(arg_utils.EngineArgs.create_speculative_config, "__wrapped__")
        print(json.dumps({"source": "def create_model_config" in source, "hooked": hooked}))
        """,
        VLLM_PLUGINS="none-of-them",
    )
    assert found == {"source": True, "hooked": True}


@pytest.mark.parametrize("theirs", [None, "other.plugin.Backend"])
def test_custom_attention_backend_is_ours_unless_taken(theirs: str | None) -> None:
    """Catches `--attention-backend CUSTOM` without a backend, and another plugin's displaced."""
    found = _run(
        f"""
        import json
        from vllm_dspark.integration.register import register
        theirs = {theirs!r}
        if theirs:
            from vllm.v1.attention.backends import registry
            registry.register_backend(registry.AttentionBackendEnum.CUSTOM, theirs)
        register()
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        register()
        print(json.dumps({{"path": AttentionBackendEnum.CUSTOM.get_path()}}))
        """,
        VLLM_PLUGINS="none-of-them",
    )
    ours = "vllm_dspark.integration.attention_backend.RaggedAttentionBackend"
    assert found == {"path": theirs or ours}


def test_logger_name_is_below_vllm() -> None:
    """Catches log lines lost: only children of "vllm" get vLLM's level and format."""
    assert register_module.logger is logging.getLogger("vllm.vllm_dspark")


def test_kernels_register_after_numba_was_imported() -> None:
    """Catches vLLM's registration tripping over numba (llvmlite's library handle)."""
    found = _run(
        """
        import json
        import numba
        from vllm_dspark.integration.cpu_kernels import register_native_kernels
        register_native_kernels()
        from vllm.v1.worker.gpu.input_batch import _post_update_kernel
        print(json.dumps({"native": type(_post_update_kernel).__name__}))
        """
    )
    assert found == {"native": "KernelOverride"}
