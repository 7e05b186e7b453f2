"""Names and shapes of the tensors that a drafter's config promises."""

from vllm_dspark.proposer.spec import DrafterSpec

Shape = tuple[int, ...]

# Training-only tensors that exporters leave in the file.
IGNORED = ("t2d", "mask_embedding")


def expected_shapes(spec: DrafterSpec) -> dict[str, Shape]:
    """Name and shape of every tensor as it is without quantisation, shared ones included."""
    h, r = spec.hidden_size, spec.markov_rank
    shapes: dict[str, Shape] = {
        "embed_tokens.weight": (spec.vocab_size, h),
        "lm_head.weight": (spec.draft_vocab_size, h),
        "fc.weight": (h, len(spec.target_layer_ids) * spec.target_hidden_size),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    if r:
        shapes["markov_head.markov_w1.weight"] = (spec.vocab_size, r)
        shapes["markov_head.markov_w2.weight"] = (spec.draft_vocab_size, r)
    if spec.markov_kind == "gated":
        shapes["markov_head.gate_proj.weight"] = (r, h + r)
        shapes["markov_head.gate_proj.bias"] = (r,)
    if spec.markov_kind == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * r, 2 * r + h)
        shapes["markov_head.joint_proj.bias"] = (3 * r,)
    if spec.has_confidence:
        shapes["confidence_head.proj.weight"] = (1, spec.confidence_width)
        shapes["confidence_head.proj.bias"] = (1,)
    if spec.draft_vocab_size < spec.vocab_size:
        shapes["d2t"] = (spec.draft_vocab_size,)
    if layers_are_known(spec):
        for layer in range(spec.num_layers):
            shapes.update(_layer_shapes(spec, f"layers.{layer}."))
    return shapes


def layers_are_known(spec: DrafterSpec) -> bool:
    """Whether the decoder layers' tensors are described here."""
    return spec.backbone != "other"


# Layers that vLLM holds as one: all members of a group are quantised or none is.
FUSED = {"qwen3": (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")),
         "gemma4": (("gate_proj", "up_proj"),)}  # fmt: skip


def linear_layers(spec: DrafterSpec) -> dict[str, tuple[int, int]]:
    """[out, in] of every linear layer that a quantised export may pack.

    The lm_head is not among them: vLLM multiplies a drafter's as plain weights.
    """
    names = ("_proj.weight", "fc.weight")
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in expected_shapes(spec).items()
        if name.endswith(names) and not name.startswith(("markov_head.", "confidence_head."))
    }


def fused_with(spec: DrafterSpec, name: str) -> list[str]:
    """The layers, `name` among them, that vLLM makes one of."""
    parent, _, last = name.rpartition(".")
    groups = FUSED.get(spec.backbone, ())
    group = next((group for group in groups if last in group), (last,))
    return [f"{parent}.{member}" if parent else member for member in group]


def _layer_shapes(spec: DrafterSpec, prefix: str) -> dict[str, Shape]:
    h, f = spec.hidden_size, spec.intermediate_size
    q, kv = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention: dict[str, Shape] = {
        "q_proj.weight": (q, h),
        "k_proj.weight": (kv, h),
        "v_proj.weight": (kv, h),
        "o_proj.weight": (h, q),
        "q_norm.weight": (spec.head_dim,),
        "k_norm.weight": (spec.head_dim,),
    }
    if spec.attention_bias:
        attention.update(
            {"q_proj.bias": (q,), "k_proj.bias": (kv,), "v_proj.bias": (kv,), "o_proj.bias": (h,)}
        )
    if spec.values_are_keys:
        attention.pop("v_proj.weight")
        attention.pop("v_proj.bias", None)
    shapes = {f"{prefix}self_attn.{name}": shape for name, shape in attention.items()}
    shapes[f"{prefix}mlp.gate_proj.weight"] = (f, h)
    shapes[f"{prefix}mlp.up_proj.weight"] = (f, h)
    shapes[f"{prefix}mlp.down_proj.weight"] = (h, f)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if spec.backbone == "gemma4":
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes[f"{prefix}layer_scalar"] = (1,)
    return {**shapes, **{f"{prefix}{norm}.weight": (h,) for norm in norms}}
