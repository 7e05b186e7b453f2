"""Checks of target and drafter before vLLM builds anything, so that errors come early and plain."""

from typing import Any


def check_request(speculative: dict[str, Any], spec_model: str | None, target_model: Any) -> None:
    """Raise when the drafter named in the speculative config cannot serve this target."""
