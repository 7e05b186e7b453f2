"""Every public report that a start-up check could have caught is caught (doctor/reports.py)."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.doctor.subjects import (
    H200,
    NAMES_A_REMEDY,
    findings,
    named,
    subject,
    write_drafter,
    write_target,
)
from tests.proposer.checkpoints import DEEPSPEC, random_tensors, spec_of, write_checkpoint
from vllm_dspark.cli.doctor import versions
from vllm_dspark.cli.doctor.arguments import parse_serve
from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.reports import REPORTS
from vllm_dspark.cli.doctor.subject import Machine, Subject

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1024}
FP4 = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
FP8 = {"quantization_config": {"quant_method": "fp8"}}
V4 = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "model_type": "deepseek_v4",
    "dspark_block_size": 5,
    "dspark_markov_rank": 3,
    "dspark_noise_token_id": 7,
    "dspark_target_layer_ids": [1, 3],
}


def _flags(*flags: str) -> Callable[[Path], Subject]:
    return lambda path: subject(path, *flags)


def _with(**parts: Any) -> Callable[[Path], Subject]:
    return lambda path: subject(path, **parts)


def _embedded(**changes: Any) -> Callable[[Path], Subject]:
    def make(path: Path) -> Subject:
        target = write_target(path / "target", **{**V4, **changes})
        speculative = json.dumps({"method": "dspark", "num_speculative_tokens": 5})
        return Subject(parse_serve([str(target), "--speculative-config", speculative]), H200)

    return make


def _head_in_file_alone(path: Path) -> Subject:
    """The config denies a confidence head that the file has."""
    made = subject(path)
    tensors = random_tensors(spec_of())
    config = {**DEEPSPEC, "enable_confidence_head": False}
    write_checkpoint(path / "dspark-drafter", config, tensors)
    return made


def _markov_width(path: Path) -> Subject:
    """The head is as wide as with a Markov embedding, the config says without."""
    made = subject(path)
    tensors = random_tensors(spec_of())
    config = {**DEEPSPEC, "confidence_head_with_markov": False}
    write_checkpoint(path / "dspark-drafter", config, tensors)
    return made


def _v4_class(path: Path) -> Subject:
    """The class name that vLLM gives to DeepSeek-V4's embedded drafter."""
    made = subject(path)
    config = {**DEEPSPEC, "architectures": ["DSparkDraftModel"], "model_type": "llama"}
    (path / "dspark-drafter" / "config.json").write_text(json.dumps(config))
    return made


def _no_head(path: Path) -> Subject:
    made = subject(path)
    write_drafter(path / "dspark-drafter", drop="confidence_head")
    return made


def _other_table(path: Path) -> Subject:
    """A cost table of another machine."""
    from tests.artifacts.records import cost_record

    record = cost_record()
    (path / "table.json").write_text(record.model_dump_json())
    options = {"cost_table": str(path / "table.json")}
    width = record.fingerprint.num_speculative_tokens
    wide = {"block_size": max(width, 7)}
    return subject(
        path, drafter=wide, speculative={"num_speculative_tokens": width, "dspark": options}
    )


def _machine(**changes: Any) -> Machine:
    return replace(H200, **changes)


