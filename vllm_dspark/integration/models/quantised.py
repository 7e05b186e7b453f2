"""vLLM's quantisation of a drafter, asked by the checkpoint's names and corrected by its tensors.

A quantisation config names layers that were left plain ("ignore" lists and targets) as the
checkpoint does: `fc`, `layers.0.mlp.down_proj`. vLLM calls the same layers `model.fc` and
`model.layers.36.mlp.down_proj`, finds them in no list, builds them packed, and fails at their plain
weights. Here a layer is asked for by its own name, and one whose weights are stored plain is plain
whatever the lists say. Checked on vLLM 0.32.0, 0.33.0 (source).
"""

import re
from collections.abc import Iterable
from typing import Any

from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.inventory import FLOATS, StoredTensor
from vllm_dspark.proposer.spec import DrafterSpec
from vllm_dspark.proposer.tensors import linear_layers

_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


def plain_layers(spec: DrafterSpec, tensors: dict[str, StoredTensor]) -> frozenset[str]:
    """Linear layers of a checkpoint that are stored as plain floating-point weights."""
    weights = {name: tensors.get(f"{name}.weight") for name in linear_layers(spec)}
    return frozenset(n for n, w in weights.items() if w is not None and w.dtype in FLOATS)


class StoredQuantization:
    """A QuantizationConfig of vLLM's that knows which layers of its checkpoint are plain.

    first_layer: number that vLLM gives to the drafter's layer 0; plain: None where the files are
    not at hand, so that the config's own lists decide.
    """

    def __init__(
        self, config: Any, first_layer: int, file: str, plain: frozenset[str] | None
    ) -> None:
        self._config = config
        self._first_layer = first_layer
        self._file = file
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        """Everything else is the config's own. (Copying asks before there is one.)"""
        if name == "_config":
            raise AttributeError(name)
        return getattr(self._config, name)

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        """How vLLM shall hold `layer`; raises DrafterError where config and tensors disagree."""
        if not isinstance(layer, LinearBase):
            return self._config.get_quant_method(layer, prefix)
        name = self._stored_name(prefix)
        members = self._members(name)
        if self._plain is not None and self._plain.issuperset(members):
            return UnquantizedLinearMethod()
        method = self._config.get_quant_method(layer, name)
        if self._plain is not None and isinstance(method, UnquantizedLinearMethod):
            raise DrafterError(
                f"{self._file}: quantization_config leaves {', '.join(members)} plain (its ignore "
                "list, or targets that do not name it), but the weights are stored quantised: "
                "correct the lists or export again"
            )
        return method

    def _stored_name(self, prefix: str) -> str:
        """The checkpoint's name of a layer that vLLM calls `prefix`."""
        found = _LAYER.search(prefix)
        if found is None:
            return prefix.rpartition(".")[2]
        return f"layers.{int(found[1]) - self._first_layer}.{found[2]}"

    def _members(self, name: str) -> Iterable[str]:
        """The checkpoint's layers of which vLLM makes one (q, k and v; gate and up)."""
        parent, _, last = name.rpartition(".")
        parts = self._config.packed_modules_mapping.get(last, [last])
        return tuple(f"{parent}.{part}" if parent else part for part in parts)
