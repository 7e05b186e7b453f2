"""Drafter configs of both formats, and errors that name file, key, value and remedy."""

import json

import pytest

from tests.proposer.checkpoints import DEEPSPEC, SPECULATORS, TARGET, spec_of
from vllm_dspark.errors import DrafterError, DSparkError
from vllm_dspark.proposer.spec import TargetShape, parse_spec, read_spec


def test_deepspec():
    spec = spec_of()
    assert (spec.format, spec.block_size, spec.default_drafts, spec.max_drafts) == (
        "deepspec", 7, 7, 7,
    )  # fmt: skip
    assert spec.sample_from_anchor and spec.target_layer_ids == (-1, 2, 5)
    assert spec.confidence_width == 16 + 3 and spec.markov_kind == "vanilla"
    assert spec.draft_vocab_size == 50 and spec.soft_cap is None and spec.logit_scale == 1.0
    spec.check_target(TARGET)


def test_speculators():
    spec = spec_of(SPECULATORS)
    assert spec.format == "speculators" and not spec.sample_from_anchor
    assert (spec.block_size, spec.max_drafts, spec.default_drafts) == (4, 3, 3)
    assert spec.target_layer_ids == (0, 2, 5), "aux ids are one-based layer outputs"
    assert spec.sliding_windows == (2048, None)
    assert spec.verifier == "some/target" and spec.draft_vocab_size == 20
    spec.check_target(TARGET)


@pytest.mark.parametrize("given", [None, False, True])
def test_sample_from_anchor_missing_means_false_for_speculators(given):
    config = {**SPECULATORS, "sample_from_anchor": given, "speculators_config": {}}
    spec = parse_spec(config)
    assert spec.sample_from_anchor is bool(given)
    assert spec.default_drafts == spec.max_drafts == (4 if given else 3)


def test_an_overlong_recorded_width_is_capped_to_the_block():
    wrapper = {"proposal_methods": [{"speculative_tokens": 9}]}
    assert spec_of(SPECULATORS, speculators_config=wrapper).default_drafts == 3


def test_gemma_style_cap_and_scale():
    spec = spec_of(
        final_logit_softcapping=30.0,
        logit_scale=0.5,
        architectures=["Gemma4DSparkModel"],
        model_type="gemma4_text",
    )
    assert spec.soft_cap == 30.0 and spec.logit_scale == 0.5


def test_without_heads():
    spec = spec_of(markov_rank=0, markov_head_type=None, confidence_head_with_markov=False)
    assert spec.markov_kind is None and spec.confidence_width == 16
    assert not spec_of(enable_confidence_head=False).confidence_with_markov


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"block_size": None}, "required key 'block_size' is missing"),
        ({"block_size": 0}, "block_size = 0: must be an integer >= 1"),
        ({"block_size": "7"}, "block_size = '7'"),
        ({"mask_token_id": 50}, "mask_token_id = 50 lies outside the drafter's vocabulary of 50"),
        ({"target_layer_ids": []}, "must be a non-empty list"),
        ({"target_layer_ids": [3, 2]}, "strictly increasing"),
        ({"target_layer_ids": [-2, 2]}, "the least allowed is -1"),
        ({"markov_head_type": "lstm"}, "= 'lstm': must be one of vanilla, gated, rnn"),
        ({"markov_rank": 0}, "confidence_head_with_markov = true needs a Markov embedding"),
        ({"enable_confidence_head": "yes"}, "_head = 'yes': must be true or false"),
        ({"draft_vocab_size": 51}, "draft_vocab_size = 51 exceeds vocab_size = 50"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads = 3"),
        ({"layer_types": ["full_attention"]}, "must name num_hidden_layers = 2 layers"),
        ({"final_logit_softcapping": -1.0}, "must be a positive number"),
        ({"dspark_block_size": 5}, "embedded in its target"),
        ({"sample_from_anchor": False, "block_size": 1}, "leaves no token to draft"),
    ],
)  # fmt: skip
def test_bad_configs_say_what_is_wrong(changes, said):
    with pytest.raises(DrafterError) as caught:
        spec_of(**changes)
    assert said in str(caught.value) and "drafter/config.json" in str(caught.value)
    assert isinstance(caught.value, DSparkError) and isinstance(caught.value, ValueError)


def test_other_speculators_are_refused():
    with pytest.raises(DrafterError, match="speculators_model_type = 'eagle3'"):
        spec_of(SPECULATORS, speculators_model_type="eagle3")


def test_width_beyond_the_block():
    spec_of().check_width(7)
    with pytest.raises(DrafterError, match=r"num_speculative_tokens = 8.*set .* to 1\.\.7"):
        spec_of().check_width(8)
    with pytest.raises(DrafterError, match=r"the anchor takes one.*1\.\.3"):
        spec_of(SPECULATORS).check_width(4)
    with pytest.raises(DrafterError, match="= 0"):
        spec_of().check_width(0)


def test_target_mismatch():
    spec = spec_of()
    with pytest.raises(
        DrafterError, match=r"size 16, but the target's config has hidden_size = 32"
    ):
        spec.check_target(TargetShape(50, 32, 6))
    with pytest.raises(DrafterError, match=r"target_layer_ids \[5\] do not exist.*5 layers"):
        spec.check_target(TargetShape(50, 16, 5))
    with pytest.raises(DrafterError, match=r"num_target_layers = 6, but .* has 7 layers"):
        spec.check_target(TargetShape(50, 16, 7))
    with pytest.raises(DrafterError, match=r"vocab_size = 50 is smaller .* 60"):
        spec.check_target(TargetShape(60, 16, 6))
    with pytest.raises(DrafterError, match="some/target"):
        spec_of(SPECULATORS).check_target(TargetShape(50, 32, 6))


def test_target_from_config():
    config = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 6}
    assert TargetShape.from_config(config) == TARGET
    assert TargetShape.from_config({"text_config": config, "hidden_size": 1}) == TARGET


def test_reading_a_folder(tmp_path):
    with pytest.raises(DrafterError, match=r"config\.json does not exist"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(DrafterError, match="not valid JSON"):
        read_spec(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DEEPSPEC))
    assert read_spec(tmp_path).block_size == 7
