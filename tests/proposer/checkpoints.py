"""Small drafter configs and safetensors files written by hand."""

import json
import struct
from pathlib import Path

import torch

from vllm_dspark.proposer.spec import DrafterSpec, TargetShape, parse_spec
from vllm_dspark.proposer.tensors import expected_shapes

TARGET = TargetShape(vocab_size=50, hidden_size=16, num_layers=6)

DEEPSPEC = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "block_size": 7,
    "mask_token_id": 49,
    "target_layer_ids": [-1, 2, 5],
    "num_target_layers": 6,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "vocab_size": 50,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "markov_rank": 3,
    "markov_head_type": "vanilla",
}

SPECULATORS = {
    "speculators_model_type": "dspark",
    "architectures": ["DSparkDraftModel"],
    "block_size": 4,
    "draft_vocab_size": 20,
    "aux_hidden_state_layer_ids": [1, 3, 6],
    "mask_token_id": 7,
    "markov_rank": 3,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "speculators_config": {
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": "some/target"},
    },
    "transformer_layer_config": {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "vocab_size": 50,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 2048,
    },
}


def spec_of(base: dict = DEEPSPEC, **changes) -> DrafterSpec:
    return parse_spec({**base, **changes}, "drafter/config.json")


def random_tensors(spec: DrafterSpec, seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=gen).bfloat16()
        for name, shape in expected_shapes(spec).items()
    }
    if "d2t" in tensors:
        ids = torch.randperm(spec.vocab_size, generator=gen)[: spec.draft_vocab_size].sort().values
        tensors["d2t"] = ids - torch.arange(spec.draft_vocab_size)
    return tensors


DTYPE_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.uint8: "U8"}


def write_safetensors(file: Path, tensors: dict[str, torch.Tensor]) -> None:
    """The format by its specification: header length, JSON header, raw little-endian data."""
    header, chunks, offset = {"__metadata__": {"format": "pt"}}, [], 0
    for name, tensor in tensors.items():
        data = bytes(tensor.contiguous().flatten().view(torch.uint8).tolist())
        header[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(data)],
        }
        chunks.append(data)
        offset += len(data)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(chunks))


def write_checkpoint(folder: Path, config: dict, tensors: dict[str, torch.Tensor], shards: int = 1):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
        return
    weight_map = {}
    names = list(tensors)
    for i in range(shards):
        part = {n: tensors[n] for n in names[i::shards]}
        file = f"model-{i + 1:05}-of-{shards:05}.safetensors"
        write_safetensors(folder / file, part)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
