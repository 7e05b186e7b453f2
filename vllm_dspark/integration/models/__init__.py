"""Drafter classes registered with vLLM where its own are missing heads or lose tensors silently."""

from typing import Any

# architecture in the checkpoint (as vLLM knows it) -> our name and class
OURS = {
    "Qwen3DSparkModel": ("VllmDSparkQwen3Drafter", "qwen3:Qwen3Drafter"),
    "Gemma4DSparkModel": ("VllmDSparkGemma4Drafter", "gemma4:Gemma4Drafter"),
}


def drafter_architecture(stock_architectures: list[str]) -> str | None:
    """Our architecture for a checkpoint's, or None where vLLM's own class loads it."""
    names = [OURS[name][0] for name in stock_architectures if name in OURS]
    return names[0] if names else None


def register_drafters() -> None:
    """Tell vLLM's model registry about our classes (by name: nothing is imported yet)."""
    from vllm.model_executor.models.registry import ModelRegistry

    known: Any = ModelRegistry.get_supported_archs()
    for name, place in OURS.values():
        if name not in known:
            ModelRegistry.register_model(name, f"{__name__}.{place}")
