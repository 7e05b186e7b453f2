"""What a drafter is, read from its config.json and validated before anything is loaded.

Two standalone formats: DeepSpec (deepseek-ai/DeepSpec: a copy of the target's config plus DSpark
keys at top level) and speculators (`speculators_model_type: dspark`, the layers under
`transformer_layer_config`). They differ where it hurts:

    key missing          DeepSpec               speculators
    sample_from_anchor   True                   False (legacy layout: 1 + K queries)
    K by default         block_size             proposal_methods[0].speculative_tokens
    target layers        target_layer_ids       aux_hidden_state_layer_ids - 1
    sliding layers       none                   causal inside the block

`target_layer_ids` are zero-based layer OUTPUTS, -1 the embedding output. Drafters inside a
DeepSeek-V4 checkpoint are in embedded.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from vllm_dspark.errors import DrafterError
from vllm_dspark.kernels.protocols import MarkovKind
from vllm_dspark.proposer.keys import Keys, read_json, shown
from vllm_dspark.proposer.other_keys import check_other_keys
from vllm_dspark.proposer.quantization import QuantScheme, parse_quantization
from vllm_dspark.proposer.rope import rope_limit

DrafterFormat = Literal["deepspec", "speculators"]
# Whose decoder layers; "other": vLLM's class knows them, we do not.
Backbone = Literal["qwen3", "gemma4", "other"]
MARKOV_KINDS: tuple[MarkovKind, ...] = ("vanilla", "gated", "rnn")
# What exporters call a drafter of Qwen3 layers; the last two say so only together with the format
# or with model_type, since vLLM gives DSparkDraftModel to DeepSeek-V4's embedded drafter.
QWEN3_NAMES = ("Qwen3DSparkModel", "DSparkSpeculator", "DSparkDraftModel")
GEMMA4_NAMES = ("Gemma4DSparkModel",)
# Gemma4's global head size where a config does not give it (transformers' default).
GEMMA4_HEAD_DIM = 512
# More layers, and longer blocks, than any model has; a wrong number must not make us build lists of
# millions, nor K, which the block gives where the user does not, outgrow the engine.
MAX_LAYERS = 1024
MAX_BLOCK = 1024
# Beyond these a cap or a scale leaves float32 nothing to tell logits apart by.
LOGIT_FACTORS = (1e-6, 1e6)


@dataclass(frozen=True)
class TargetShape:
    """The facts of the target that a drafter must agree with."""

    vocab_size: int
    hidden_size: int
    num_layers: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], file: str = "config.json") -> "TargetShape":
        """From the target's config; multimodal configs keep the text model under text_config."""
        keys = Keys(file, config.get("text_config") or config)
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
    # whether queries of a block see later ones in sliding layers too
    sliding_non_causal: bool
    backbone: Backbone
    # Gemma4: values are the (normed) keys, there is no v_proj
    values_are_keys: bool
    # without an lm_head of its own, the drafter's embedding is its head
    tied: bool
    # longest context its rotary table can be made for, None: any
    max_context: int | None
    # what the stored linear weights look like, None: plain
    quantization: QuantScheme | None
    # layers of the target it was trained on, None: not recorded
    num_target_layers: int | None
    # the target's name as the checkpoint records it
    verifier: str | None

    @property
    def max_drafts(self) -> int:
        """Largest K that the trained block has predictions for."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def confidence_width(self) -> int:
        return self.hidden_size + (self.markov_rank if self.confidence_with_markov else 0)

    def limited_to(self, target_vocab: int) -> "DrafterSpec":
        """As it drafts for a target of this vocabulary: ids the target lacks are never drafted.

        Drafters padded, or extended by a row for the mask, may predict more ids than there are;
        the target has neither an embedding nor a logit for those.
        """
        if self.draft_vocab_size <= target_vocab:
            return self
        return replace(self, draft_vocab_size=target_vocab)

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
                f"{self.file}: target_layer_ids {shown(beyond)} do not exist, {target_file} has "
                f"{target.num_layers} layers (0..{target.num_layers - 1}, -1 for the embedding): "
                "use the target it was trained for"
            )
        if self.num_target_layers not in (None, target.num_layers):
            raise DrafterError(
                f"{self.file}: num_target_layers = {self.num_target_layers}, but {target_file} has "
                f"{target.num_layers} layers: the layers that the drafter reads exist there and "
                "hold something else, so next to nothing would be accepted; use the target it was "
                "trained for"
            )
        if self.vocab_size < target.vocab_size:
            raise DrafterError(
                f"{self.file}: vocab_size = {self.vocab_size} is smaller than {target_file}'s "
                f"{target.vocab_size}, so some target tokens have no embedding in the drafter: "
                "use a drafter trained for this vocabulary"
            )


def read_spec(folder: str | Path) -> DrafterSpec:
    """The drafter in a checkpoint folder."""
    file = Path(folder) / "config.json"
    return parse_spec(read_json(file, "a DSpark drafter checkpoint"), str(file))


def parse_spec(config: Mapping[str, Any], file: str = "config.json") -> DrafterSpec:
    """Validate a standalone drafter's config."""
    if config.get("speculators_model_type") is not None:
        spec = _parse_speculators(config, file)
    elif config.get("dspark_block_size") is not None:
        raise DrafterError(
            f"{file}: the drafter is embedded in its target (dspark_block_size = "
            f'{config["dspark_block_size"]!r}, DeepSeek-V4 style): leave out "model" in the '
            "speculative config, or name the target itself"
        )
    else:
        spec = _parse_deepspec(config, file)
    _validate(spec)
    return spec


