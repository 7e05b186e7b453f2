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
Shapes = dict[str, list[Shape]]

# By suffix; whatever is not named is a scale.
TYPES = {
    **dict.fromkeys(("weight_packed", "qweight", "qzeros", "g_idx", "weight_g_idx"), ("I32",)),
    "weight": ("F8_E4M3", "F8_E5M2", "I8", "U8"),
    "weight_shape": ("I64", "I32"),
    "weight_zero_point": ("I32", "I8", "F8_E4M3"),
    "input_zero_point": ("I32", "I8", "F8_E4M3"),
}
SCALE_TYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0")


@dataclass(frozen=True)
class QuantScheme:
    """How one linear layer [out, in] is stored; `tensors` has names and shapes."""

    method: str
    # compressed-tensors: "pack-quantized", "float-quantized", ...; else the method again
    layout: str
    bits: int
    # input channels that share a scale; 0: all of them
    group: int
    # rows and columns of a block that shares a scale (DeepSeek's fp8), None: no blocks
    block: tuple[int, int] | None

    def tensors(self, out: int, into: int) -> tuple[Shapes, Shapes]:
        """Suffix -> allowed shapes of a layer [out, in]: required tensors, and optional ones."""
        groups = math.ceil(into / self.group) if self.group else 1
        words_in, words_out = self._words(into), self._words(out)
        if self.layout == "pack-quantized":
            return (
                {
                    "weight_packed": [(out, words_in)],
                    "weight_scale": [(out, groups)],
                    "weight_shape": [(2,)],
                },
                {"weight_zero_point": [(words_out, groups)], "weight_g_idx": [(into,)]},
            )
        if self.layout == "gptq":
            return (
                {
                    "qweight": [(words_in, out)],
                    "qzeros": [(groups, words_out)],
                    "scales": [(groups, out)],
                },
                {"g_idx": [(into,)]},
            )
        if self.layout == "awq":
            return (
                {
                    "qweight": [(into, words_out)],
                    "qzeros": [(groups, words_out)],
                    "scales": [(groups, out)],
                },
                {},
            )
        if self.layout == "nvfp4":
            return (
                {
                    "weight": [(out, into // 2)],
                    "weight_scale": [(out, into // 16)],
                    "weight_scale_2": [(), (1,)],
                },
                {"input_scale": [(), (1,)]},
            )
        return self._one_byte(out, into)

    def _words(self, count: int) -> int:
        return math.ceil(count * self.bits / WORD_BITS)

    def _one_byte(self, out: int, into: int) -> tuple[Shapes, Shapes]:
        """fp8 and int8 weights with scales per tensor, row or block."""
        scales: list[Shape] = [(), (1,), (out,), (out, 1)]
        optional: Shapes = {
            "input_scale": [(), (1,)],
            "input_zero_point": [(), (1,)],
            "weight_zero_point": scales,
        }
        if self.block is not None:
            blocks = (math.ceil(out / self.block[0]), math.ceil(into / self.block[1]))
            name = "weight_scale_inv" if self.method == "fp8" else "weight_scale"
            return {"weight": [(out, into)], name: [blocks]}, optional
        return {"weight": [(out, into)], "weight_scale": scales}, optional


def stored_types(suffix: str) -> tuple[str, ...]:
    """safetensors' names of the types that a quantised layer's tensor may have."""
    return TYPES.get(suffix, SCALE_TYPES)


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
