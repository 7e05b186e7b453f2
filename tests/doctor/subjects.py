"""Engines to examine: a target and a drafter that fit, changed one thing at a time."""

import json
import re
from pathlib import Path
from typing import Any

from tests.proposer.checkpoints import DEEPSPEC, random_tensors, spec_of, write_checkpoint
from vllm_dspark.cli.doctor.arguments import parse_serve
from vllm_dspark.cli.doctor.examine import CHECKS
from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Machine, Subject

TARGET = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "num_hidden_layers": 6,
    "max_position_embeddings": 4096,
}
# A flag, a key or value of a config, or a command: something that one can type.
NAMES_A_REMEDY = re.compile(r"--\w|\"\w|^(vllm-dspark|hf|pip|rm|unset) |as TARGET")
H200 = Machine("NVIDIA H200", capability=90, device_count=1)


def write_target(folder: Path, **changes: Any) -> Path:
    """A target's config (no weights: doctor reads none)."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in {**TARGET, **changes}.items() if v is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def write_drafter(folder: Path, drop: str = "", **changes: Any) -> Path:
    """A DeepSpec drafter for TARGET; drop: tensors left out, by prefix."""
    config = {**DEEPSPEC, **changes}
    legal = {k: v for k, v in changes.items() if k not in ("mask_token_id", "quantization_config")}
    tensors = random_tensors(spec_of(DEEPSPEC, **legal))
    if drop:
        tensors = {name: t for name, t in tensors.items() if not name.startswith(drop)}
    write_checkpoint(folder, config, tensors)
    return folder


def subject(
    tmp_path: Path,
    *flags: str,
    target: dict[str, Any] | None = None,
    drafter: dict[str, Any] | None = None,
    speculative: dict[str, Any] | None = None,
    machine: Machine = H200,
) -> Subject:
    """What `doctor` would examine; changes are laid over a combination without findings."""
    given = {
        "method": "dspark",
        "model": str(write_drafter(tmp_path / "dspark-drafter", **(drafter or {}))),
        "num_speculative_tokens": 7,
        **(speculative or {}),
    }
    given = {key: value for key, value in given.items() if value is not None}
    folder = write_target(tmp_path / "target", **(target or {}))
    flags = flags or ("--max-num-seqs", "32", "--max-model-len", "4k")
    arguments = [str(folder), *flags, "--speculative-config", json.dumps(given)]
    return Subject(parse_serve(arguments), machine)


def findings(examined: Subject) -> list[Finding]:
    """Findings of all checks but those of the installed versions."""
    return [finding for check in CHECKS for finding in check(examined)]


def named(found: list[Finding], check: str) -> list[Finding]:
    """Findings of one name that say something is wrong, or worth knowing."""
    return [f for f in found if f.check == check and f.level != "ok"]
