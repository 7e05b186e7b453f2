"""Tensor inventories: every missing, unexpected or misshapen tensor is named before serving."""

import json

import pytest
import torch

from tests.proposer.checkpoints import (
    DEEPSPEC,
    SPECULATORS,
    TARGET,
    random_tensors,
    spec_of,
    write_checkpoint,
    write_safetensors,
)
from vllm_dspark.errors import DrafterError
from vllm_dspark.proposer.checkpoint import check_checkpoint
from vllm_dspark.proposer.heads import head_from_tensors
from vllm_dspark.proposer.inventory import parameter_count, read_inventory, read_tensor


def head_of(drafter, dtype=torch.float32):
    """The head of a checked checkpoint, from the tensors in its files."""
    tensors = {name: read_tensor(stored) for name, stored in drafter.tensors.items()}
    return head_from_tensors(drafter.spec, tensors, "cpu", dtype, drafter.target.vocab_size)


def checked(tmp_path, tensors, base=DEEPSPEC, shards=1, **changes):
    spec = spec_of(base, **changes)
    write_checkpoint(tmp_path, {**base, **changes}, tensors, shards)
    return check_checkpoint(tmp_path, spec, TARGET)


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("base", [DEEPSPEC, SPECULATORS], ids=["deepspec", "speculators"])
def test_a_complete_checkpoint(tmp_path, base, shards):
    tensors = random_tensors(spec_of(base))
    drafter = checked(tmp_path, tensors, base, shards)
    assert drafter.findings == () and drafter.has_confidence_head
    assert not drafter.shares_embedding and not drafter.shares_lm_head
    assert parameter_count(drafter.tensors) == sum(t.numel() for t in tensors.values())
    for name, tensor in tensors.items():
        assert torch.equal(read_tensor(drafter.tensors[name]), tensor), name


def test_shared_embedding_and_head(tmp_path):
    tensors = random_tensors(spec_of())
    del tensors["embed_tokens.weight"], tensors["lm_head.weight"]
    drafter = checked(tmp_path, tensors)
    assert drafter.shares_embedding and drafter.shares_lm_head


def test_expanded_input_vocabulary_needs_an_embedding_but_no_map(tmp_path):
    """Input ids beyond the target's (a padded or extra mask row), drafts over the target's own."""
    changes = {"vocab_size": 60, "draft_vocab_size": 50, "mask_token_id": 55}
    tensors = random_tensors(spec_of(**changes))
    del tensors["d2t"], tensors["lm_head.weight"]
    drafter = checked(tmp_path, tensors, **changes)
    assert drafter.shares_lm_head and not drafter.shares_embedding
    assert head_of(drafter).d2t is None
    del tensors["embed_tokens.weight"]
    with pytest.raises(DrafterError, match=r"missing: embed_tokens\.weight"):
        checked(tmp_path, tensors, **changes)


def test_training_leftovers_are_ignored(tmp_path):
    tensors = {
        **random_tensors(spec_of()),
        "t2d": torch.zeros(50),
        "mask_embedding": torch.zeros(16),
    }
    assert checked(tmp_path, tensors).findings == ()


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_stateful_heads(tmp_path, kind):
    spec = spec_of(markov_head_type=kind)
    tensors = random_tensors(spec)
    drafter = checked(tmp_path, tensors, markov_head_type=kind)
    head = head_of(drafter)
    stem = "gate_proj" if kind == "gated" else "joint_proj"
    assert head.markov.kind == kind
    assert torch.equal(head.markov.proj_bias, tensors[f"markov_head.{stem}.bias"].float())


def test_missing_confidence_head_is_a_finding_not_an_error(tmp_path):
    tensors = random_tensors(spec_of())
    for name in list(tensors):
        if name.startswith("confidence_head"):
            del tensors[name]
    drafter = checked(tmp_path, tensors)
    assert [f.kind for f in drafter.findings] == ["no_confidence_head"]
    assert "promises one that the file lacks" in drafter.findings[0].message
    assert head_of(drafter, torch.bfloat16).confidence is None


