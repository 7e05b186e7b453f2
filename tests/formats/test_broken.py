"""Broken drafters, as somebody would feed them: each ends in one error before anything is loaded.

Errors are DrafterErrors; beside the cause they hold the value seen and what to do.
"""

import json
import os
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from vllm_dspark.proposer.checkpoint import CheckedDrafter, check_checkpoint
from vllm_dspark.proposer.spec import read_spec

Change = Callable[[Path], object]
INDEX = "model.safetensors.index.json"
NAN, INFINITY = float("nan"), float("inf")


def check(folder: Path) -> CheckedDrafter:
    """What a start looks at before it builds anything."""
    spec = read_spec(folder)
    spec.check_width(spec.default_drafts)
    return check_checkpoint(folder, spec, TARGET)


def refused(folder: Path, *words: str) -> str:
    with pytest.raises(DrafterError) as caught:
        check(folder)
    message = str(caught.value)
    assert not [word for word in words if word not in message], message
    assert message.isprintable() and len(message) < 2500, "not a message for a terminal"
    return message


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    """A good one."""
    write_checkpoint(tmp_path / "drafter", DEEPSPEC, random_tensors(spec_of()))
    check(tmp_path / "drafter")
    return tmp_path / "drafter"


def rope(**parameters: Any) -> dict[str, Any]:
    return {"max_position_embeddings": 4096, "rope_parameters": parameters}


