"""Quantised drafters: complete ones pass, and what an incomplete export lacks is named."""

import dataclasses

import pytest

from tests.proposer.checkpoints import TARGET, random_tensors, spec_of
from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.checkpoint import check_tensors
from vllm_dspark.proposer.inventory import StoredTensor
from vllm_dspark.proposer.quantization import stored_types
from vllm_dspark.proposer.tensors import linear_layers

SIZES = {"hidden_size": 32, "intermediate_size": 64, "head_dim": 16, "num_attention_heads": 4}
W4A16 = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}},
    "ignore": ["lm_head", "fc"],
}
FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float"}}},
}
CONFIGS = {
    "w4a16": W4A16,
    "fp8 per row": FP8,
    "fp8 blocks": {"quant_method": "fp8", "weight_block_size": [16, 16]},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 16},
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 16},
    "nvfp4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
}
TARGET_32 = dataclasses.replace(TARGET, hidden_size=32)
PLAIN = ("lm_head", "fc")  # what exporters usually leave alone


def stored(shape, dtype: str) -> StoredTensor:
    return StoredTensor(tuple(shape), dtype, None, 0, 0)


def inventory(spec):
    """A complete checkpoint: decoder layers packed, everything else plain."""
    found = {n: stored(t.shape, "I64" if n == "d2t" else "BF16") for n, t in
             random_tensors(dataclasses.replace(spec, quantization=None)).items()}  # fmt: skip
    for name, (out, into) in linear_layers(spec).items():
        if name in PLAIN:
            continue
        del found[f"{name}.weight"]
        required, _ = spec.quantization.tensors(out, into)
        for suffix, shapes in required.items():
            found[f"{name}.{suffix}"] = stored(shapes[-1], stored_types(suffix)[0])
    return found


def quantised(config):
    return spec_of(**SIZES, quantization_config=config)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_complete_quantised_drafter_passes(name):
    spec = quantised(CONFIGS[name])
    check_tensors(inventory(spec), spec, TARGET_32, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_missing_scale_is_named(name):
    spec = quantised(CONFIGS[name])
    for suffix in spec.quantization.tensors(64, 32)[0]:
        tensors = inventory(spec)
        victim = f"layers.1.mlp.gate_proj.{suffix}"
        del tensors[victim]
        with pytest.raises(DrafterError, match=f"missing: {victim.replace('.', '[.]')}"):
            check_tensors(tensors, spec, TARGET_32, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_scale_of_another_group_size_is_named(name):
    spec = quantised(CONFIGS[name])
    tensors = inventory(spec)
    suffix = next(s for s in spec.quantization.tensors(64, 32)[0] if "scale" in s)
    victim = f"layers.0.self_attn.k_proj.{suffix}"
    tensors[victim] = stored((3, 7), "F32")
    with pytest.raises(DrafterError, match=r"k_proj.*\[3, 7\], expected"):
        check_tensors(tensors, spec, TARGET_32, name)


@pytest.mark.parametrize("name", CONFIGS)
def test_parts_of_another_type_are_named(name):
    """Catches scales for codes, and codes for scales: of the right shape, they would load."""
    spec = quantised(CONFIGS[name])
    for suffix in spec.quantization.tensors(64, 32)[0]:
        tensors = inventory(spec)
        victim = f"layers.1.mlp.gate_proj.{suffix}"
        tensors[victim] = dataclasses.replace(tensors[victim], dtype="U16")
        with pytest.raises(DrafterError, match=rf"wrong type: {victim} \(U16, expected "):
            check_tensors(tensors, spec, TARGET_32, name)


def test_optional_parts_of_another_shape_are_named():
    """Catches zero points that vLLM's loader would end at, without the tensor's name."""
    spec = quantised(W4A16)
    tensors = inventory(spec)
    tensors["layers.0.mlp.up_proj.weight_zero_point"] = stored((8, 2), "I32")
    check_tensors(tensors, spec, TARGET_32, "asymmetric")
    tensors["layers.0.mlp.up_proj.weight_zero_point"] = stored((64, 2), "I32")
    with pytest.raises(DrafterError, match=r"zero_point \[64, 2\], expected \[8, 2\]"):
        check_tensors(tensors, spec, TARGET_32, "asymmetric")


def left_plain(tensors, spec, *layers):
    """The inventory with `layers` stored plain."""
    sizes = linear_layers(spec)
    for layer in layers:
        for suffix in spec.quantization.tensors(64, 32)[0]:
            del tensors[f"{layer}.{suffix}"]
        tensors[f"{layer}.weight"] = stored(sizes[layer], "BF16")
    return tensors


def test_layers_left_plain_by_the_export_pass():
    """ "ignore" lists are patterns; what is stored decides."""
    spec = quantised(W4A16)
    for layers in (["layers.0.mlp.down_proj"], ["layers.0.mlp.gate_proj", "layers.0.mlp.up_proj"]):
        check_tensors(left_plain(inventory(spec), spec, *layers), spec, TARGET_32, "mixed")


def test_half_a_fused_layer_is_named():
    """Catches a projection that vLLM would load into the packed weights of its neighbours."""
    spec = quantised(W4A16)
    tensors = left_plain(inventory(spec), spec, "layers.1.self_attn.k_proj")
    with pytest.raises(DrafterError, match=r"in part: .*q_proj but not layers\.1\..*k_proj, and"):
        check_tensors(tensors, spec, TARGET_32, "mixed")


def test_a_quantised_head_is_refused():
    """Catches packed or fp8 numbers multiplied as if they were the head's weights."""
    packed, fp8 = inventory(quantised(W4A16)), inventory(quantised(FP8))
    packed["lm_head.weight_packed"] = stored((50, 4), "I32")
    out, into = packed.pop("lm_head.weight").shape
    fp8["lm_head.weight"] = stored((out, into), "F8_E4M3")
    for tensors, config in ((packed, W4A16), (fp8, FP8)):
        with pytest.raises(DrafterError, match=r"lm_head.*leave the lm_head plain"):
            check_tensors(tensors, quantised(config), TARGET_32, "head")


def test_leftovers_of_another_scheme_are_unexpected():
    spec = quantised(W4A16)
    tensors = inventory(spec)
    tensors["layers.0.mlp.up_proj.qweight"] = stored((4, 64), "I32")
    with pytest.raises(DrafterError, match=r"unexpected: layers\.0\.mlp\.up_proj\.qweight"):
        check_tensors(tensors, spec, TARGET_32, "mixed")


def test_quantised_weights_without_a_config_are_refused():
    """vLLM would copy the raw fp8 numbers into a bf16 weight, scales and all forgotten."""
    spec = spec_of(**SIZES)
    tensors = {n: stored(t.shape, "BF16") for n, t in random_tensors(spec).items()}
    tensors["layers.0.mlp.up_proj.weight"] = stored((64, 32), "F8_E4M3")
    with pytest.raises(DrafterError, match=r"wrong type: .*up_proj.*no quantization_config"):
        check_tensors(tensors, spec, TARGET_32, "raw fp8")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "bitsandbytes"}, "known are compressed-tensors, fp8"),
        ({"quant_method": "gptq", "bits": "4"}, "bits = '4'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "a list of two integers"),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 4}}, "b": {"weights": {}}}},
            "2 different weight schemes",
        ),
        ("fp8", "must be a JSON object"),
    ],
)
def test_unknown_schemes_are_refused(config, said):
    with pytest.raises(DrafterError) as caught:
        quantised(config)
    assert said in str(caught.value)


def test_no_quantisation():
    assert spec_of().quantization is None
    assert spec_of(quantization_config={}).quantization is None
