"""Files and options from anywhere: a typed error or a result, nothing half done, nothing executed.

Each test feeds arbitrary or mutated input to one reader and lets only `DSparkError` through.
"""

import ast
import json
import os
import pickle
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.artifacts.records import K, admission_record, calibration_record, cost_record
from tests.formats.test_embedded import CONFIG
from tests.formats.test_quantised import CONFIGS, SIZES, TARGET_32, inventory, quantised
from tests.proposer.checkpoints import (
    DEEPSPEC,
    SPECULATORS,
    TARGET,
    random_tensors,
    spec_of,
    write_checkpoint,
    write_safetensors,
)
from vllm_dspark.artifacts.store import (
    read_admission,
    read_calibration,
    read_cost_table,
    write_atomic,
)
from vllm_dspark.config import DSparkConfig
from vllm_dspark.errors import DSparkConfigError, DSparkError
from vllm_dspark.proposer.checkpoint import check_checkpoint, check_tensors
from vllm_dspark.proposer.embedded import read_stages, stage_shapes
from vllm_dspark.proposer.inventory import read_inventory, read_tensor
from vllm_dspark.proposer.spec import parse_spec, read_spec
from vllm_dspark.proposer.tensors import expected_shapes

PACKAGE = Path(__file__).parents[2] / "vllm_dspark"
# More for a search: FUZZ_EXAMPLES=20000 pytest --hypothesis-seed=random
QUICK = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "150")),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.sampled_from(
        [0, -1, 1, 2**31, 2**63, 10**400, "", "7", "~nobody/x", "\x00", "host", "rnn"]
    )
    | st.text(max_size=8)
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


def mutations(base: dict):
    """`base` with some of its keys, nested ones included, replaced or taken out."""

    def apply(changes: list[tuple[int, object, bool]]) -> dict:
        config = json.loads(json.dumps(base))
        for place, value, removed in changes:
            owner, key = _places(config)[place % len(_places(config))]
            if removed:
                del owner[key]
            else:
                owner[key] = value
            if not config:
                return config
        return config

    change = st.tuples(st.integers(0, 10_000), JSON, st.booleans())
    return st.lists(change, min_size=1, max_size=3).map(apply)


def _places(config: dict) -> list[tuple[dict, str]]:
    found = [(config, key) for key in config]
    for value in config.values():
        if isinstance(value, dict):
            found += _places(value)
    return found


@QUICK
@given(JSON | st.dictionaries(st.sampled_from([*DSparkConfig.model_fields]), JSON, max_size=4))
def test_options(given_options):
    """Catches options that end in a TypeError, OSError or RuntimeError instead of their name."""
    try:
        config = DSparkConfig.from_mapping(given_options, num_speculative_tokens=7)
    except DSparkConfigError:
        return
    assert DSparkConfig.from_mapping(config.to_mapping()) == config


@QUICK
@given(st.dictionaries(st.integers() | st.none() | st.binary(max_size=3), SCALARS, min_size=1))
def test_options_with_keys_that_are_no_names(given_options):
    with pytest.raises(DSparkConfigError):
        DSparkConfig.from_mapping(given_options)


@pytest.mark.parametrize("path", ["~no-such-user/x.json", "\x00", "a" * 5000])
@pytest.mark.parametrize("option", ["cost_table", "calibration", "cache_dir"])
def test_option_paths_that_cannot_be(option, path):
    """Catches an unknown home folder that ends the start without the option's name."""
    try:
        DSparkConfig.from_mapping({option: path})
    except DSparkConfigError as error:
        assert option in str(error)


@QUICK
@given(mutations(DEEPSPEC) | mutations(SPECULATORS) | JSON.filter(lambda v: isinstance(v, dict)))
def test_drafter_configs(config):
    """Catches configs whose numbers are believed without a look, and tables built from them."""
    try:
        spec = parse_spec(config)
        shapes = expected_shapes(spec)
        spec.check_target(TARGET)
    except DSparkError:
        return
    assert all(size >= 0 for shape in shapes.values() for size in shape)
    assert 1 <= spec.default_drafts <= spec.max_drafts


QUANTISED = {name: {**DEEPSPEC, **SIZES, "quantization_config": CONFIGS[name]} for name in CONFIGS}
PACKED = inventory(quantised(CONFIGS["w4a16"]))


@QUICK
@given(st.sampled_from(list(QUANTISED)).flatmap(lambda name: mutations(QUANTISED[name])))
def test_quantised_drafters(config):
    """Catches schemes whose group sizes, bits or blocks are believed without a look."""
    try:
        check_tensors(PACKED, parse_spec(config), TARGET_32, "fuzzed")
    except DSparkError:
        return


@QUICK
@given(mutations({**CONFIG, "dspark_n_routed_experts": 4, "num_nextn_predict_layers": 3}))
def test_embedded_configs(config):
    try:
        spec = read_stages(config)
    except DSparkError:
        return
    stage_shapes(spec)