def test_unknown_layers_are_a_finding(tmp_path):
    spec = spec_of(architectures=["K3DSparkModel"])
    tensors = {**random_tensors(spec), "layers.0.layer_scalar": torch.ones(1)}
    drafter = checked(tmp_path, tensors, architectures=["K3DSparkModel"])
    assert [f.kind for f in drafter.findings] == ["layers_unchecked"]


def test_every_problem_is_named_at_once(tmp_path):
    tensors = random_tensors(spec_of())
    del tensors["fc.weight"], tensors["layers.1.mlp.up_proj.weight"]
    tensors["markov_head.markov_w2.weight"] = torch.zeros(50, 4)
    tensors["surprise"] = torch.zeros(1)
    with pytest.raises(DrafterError) as caught:
        checked(tmp_path, tensors)
    message = str(caught.value)
    assert "missing: fc.weight, layers.1.mlp.up_proj.weight" in message
    assert "unexpected: surprise" in message
    assert "wrong shape: markov_head.markov_w2.weight [50, 4], expected [50, 3]" in message
    assert str(tmp_path) in message


def test_hints(tmp_path):
    tensors = random_tensors(spec_of())
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    with pytest.raises(DrafterError, match=r"carry a 'model\.' prefix"):
        checked(tmp_path / "a", prefixed)
    reduced = random_tensors(spec_of(SPECULATORS))
    del reduced["d2t"], reduced["lm_head.weight"]
    with pytest.raises(DrafterError, match=r"draft vocabulary of 20 needs its own lm_head and d2t"):
        checked(tmp_path / "b", reduced, SPECULATORS)
    with pytest.raises(DrafterError, match=r"markov_head_type = 'rnn' may not be what was trained"):
        checked(tmp_path / "c", tensors, markov_head_type="rnn")


def test_target_is_checked_first(tmp_path):
    with pytest.raises(DrafterError, match="hidden states of size 8"):
        checked(tmp_path, {}, target_hidden_size=8)


def test_broken_files(tmp_path):
    with pytest.raises(DrafterError, match="holds neither"):
        read_inventory(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(DrafterError, match="Git LFS pointer"):
        read_inventory(tmp_path)
    file.write_bytes(b"abc")
    with pytest.raises(DrafterError, match="not a safetensors file"):
        read_inventory(tmp_path)
    write_safetensors(file, {"a": torch.zeros(100)})
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(DrafterError, match="download is incomplete"):
        read_inventory(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"a": "x.safetensors"}})
    )
    with pytest.raises(DrafterError, match=r"x\.safetensors does not exist"):
        read_inventory(tmp_path)
    write_safetensors(tmp_path / "x.safetensors", {"b": torch.zeros(1)})
    with pytest.raises(DrafterError, match="its shards lack: a"):
        read_inventory(tmp_path)


def test_files_beside_the_weights_count(tmp_path):
    """vLLM reads every file of a folder without an index, and of a tensor in two the last one."""
    tensors = random_tensors(spec_of())
    checked(tmp_path, tensors)
    write_safetensors(tmp_path / "old.safetensors", {"fc.weight": tensors["fc.weight"]})
    with pytest.raises(DrafterError, match=r"fc\.weight is in model\.safetensors and in old\."):
        read_inventory(tmp_path)
    write_safetensors(tmp_path / "old.safetensors", {"adapter": torch.zeros(1)})
    with pytest.raises(DrafterError, match="unexpected: adapter"):
        checked(tmp_path, tensors)
    (tmp_path / "old.safetensors").unlink()
    checked(tmp_path, tensors, shards=2)
    with pytest.raises(DrafterError, match=r"is in model-0000[12]"):
        _twice(tmp_path)


def _twice(folder):
    """A shard that is in the index under a second name too."""
    index = folder / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = next(iter(weight_map.values()))
    (folder / "model-00003-of-00002.safetensors").write_bytes((folder / shard).read_bytes())
    weight_map["more"] = "model-00003-of-00002.safetensors"
    index.write_text(json.dumps({"weight_map": weight_map}))
    read_inventory(folder)


