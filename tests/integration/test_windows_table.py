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
    replay: bool = False,
    microbatches: bool = False,
    sharded: bool = False,
    routing: bool = False,
    fast_prefill: bool = False,
    variable_rows: bool = True,
) -> Any:
    """The parts of a VllmConfig that the table looks at."""
    return SimpleNamespace(
        model_config=SimpleNamespace(enable_trace_replay=replay, is_hybrid=hybrid),
        parallel_config=SimpleNamespace(
            data_parallel_size=data,
            pipeline_parallel_size=pipeline,
            use_ubatching=microbatches,
            enable_batch_sharded_sampling=sharded,
        ),
        lora_config=object() if lora else None,
        cache_config=SimpleNamespace(kv_sharing_fast_prefill=fast_prefill),
        aux_output_config=SimpleNamespace(enabled=routing),
        compilation_config=SimpleNamespace(
            cudagraph_mode=SimpleNamespace(has_full_cudagraphs=lambda: full_graphs)
        ),
        variable_rows=variable_rows,  # what `ragged_graph_refusal` would find
    )


FULL = {"full_graphs": True}


@pytest.mark.parametrize(
    ("name", "on_cpu", "engine", "auto", "host", "device"),
    [
        ("CPU build", True, {}, "host", "host", "device"),
        ("data parallel", True, {"data": 2}, "native", "native", "native"),
        ("recurrent states", False, {"hybrid": True}, "native", "native", "native"),
        ("LoRA", True, {"lora": True}, "host", "host", "native"),
        ("pipeline parallel", False, {"pipeline": 2}, "host", "host", "native"),
        ("CUDA, no full graphs", False, {}, "host", "host", "native"),
        ("sampling replay", False, {**FULL, "replay": True}, "native", "native", "native"),
        ("CUDA, full graphs", False, FULL, "device", "host", "device"),
        ("FlashAttention 2", False, {**FULL, "variable_rows": False}, "host", "host", "host"),
        ("microbatches", False, {**FULL, "microbatches": True}, "host", "host", "host"),
        ("sharded sampling", False, {**FULL, "sharded": True}, "host", "host", "host"),
        ("returned routing", False, {**FULL, "routing": True}, "host", "host", "host"),
        ("fast prefill", False, {**FULL, "fast_prefill": True}, "host", "host", "host"),
        ("LoRA on CUDA", False, {**FULL, "lora": True}, "host", "host", "native"),
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
    monkeypatch.setattr(
        startup, "ragged_graph_refusal", lambda c: "" if c.variable_rows else "uniform rows only"
    )
    got = {}
    for wish in ("auto", "host", "device"):
        mode, why = startup.settle_windows(config(**engine), DSparkConfig(windows=wish))
        assert why, f"{name}: no reason given for {mode}"
        got[wish] = mode
    assert got == {"auto": auto, "host": host, "device": device}, name


def test_reference_kernels_keep_windows_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a plan for the device where the allocation kernel was switched off."""
    monkeypatch.setattr(startup, "is_cpu_build", lambda: False)
    monkeypatch.setattr(startup, "ragged_graph_refusal", lambda c: "")
    for wish in ("auto", "device"):
        options = DSparkConfig(windows=wish, kernels="reference")
        assert startup.settle_windows(config(**FULL), options)[0] == "host"


def attention(**changes: Any) -> Any:
    """A VllmConfig for `ragged_graph_refusal`."""
    model = {"use_mla": False}
    backend = changes.pop("backend", None)
    return SimpleNamespace(
        model_config=SimpleNamespace(**{**model, **changes}),
        attention_config=SimpleNamespace(backend=backend),
    )


class TestBackends:
    """What the config says about graphs of variable rows."""

    @staticmethod
    def backend(support: str, *, mismatch: bool = True) -> Any:
        from vllm.v1.attention.backend import AttentionCGSupport

        builder = SimpleNamespace(_cudagraph_support=AttentionCGSupport[support])
        found = SimpleNamespace(
            get_builder_cls=lambda: builder,
            supports_device_cpu_query_lens_mismatch=lambda: mismatch,
        )
        return SimpleNamespace(name="SOME", get_class=lambda: found)

    def test_graphs_of_any_batch_are_enough(self) -> None:
        """FlashAttention 3, Triton and our own backend."""
        assert startup.ragged_graph_refusal(attention(backend=self.backend("ALWAYS"))) == ""

    def test_uniform_graphs_are_refused(self) -> None:
        """Catches FlashAttention 2 taken for 3: its graphs would compute garbage."""
        refusal = startup.ragged_graph_refusal(attention(backend=self.backend("UNIFORM_BATCH")))
        assert "SOME" in refusal

    def test_plans_on_host_lengths_are_refused(self) -> None:
        """Catches a backend whose split is computed from lengths that are not true."""
        backend = self.backend("ALWAYS", mismatch=False)
        assert "lengths" in startup.ragged_graph_refusal(attention(backend=backend))

    def test_latent_attention_is_refused(self) -> None:
        """Catches MLA backends, whose host-side planning was not checked."""
        assert startup.ragged_graph_refusal(attention(use_mla=True))

    def test_no_backend_named_off_hopper(self) -> None:
        """Catches a default backend of another GPU assumed to be FlashAttention 3."""
        assert "Hopper" in startup.ragged_graph_refusal(attention())
