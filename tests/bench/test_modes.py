"""What each mode means to vLLM."""

import importlib

import pytest

from vllm_dspark.bench.modes import (
    BenchError,
    Mode,
    PairSpec,
    launch,
    plan_engines,
    server_arguments,
)

PAIR = PairSpec(
    "target/x", "drafter/x", plugin_options={"calibration": "c.json", "hysteresis_steps": 2}
)


def of(name: str, *, is_cpu: bool) -> tuple[dict, dict]:
    found = launch(Mode.parse(name), PAIR, is_cpu=is_cpu)
    return found.environment, found.arguments


@pytest.mark.parametrize("name", ["fixed", "fixed0", "ours7", "stock", "", "off-v3"])
def test_unknown_modes_are_refused(name: str) -> None:
    with pytest.raises(BenchError, match="choose from off"):
        Mode.parse(name)


def test_engines_differ_in_speculation_only() -> None:
    """Catches a baseline with other lengths, memory or caching than ours."""
    plain = of("off", is_cpu=True)[1]
    for name in ("off-v2", "fixed3", "plugin7", "ours"):
        arguments = of(name, is_cpu=True)[1]
        arguments.pop("speculative_config", None)
        assert arguments == plain


@pytest.mark.parametrize("name", ["off", "fixed3", "adaptive"])
def test_stock_modes_on_cuda_run_without_the_plugin(name: str) -> None:
    """Catches a "stock" row that our code had a part in."""
    environment, arguments = of(name, is_cpu=False)
    assert environment["VLLM_PLUGINS"] == "" and environment["TRITON_BACKENDS_IN_TREE"] == "1"
    assert "dspark" not in arguments.get("speculative_config", {})


@pytest.mark.parametrize("name", ["off", "fixed3", "adaptive", "ours"])
def test_engines_on_one_gpu_do_not_ask_for_all_of_it(name: str) -> None:
    """Catches a second engine that vLLM refuses because the first one holds memory."""
    assert of(name, is_cpu=False)[1]["gpu_memory_utilization"] <= 0.1
    chosen = launch(
        Mode.parse(name), PairSpec("t", "d", engine={"gpu_memory_utilization": 0.5}), is_cpu=False
    )
    assert chosen.arguments["gpu_memory_utilization"] == 0.5
    unbounded = launch(Mode.parse(name), PairSpec("t", "d", kv_cache_bytes=None), is_cpu=False)
    assert "gpu_memory_utilization" not in unbounded.arguments


def test_fixed_on_a_cpu_is_the_plugin_without_scheduling() -> None:
    """Catches fixed settings that schedule, or depend on ours' artifacts."""
    for is_cpu, name in ((True, "fixed3"), (False, "plugin3")):
        environment, arguments = of(name, is_cpu=is_cpu)
        assert "VLLM_PLUGINS" not in environment
        config = arguments["speculative_config"]
        assert config["num_speculative_tokens"] == 3
        assert config["dspark"] == {"hysteresis_steps": 2, "scheduling": False}


def test_ours_full_differs_by_its_draft_width_alone() -> None:
    """Catches a comparison of narrow passes with something else than the same engine without."""
    ours, full = (of(name, is_cpu=True)[1]["speculative_config"] for name in ("ours", "ours-full"))
    assert full == {**ours, "dspark": {**ours["dspark"], "draft_width": "full"}}


def test_ours_and_adaptive_have_the_full_width() -> None:
    assert of("ours", is_cpu=False)[1]["speculative_config"] == {
        "method": "dspark",
        "model": "drafter/x",
        "num_speculative_tokens": 7,
        "dspark": PAIR.plugin_options,
    }
    adaptive = of("adaptive", is_cpu=False)[1]["speculative_config"]
    assert adaptive["enable_adaptive_verification"] is True
    assert adaptive["num_speculative_tokens"] == 7
    with pytest.raises(BenchError, match="full CUDA graphs"):
        of("adaptive", is_cpu=True)


def test_only_what_is_the_same_shares_an_engine() -> None:
    """Catches a fixed K that is measured by cutting windows of a wider drafter."""
    modes = [Mode.parse(n) for n in ("off", "fixed3", "fixed7", "plugin7", "ours")]

    def shared(is_cpu: bool, share: bool) -> list[list[str]]:
        engines = plan_engines(modes, PAIR, is_cpu=is_cpu, share=share)
        return [[mode.name for mode in engine.modes] for engine in engines]

    alone = [["off"], ["fixed3"], ["fixed7"], ["plugin7"], ["ours"]]
    assert shared(True, False) == alone
    assert shared(True, True) == [["off"], ["fixed3"], ["ours", "fixed7", "plugin7"]]
    assert shared(False, True) == [["off"], ["fixed3"], ["fixed7"], ["ours", "plugin7"]]
    assert plan_engines(modes[:3], PAIR, is_cpu=True, share=True)[2].modes == (modes[2],)


def test_arguments_as_flags() -> None:
    flags = server_arguments({"model": "m", "a_b": True, "c": False, "d": {"e": 1}, "f_g": 3})
    assert flags == ["m", "--a-b", "--no-c", "--d", '{"e": 1}', "--f-g", "3"]


def test_every_mode_with_drafts_replays() -> None:
    """Catches a mode that is measured with its own acceptance, and a name that vLLM cannot find."""
    pair = PairSpec("t", "d", replayed=True)
    for name in ("fixed3", "plugin3", "adaptive", "ours", "ours-full"):
        arguments = launch(Mode.parse(name), pair, is_cpu=False).arguments
        module, _, kind = arguments["worker_extension_cls"].rpartition(".")
        assert callable(getattr(importlib.import_module(module), kind).dspark_replay)
        rates = arguments["speculative_config"]["synthetic_acceptance_rates"]
        assert rates == [1.0] * arguments["speculative_config"]["num_speculative_tokens"]
    for name in ("off", "off-v2"):
        arguments = launch(Mode.parse(name), pair, is_cpu=False).arguments
        assert "worker_extension_cls" not in arguments
    plain = launch(Mode.parse("ours"), PairSpec("t", "d"), is_cpu=False).arguments
    assert "worker_extension_cls" not in plain


def test_synthetic_rates_are_cut_to_the_width() -> None:
    """Catches a fixed K that vLLM refuses because rates are there for more drafts than it has."""
    pair = PairSpec("t", "d", speculative={"synthetic_acceptance_rates": [0.8, 0.7, 0.6]}, width=3)
    for name, rates in (("fixed2", [0.8, 0.7]), ("ours", [0.8, 0.7, 0.6])):
        config = launch(Mode.parse(name), pair, is_cpu=False).arguments["speculative_config"]
        assert config["synthetic_acceptance_rates"] == rates
