"""What a drafter is, read from its config.json and validated before anything is loaded.

Two formats: DeepSpec (deepseek-ai/DeepSpec: a copy of the target's config plus DSpark keys at top
level) and speculators (`speculators_model_type: dspark`, the layers under
`transformer_layer_config`). They differ where it hurts:

    key missing          DeepSpec               speculators
    sample_from_anchor   True                   False (legacy layout: 1 + K queries)
    K by default         block_size             proposal_methods[0].speculative_tokens
    target layers        target_layer_ids       aux_hidden_state_layer_ids - 1

`target_layer_ids` are zero-based layer OUTPUTS, -1 the embedding output.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels.protocols import MarkovKind

DrafterFormat = Literal["deepspec", "speculators"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")


@dataclass(frozen=True)
class TargetShape:
    """The facts of the target that a drafter must agree with."""

    vocab_size: int
    hidden_size: int
    num_layers: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], file: str = "config.json") -> "TargetShape":
        """From the target's config; multimodal configs keep the text model under text_config."""
        keys = _Keys(file, config.get("text_config") or config)
        return cls(
            vocab_size=keys.integer("vocab_size", 1),
            hidden_size=keys.integer("hidden_size", 1),
            num_layers=keys.integer("num_hidden_layers", 1),
        )


@dataclass(frozen=True)
class DrafterSpec:
    """One drafter. `file` names its config in error messages."""

    file: str
    format: DrafterFormat
    architecture: str
    # trained block length, anchor included where the block starts with it
    block_size: int
    # True: K queries, the anchor's own predicts the first draft. False: 1 + K queries
    sample_from_anchor: bool
    # K when the user gives none
    default_drafts: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_layers: int
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_bias: bool
    # ids that the embedding and markov_w1 know
    vocab_size: int
    # ids that the lm_head and markov_w2 predict
    draft_vocab_size: int
    markov_rank: int
    # None with rank 0
    markov_kind: MarkovKind | None
    has_confidence: bool
    confidence_with_markov: bool
    soft_cap: float | None
    logit_scale: float
    # [num_layers] attention span, None: the whole context
    sliding_windows: tuple[int | None, ...]
    # the target's name as the checkpoint records it
    verifier: str | None

    @property
    def max_drafts(self) -> int:
        """Largest K that the trained block has predictions for."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def confidence_width(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)

    def check_width(self, num_drafts: int) -> None:
        """Refuse a K that the block cannot serve."""
        if not 1 <= num_drafts <= self.max_drafts:
            layout = "" if self.sample_from_anchor else ", of which the anchor takes one"
            raise DrafterError(
                f"num_speculative_tokens = {num_drafts}, but {self.file} was trained with "
                f"block_size = {self.block_size}{layout}: set num_speculative_tokens to "
                f"1..{self.max_drafts}"
            )

    def check_target(self, target: TargetShape, target_file: str = "the target's config") -> None:
        """Refuse a target of other dimensions than the drafter was trained for."""
        if self.target_hidden_size != target.hidden_size:
            raise DrafterError(
                f"{self.file}: the drafter reads target hidden states of size "
                f"{self.target_hidden_size}, but {target_file} has hidden_size = "
                f"{target.hidden_size}: use the target it was trained for"
                + (f" ({self.verifier})" if self.verifier else "")
            )
        beyond = [i for i in self.target_layer_ids if i >= target.num_layers]
        if beyond:
            raise DrafterError(
                f"{self.file}: target_layer_ids {beyond} do not exist, {target_file} has "
                f"{target.num_layers} layers (0..{target.num_layers - 1}, -1 for the embedding): "
                "use the target it was trained for"
            )
        if self.vocab_size < target.vocab_size:
            raise DrafterError(
                f"{self.file}: vocab_size = {self.vocab_size} is smaller than {target_file}'s "
                f"{target.vocab_size}, so some target tokens have no embedding in the drafter: "
                "use a drafter trained for this vocabulary"
            )


class _Keys:
    """Typed access to a config whose errors name file, key, value and remedy."""

    def __init__(self, file: str, config: Mapping[str, Any]) -> None:
        self.file = file
        self.config = config

    def bad(self, key: str, value: object, why: str) -> DrafterError:
        return DrafterError(f"{self.file}: {key} = {value!r}: {why}")

    def get(self, key: str) -> Any:
        if self.config.get(key) is None:
            raise DrafterError(
                f"{self.file}: required key {key!r} is missing: this is not a complete DSpark "
                "drafter config, or it was exported by a tool that drops it"
            )
        return self.config[key]

    def integer(self, key: str, low: int, default: int | None = None) -> int:
        value = self.config.get(key)
        value = default if value is None else value
        value = self.get(key) if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise self.bad(key, value, f"must be an integer >= {low}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, value, "must be true or false")
        return value

    def number(self, key: str) -> float | None:
        value = self.config.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise self.bad(key, value, "must be a positive number")
        return float(value)

    def layer_ids(self, key: str) -> tuple[int, ...]:
        value = self.get(key)
        if not isinstance(value, list) or not value or not all(type(i) is int for i in value):
            raise self.bad(key, value, "must be a non-empty list of integers")
        if any(b <= a for a, b in itertools.pairwise(value)):
            raise self.bad(key, value, "must be strictly increasing, the order of the fc input")
        return tuple(value)


def read_spec(folder: str | Path) -> DrafterSpec:
    """The drafter in a checkpoint folder."""
    file = Path(folder) / "config.json"
    if not file.is_file():
        raise DrafterError(f"{file} does not exist: give the folder of a DSpark drafter checkpoint")
    try:
        config = json.loads(file.read_text())
    except json.JSONDecodeError as error:
        raise DrafterError(f"{file} is not valid JSON ({error}): fetch the file again") from error
    return parse_spec(config, str(file))


def parse_spec(config: Mapping[str, Any], file: str = "config.json") -> DrafterSpec:
    """Validate a drafter's config."""
    if config.get("speculators_model_type") is not None:
        spec = _parse_speculators(config, file)
    elif config.get("dspark_block_size") is not None:
        raise DrafterError(
            f"{file}: the drafter is embedded in the target (dspark_block_size = "
            f"{config['dspark_block_size']!r}, DeepSeek-V4 style): vllm-dspark reads standalone "
            "drafters, vLLM's own loader serves this one"
        )
    else:
        spec = _parse_deepspec(config, file)
    _validate(spec)
    return spec


