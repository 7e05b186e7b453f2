"""All sizes and settings of the recipe, as frozen dataclasses with the reasons beside them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class DrafterConfig:
    """Shape of the drafter. The default is 11.94 M parameters, 23.9 MB in bf16."""

    hidden_size: int = 576  # must be the target's: embedding and head are shared with it
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64
    intermediate_size: int = 864
    num_layers: int = 3
    vocab_size: int = 49152
    block_size: int = 7
    # Zero-based layer outputs of the target. The last layer's is left out: Hugging Face shows it
    # after the final norm, vLLM before it, so id 29 of 30 would mean two different things.
    target_layer_ids: tuple[int, ...] = (1, 8, 15, 22, 28)
    num_target_layers: int = 30
    markov_rank: int = 32
    # `<reponame>`: a special token the chat model never emits, with an ordinary embedding row.
    mask_token_id: int = 4
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    max_positions: int = 8192

    @property
    def feature_size(self) -> int:
        """Width of the concatenated target features, `len(target_layer_ids) * hidden_size`."""
        return len(self.target_layer_ids) * self.hidden_size


@dataclass(frozen=True)
class Bucket:
    """One batch shape: `rows` sequences padded to `length`, `anchors` blocks drawn in each."""

    length: int
    rows: int
    anchors: int


@dataclass(frozen=True)
class TrainConfig:
    """How long and how hard to train."""

    # rows * anchors is the same in every bucket (2560 blocks), so the loss, where most of the
    # memory traffic is, is compiled once. Anchor counts are multiples of 8 for attention kernels.
    buckets: tuple[Bucket, ...] = (
        Bucket(384, 40, 64),
        Bucket(640, 20, 128),
        Bucket(1280, 10, 256),
    )
    # Best of three after 200 steps each (sweep.py): expected length 1.69, against 1.59 for Muon at
    # 2e-3 and 1.42 for AdamW at 2e-3.
    optimizer: str = "muon"  # or "adamw"
    lr: float = 5e-3
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    warmup: float = 0.02  # fractions of the whole run
    decay_from: float = 0.35
    grad_clip: float = 1.0
    ema_decay: float = 0.998
    ce_weight: float = 0.1
    tv_weight: float = 0.9
    confidence_weight: float = 1.0
    # Position k (0-based) counts exp(-k / position_decay): a late position matters only when all
    # before it were accepted.
    position_decay: float = 3.0
    seed: int = 1234

    def __post_init__(self) -> None:
        blocks = {bucket.rows * bucket.anchors for bucket in self.buckets}
        if len(blocks) != 1:
            raise ValueError(f"buckets differ in rows * anchors: {sorted(blocks)}")


@dataclass(frozen=True)
class GenerateConfig:
    """On-policy text: how much, how long, how warm."""

    slots: int = 2048  # sequences decoded at once
    max_prompt: int = 960  # longer prompts are dropped
    max_new: int = 320
    temperatures: tuple[float, ...] = (1.0, 0.7, 0.0)
    # Samples of every public training prompt at each of `temperatures`; greedy text has only one.
    public_samples: tuple[int, ...] = (8, 3, 1)
    # A derived prompt is sampled once; these are the odds of its temperature.
    derived_odds: tuple[float, ...] = (0.45, 0.2, 0.35)
    derived_prompts: int = 80_000
    seed: int = 99


def recipe_hash() -> str:
    """sha256 over the recipe's Python files, so a checkpoint names the code that made it."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).resolve().parent.glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()
