"""What a measurement depends on, and so what must match for it to be reused.

Step times depend on all of it. A calibration depends on the models and their
numerics alone, so it survives a driver update (MODEL_FIELDS).
"""

import hashlib
import json
from collections.abc import Iterable, Mapping

from pydantic import BaseModel, ConfigDict, Field

MODEL_FIELDS = (
    "model_hash",
    "drafter_hash",
    "quantization",
    "dtype",
    "num_speculative_tokens",
    "acceptance_rule",
)


class Fingerprint(BaseModel):
    """Identity of machine, software, models and layout; integration/ fills it."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    device: str = Field(min_length=1)  # GPU or CPU model name
    device_count: int = Field(ge=1)
    driver: str  # "" on a CPU, as the next two
    cuda: str
    triton: str
    torch: str = Field(min_length=1)
    vllm: str = Field(min_length=1)
    plugin: str = Field(min_length=1)
    model_hash: str = Field(min_length=1)  # hash_config of the target's config
    drafter_hash: str = Field(min_length=1)
    quantization: str
    dtype: str = Field(min_length=1)
    kv_cache_dtype: str = Field(min_length=1)
    tensor_parallel: int = Field(ge=1)
    data_parallel: int = Field(ge=1)
    pipeline_parallel: int = Field(ge=1)
    attention_backend: str = Field(min_length=1)
    num_speculative_tokens: int = Field(ge=1)  # K
    # Which drafts are accepted: vLLM's rejection_sample_method/draft_sample_method.
    acceptance_rule: str = "standard/greedy"
    ladder: tuple[int, ...] = Field(strict=False)  # captured sizes; empty when eager
    compilation: str = ""  # vLLM's compilation mode; "" in records of earlier versions

    def digest(self, fields: Iterable[str] | None = None) -> str:
        """Hex digest of all or some fields; names cache files."""
        return hash_config(self.model_dump(mode="json", include=set(fields) if fields else None))

    def differences(self, live: "Fingerprint", fields: Iterable[str] | None = None) -> list[str]:
        """One line per field in which this stored fingerprint differs from the live one."""
        return [
            f"{name}: recorded {getattr(self, name)!r}, now {getattr(live, name)!r}"
            for name in (fields or type(self).model_fields)
            if getattr(self, name) != getattr(live, name)
        ]


def hash_config(config: Mapping[str, object]) -> str:
    """Digest of a JSON-like mapping that does not depend on key order."""
    text = json.dumps(config, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
