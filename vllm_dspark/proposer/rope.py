"""How long a context the drafter's rotary table can be made for.

The drafter sees the target's positions, up to the target's max_model_len, while its table is sized
by its own `max_position_embeddings` (2048 or 4096 in some checkpoints): positions past the end read
outside it. A table whose frequencies do not depend on its length may simply be made longer.
"""

from vllm_dspark.proposer.keys import Keys

# Frequencies independent of the table's length; all but "default" rescale by fixed factors.
EXTENDABLE = ("default", "linear", "llama3", "proportional", "mrope")
SUPPORTED = (*EXTENDABLE, "dynamic", "yarn")
# Numbers without which a kind means nothing; vLLM ends in a KeyError for them.
REQUIRED = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "dynamic": ("factor",),
    "yarn": ("factor",),
}
# Other readings of "dynamic": HunYuan's fixed base (alpha), and a trained length of its own.
FOREIGN = ("alpha", "max_trained_positions")
# Rows of a table, far beyond any model's; a wrong number must not fill the memory.
MAX_POSITIONS = 2**27
MAX_THETA = 1e12
MAX_FACTOR = 1e6


def rope_limit(layers: Keys, head_dim: int, by_kind: bool) -> int | None:
    """Longest context in tokens; None where the table can be made as long as asked for.

    layers: the config (section) that describes the decoder layers; by_kind: whether its kinds of
    layers may have positions of their own. Raises DrafterError for kinds of
    rotary embedding that drafters cannot have, and for numbers that none can have.
    """
    rope = _section(layers, by_kind)
    for keys in (layers, rope):
        keys.number("rope_theta", within=(1.0, MAX_THETA))
        part = keys.number("partial_rotary_factor", within=(1e-3, 1.0))
        turned = head_dim if part is None else int(head_dim * part)
        if part is not None and (turned % 2 or not turned):
            raise keys.bad(
                "partial_rotary_factor",
                part,
                f"turns {turned} of {head_dim} dimensions, and rotary embeddings turn pairs: it is "
                "not what the drafter was trained with",
            )
    if layers.config.get("max_position_embeddings") is not None:
        layers.integer("max_position_embeddings", 1, high=MAX_POSITIONS)
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind not in SUPPORTED:
        raise rope.bad(
            "rope_type",
            kind,
            # LongRoPE, for one: vLLM keeps two tables for it, and its drafters read the others' one
            f"needs a table that vLLM's drafters do not have; use one of {', '.join(SUPPORTED)}",
        )
    for name in REQUIRED.get(kind, ()):
        rope.get(name)
        rope.number(name, within=(1 / MAX_FACTOR, MAX_FACTOR))
    if kind in EXTENDABLE:
        return None
    _refuse_foreign(rope, kind)
    limit = layers.integer("max_position_embeddings", 1)
    if kind == "yarn":
        limit = _stretched(layers, rope, limit)
    return limit


def _section(layers: Keys, by_kind: bool) -> Keys:
    # transformers 5 calls it rope_parameters, older exports rope_scaling
    key = "rope_parameters" if layers.config.get("rope_parameters") else "rope_scaling"
    rope = layers.section(key)
    if isinstance(rope.config.get("full_attention"), dict):  # one entry per kind of layer
        if not by_kind:
            raise layers.bad(
                key,
                rope.config,
                "positions by kind of layer belong to Gemma4, and vLLM would take the default ones "
                'for these layers: give one object, {"rope_type": ..., "rope_theta": ...}',
            )
        rope = rope.section("full_attention")
    return rope


def _refuse_foreign(rope: Keys, kind: str) -> None:
    """Keys that the layers a drafter was trained with leave unread, and vLLM does not.

    transformers' Qwen3 and Gemma4 layers know "dynamic" by `factor` alone, so a drafter trained
    beside a HunYuan target has plain frequencies up to its max_position_embeddings. vLLM makes
    another base of `alpha`, for every position.
    """
    for name in FOREIGN:
        if kind == "dynamic" and rope.config.get(name) is not None:
            raise rope.bad(
                name,
                rope.config[name],
                'together with rope_type "dynamic" it means other positions to vLLM than to the '
                "layers that drafters are trained with: take it out of the drafter's config "
                "(positions up to max_position_embeddings are the plain ones), or give rope_type "
                '"default" and the rope_theta that was trained with',
            )


def _stretched(layers: Keys, rope: Keys, limit: int) -> int:
    """What YaRN's table covers, whatever the config repeats elsewhere."""
    # outside the section it counts more (transformers)
    for keys in (layers, rope):
        if keys.config.get("original_max_position_embeddings") is not None:
            original = keys.integer("original_max_position_embeddings", 1, high=MAX_POSITIONS)
            limit = int(original * (rope.number("factor") or 1.0))
            break
    if not 1 <= limit <= MAX_POSITIONS:
        raise rope.bad("factor", rope.config["factor"], f"makes a table of {limit} positions")
    return limit