def _parse_deepspec(config: Mapping[str, Any], file: str) -> DrafterSpec:
    keys = Keys(file, config)
    block_size = keys.integer("block_size", 1, high=MAX_BLOCK)
    sample_from_anchor = keys.flag("sample_from_anchor", True)
    hidden = keys.integer("hidden_size", 1)
    architecture = _deepspec_architecture(keys)
    layers = config.get("num_target_layers")
    return DrafterSpec(
        format="deepspec",
        architecture=architecture,
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        default_drafts=block_size if sample_from_anchor else block_size - 1,
        target_layer_ids=keys.layer_ids("target_layer_ids"),
        target_hidden_size=keys.integer("target_hidden_size", 1, hidden),
        num_target_layers=None if layers is None else keys.integer("num_target_layers", 1),
        verifier=None,
        **_common(keys, keys, _backbone(architecture)),
    )


def _deepspec_architecture(keys: Keys) -> str:
    """The drafter's class; vLLM takes every other name, and none, for DeepSeek-V4's drafter."""
    keys.get("architectures")
    keys.get("model_type")  # transformers knows the config's class by it
    architecture = keys.names("architectures", [""])[0]
    model_type = keys.text("model_type", "")
    remedy = "name the class, for example Qwen3DSparkModel"
    if "DSpark" not in architecture:
        raise keys.bad("architectures", [architecture], f"is no DSpark drafter: {remedy}")
    if architecture in QWEN3_NAMES[1:] and model_type != "qwen3":
        raise keys.bad(
            "architectures",
            [architecture],
            f"with model_type = {model_type!r} this name does not say what the layers are (vLLM "
            f"takes it for DeepSeek-V4's embedded drafter): {remedy}",
        )
    backbone, is_gemma4 = _backbone(architecture), model_type.startswith("gemma4")
    if backbone != "other" and is_gemma4 != (backbone == "gemma4"):
        raise keys.bad("model_type", model_type, f"is not that of a {architecture}")
    return architecture


def _parse_speculators(config: Mapping[str, Any], file: str) -> DrafterSpec:
    keys = Keys(file, config)
    kind = config["speculators_model_type"]
    if kind != "dspark":
        raise keys.bad("speculators_model_type", kind, "only 'dspark' drafters are served here")
    layers = Keys(f"{file} (transformer_layer_config)", keys.get("transformer_layer_config"))
    block_size = keys.integer("block_size", 1, high=MAX_BLOCK)
    sample_from_anchor = keys.flag("sample_from_anchor", False)
    keys.get("speculators_config")
    wrapper = keys.section("speculators_config")
    methods = wrapper.config.get("proposal_methods") or [{}]
    if not isinstance(methods, list):
        raise wrapper.bad("proposal_methods", methods, "must be a list")
    most = block_size if sample_from_anchor else block_size - 1
    first = Keys(f"{wrapper.file} (proposal_methods[0])", methods[0])
    hidden = layers.integer("hidden_size", 1)
    architecture = keys.names("architectures", ["DSparkSpeculator"])[0]
    return DrafterSpec(
        format="speculators",
        architecture=architecture,
        block_size=block_size,
        sample_from_anchor=sample_from_anchor,
        default_drafts=min(first.integer("speculative_tokens", 1, max(most, 1)), most),
        target_layer_ids=tuple(i - 1 for i in keys.layer_ids("aux_hidden_state_layer_ids")),
        target_hidden_size=keys.integer("target_hidden_size", 1, hidden),
        num_target_layers=None,
        verifier=wrapper.section("verifier").text("name_or_path", "") or None,
        **_common(keys, layers, _backbone(architecture)),
    )


