"""Who sets windows: one test per row of the table in `startup.settle_windows`."""

from types import SimpleNamespace
from typing import Any

import pytest

from vllm_dspark.config import DSparkConfig
from vllm_dspark.integration import startup


def config(
    *,
    data: int = 1,
    pipeline: int = 1,
    lora: bool = False,
    full_graphs: bool = False,
    hybrid: bool = False,
) -> Any:
    """The parts of a VllmConfig that the table looks at."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(data_parallel_size=data, pipeline_parallel_size=pipeline),
        model_config=SimpleNamespace(is_hybrid=hybrid),
        lora_config=object() if lora else None,
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full_graphs)
        ),
    )


@pytest.mark.parametrize(
    ("name", "on_cpu", "engine", "auto", "host", "device"),
    [
        ("CPU build", True, {}, "host", "host", "device"),
        ("data parallel", True, {"data": 2}, "native", "native", "native"),
        ("recurrent states", False, {"hybrid": True}, "native", "native", "native"),
        ("LoRA", True, {"lora": True}, "host", "host", "native"),
        ("pipeline parallel", False, {"pipeline": 2}, "host", "host", "native"),
        ("CUDA, no full graphs", False, {}, "host", "host", "native"),
        ("CUDA, full graphs", False, {"full_graphs": True}, "native", "host", "native"),
    ],
)
def test_row(
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    on_cpu: bool,
    engine: dict[str, Any],
    auto: str,
    host: str,
    device: str,
) -> None:
    """Catches a row that was changed in the table or in the code alone."""
    monkeypatch.setattr(startup, "is_cpu_build", lambda: on_cpu)
    got = {}
    for wish in ("auto", "host", "device"):
        mode, why = startup.settle_windows(config(**engine), DSparkConfig(windows=wish))
        assert why, f"{name}: no reason given for {mode}"
        got[wish] = mode
    assert got == {"auto": auto, "host": host, "device": device}, name