def _parse_deepspec(config: Mapping[str, Any], file: str) -> DrafterSpec:
    keys = _Keys(file, config)
    block_size = keys.integer("block_size", 1)
    layer_ids = keys.layer_ids("target_layer_ids")
    sample_from_anchor = keys.flag("sample_from_anchor", True)
    hidden = keys.integer("hidden_size", 1)
    return DrafterSpec(
        format="deepspec",
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        default_drafts=block_size if sample_from_anchor else block_size - 1,
        target_layer_ids=layer_ids,
        target_hidden_size=keys.integer("target_hidden_size", 1, hidden),
        verifier=None,
        **_common(keys, keys),
    )


def _parse_speculators(config: Mapping[str, Any], file: str) -> DrafterSpec:
    keys = _Keys(file, config)
    kind = config["speculators_model_type"]
    if kind != "dspark":
        raise keys.bad("speculators_model_type", kind, "only 'dspark' drafters are served here")
    layers = _Keys(f"{file} (transformer_layer_config)", keys.get("transformer_layer_config"))
    block_size = keys.integer("block_size", 1)
    sample_from_anchor = keys.flag("sample_from_anchor", False)
    wrapper = config.get("speculators_config") or {}
    methods = wrapper.get("proposal_methods") or [{}]
    most = block_size if sample_from_anchor else block_size - 1
    proposed = methods[0].get("speculative_tokens") or most
    hidden = layers.integer("hidden_size", 1)
    return DrafterSpec(
        format="speculators",
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        default_drafts=min(proposed, most),
        target_layer_ids=tuple(i - 1 for i in keys.layer_ids("aux_hidden_state_layer_ids")),
        target_hidden_size=keys.integer("target_hidden_size", 1, hidden),
        verifier=(wrapper.get("verifier") or {}).get("name_or_path"),
        **_common(keys, layers),
    )