@QUICK
@given(st.binary(max_size=400))
def test_config_files(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(DSparkError):
        read_spec(tmp_path)


@QUICK
@given(
    st.binary(max_size=300) | st.binary(max_size=300).map(lambda b: struct.pack("<Q", len(b)) + b)
)
def test_weight_files_of_any_bytes(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    try:
        read_inventory(tmp_path)
    except DSparkError:
        return
    # what is accepted is an object without tensors
    assert isinstance(json.loads(content[8 : 8 + struct.unpack("<Q", content[:8])[0]]), dict)


ENTRY = {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}


@QUICK
@given(mutations({"a": ENTRY, "b": {**ENTRY, "data_offsets": [16, 32]}}) | JSON)
@example({"a": ENTRY, "b": ENTRY})  # one on top of the other, 16 bytes of nothing behind
@example({"b": {**ENTRY, "data_offsets": [16, 32]}})  # a gap
@example({"a": {**ENTRY, "shape": [2, 4], "data_offsets": [0, 32]}, "__metadata__": {"format": 1}})
def test_weight_file_headers(tmp_path, header):
    """Catches offsets and shapes that lead outside the file, or to more memory than it has.

    What passes here must pass safetensors' own reader, which vLLM loads with.
    """
    encoded = json.dumps(header).encode()
    data = struct.pack("<Q", len(encoded)) + encoded + bytes(32)
    (tmp_path / "model.safetensors").write_bytes(data)
    try:
        found = read_inventory(tmp_path)
        for tensor in found.values():
            read_tensor(tensor)
    except DSparkError:
        return
    with safe_open(str(tmp_path / "model.safetensors"), framework="pt") as opened:
        assert set(opened.keys()) == set(found)


@QUICK
@given(
    mutations({"weight_map": {"a": "x.safetensors", "b": "x.safetensors"}, "metadata": {}}) | JSON
)
def test_shard_indices(tmp_path, index):
    """Catches an index that points outside its folder."""
    import torch

    write_safetensors(tmp_path / "x.safetensors", {"a": torch.zeros(2), "b": torch.zeros(1)})
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    try:
        found = read_inventory(tmp_path)
    except DSparkError:
        return
    assert all(tensor.file.parent == tmp_path for tensor in found.values())


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/passwd", "sub/x.safetensors", "x.bin"])
def test_shards_stay_in_their_folder(tmp_path, shard):
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(DSparkError, match="beside the index"):
        read_inventory(tmp_path)


@QUICK
@given(st.data())
def test_checkpoints_with_flipped_bytes(tmp_path, data):
    """Catches a damaged file that is accepted with other shapes than the config's."""
    spec = spec_of()
    write_checkpoint(tmp_path, DEEPSPEC, random_tensors(spec))
    path = tmp_path / "model.safetensors"
    content = bytearray(path.read_bytes())
    header = 8 + struct.unpack("<Q", content[:8])[0]
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        checked = check_checkpoint(tmp_path, spec, TARGET)
    except DSparkError:
        return
    for name, shape in expected_shapes(spec).items():
        assert name not in checked.tensors or checked.tensors[name].shape == shape


READERS = {
    "cost table": (read_cost_table, cost_record()),
    "calibration": (lambda path: read_calibration(path, K), calibration_record()),
    "admission": (read_admission, admission_record()),
}


@pytest.mark.parametrize("name", READERS)
@QUICK
@given(data=st.data())
def test_artifacts(tmp_path, name, data):
    """Catches a record that crashes its reader instead of being refused."""
    reader, record = READERS[name]
    base = json.loads(record.model_dump_json())
    changed = data.draw(mutations(base) | JSON)
    path = tmp_path / "record.json"
    path.write_text(json.dumps(changed))
    try:
        reader(path)
    except DSparkError:
        return


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "\ud800", "NaN", ""])
def test_artifacts_that_are_hardly_json(tmp_path, name, content):
    path = tmp_path / "record.json"
    path.write_bytes(content.encode("utf-8", "surrogatepass"))
    with pytest.raises(DSparkError):
        READERS[name][0](path)


def test_deeply_nested_checkpoints(tmp_path):
    nested = b'{"a":' * 100_000
    (tmp_path / "config.json").write_bytes(nested)
    with pytest.raises(DSparkError, match="not valid JSON"):
        read_spec(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(nested)) + nested)
    with pytest.raises(DSparkError, match="not valid JSON"):
        read_inventory(tmp_path)


def test_a_failing_write_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    """Catches half-written records, and temporary files that pile up."""
    path = tmp_path / "record.json"
    write_atomic(path, "old")

    def fail(*_args):
        raise OSError("no space left on device")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="no space"):
        write_atomic(path, "new")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


class Payload:
    """Unpickling it would create a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "pytorch_model.bin"])
def test_pickles_are_never_loaded(tmp_path, file):
    """Catches a fallback that executes what a checkpoint folder holds."""
    proof = tmp_path / "executed"
    write_checkpoint(tmp_path, DEEPSPEC, random_tensors(spec_of()))
    if file == "pytorch_model.bin":
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / file).write_bytes(pickle.dumps(Payload(proof)))
    with pytest.raises(DSparkError):
        check_checkpoint(tmp_path, read_spec(tmp_path), TARGET)
    assert not proof.exists()


def test_nothing_in_the_package_can_execute_a_file():
    """Catches pickle, torch.load, eval and exec where files of others are read."""
    banned_calls = {"eval", "exec", "compile"}
    found = []
    for path in [*PACKAGE.glob("proposer/*.py"), *PACKAGE.glob("artifacts/*.py"),
                 PACKAGE / "config.py", PACKAGE / "integration/checkpoints.py",
                 PACKAGE / "integration/preflight.py"]:  # fmt: skip
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in banned_calls:
                found.append(f"{path.name}: {node.func.id}")
            is_load = isinstance(node, ast.Attribute) and node.attr in ("load", "loads")
            if is_load and getattr(node.value, "id", "") != "json":
                found.append(f"{path.name}: {ast.unparse(node)}")
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = [a.name for a in node.names] + [getattr(node, "module", "") or ""]
                found += [f"{path.name}: {n}" for n in names if n in ("pickle", "marshal", "yaml")]
    assert not found
