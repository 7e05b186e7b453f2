"""What a command can know to be wrong before any engine starts; the rules are the doctor's own."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_dspark.errors import InputError

if TYPE_CHECKING:
    from vllm_dspark.cli.doctor.findings import Finding
    from vllm_dspark.cli.doctor.subject import Subject


def require_servable(arguments: Sequence[str], *, here: bool = True) -> None:
    """Raise InputError (or DSparkConfigError) for arguments of `vllm serve` that cannot draft.

    here: whether the engine runs on this machine, so that folders can be looked into.
    """
    from vllm_dspark.cli.doctor import files, speculative
    from vllm_dspark.cli.doctor.arguments import parse_serve

    parsed = parse_serve(arguments)
    subject = _subject(parsed)
    if not parsed.speculative and (not here or not subject.is_embedded):
        raise InputError(
            "no speculative config was given, so nothing would be drafted; give "
            '--speculative-config \'{"method": "dspark", "model": "DRAFTER"}\''
        )
    if not here:
        return
    checks = (speculative.check_method, speculative.check_model, files.check_target_files)
    _refuse([found for check in checks for found in check(subject)])
    if _is_local(subject):
        _refuse(_drafter(subject))


def require_drafter(
    target: str, drafter: str, widths: Mapping[str, int], *, tensors: bool = True
) -> None:
    """Raise InputError if a drafter's folder cannot serve one of `widths` (option -> K).

    tensors: whether its weights and its fit to the target are looked at too. A drafter that is no
    local folder is left to the engine.
    """
    from vllm_dspark.cli.doctor.arguments import parse_serve

    for option, width in widths.items():
        config = {"method": "dspark", "model": drafter, "num_speculative_tokens": width}
        subject = _subject(parse_serve([target, "--speculative-config", json.dumps(config)]))
        if not _is_local(subject):
            return
        found = list(_drafter(subject))
        if not tensors:
            found = [item for item in found if item.check in ("draft_width", "drafter_config")]
        _refuse([item for item in found if item.check == "draft_width"], f"{option}: ")
        _refuse(found, f"drafter {drafter}: ")


def _subject(parsed: Any) -> Subject:
    from vllm_dspark.cli.doctor.subject import Machine, Subject

    return Subject(parsed, Machine())


def _drafter(subject: Subject) -> Iterator[Finding]:
    from vllm_dspark.cli.doctor.drafter import check_drafter

    return check_drafter(subject)


def _is_local(subject: Subject) -> bool:
    """Whether the drafter is named by a path: a hub id may have to be fetched, by the engine."""
    from vllm_dspark.cli.doctor.subject import missing_path

    name = subject.drafter_name
    return name is not None and (Path(name).exists() or missing_path(name))


def _refuse(findings: Sequence[Finding] | Iterator[Finding], start: str = "") -> None:
    for found in findings:
        if found.level == "error":
            remedy = f"; give {found.flag}" if found.flag and not start else ""
            raise InputError(f"{start}{found.message}{remedy}")
