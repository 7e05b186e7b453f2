"""Wheels of vLLM with just the files that the contract reads, taken from the installed vLLM."""

import zipfile
from pathlib import Path

from vllm_dspark.integration.contract import CONTRACT, installed_source


def write_wheel(folder: Path, version: str, drop: str = "", name: str = "vllm") -> Path:
    """A wheel; drop: a file that is left out."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-{version}-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{name}-{version}.dist-info/METADATA", f"Name: {name}\n")
        if name == "vllm":
            archive.writestr("vllm/__init__.py", "")
            for file in sorted({symbol.path for symbol in CONTRACT} - {drop}):
                archive.writestr(f"vllm/{file}", installed_source(file))
    return path
