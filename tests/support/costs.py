"""Cost tables that make plans predictable: a step costs `base + per_token * tokens`."""

from dataclasses import replace
from pathlib import Path

from vllm_dspark.artifacts.fingerprint import Fingerprint
from vllm_dspark.artifacts.schema import CostTableRecord
from vllm_dspark.planning.cost import StepMode, StepShape, StepTiming, build_cost_table
from vllm_dspark.planning.draft_cost import measured_widths


def write_cost_table(
    path: Path,
    *,
    base_ms: float = 10.0,
    per_token_ms: float = 1.0,
    draft_ms: float = 1.0,
    width: int = 7,
    max_requests: int = 8,
    narrow_share: float | None = None,
) -> Path:
    """A linear table for eager steps of up to `max_requests` full windows, as an artifact.

    narrow_share: what a draft pass without columns would take of a full one; None: the table knows
    passes of full width only.
    """
    samples = [
        StepTiming(
            StepMode.EAGER,
            StepShape.RAGGED,
            num_requests=min(tokens, max_requests),
            num_tokens=tokens,
            kv_tokens=128,
            forward_ms=base_ms + per_token_ms * tokens,
            draft_ms=draft_ms,
        )
        for tokens in range(1, max_requests * (width + 1) + 1)
        for _ in range(3)
    ]
    for columns in measured_widths(width) if narrow_share is not None else ():
        share = narrow_share + (1.0 - narrow_share) * columns / width
        samples += [
            replace(samples[0], num_requests=n, draft_ms=draft_ms * share, draft_width=columns)
            for n in (1, max_requests)
            for _ in range(3)
        ]
    record = CostTableRecord.from_table(build_cost_table(samples), any_fingerprint(width))
    path.write_text(record.model_dump_json())
    return path


def any_fingerprint(width: int) -> Fingerprint:
    """A fingerprint that matches no machine."""
    return Fingerprint(
        device="none",
        device_count=1,
        driver="",
        cuda="",
        triton="",
        torch="0",
        vllm="0",
        plugin="0",
        model_hash="0",
        drafter_hash="0",
        quantization="",
        dtype="float32",
        kv_cache_dtype="auto",
        tensor_parallel=1,
        data_parallel=1,
        pipeline_parallel=1,
        attention_backend="none",
        num_speculative_tokens=width,
        ladder=(),
    )