def test_linked_shards(tmp_path):
    """The hub's cache is made of links; a broken one is an error that names it."""
    checked(tmp_path, random_tensors(spec_of()), shards=2)
    shard = tmp_path / "model-00002-of-00002.safetensors"
    (tmp_path / "blob").write_bytes(shard.read_bytes())
    shard.unlink()
    shard.symlink_to(tmp_path / "blob")
    assert "fc.weight" in read_inventory(tmp_path)
    (tmp_path / "blob").unlink()
    with pytest.raises(DrafterError, match=f"{shard.name} does not exist"):
        read_inventory(tmp_path)


def test_more_ids_than_the_target_has():
    """Rows of ids that the target lacks (a row for the mask, padding) are never drafted."""
    wide = spec_of(vocab_size=60, mask_token_id=55)
    wide.check_target(TARGET)
    assert wide.limited_to(50).draft_vocab_size == 50 and wide.limited_to(50).vocab_size == 60
    assert wide.limited_to(60) is wide and spec_of().limited_to(64) == spec_of()


def test_heads_share_memory_with_a_loaded_model():
    spec = spec_of()
    tensors = {name: t.float() for name, t in random_tensors(spec).items()}
    head = head_from_tensors(spec, tensors, "cpu", torch.float32, 50)
    assert head.markov.w1.data_ptr() == tensors["markov_head.markov_w1.weight"].data_ptr()
    assert head.confidence.weight.shape == (19,) and head.confidence.bias.shape == ()


def test_padded_or_foreign_head_tensors_are_refused():
    spec = spec_of()
    tensors = random_tensors(spec)
    padded = {**tensors, "markov_head.markov_w2.weight": torch.zeros(64, 3)}
    with pytest.raises(DrafterError, match=r"markov_w2 has shape \[64, 3\], expected \[50, 3\]"):
        head_from_tensors(spec, padded, "cpu", torch.float32, 50)
    del padded["markov_head.markov_w2.weight"]
    with pytest.raises(DrafterError, match=r"markov_w2\.weight is missing"):
        head_from_tensors(spec, padded, "cpu", torch.float32, 50)


def test_d2t_must_be_offsets_of_distinct_ids():
    spec = spec_of(SPECULATORS)
    tensors = random_tensors(spec)
    absolute = {**tensors, "d2t": torch.arange(20) + 30}
    absolute["d2t"][-1] = 45
    with pytest.raises(DrafterError, match="must hold offsets"):
        head_from_tensors(spec, absolute, "cpu", torch.float32, 50)
    twice = {**tensors, "d2t": -torch.arange(20)}
    with pytest.raises(DrafterError, match="two draft ids to one target id"):
        head_from_tensors(spec, twice, "cpu", torch.float32, 50)


def test_d2t_stays_within_the_target():
    """Catches ids that the drafter knows and the target does not: it has no row to verify them."""
    layers = {**SPECULATORS["transformer_layer_config"], "vocab_size": 60}
    spec = spec_of(SPECULATORS, transformer_layer_config=layers)
    tensors = random_tensors(spec)
    tensors["d2t"] = torch.arange(20) + 21  # 21, 23, ... 59
    head_from_tensors(spec, tensors, "cpu", torch.float32, 60)
    with pytest.raises(DrafterError, match=r"to 21\.\.59, outside the vocabulary of 50"):
        head_from_tensors(spec, tensors, "cpu", torch.float32, 50)
    whole = spec_of(SPECULATORS, transformer_layer_config=layers, draft_vocab_size=50)
    tensors = random_tensors(whole)
    tensors["d2t"] = torch.ones(50, dtype=torch.int64)
    with pytest.raises(DrafterError, match="only a reduced draft vocabulary is mapped"):
        head_from_tensors(whole, tensors, "cpu", torch.float32, 50)
    tensors["d2t"] = torch.zeros(50, dtype=torch.int64)
    assert head_from_tensors(whole, tensors, "cpu", torch.float32, 50).d2t is None
