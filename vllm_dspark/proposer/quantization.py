"""What the linear weights of a quantised drafter look like in its file.

vLLM unpacks and multiplies them; here only names and shapes are checked, so that an incomplete
export is named before serving. Heads (Markov, confidence) and norms are never quantised by the
exporters known to us, and the sequential sampling needs them plain.
"""

import math
from dataclasses import dataclass

from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.keys import Keys

# What one stored element of a packed weight holds: 32 bits.
WORD_BITS = 32
METHODS = ("compressed-tensors", "fp8", "gptq", "awq", "modelopt")
# compressed-tensors' names of layouts that are described here
LAYOUTS = ("pack-quantized", "float-quantized", "int-quantized", "naive-quantized", "dense")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class QuantScheme:
    """How one linear layer [out, in] is stored.

    required: suffix -> allowed shapes, as functions of the layer are evaluated by `tensors`.
    """

    method: str
    # compressed-tensors: "pack-quantized", "float-quantized", ...; else the method again
    layout: str
    bits: int
    # input channels that share a scale; 0: all of them
    group: int
    # rows and columns of a block that shares a scale (DeepSeek's fp8), None: no blocks
    block: tuple[int, int] | None

    def tensors(self, out: int, into: int) -> tuple[dict[str, list[Shape]], tuple[str, ...]]:
        """(required suffix -> allowed shapes, optional suffixes) of a layer [out, in]."""
        groups = math.ceil(into / self.group) if self.group else 1
        if self.layout == "pack-quantized":
            packed = math.ceil(into * self.bits / WORD_BITS)
            return (
                {
                    "weight_packed": [(out, packed)],
                    "weight_scale": [(out, groups)],
                    "weight_shape": [(2,)],
                },
                ("weight_zero_point", "weight_g_idx"),
            )
        if self.layout == "gptq":
            packed = math.ceil(into * self.bits / WORD_BITS)
            zeros = math.ceil(out * self.bits / WORD_BITS)
            return (
                {
                    "qweight": [(packed, out)],
                    "qzeros": [(groups, zeros)],
                    "scales": [(groups, out)],
                },
                ("g_idx",),
            )
        if self.layout == "awq":
            packed = math.ceil(out * self.bits / WORD_BITS)
            return (
                {
                    "qweight": [(into, packed)],
                    "qzeros": [(groups, packed)],
                    "scales": [(groups, out)],
                },
                (),
            )
        if self.layout == "nvfp4":
            return (
                {
                    "weight": [(out, into // 2)],
                    "weight_scale": [(out, into // 16)],
                    "weight_scale_2": [(), (1,)],
                },
                ("input_scale",),
            )
        return self._one_byte(out, into)

    def _one_byte(self, out: int, into: int) -> tuple[dict[str, list[Shape]], tuple[str, ...]]:
        """fp8 and int8 weights with scales per tensor, row or block."""
        optional = ("input_scale", "weight_zero_point", "input_zero_point")
        if self.block is not None:
            blocks = (math.ceil(out / self.block[0]), math.ceil(into / self.block[1]))
            name = "weight_scale_inv" if self.method == "fp8" else "weight_scale"
            return {"weight": [(out, into)], name: [blocks]}, optional
        scales: list[Shape] = [(), (1,), (out,), (out, 1)]
        return {"weight": [(out, into)], "weight_scale": scales}, optional


def parse_quantization(keys: Keys) -> QuantScheme | None:
    """The scheme that `quantization_config` names; None for plain weights."""
    section = keys.section("quantization_config")
    if not section.config:
        section = keys.section("compression_config")
    if not section.config:
        return None
    method = section.text("quant_method", "compressed-tensors").replace("_", "-")
    if method == "compressed-tensors":
        return _compressed(section)
    if method == "fp8":
        return QuantScheme(method, "fp8", 8, 0, _block(section, "weight_block_size"))
    if method in ("gptq", "awq"):
        group = section.config.get("group_size")
        size = 0 if group == -1 else section.integer("group_size", 1, 128)
        return QuantScheme(method, method, section.integer("bits", 2, 4), size, None)
    if method == "modelopt":
        algorithm = section.text("quant_algo", "FP8").lower()
        layout = "nvfp4" if algorithm == "nvfp4" else "fp8"
        return QuantScheme(method, layout, 4 if layout == "nvfp4" else 8, 16, None)
    raise section.bad("quant_method", method, f"known are {', '.join(METHODS)}")


def _compressed(section: Keys) -> QuantScheme:
    groups = section.section("config_groups")
    schemes = {_weights(Keys(groups.file, group)) for group in groups.config.values()}
    if len(schemes) > 1:
        raise DrafterError(
            f"{section.file}: config_groups holds {len(schemes)} different weight schemes: export "
            "the drafter with one"
        )
    bits, group, block = schemes.pop() if schemes else (8, 0, None)
    layout = section.text("format", "float-quantized")
    if layout not in LAYOUTS:
        raise section.bad("format", layout, f"known are {', '.join(LAYOUTS)}: export with one")
    return QuantScheme("compressed-tensors", layout, bits, group, block)


def _weights(group: Keys) -> tuple[int, int, tuple[int, int] | None]:
    weights = group.section("weights")
    size = weights.config.get("group_size")
    return (
        weights.integer("num_bits", 2, 8),
        0 if size in (None, -1) else weights.integer("group_size", 1),
        _block(weights, "block_structure"),
    )


def _block(section: Keys, key: str) -> tuple[int, int] | None:
    value = section.config.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(i) is int for i in value):
        raise section.bad(key, value, "must be a list of two integers")
    if min(value) < 1:
        raise section.bad(key, value, "must be positive")
    return (value[0], value[1])
