"""Every file of configs/: read by vLLM's own parser, its options by ours, its facts pinned."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("vllm", reason="the files are read by vLLM's parser")

from vllm_dspark.config import DSparkConfig
from vllm_dspark.demo.target import drafter_path
from vllm_dspark.errors import DSparkConfigError
from vllm_dspark.integration.engine_files import engine_arguments
from vllm_dspark.proposer.spec import read_spec

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "configs").glob("*.yaml"))

# What the checkpoints say: (target, drafter or None where it is embedded, K or None where the
# checkpoint gives it).
PUBLISHED: dict[str, tuple[str, str | None, int | None]] = {
    "qwen3-4b": ("Qwen/Qwen3-4B", "deepseek-ai/dspark_qwen3_4b_block7", 7),
    "qwen3-8b": ("Qwen/Qwen3-8B", "deepseek-ai/dspark_qwen3_8b_block7", 7),
    "qwen3-14b": ("Qwen/Qwen3-14B", "deepseek-ai/dspark_qwen3_14b_block7", 7),
    "gemma4-12b": ("google/gemma-4-12B-it", "deepseek-ai/dspark_gemma4_12b_block7", 7),
    "qwen3-8b-speculators": ("Qwen/Qwen3-8B", "mpashkovskii/dspark-qwen3-8b", None),
    "deepseek-v4-flash": ("deepseek-ai/DeepSeek-V4-Flash-DSpark", None, 5),
    "deepseek-v4-pro": ("deepseek-ai/DeepSeek-V4-Pro-DSpark", None, 5),
    "demo": ("SmolLM2-135M-Instruct-bfloat16", "vllm_dspark/demo/drafter", 7),
}


@pytest.fixture(scope="module", params=FILES, ids=lambda path: path.stem)
def config(request: pytest.FixtureRequest) -> tuple[Path, dict[str, Any]]:
    return request.param, engine_arguments(request.param)


def test_the_table_is_complete() -> None:
    assert {path.stem for path in FILES} == set(PUBLISHED)


def test_models_and_width(config: tuple[Path, dict[str, Any]]) -> None:
    """Catches a K that the block cannot serve (acceptance of 4 % on a block-5 drafter)."""
    path, given = config
    target, drafter, width = PUBLISHED[path.stem]
    speculative = given["speculative_config"]
    assert speculative["method"] == "dspark"
    assert (given["model"], speculative.get("model")) == (target, drafter)
    assert speculative.get("num_speculative_tokens") == width


def test_what_vllm_and_we_make_of_it(config: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Catches keys that vLLM's config classes do not have, and illegal options of ours."""
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

    path, given = config
    speculative = dict(given["speculative_config"])
    width = speculative.get("num_speculative_tokens")
    DSparkConfig.from_mapping(speculative.pop("dspark", None), width)
    assert set(speculative) <= set(SpeculativeConfig.__dataclass_fields__)
    fields = AsyncEngineArgs.__dataclass_fields__
    known = {name: value for name, value in given.items() if name in fields}
    AsyncEngineArgs(**{**known, "model": str(tmp_path)})  # offline, a name would be looked up
    rest = set(given) - set(fields)
    assert rest <= {"enable_auto_tool_choice", "tool_call_parser"}, f"{path.name}: {rest}"


def test_graphs_cover_every_decode_step(config: tuple[Path, dict[str, Any]]) -> None:
    """Catches a ladder that ends below max_num_seqs full windows, so that busy steps run outside
    graphs, and a token budget that cannot hold them.
    """
    path, given = config
    width = PUBLISHED[path.stem][2]
    if width is None:
        pytest.skip("K is the checkpoint's")
    full = given["max_num_seqs"] * (width + 1)
    assert given.get("max_num_batched_tokens", 2048) >= full
    compilation = given.get("compilation_config")
    if compilation is not None:
        assert compilation.max_cudagraph_capture_size >= full


def test_header_serves_this_file(config: tuple[Path, dict[str, Any]]) -> None:
    """Each file starts with one line that serves it."""
    path, _ = config
    header = [line for line in path.read_text().splitlines() if line.startswith("#")]
    commands = [line for line in header if re.search(r"\bvllm-dspark serve ", line)]
    assert len(commands) == 1
    assert commands[0].endswith(f"--config configs/{path.name}")


def test_demo_names_the_packaged_drafter() -> None:
    """The one drafter that is here: its own config agrees with the file."""
    given = yaml.safe_load((ROOT / "configs/demo.yaml").read_text())["speculative-config"]
    assert (ROOT / given["model"]).samefile(drafter_path())
    read_spec(ROOT / given["model"]).check_width(given["num_speculative_tokens"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-seqs: 4\n", "key 'model'"),
        ("- model\n", "key 'model'"),
        ("model: [\n", "cannot be read as YAML"),
        ("model: x\nmax-num-seq-s: 4\n", "max-num-seq-s"),
        ("model: x\nmax-num-seqs: many\n", "max-num-seqs"),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    """Catches a process that ends (argparse) or an engine that starts with half a file."""
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(DSparkConfigError, match=re.escape(message)):
        engine_arguments(path)
