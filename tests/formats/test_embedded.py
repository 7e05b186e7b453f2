"""Drafters inside DeepSeek-V4 checkpoints: keys, names, quantised experts, refusals."""

import pytest
import torch

from tests.proposer.checkpoints import write_safetensors
from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.embedded import check_stages, embeds_drafter, read_stages, stage_shapes

CONFIG = {
    "model_type": "deepseek_v4",
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 6,
    "vocab_size": 50,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "head_dim": 16,
    "qk_rope_head_dim": 4,
    "q_lora_rank": 8,
    "o_lora_rank": 6,
    "o_groups": 2,
    "sliding_window": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 12,
    "n_shared_experts": 1,
    "routed_scaling_factor": 1.5,
    "swiglu_limit": 10.0,
    "topk_method": "noaux_tc",
    "hc_mult": 3,
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "n_mtp_layers": 3,
    "dspark_block_size": 5,
    "dspark_markov_rank": 4,
    "dspark_noise_token_id": 49,
    "dspark_target_layer_ids": [1, 3, 5],
}
V41 = {**CONFIG, "model_type": "deepseek_v41"}


def tensors_of(config=CONFIG, seed=0):
    gen = torch.Generator().manual_seed(seed)
    shapes = stage_shapes(read_stages(config))
    return {name: torch.randn(shape, generator=gen) for name, shape in shapes.items()}


def check(folder, tensors, config=CONFIG):
    # the target's own tensors are in the same file and none of our business
    write_safetensors(
        folder / "model.safetensors", {**tensors, "layers.0.attn.wkv.weight": torch.zeros(2, 2)}
    )
    return check_stages(folder, read_stages(config))


@pytest.mark.parametrize("config", [CONFIG, V41], ids=["v4", "v4.1"])
def test_a_complete_checkpoint(tmp_path, config):
    found = check(tmp_path, tensors_of(config), config)
    assert found.has_confidence_head and found.findings == ()
    assert "layers.0.attn.wkv.weight" not in found.tensors


def test_names_of_both_versions():
    v4, v41 = stage_shapes(read_stages(CONFIG)), stage_shapes(read_stages(V41))
    assert v4["mtp.2.markov_head.markov_w1.weight"] == (50, 4)
    assert v41["mtp.2.markov_head.embed.weight"] == (50, 4)
    assert "mtp.2.hc_head_fn" in v4 and "mtp.2.hc_head_fn" not in v41
    assert v4["mtp.0.main_proj.weight"] == (16, 48)
    assert not any(name.startswith("mtp.1.main_proj") for name in v4)


def test_draft_experts_of_their_own_number():
    shapes = stage_shapes(read_stages({**V41, "dspark_n_routed_experts": 2}))
    assert shapes["mtp.1.ffn.gate.weight"] == (2, 16)


def test_quantised_stages(tmp_path):
    """fp8 with scales, and two 4-bit numbers to a byte."""
    tensors = tensors_of()
    for name in list(tensors):
        if ".ffn.experts." in name:
            out, into = tensors[name].shape
            tensors[name] = torch.zeros(out, into // 2, dtype=torch.uint8)
            tensors[name.replace(".weight", ".scale")] = torch.zeros(out, 1)
    assert check(tmp_path, tensors).has_confidence_head


def test_problems_are_named(tmp_path):
    tensors = tensors_of()
    del tensors["mtp.1.attn.wkv.weight"]
    tensors["mtp.0.surprise"] = torch.zeros(1)
    tensors["mtp.2.norm.weight"] = torch.zeros(3)
    with pytest.raises(DrafterError) as caught:
        check(tmp_path, tensors)
    message = str(caught.value)
    assert "missing: mtp.1.attn.wkv.weight" in message
    assert "unexpected: mtp.0.surprise" in message
    assert "wrong shape: mtp.2.norm.weight [3], expected [16]" in message


def test_tensors_of_another_type_are_named(tmp_path):
    """Catches codes read as numbers where nothing is ever quantised."""
    tensors = tensors_of()
    tensors["mtp.2.markov_head.markov_w1.weight"] = torch.zeros(50, 4, dtype=torch.int64)
    tensors["mtp.0.attn.attn_sink"] = torch.zeros(4, dtype=torch.uint8)
    with pytest.raises(DrafterError, match=r"wrong type: mtp.0.attn.attn_sink \(U8\), .*w1.*I64"):
        check(tmp_path, tensors)


@pytest.mark.parametrize(
    "name", ["mtp.2.confidence_head.proj.weight", "mtp.2.markov_head.markov_w2.weight"]
)
def test_heads_that_hold_no_numbers_are_named(tmp_path, name):
    tensors = tensors_of()
    tensors[name].view(-1)[3] = float("nan")
    with pytest.raises(DrafterError, match=rf"NaN or infinity\): {name} \(1 of "):
        check(tmp_path, tensors)


def test_a_plain_mtp_checkpoint_is_not_a_drafter(tmp_path):
    with pytest.raises(DrafterError, match="holds no DSpark drafter"):
        check(tmp_path, {"mtp.0.e_proj.weight": torch.zeros(16, 16)})


def test_without_confidence_head(tmp_path):
    tensors = tensors_of()
    del tensors["mtp.2.confidence_head.proj.weight"]
    found = check(tmp_path, tensors)
    assert [f.kind for f in found.findings] == ["no_confidence_head"]


def test_width():
    spec = read_stages(CONFIG)
    assert spec.default_drafts == 5 and embeds_drafter(CONFIG) and not embeds_drafter({})
    spec.check_width(3)
    with pytest.raises(DrafterError, match=r"num_speculative_tokens = 6.*to 1\.\.5"):
        spec.check_width(6)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"dspark_noise_token_id": 50}, "outside the vocabulary of 50"),
        ({"dspark_noise_token_id": None}, "'dspark_noise_token_id' is missing"),
        ({"dspark_target_layer_ids": [1, 6]}, "must be layers 0..5"),
        ({"dspark_target_layer_ids": [-1, 2]}, "must be layers 0..5"),
        ({"dspark_markov_head_type": "rnn"}, "vanilla heads"),
        ({"dspark_markov_rank": 0}, "dspark_markov_rank = 0"),
        ({"n_mtp_layers": 65}, "n_mtp_layers = 65: must be an integer >= 1 and <= 64"),
        ({"n_mtp_layers": 0}, "n_mtp_layers = 0"),
        ({"n_mtp_layers": None, "num_nextn_predict_layers": "2"}, "predict_layers = '2'"),
        ({"dspark_n_routed_experts": "4"}, "dspark_n_routed_experts = '4'"),
        ({"dspark_n_routed_experts": 2**30}, "and <= 16384"),
        ({"dspark_block_size": 2**30}, "dspark_block_size = 1073741824"),
        ({"o_groups": 3}, "must divide the 4 heads"),
        ({"qk_rope_head_dim": 5}, "must be even"),
        ({"num_experts_per_tok": 9}, "exceeds 4 experts"),
        ({"model_type": "qwen3"}, "known are deepseek_v4, deepseek_v41"),
    ],
)
def test_bad_configs(changes, said):
    with pytest.raises(DrafterError) as caught:
        read_stages({**CONFIG, **changes}, "target/config.json")
    assert said in str(caught.value) and "target/config.json" in str(caught.value)
