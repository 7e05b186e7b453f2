"""What a command can know to be wrong before any engine starts; the rules are the doctor's own."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from vllm_dspark.cli.doctor import files, speculative
from vllm_dspark.cli.doctor.arguments import parse_serve
from vllm_dspark.cli.doctor.drafter import check_drafter
from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Machine, Subject, missing_path
from vllm_dspark.errors import InputError


class _AtHand(Subject):
    """Looks at folders and the hub's cache alone: to fetch a model is the engine's business."""

    def _folder(self, model: str, revision: str | None) -> Path | None:
        if Path(model).is_dir():
            return Path(model)
        return cached_folder(model, revision, self.arguments.get("download-dir"))


def cached_folder(model: str, revision: str | None = None, cache: str | None = None) -> Path | None:
    """The folder of the hub's cache with a model's config; None if it is not there."""
    try:
        found = try_to_load_from_cache(model, "config.json", cache_dir=cache, revision=revision)
    except HFValidationError:  # a path
        return None
    return Path(found).parent if isinstance(found, str) else None


def require_servable(arguments: Sequence[str], *, here: bool = True) -> None:
    """Raise InputError (or DSparkConfigError) for arguments of `vllm serve` that cannot draft.

    here: whether the engine runs on this machine, so that folders can be looked into.
    """
    parsed = parse_serve(arguments)
    subject = _AtHand(parsed, Machine())
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
        _refuse(check_drafter(subject))


def require_drafter(
    target: str, drafter: str, widths: Mapping[str, int], *, tensors: bool = True
) -> None:
    """Raise InputError if a drafter's folder cannot serve one of `widths` (option -> K).

    tensors: whether its weights and its fit to the target are looked at too. A drafter that is no
    local folder is left to the engine.
    """
    for option, width in widths.items():
        config = {"method": "dspark", "model": drafter, "num_speculative_tokens": width}
        arguments = parse_serve([target, "--speculative-config", json.dumps(config)])
        subject = _AtHand(arguments, Machine())
        if not _is_local(subject):
            return
        found = list(check_drafter(subject))
        if not tensors:
            found = [item for item in found if item.check in ("draft_width", "drafter_config")]
        _refuse([item for item in found if item.check == "draft_width"], f"{option}: ")
        _refuse(found, f"drafter {drafter}: ")


def _is_local(subject: Subject) -> bool:
    """Whether the drafter is named by a path: a hub id may have to be fetched, by the engine."""
    name = subject.drafter_name
    return name is not None and (Path(name).exists() or missing_path(name))


def _refuse(findings: Iterable[Finding], start: str = "") -> None:
    for found in findings:
        if found.level == "error":
            remedy = f"; give {found.flag}" if found.flag and not start else ""
            raise InputError(f"{start}{found.message}{remedy}")
