"""How long a context the drafter's rotary table can be made for.

The drafter sees the target's positions, up to the target's max_model_len, while its table is sized
by its own `max_position_embeddings` (2048 or 4096 in some checkpoints): positions past the end read
outside it. A table whose frequencies do not depend on its length may simply be made longer.
"""

from vllm_dspark.proposer.keys import Keys

# Frequencies independent of the table's length; all but "default" rescale by fixed factors.
EXTENDABLE = ("default", "linear", "llama3", "proportional", "mrope")
SUPPORTED = (*EXTENDABLE, "dynamic", "yarn")
# vLLM keeps two tables for it, and its drafter classes read the one of the others.
UNSUPPORTED = ("longrope", "su")


def rope_limit(layers: Keys) -> int | None:
    """Longest context in tokens; None where the table can be made as long as asked for.

    layers: the config (section) that describes the decoder layers. Raises DrafterError for kinds of
    rotary embedding that drafters cannot have.
    """
    # transformers 5 calls it rope_parameters, older exports rope_scaling
    key = "rope_parameters" if layers.config.get("rope_parameters") else "rope_scaling"
    rope = layers.section(key)
    if isinstance(rope.config.get("full_attention"), dict):  # Gemma4: one entry per kind of layer
        rope = rope.section("full_attention")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind in UNSUPPORTED:
        raise rope.bad(
            "rope_type",
            kind,
            f"needs a table that vLLM's drafters do not have; use one of {', '.join(SUPPORTED)}",
        )
    if kind in EXTENDABLE:
        return None
    limit = layers.integer("max_position_embeddings", 1)
    original, factor = rope.config.get("original_max_position_embeddings"), rope.number("factor")
    if original is not None and factor is not None:
        # YaRN's table covers what it was stretched to, whatever the config repeats elsewhere.
        limit = int(rope.integer("original_max_position_embeddings", 1) * factor)
    return limit