def _backbone(architecture: str) -> Backbone:
    if architecture in QWEN3_NAMES:
        return "qwen3"
    return "gemma4" if architecture in GEMMA4_NAMES else "other"


def _common(keys: Keys, layers: Keys, backbone: Backbone) -> dict[str, Any]:
    """Fields that both formats spell alike: DSpark's from `keys`, the backbone's from `layers`."""
    check_other_keys(keys, layers, backbone)
    geometry = _layer_geometry(layers, backbone)
    vocab = layers.integer("vocab_size", 1)
    rank = keys.integer("markov_rank", 0, 0)
    kind = keys.text("markov_head_type", "vanilla")
    if rank and kind not in MARKOV_KINDS:
        raise keys.bad("markov_head_type", kind, f"must be one of {', '.join(MARKOV_KINDS)}")
    has_confidence = keys.flag("enable_confidence_head", False)
    return {
        "file": keys.file,
        "backbone": backbone,
        "mask_token_id": keys.integer("mask_token_id", 0),
        "vocab_size": vocab,
        "draft_vocab_size": keys.integer("draft_vocab_size", 1, vocab),
        "markov_rank": rank,
        "markov_kind": kind if rank else None,
        "has_confidence": has_confidence,
        "confidence_with_markov": has_confidence
        and keys.flag("confidence_head_with_markov", False),
        "soft_cap": layers.number("final_logit_softcapping", within=LOGIT_FACTORS),
        "logit_scale": layers.number("logit_scale", within=LOGIT_FACTORS) or 1.0,
        "tied": layers.flag("tie_word_embeddings", False),
        "sliding_windows": _sliding_windows(layers),
        "sliding_non_causal": keys.flag("sliding_window_non_causal", False),
        "max_context": rope_limit(layers, geometry["head_dim"], backbone != "qwen3"),
        "quantization": parse_quantization(keys),
        **geometry,
    }


def _layer_geometry(layers: Keys, backbone: Backbone) -> dict[str, Any]:
    """Sizes of the decoder layers."""
    hidden = layers.integer("hidden_size", 1)
    heads = layers.integer("num_attention_heads", 1)
    kv_heads = layers.integer("num_key_value_heads", 1, heads)
    head_dim = layers.integer("head_dim", 1, max(hidden // heads, 1))
    values_are_keys = False
    if backbone == "gemma4":
        # DeepSpec builds every layer like Gemma4's global ones.
        values_are_keys = layers.flag("attention_k_eq_v", False)
        head_dim = layers.integer("global_head_dim", 1, GEMMA4_HEAD_DIM)
        if values_are_keys:
            kv_heads = layers.integer("num_global_key_value_heads", 1, kv_heads)
    return {
        "num_layers": _layer_count(layers),
        "hidden_size": hidden,
        "intermediate_size": layers.integer("intermediate_size", 1),
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "attention_bias": layers.flag("attention_bias", False),
        "values_are_keys": values_are_keys,
    }


def _layer_count(layers: Keys) -> int:
    return layers.integer("num_hidden_layers", 1, high=MAX_LAYERS)


def _sliding_windows(layers: Keys) -> tuple[int | None, ...]:
    num_layers = _layer_count(layers)
    kinds = layers.names("layer_types", ["full_attention"] * num_layers)
    if len(kinds) != num_layers:
        raise layers.bad("layer_types", kinds, f"must name num_hidden_layers = {num_layers} layers")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise layers.bad("layer_types", unknown, "may hold full_attention and sliding_attention")
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
            f"{spec.file}: target_layer_ids = {shown(list(spec.target_layer_ids))}: the least "
            "allowed is -1, the embedding output (0 in aux_hidden_state_layer_ids)"
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
    if spec.head_dim % 2:
        raise DrafterError(
            f"{spec.file}: head_dim = {spec.head_dim} is odd, and rotary embeddings turn pairs: "
            "it is not what the drafter was trained with"
        )
