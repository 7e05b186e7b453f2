"""Keys of a drafter's config that only vLLM and transformers read.

They meet a wrong value while they build the config or the layers, with errors that name neither
the file nor what to do, or take it as it is; so it is refused here, before.
"""

from collections.abc import Mapping
from typing import Any

import torch

from vllm_dspark.proposer.keys import Keys

# Key and values of the MLP's activation that vLLM's layers know, by backbone.
ACTIVATIONS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "qwen3": ("hidden_act", ("silu",)),
    "gemma4": ("hidden_activation", ("gelu_pytorch_tanh", "gelu", "silu")),
}
# A norm's epsilon above this would outweigh activations of order one.
MAX_EPSILON = 0.1
# Fields that every config of transformers may have.
TYPES: Mapping[str, tuple[type, ...]] = {
    "attention_dropout": (int, float),
    "bos_token_id": (int, list),
    "eos_token_id": (int, list),
    "pad_token_id": (int, list),
    "id2label": (dict,),
    "label2id": (dict,),
    "initializer_range": (int, float),
    "max_window_layers": (int,),
    "num_labels": (int,),
    "use_cache": (bool,),
    "use_sliding_window": (bool,),
}
# Sections that vLLM merges into what it reads.
SECTIONS = ("dflash_config", "eagle_config")


def check_other_keys(keys: Keys, layers: Keys, backbone: str) -> None:
    """Raise DrafterError for a value that vLLM's config or layer classes cannot take.

    keys: the config; layers: its section about the decoder layers, or the same.
    """
    for section in SECTIONS:
        keys.section(section)
    for config in {id(keys): keys, id(layers): layers}.values():
        _check_types(config)
        _check_dtype(config)
    layers.number("rms_norm_eps", within=(1e-20, MAX_EPSILON))
    if backbone in ACTIVATIONS:
        key, known = ACTIVATIONS[backbone]
        activation = layers.text(key, known[0])
        if activation not in known:
            raise layers.bad(key, activation, f"vLLM's layers have {', '.join(known)} only")


def _check_types(config: Keys) -> None:
    for key, types in TYPES.items():
        value: Any = config.config.get(key)
        if value is not None and type(value) not in types:
            names = " or ".join(kind.__name__ for kind in types)
            raise config.bad(key, value, f"must be of type {names}: correct the config.json")


def _check_dtype(config: Keys) -> None:
    for key in ("dtype", "torch_dtype"):
        name = config.text(key, "auto")
        found = getattr(torch, name.removeprefix("torch."), None)
        floating = isinstance(found, torch.dtype) and found.is_floating_point
        if not floating and name != "auto":
            raise config.bad(key, name, "is no type of weights: give bfloat16, float16 or float32")