def _common(keys: _Keys, layers: _Keys) -> dict[str, Any]:
    """Fields that both formats spell alike: DSpark's from `keys`, the backbone's from `layers`."""
    hidden = layers.integer("hidden_size", 1)
    heads = layers.integer("num_attention_heads", 1)
    vocab = layers.integer("vocab_size", 1)
    rank = keys.integer("markov_rank", 0)
    kind = keys.config.get("markov_head_type") or "vanilla"
    if rank and kind not in MARKOV_KINDS:
        raise keys.bad("markov_head_type", kind, f"must be one of {', '.join(MARKOV_KINDS)}")
    has_confidence = keys.flag("enable_confidence_head", False)
    architectures = keys.config.get("architectures") or ["Qwen3DSparkModel"]
    return {
        "file": keys.file,
        "architecture": architectures[0],
        "mask_token_id": keys.integer("mask_token_id", 0),
        "num_layers": layers.integer("num_hidden_layers", 1),
        "hidden_size": hidden,
        "intermediate_size": layers.integer("intermediate_size", 1),
        "num_heads": heads,
        "num_kv_heads": layers.integer("num_key_value_heads", 1, heads),
        "head_dim": layers.integer("head_dim", 1, hidden // heads),
        "attention_bias": layers.flag("attention_bias", False),
        "vocab_size": vocab,
        "draft_vocab_size": keys.integer("draft_vocab_size", 1, vocab),
        "markov_rank": rank,
        "markov_kind": kind if rank else None,
        "has_confidence": has_confidence,
        "confidence_with_markov": has_confidence
        and keys.flag("confidence_head_with_markov", False),
        "soft_cap": layers.number("final_logit_softcapping"),
        "logit_scale": layers.number("logit_scale") or 1.0,
        "sliding_windows": _sliding_windows(layers),
    }


def _sliding_windows(layers: _Keys) -> tuple[int | None, ...]:
    num_layers = layers.integer("num_hidden_layers", 1)
    kinds = layers.config.get("layer_types") or ["full_attention"] * num_layers
    if len(kinds) != num_layers:
        raise layers.bad("layer_types", kinds, f"must name num_hidden_layers = {num_layers} layers")
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    span = layers.integer("sliding_window", 1)
    return tuple(span if kind == "sliding_attention" else None for kind in kinds)


def _validate(spec: DrafterSpec) -> None:
    """Facts that must agree within one config."""
    if spec.max_drafts < 1:
        raise DrafterError(
            f"{spec.file}: block_size = {spec.block_size} with sample_from_anchor = false leaves "
            "no token to draft: the block must hold the anchor and at least one mask"
        )
    if spec.mask_token_id >= spec.vocab_size:
        raise DrafterError(
            f"{spec.file}: mask_token_id = {spec.mask_token_id} lies outside the drafter's "
            f"vocabulary of {spec.vocab_size}: use the id the drafter was trained with"
        )
    if spec.target_layer_ids[0] < -1:
        raise DrafterError(
            f"{spec.file}: target_layer_ids = {list(spec.target_layer_ids)}: the least allowed is "
            "-1, the embedding output (0 in aux_hidden_state_layer_ids)"
        )
    if spec.draft_vocab_size > spec.vocab_size:
        raise DrafterError(
            f"{spec.file}: draft_vocab_size = {spec.draft_vocab_size} exceeds vocab_size = "
            f"{spec.vocab_size}: a reduced draft vocabulary must be a subset"
        )
    if spec.confidence_with_markov and not spec.markov_rank:
        raise DrafterError(
            f"{spec.file}: confidence_head_with_markov = true needs a Markov embedding, but "
            "markov_rank = 0: set confidence_head_with_markov to false"
        )
    if spec.num_heads % spec.num_kv_heads:
        raise DrafterError(
            f"{spec.file}: num_attention_heads = {spec.num_heads} is no multiple of "
            f"num_key_value_heads = {spec.num_kv_heads}"
        )
