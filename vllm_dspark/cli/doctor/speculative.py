"""Checks of the speculative config: what was asked for, and in words that vLLM knows."""

import difflib
from collections.abc import Iterator

from vllm_dspark.cli.doctor.findings import Finding, Level
from vllm_dspark.cli.doctor.subject import Subject
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import ContractError
from vllm_dspark.integration.contract import declared_fields

_MODEL = '"model": "DRAFTER" in --speculative-config'


def check_method(subject: Subject) -> Iterator[Finding]:
    """What speculation was asked for, and stock options that go against it."""
    given = subject.arguments.speculative
    method = given.get("method")
    if not given and not subject.is_embedded:
        yield Finding(
            "method",
            "error",
            "no speculative config was given",
            "without one vLLM serves without drafts and the plugin does nothing",
            '--speculative-config \'{"method": "dspark", "model": "DRAFTER"}\'',
        )
        return
    name = f"{subject.drafter_name or ''} {' '.join(_architectures(subject))}".lower()
    if method != "dspark" and (method is not None or "dspark" not in name):
        yield Finding(
            "method",
            "error",
            f'the speculative method is {method!r}, not "dspark"',
            "the plugin serves DSpark alone; other methods run in vLLM as they are",
            '"method": "dspark" in --speculative-config',
        )
    if given.get("num_speculative_tokens_per_batch_size"):
        yield Finding(
            "dynamic_width",
            "error",
            "num_speculative_tokens_per_batch_size is set",
            "vLLM's draft width by batch size is ignored, or ends in an assertion, on the V2 "
            "runner that DSpark needs; the plugin decides widths step by step instead",
            "leave num_speculative_tokens_per_batch_size out of --speculative-config",
        )
    if given.get("enable_adaptive_verification"):
        ranks = subject.arguments.integer("tensor-parallel-size", 1)
        level: Level = "error" if ranks > 1 else "warning"
        yield Finding(
            "stock_adaptive",
            level,
            "enable_adaptive_verification asks for vLLM's own scheduler of verification",
            "its budgets are made by each rank for itself (ranks that differ hang), it has no "
            "margin, and hangs on drain were reported; the plugin replaces it",
            "leave enable_adaptive_verification out of --speculative-config",
        )


def check_keys(subject: Subject) -> Iterator[Finding]:
    """Keys beside "dspark": vLLM refuses those that its SpeculativeConfig lacks."""
    try:
        known = declared_fields("config/speculative.py", "SpeculativeConfig")
    except ContractError:
        return  # check_versions says so
    for key in subject.arguments.speculative:
        if not known or key in known:
            continue
        close = difflib.get_close_matches(key, [*known, "dspark"], n=1)
        guess, flag = "", f'leave "{key}" out of --speculative-config'
        if key in DSparkConfig.model_fields:
            guess = "; it is one of the plugin's"
            flag = f'"dspark": {{"{key}": ...}} inside --speculative-config'
        elif close:
            guess, flag = f"; did you mean {close[0]!r}?", f'"{close[0]}" instead of "{key}"'
        yield Finding(
            "speculative_keys",
            "error",
            f"{key!r} is no option of vLLM's --speculative-config{guess}",
            "vLLM would not start",
            flag,
        )


def check_model(subject: Subject) -> Iterator[Finding]:
    """Whether a drafter is named, or is inside the target."""
    given = subject.arguments.speculative
    if not given or subject.drafter_name is not None or subject.is_embedded:
        return  # without a config check_method has said all
    target = subject.arguments.target
    if subject.target_config:
        yield Finding(
            "drafter_files",
            "error",
            f"no drafter: --speculative-config names no model, and {target} has none inside (no "
            "dspark_block_size in its config)",
            "vLLM would not start",
            _MODEL,
        )
    elif not subject.target_is_nowhere:
        yield Finding(
            "drafter_files",
            "warning",
            f"--speculative-config names no model, and the config of {target} is not at hand",
            "only targets with a drafter inside (DeepSeek-V4) can do without",
            f"hf download {target} config.json, or {_MODEL}",
        )


def _architectures(subject: Subject) -> list[str]:
    names = subject.drafter_config.get("architectures") or []
    return [str(name) for name in names] if isinstance(names, list) else []
