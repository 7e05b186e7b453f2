"""All checks in order."""

from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_dspark.cli.doctor import drafter, engine, features, files, flags, speculative, versions
from vllm_dspark.cli.doctor.findings import Finding, Report
from vllm_dspark.cli.doctor.subject import Subject

# check_drafter first: the others use what it reads.
CHECKS: tuple[Callable[[Subject], Iterator[Finding]], ...] = (
    flags.check_flags,
    speculative.check_method,
    speculative.check_keys,
    speculative.check_model,
    files.check_target_files,
    drafter.check_drafter,
    drafter.check_quantization,
    engine.check_options,
    engine.check_room,
    engine.check_context,
    engine.check_graphs,
    engine.check_windows,
    engine.check_backend,
    features.check_parallelism,
    features.check_cache,
    features.check_target,
    features.check_cpu,
    features.check_features,
    features.check_artifacts,
    files.check_written_files,
)


def examine(subject: Subject) -> Report:
    """Everything about serving `subject` on its machine."""
    findings = list(versions.check_versions(subject.machine))
    for check in CHECKS:
        findings += check(subject)
    return Report.of(findings)


def examine_wheel(path: Path) -> Report:
    """Version and contract of a vLLM wheel."""
    return Report.of(versions.check_wheel(path))
