"""Drafters with random weights that all matter: written from a config, whatever its format."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.support.pairs import PairSpec
from vllm_dspark.proposer.spec import DrafterSpec, parse_spec
from vllm_dspark.proposer.tensors import expected_shapes

SPEC = PairSpec(symbols=94, kind="random", seed=11)
V = SPEC.vocab_size
LAYERS = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "vocab_size": V,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": 64,  # the engine's context is longer: the table has to grow
}
HEADS = {
    "markov_rank": 16,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "mask_token_id": SPEC.special_ids["<mask>"],
}
DEEPSPEC = {
    **LAYERS,
    **HEADS,
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 5,
    "target_layer_ids": [-1, 1],
}
SPECULATORS = {
    **HEADS,
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "block_size": 5,
    "draft_vocab_size": 40,
    "target_hidden_size": 64,
    "aux_hidden_state_layer_ids": [1, 3],
    "speculators_config": {
        "algorithm": "dspark",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
    },
    "transformer_layer_config": {
        **LAYERS,
        "model_type": "qwen3",
        "hidden_size": 48,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 12,
        "use_sliding_window": True,
    },
}


def random_drafter(
    folder: Path, config: dict, seed: int = 3, without: tuple[str, ...] = ()
) -> tuple[DrafterSpec, dict[str, torch.Tensor]]:
    """Write config and weights; returns what was written, `without` left out of the file."""
    spec = parse_spec(config, str(folder / "config.json"))
    gen = torch.Generator().manual_seed(seed)
    tensors = {name: _values(name, shape, gen) for name, shape in expected_shapes(spec).items()}
    if spec.backbone == "gemma4":
        # Gemma multiplies embeddings by sqrt(H); of order one they leave the layers a say.
        tensors["embed_tokens.weight"] *= spec.hidden_size**-0.5
    if "d2t" in tensors:
        ids = torch.randperm(spec.vocab_size, generator=gen)[: spec.draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(spec.draft_vocab_size)
    tensors = (
        {n: t for n, t in tensors.items() if not n.startswith(without)} if without else tensors
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return spec, tensors


def _values(name: str, shape: tuple[int, ...], gen: torch.Generator) -> torch.Tensor:
    noise = torch.randn(shape, generator=gen)
    if name.endswith("layer_scalar"):
        return 1.0 + 0.3 * noise
    if "norm" in name:
        return 1.0 + 0.3 * noise  # unequal in every layer, so that a swapped norm shows
    if name.startswith(("embed_tokens", "markov_head.markov_w1")):
        return noise
    if name.endswith("bias"):
        return 0.1 * noise
    # The head's bias must not drown what the backbone says.
    strength = 0.5 if "markov_w2" in name else 1.5
    return noise * strength * shape[-1] ** -0.5