# One situation per row of REPORTS that names a check, in its order.
SITUATIONS: dict[str, Callable[[Path], Subject]] = {
    "acceptance of 4 %": _with(drafter={"block_size": 5}),
    "acceptance collapses, then a hang": _with(speculative={"enable_adaptive_verification": True}),
    "tensor-parallel ranks diverge": lambda path: subject(
        path, "-tp", "2", speculative={"enable_adaptive_verification": True}
    ),
    "acceptance collapses with prefix caching": _flags("--enable-prefix-caching"),
    "prefix hits vetoed": lambda path: subject(
        path,
        "--kv-offloading-size=8",
        drafter={
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 128,
        },
    ),
    "tool call accepted": _flags("--reasoning-parser", "qwen3", "--enable-auto-tool-choice"),
    "thinking budget": _flags("--reasoning-parser", "qwen3"),
    "accepted length of 1.0": _with(target=FP4),
    "KeyError w13_weight_scale": _embedded(**FP4),
    "crash in F.linear": _with(drafter=FP8),
    "bf16 drafter beside": _with(target=FP8, speculative={"quantization": "fp8"}),
    "DSparkDraftModel taken": _v4_class,
    "confidence head in the file": _head_in_file_alone,
    "adaptive verification without a head": _no_head,
    "block beyond max_model_len": _flags("--max-model-len", "4096"),
    "positions beyond": _with(drafter={"rope_scaling": YARN, "max_position_embeddings": 2048}),
    "max_num_scheduled_tokens": _flags("--max-num-seqs=256", "--max-num-batched-tokens=1k"),
    "draft width by batch size": _with(
        speculative={"num_speculative_tokens_per_batch_size": [[1, 8, 7]]}
    ),
    "MNNVL": lambda path: subject(
        path,
        "-tp=8",
        "--max-num-seqs=1024",
        target={"hidden_size": 16_384},
    ),
    "illegal memory access": lambda path: subject(
        path, target={"kv_lora_rank": 512}, machine=_machine(capability=120)
    ),
    "NIXL": _flags("--kv-transfer-config", '{"kv_connector": "NixlConnector"}'),
    "mixed-length error": lambda path: subject(
        path, "--attention-backend", "FLASHMLA", speculative={"dspark": {"windows": "device"}}
    ),
    "n-gram state": _with(target={"engram_vocab_size": 1000}),
    "wrong graph geometry": _flags("--cudagraph-capture-sizes", "1,2,4,10,20,300"),
    "mRoPE": _with(target={"layer_types": ["linear_attention"] * 6}),
    "start-up deadlock": _flags("--nnodes", "2"),
    "74 % slower": _flags("--kv-cache-dtype", "fp8"),
    "the drafter knows nothing of a LoRA": _flags("--enable-lora"),
    "corrupt text": _flags("-pp", "2"),
    "Markov embedding": _markov_width,
    "stale attention-DP": _flags("--data-parallel-size", "4"),
    "logits processors": _flags("--logits-processors", "my.module:Processor"),
    "slower than without": _other_table,
}
SEEN = [row for row in REPORTS if row.check and row.check != "runner"]


def _situation(symptom: str) -> Callable[[Path], Subject]:
    (found,) = [make for start, make in SITUATIONS.items() if symptom.startswith(start)]
    return found


@pytest.mark.parametrize("row", SEEN, ids=lambda row: row.symptom[:40])
def test_report_is_caught(tmp_path: Path, row: Any) -> None:
    """Catches a reported failure that the doctor would let through."""
    caught = named(findings(_situation(row.symptom)(tmp_path)), row.check)
    assert caught, f"no finding {row.check!r} for: {row.symptom}"
    assert all(f.reason or f.level == "error" for f in caught)
    unclear = [f.flag for f in caught if f.level != "info" and not NAMES_A_REMEDY.search(f.flag)]
    assert not unclear, "a remedy names the flag, option or command that mends it"


@pytest.mark.parametrize("row", SEEN, ids=lambda row: row.symptom[:40])
def test_finding_comes_from_the_situation(tmp_path: Path, row: Any) -> None:
    """Catches a check that always fires: a healthy engine does not have the finding."""
    healthy = subject(tmp_path, "--max-num-seqs", "32", "--max-model-len", "4000")
    if row.check == "cost_table":  # a missing table is worth an info; a wrong one is more
        assert {f.level for f in named(findings(healthy), row.check)} <= {"info"}
        return
    assert not named(findings(healthy), row.check)


def test_runner_switch_is_caught() -> None:
    """Catches a start on the V1 runner, which has no DSpark."""
    off = Machine(environment={"VLLM_USE_V2_MODEL_RUNNER": "0"})
    found = list(versions.check_runner(off))
    assert [f.check for f in found] == ["runner"]
    assert found[0].level == "error"
    assert not list(versions.check_runner(Machine()))


def test_every_row_is_answered_once() -> None:
    """Catches a report without check and without reason, and a situation that no report has."""
    assert all(bool(row.check) != bool(row.not_at_start) for row in REPORTS)
    assert len({row.symptom for row in REPORTS}) == len(REPORTS)
    for row in SEEN:
        _situation(row.symptom)
    starts = tuple(SITUATIONS)
    assert all(any(row.symptom.startswith(start) for row in SEEN) for start in starts)


def test_documentation_shows_the_table() -> None:
    """Catches docs/doctor.md falling behind."""
    text = (Path(__file__).parent.parent.parent / "docs" / "doctor.md").read_text()
    for row in REPORTS:
        assert row.symptom in text, row.symptom
        assert (f"`{row.check}`" if row.check else row.not_at_start) in text, row.symptom


def test_findings_are_finding_objects(tmp_path: Path) -> None:
    """Catches a check that yields something else."""
    assert all(isinstance(f, Finding) for f in findings(subject(tmp_path)))
