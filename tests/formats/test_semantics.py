"""What configs of both formats mean: layouts, widths, layers, windows, lengths, tied heads."""

import pytest

from tests.proposer.checkpoints import DEEPSPEC, SPECULATORS, spec_of
from vllm_dspark.errors import DrafterError

LAYERS = SPECULATORS["transformer_layer_config"]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def speculators(layers=None, **changes):
    return spec_of(SPECULATORS, transformer_layer_config={**LAYERS, **(layers or {})}, **changes)


@pytest.mark.parametrize(
    ("base", "anchor", "block", "most"),
    [
        (DEEPSPEC, None, 7, 7),
        (DEEPSPEC, False, 7, 6),
        (SPECULATORS, None, 8, 7),
        (SPECULATORS, True, 8, 8),
        (SPECULATORS, False, 16, 15),
    ],
)
def test_width_by_layout(base, anchor, block, most):
    """K above the trained block is an error, every K below it works, the default is the most."""
    spec = spec_of(base, sample_from_anchor=anchor, block_size=block, speculators_config={})
    assert spec.default_drafts == spec.max_drafts == most
    for width in range(1, most + 1):
        spec.check_width(width)
    with pytest.raises(DrafterError, match=f"set num_speculative_tokens to 1..{most}"):
        spec.check_width(most + 1)


def test_recorded_width_is_the_default():
    wrapper = {"proposal_methods": [{"speculative_tokens": 2}]}
    assert speculators(speculators_config=wrapper).default_drafts == 2


@pytest.mark.parametrize("architecture", ["DSparkSpeculator", "DSparkDraftModel"])
@pytest.mark.parametrize("model_type", ["qwen3", "llama", None])
def test_speculators_layers_are_qwen3_whatever_the_names(architecture, model_type):
    """The layer config's model_type is the target's habit; training builds Qwen3 layers."""
    spec = speculators({"model_type": model_type}, architectures=[architecture])
    assert spec.backbone == "qwen3"


def test_a_generic_name_without_a_model_type_that_says_more_is_refused():
    """vLLM gives DSparkDraftModel to DeepSeek-V4's class (`hc_mult` AttributeError)."""
    assert spec_of(architectures=["DSparkDraftModel"], model_type="qwen3").backbone == "qwen3"
    with pytest.raises(DrafterError, match=r"DSparkDraftModel.*model_type = 'llama'.*Qwen3DSparkM"):
        spec_of(architectures=["DSparkDraftModel"], model_type="llama")


@pytest.mark.parametrize("given", [None, False, True])
def test_causality_of_sliding_layers(given):
    spec = speculators(sliding_window_non_causal=given)
    assert spec.sliding_windows == (2048, None)
    assert spec.sliding_non_causal is bool(given)


def test_layer_kinds_are_known():
    with pytest.raises(DrafterError, match=r"layer_types = \['linear_attention'\]"):
        spec_of(layer_types=["linear_attention", "full_attention"])


def test_rotary_embeddings_turn_pairs():
    with pytest.raises(DrafterError, match="head_dim = 5 is odd"):
        spec_of(head_dim=5)


def test_vocabularies():
    assert speculators(draft_vocab_size=20).draft_vocab_size == 20
    assert speculators({"vocab_size": 60}, draft_vocab_size=50).vocab_size == 60
    assert speculators(target_hidden_size=40).target_hidden_size == 40


def test_gemma4_geometry():
    """DeepSpec builds Gemma4 drafters of global layers only."""
    base = {
        "architectures": ["Gemma4DSparkModel"],
        "model_type": "gemma4_text",
        "global_head_dim": 8,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
    }
    spec = spec_of(**base)
    assert (spec.head_dim, spec.num_kv_heads, spec.values_are_keys) == (8, 1, True)
    separate = spec_of(**{**base, "attention_k_eq_v": False})
    assert (separate.head_dim, separate.num_kv_heads, separate.values_are_keys) == (8, 2, False)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({}, None),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, None),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, None),
        ({"rope_scaling": LLAMA3}, None),
        (
            {
                "architectures": ["Gemma4DSparkModel"],
                "model_type": "gemma4_text",
                "rope_parameters": {
                    "full_attention": {"rope_type": "proportional"},
                    "sliding_attention": {"rope_type": "default"},
                },
            },
            None,
        ),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 2048,
                }
            },
            8192,
        ),
        (
            # transformers lets what stands outside the section count
            {
                "original_max_position_embeddings": 1024,
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 2048,
                },
            },
            4096,
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 4096),
    ],
)
def test_longest_context_of_the_rotary_table(rope, limit):
    assert spec_of(max_position_embeddings=4096, **rope).max_context == limit


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_rotary_tables_that_drafters_cannot_have_are_refused(key, kind):
    """vLLM ended in an AttributeError while it loaded such a drafter."""
    with pytest.raises(DrafterError, match=f"{kind}.*use one of"):
        spec_of(max_position_embeddings=4096, rope_scaling={key: kind, "factor": 4.0})


@pytest.mark.parametrize("key", ["alpha", "max_trained_positions"])
def test_dynamic_positions_of_another_kind_are_refused_by_name(key):
    """Catches NTK-alpha: vLLM scales the base by it, the layers a drafter is trained with do not.

    So drafts would be read off other positions than trained, with hardly one accepted.
    """
    rope = {"rope_type": "dynamic", "factor": 1.0, key: 1000.0}
    with pytest.raises(DrafterError, match=rf"rope_scaling.*{key} = 1000.0.*take it out.*rope_th"):
        spec_of(max_position_embeddings=4096, rope_scaling=rope)
    linear = {"rope_type": "linear", "factor": 2.0, key: 1000.0}  # nobody reads it there
    assert spec_of(max_position_embeddings=4096, rope_scaling=linear).max_context is None


def test_tied_heads():
    assert spec_of(tie_word_embeddings=True).tied and not spec_of().tied
