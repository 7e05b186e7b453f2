"""Drafters with random weights that all matter: written from a config, whatever its format."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from vllm_dspark.proposer.spec import DrafterSpec, parse_spec
from vllm_dspark.proposer.tensors import expected_shapes


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
