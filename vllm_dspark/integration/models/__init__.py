"""Drafter classes registered with vLLM where its own are missing heads or lose tensors silently."""

from typing import Any

QWEN3_DRAFTER = "VllmDSparkQwen3Drafter"


def drafter_architecture(stock_architectures: list[str]) -> str | None:
    """Our architecture for a checkpoint's, or None where vLLM's own class loads it."""
    return QWEN3_DRAFTER if "Qwen3DSparkModel" in stock_architectures else None


def register_drafters() -> None:
    """Tell vLLM's model registry about our classes (by name: nothing is imported yet)."""
    from vllm.model_executor.models.registry import ModelRegistry

    known: Any = ModelRegistry.get_supported_archs()
    if QWEN3_DRAFTER not in known:
        ModelRegistry.register_model(
            QWEN3_DRAFTER, "vllm_dspark.integration.models.qwen3:Qwen3Drafter"
        )