# what config.json says instead, words of the error
CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "negative rank": ({"markov_rank": -1}, "markov_rank = -1: must be an integer >= 0"),
    "rank as text": ({"markov_rank": "3"}, "markov_rank = '3'"),
    "rank of millions": ({"markov_rank": 10**9}, "markov_w1.weight [50, 3], expected [50, 10"),
    "head of unknown kind": ({"markov_head_type": "lstm"}, "must be one of vanilla, gated, rnn"),
    "head kind as a list": ({"markov_head_type": ["rnn"]}, "= ['rnn']: must be a string"),
    "empty block": ({"block_size": 0}, "block_size = 0: must be an integer >= 1 and <= 1024"),
    "block of billions": ({"block_size": 2**31 - 1}, "block_size = 2147483647"),
    "block as a float": ({"block_size": 7.0}, "block_size = 7.0: must be an integer"),
    "block as a flag": ({"block_size": True}, "block_size = True: must be an integer"),
    "negative mask": ({"mask_token_id": -1}, "mask_token_id = -1"),
    "mask outside": ({"mask_token_id": 50}, "outside the drafter's vocabulary of 50: use the id"),
    "layers out of range": ({"target_layer_ids": [0, 2, 6]}, "has 6 layers (0..5"),
    "layers twice": ({"target_layer_ids": [1, 1, 2]}, "[1, 1, 2]: must be strictly increasing"),
    "layers nested": ({"target_layer_ids": [[1]]}, "must be a non-empty list of integers"),
    "200,000 layers": ({"target_layer_ids": list(range(200_000))}, "characters) do not exist"),
    "epsilon as text": ({"rms_norm_eps": "1e-6"}, "rms_norm_eps = '1e-6'"),
    "epsilon NaN": ({"rms_norm_eps": NAN}, "rms_norm_eps = nan: must be a positive number"),
    "epsilon of 1": ({"rms_norm_eps": 1.0}, "must be a number from 1e-20 to 0.1"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act = 'gelu': vLLM's layers have silu only"),
    "type of weights": ({"torch_dtype": "float99"}, "= 'float99': is no type of weights: give bf"),
    "integer weights": ({"dtype": "int64"}, "dtype = 'int64': is no type of weights"),
    "positions as text": ({"max_position_embeddings": "4k"}, "max_position_embeddings = '4k'"),
    "no positions": ({"max_position_embeddings": 0}, "max_position_embeddings = 0"),
    "billions of positions": ({"max_position_embeddings": 2**31 - 1}, "and <= 134217728"),
    "negative theta": ({"rope_theta": -1.0}, "rope_theta = -1.0"),
    "theta inside": (rope(rope_type="default", rope_theta="x"), "(rope_parameters): rope_theta"),
    "rope as text": ({"rope_scaling": "yarn"}, "(rope_scaling): must be a JSON object, not 'yarn'"),
    "rope unknown": (rope(rope_type="twist"), "rope_type = 'twist': needs a table that vLLM's"),
    "rope by kind of layer": (
        rope(full_attention={"rope_theta": 1e6}, sliding_attention={"rope_theta": 1e4}),
        "belong to Gemma4, and vLLM would take the default ones",
    ),
    "linear without factor": (rope(rope_type="linear"), "required key 'factor' is missing"),
    "YaRN to infinity": (
        rope(rope_type="yarn", factor=1e6, original_max_position_embeddings=2**20),
        "factor = 1000000.0: makes a table of",
    ),
    "half a pair turned": (
        rope(rope_type="default", partial_rotary_factor=0.25),
        "partial_rotary_factor = 0.25: turns 1 of 4 dimensions",
    ),
    "cap of nothing": ({"final_logit_softcapping": 1e-30}, "must be a number from 1e-06 to 1e+06"),
    "scale of everything": ({"logit_scale": 1e30}, "logit_scale = 1e+30"),
    "no class": ({"architectures": None}, "required key 'architectures' is missing"),
    "class as text": ({"architectures": "Qwen3DSparkModel"}, "must be a list of strings"),
    "no DSpark class": (
        {"architectures": ["Qwen3ForCausalLM"]},
        "['Qwen3ForCausalLM']: is no DSpark drafter: name the class, for example Qwen3DSparkModel",
    ),
    "no model_type": ({"model_type": None}, "required key 'model_type' is missing"),
    "class of another model_type": (
        {"model_type": "gemma4_text"},
        "model_type = 'gemma4_text': is not that of a Qwen3DSparkModel",
    ),
    "section as text": ({"dflash_config": "x"}, "(dflash_config): must be a JSON object, not 'x'"),
    "labels as a list": ({"id2label": ["a"]}, "id2label = ['a']: must be of type dict"),
    "end token as text": ({"eos_token_id": "</s>"}, "eos_token_id = '</s>': must be of type int"),
    "layers of thousands": ({"num_hidden_layers": 10**9}, "must be an integer >= 1 and <= 1024"),
    "quantised by nobody": ({"quantization_config": {"quant_method": "x"}}, "= 'x': known are co"),
    "quantised as text": ({"quantization_config": "fp8"}, "must be a JSON object, not 'fp8'"),
    "quantised in a layout of its own": (
        {"quantization_config": {"format": "zip", "config_groups": {}}},
        "format = 'zip': known are pack-quantized",
    ),
    "a long value": ({"architectures": "x" * 10**6}, "(1000002 characters): must be a list"),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_configs(drafter: Path, name: str) -> None:
    changes, said = CONFIGS[name]
    (drafter / "config.json").write_text(json.dumps({**DEEPSPEC, **changes}))
    assert "drafter" in refused(drafter, said)


SPECULATORS_CONFIGS: dict[str, tuple[dict[str, Any], str]] = {
    "layers twice": ({"aux_hidden_state_layer_ids": [1, 1, 2]}, "must be strictly increasing"),
    "layers below the embedding": ({"aux_hidden_state_layer_ids": [-3, 1, 2]}, "least allowed is"),
    "layers out of range": ({"aux_hidden_state_layer_ids": [1, 3, 9]}, "[8] do not exist"),
    "no layers": ({"transformer_layer_config": []}, "must be a JSON object, not []"),
    "no wrapper": ({"speculators_config": None}, "required key 'speculators_config' is missing"),
    "methods as text": ({"speculators_config": {"proposal_methods": "x"}}, "= 'x': must be a list"),
    "a method as a number": ({"speculators_config": {"proposal_methods": [1]}}, "object, not 1"),
    "no tokens": (
        {"speculators_config": {"proposal_methods": [{"speculative_tokens": 0}]}},
        "speculative_tokens = 0: must be an integer >= 1",
    ),
    "verifier as text": ({"speculators_config": {"verifier": "x"}}, "JSON object, not 'x'"),
    "another method": ({"speculators_model_type": ["dspark"]}, "only 'dspark' drafters"),
    "more drafts than tokens": ({"draft_vocab_size": 51}, "draft_vocab_size = 51 exceeds"),
}


@pytest.mark.parametrize("name", SPECULATORS_CONFIGS)
def test_speculators_configs(tmp_path: Path, name: str) -> None:
    changes, said = SPECULATORS_CONFIGS[name]
    write_checkpoint(tmp_path / "drafter", SPECULATORS, random_tensors(spec_of(SPECULATORS)))
    check(tmp_path / "drafter")
    (tmp_path / "drafter" / "config.json").write_text(json.dumps({**SPECULATORS, **changes}))
    refused(tmp_path / "drafter", said)


def edited(file: str, edit: Callable[[bytes], bytes]) -> Change:
    return lambda folder: (folder / file).write_bytes(edit((folder / file).read_bytes()))


def header(edit: Callable[[str], str]) -> Change:
    """The header of the weights, edited; its length is set right."""

    def change(content: bytes) -> bytes:
        end = 8 + struct.unpack("<Q", content[:8])[0]
        new = edit(content[8:end].decode()).encode()
        return struct.pack("<Q", len(new)) + new + content[end:]

    return edited("model.safetensors", change)


def replaced(file: str, by: Callable[[Path], object]) -> Change:
    def change(folder: Path) -> None:
        (folder / file).unlink()
        by(folder / file)

    return change


def index(shard: str, **more: Any) -> Change:
    """An index that sends one tensor to `shard`."""
    weight_map = {"fc.weight": shard, "norm.weight": "model.safetensors"}
    return lambda folder: (folder / INDEX).write_text(
        json.dumps({"weight_map": weight_map, **more})
    )


def a_file_instead(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    folder.write_text("a drafter")


DEEP = b'{"a":' * 900 + b"1" + b"}" * 900
FILES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "a key twice": (
        edited("config.json", lambda text: text[:-1] + b', "block_size": 3}'),
        ("config.json", "the key 'block_size' is there more than once", "fetch the file again"),
    ),
    "a tensor twice in a header": (
        header(lambda text: text.replace('"norm.weight"', '"fc.weight"')),
        ("model.safetensors: the header", "'fc.weight' is there more than once"),
    ),
    "objects in each other": (
        edited("config.json", lambda text: text[:-1] + b', "a": ' + DEEP + b"}"),
        ("config.json nests more than 64 objects", "fetch the file again"),
    ),
    "objects in each other in a header": (
        header(lambda text: text[:-1] + ', "a": ' + DEEP.decode() + "}"),
        ("the header nests more than 64 objects",),
    ),
    "UTF-16": (
        edited("config.json", lambda text: text.decode().encode("utf-16")),
        ("not valid J",),
    ),
    "a byte order mark": (
        edited("config.json", lambda t: b"\xef\xbb\xbf" + t),
        ("not valid JSON",),
    ),
    "5,000 digits": (
        edited("config.json", lambda t: t.replace(b'_size": 7', b'_size": ' + b"7" * 5000)),
        ("not valid JSON", "5000 digits"),
    ),
    "a list": (edited("config.json", lambda _: b"[]"), ("holds a JSON list, not an object",)),
    "NaN for an offset": (
        header(lambda text: text.replace('"data_offsets": [0,', '"data_offsets": [NaN,')),
        ("[nan, ", "no safetensors entry", "fetch the file again"),
    ),
    "an unknown type": (
        header(lambda text: text.replace('"BF16"', '"F4"', 1)),
        ("'dtype': 'F4'", "dtypes are F64"),
    ),
    "truncated": (
        edited("model.safetensors", lambda content: content[:-2]),
        ("before the end of", "the download is incomplete"),
    ),
    "bytes behind the end": (
        edited("model.safetensors", lambda content: content + b"xx"),
        ("safetensors refuses it", "fetch the file again"),
    ),
    "config.json is a folder": (replaced("config.json", os.mkdir), ("config.json does not exist",)),
    "config.json is a pipe": (replaced("config.json", os.mkfifo), ("config.json does not exist",)),
    "weights are a folder": (
        replaced("model.safetensors", os.mkdir),
        ("holds neither model.safetensors nor",),
    ),
    "weights point to themselves": (
        replaced("model.safetensors", lambda path: path.symlink_to(path)),
        ("holds neither",),
    ),
    "weights without end": (
        replaced("model.safetensors", lambda path: path.symlink_to("/dev/zero")),
        ("holds neither",),
    ),
    "a broken link beside": (
        lambda folder: (folder / "old.safetensors").symlink_to("nowhere"),
        ("old.safetensors does not exist",),
    ),
    "the folder is a file": (a_file_instead, ("config.json does not exist: give the folder",)),
    "a shard that is absent": (index("absent.safetensors"), ("absent.safetensors does not exist",)),
    "a shard of endless name": (
        index("a" * 5000 + ".safetensors"),
        ("names the shard 'aaa", "(5014 characters): shards are .safetensors files beside"),
    ),
    "a shard of no name": (index("\ud800.safetensors"), (r"'\ud800.safetensors': shards are",)),
    "a shard with a line break": (index("a\n.safetensors"), (r"'a\n.safetensors': shards are",)),
    "an index without a map": (
        lambda folder: (folder / INDEX).write_text("{}"),
        ("'weight_map' must map tensor names to files",),
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_files(drafter: Path, name: str) -> None:
    change, words = FILES[name]
    change(drafter)
    refused(drafter, *words)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_files_that_may_not_be_read(
    drafter: Path, monkeypatch: pytest.MonkeyPatch, file: str
) -> None:
    """Catches a PermissionError without the file's name and without what to do."""
    stat = Path.stat

    def fail(path: Path, **given: Any) -> os.stat_result:
        if path.name == file:
            raise PermissionError(13, "Permission denied")
        return stat(path, **given)

    monkeypatch.setattr(Path, "stat", fail)
    refused(drafter, f"{file}' cannot be read (Permission denied): check name and permissions")


def fill(name: str, value: float, dtype: torch.dtype | None = None) -> Callable[[dict], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensor = tensors[name].to(dtype) if dtype is not None else tensors[name].clone()
        tensor.view(-1)[-1] = value
        tensors[name] = tensor

    return change


def put(name: str, tensor: torch.Tensor) -> Callable[[dict], None]:
    return lambda tensors: tensors.update({name: tensor})


TENSORS: dict[str, tuple[Callable[[dict], None], tuple[str, ...]]] = {
    "NaN in a backbone": (
        fill("fc.weight", NAN),
        ("NaN or infinity): fc.weight (1 of 768)", "take another checkpoint"),
    ),
    "NaN only": (
        put("layers.1.mlp.down_proj.weight", torch.full((16, 24), NAN).bfloat16()),
        ("layers.1.mlp.down_proj.weight (384 of 384)",),
    ),
    "infinity in float32": (
        fill("layers.0.self_attn.q_proj.weight", INFINITY, torch.float32),
        ("layers.0.self_attn.q_proj.weight (1 of 256)",),
    ),
    "minus infinity in a head": (
        fill("markov_head.markov_w2.weight", -INFINITY),
        ("markov_head.markov_w2.weight (1 of 150)",),
    ),
    "NaN in a bias": (fill("confidence_head.proj.bias", NAN), ("proj.bias (1 of 1)",)),
    "integers for weights": (
        put("fc.weight", torch.zeros(16, 48, dtype=torch.int64)),
        ("wrong type: fc.weight (I64): fetch the checkpoint again",),
    ),
    "codes for weights": (
        put("norm.weight", torch.ones(16, dtype=torch.uint8)),
        ("wrong type: norm.weight (U8)", "config.json has no quantization_config"),
    ),
    "a scalar for a vector": (
        put("confidence_head.proj.bias", torch.zeros(()).bfloat16()),
        ("confidence_head.proj.bias [], expected [1]",),
    ),
    "a name that writes to the terminal": (
        put("x\n\x1b[31mERROR " + "y" * 5000, torch.zeros(1)),
        (r"unexpected: 'x\n\x1b[31mERROR yyy", "characters)"),
    ),
    "2,000 tensors too many": (
        lambda tensors: tensors.update({f"x{i}": torch.zeros(1) for i in range(2000)}),
        ("unexpected: x0, x1, x2", "and 1988 more"),
    ),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors(drafter: Path, name: str) -> None:
    change, words = TENSORS[name]
    tensors = random_tensors(spec_of())
    change(tensors)
    write_safetensors(drafter / "model.safetensors", tensors)
    refused(drafter, *words)


MAPS: dict[str, tuple[torch.Tensor, str]] = {
    "ids instead of offsets": (torch.arange(20) + 30, "to 30..68, outside the vocabulary of 50"),
    "negative": (torch.full((20,), -(2**62)), "d2t must hold offsets, target = id + d2t[id]"),
    "past 64 bits": (torch.full((20,), 2**63 - 1), "outside the vocabulary of 50"),
    "two ids to one": (-torch.arange(20), "two draft ids to one target id"),
    "too short": (torch.zeros(19, dtype=torch.int64), "d2t [19], expected [20]"),
    # 8 bits hold no vocabulary
    "bytes": (torch.zeros(20, dtype=torch.uint8), "wrong type: d2t (U8): fetch the checkpoint"),
    "floats": (torch.zeros(20), "wrong type: d2t (F32): fetch the checkpoint"),
}


@pytest.mark.parametrize("name", MAPS)
def test_maps_of_a_reduced_vocabulary(tmp_path: Path, name: str) -> None:
    """Before loading: what a worker says about a map is in its log, not in the error."""
    d2t, said = MAPS[name]
    tensors = random_tensors(spec_of(SPECULATORS))
    write_checkpoint(tmp_path, SPECULATORS, {**tensors, "d2t": d2t})
    refused(tmp_path, said)
