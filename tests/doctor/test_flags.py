"""Flags, abbreviations and dotted keys: what vLLM's own parser would make of them."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.doctor.subjects import H200, NAMES_A_REMEDY, named, subject
from vllm_dspark.cli.doctor import flags, vllm_flags
from vllm_dspark.cli.doctor.arguments import parse_serve
from vllm_dspark.cli.doctor.findings import Finding
from vllm_dspark.cli.doctor.subject import Subject
from vllm_dspark.cli.doctor.vllm_flags import VllmFlags
from vllm_dspark.cli.main import app
from vllm_dspark.errors import ContractError, DSparkConfigError

# Small files laid out as vLLM's.
ENGINE = """
class EngineArgs:
    max_num_seqs: int | None = None
    enable_lora: bool = False
    def add_cli_args(parser):
        parser.add_argument("--max-num-seqs", **kwargs)
        parser.add_argument("--max-num-batched-tokens", **kwargs)
        parser.add_argument("--enable-lora", "-el", **kwargs)
        parser.add_argument("--speculative-config", "-sc", **kwargs)
        parser.add_argument("--log-requests", action=argparse.BooleanOptionalAction)
"""
FRONTEND = """
class FrontendArgs:
    port: int = 8000
    enable_docs: bool = False
"""
KNOWN = {
    "--max-num-seqs", "--max-num-batched-tokens", "--enable-lora", "--no-enable-lora", "-el",
    "--speculative-config", "-sc", "--log-requests", "--no-log-requests", "--port",
    "--enable-docs", "--no-enable-docs", "--help", "-h",
}  # fmt: skip


def _read(path: str) -> str:
    if path == "engine/arg_utils.py":
        return ENGINE
    if path == "entrypoints/common/cli_args.py":
        return FRONTEND
    raise FileNotFoundError(path)


def _found(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> list[Finding]:
    known = VllmFlags(frozenset(KNOWN))
    monkeypatch.setattr(flags, "vllm_flags", lambda: known)
    return list(flags.check_flags(Subject(parse_serve(["t", *arguments], known), H200)))


def test_flags_are_read_from_source() -> None:
    """Catches a flag, a field or a `--no-` form that is passed over."""
    found = vllm_flags.vllm_flags(_read)
    assert found is not None
    assert found.options == KNOWN


def test_nothing_is_claimed_without_vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches every flag called unknown where there is no vLLM, or one of another layout."""

    def missing(path: str) -> str:
        raise ContractError(path)

    def moved(path: str) -> str:
        raise FileNotFoundError(path)

    assert vllm_flags.vllm_flags(missing) is None
    assert vllm_flags.vllm_flags(moved) is None
    monkeypatch.setattr(flags, "vllm_flags", lambda: None)
    assert not list(flags.check_flags(subject(tmp_path, "--bogus", "1")))


@pytest.mark.parametrize(
    ("typed", "level", "words", "remedy"),
    [
        (["--max-nmu-seqs", "6"], "error", "did you mean --max-num-seqs?", "--max-num-seqs"),
        (["--bogus=1"], "error", "--bogus is no flag", "leave out --bogus"),
        (["--max-num-seq", "6"], "info", "--max-num-seq is read as --max-num-seqs", "in full"),
        (["--max-num", "6"], "error", "may be --max-num-batched-tokens, --max-num-seqs", "in full"),
        (["--por", "80"], "info", "--por is read as --port", "--port in full"),
    ],
)
def test_misspelt_flags(
    monkeypatch: pytest.MonkeyPatch, typed: list[str], level: str, words: str, remedy: str
) -> None:
    """Catches a misspelt flag that passes silently."""
    (found,) = _found(monkeypatch, *typed)
    assert (found.check, found.level) == ("flags", level)
    assert words in found.message
    assert remedy in found.flag
    assert NAMES_A_REMEDY.search(found.flag)


def test_known_flags_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a complaint about a flag in another spelling, or about a value."""
    known = ("--port", "80", "--no-log-requests", "--max_num_seqs=8", "--enable_docs")
    assert not _found(monkeypatch, *known)


def test_unknown_keys_of_a_config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches `modle: x`, which ends vLLM's start, passed over."""
    file = tmp_path / "serve.yaml"
    file.write_text("prot: 80\nmax_num_seqs: 5\nspeculative-config.method: dspark\n")
    (found,) = _found(monkeypatch, "--config", str(file))
    assert found.message.startswith('"prot" in the --config file is no flag')
    assert found.flag.startswith("--port")


def test_a_platform_plugin_makes_it_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an error about a flag that the platform adds."""
    known = VllmFlags(frozenset(KNOWN), complete=False)
    monkeypatch.setattr(flags, "vllm_flags", lambda: known)
    (found,) = flags.check_flags(Subject(parse_serve(["t", "--bogus"], known), H200))
    assert found.level == "warning"


def test_an_abbreviation_has_its_effect() -> None:
    """Catches `--max-num-seq 6` named, but its value left out of the other checks."""
    known = VllmFlags(frozenset(KNOWN))
    assert parse_serve(["t", "--max-num-seq", "6"], known).integer("max-num-seqs", 1) == 6


def test_installed_flags_are_those_of_the_parser(tmp_path: Path) -> None:
    """Catches a flag of the real vLLM that the reader of its source does not see."""
    pytest.importorskip("vllm", reason="its parser is the judge")
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from vllm_dspark.integration import engine_files

    found = vllm_flags.vllm_flags()
    assert found is not None
    parser = vars(engine_files)["make_arg_parser"](FlexibleArgumentParser())
    real = set(parser._option_string_actions)
    assert real <= found.options
    assert len(found.options - real) < 10, "a few --no- forms of switches that have none"
    assert not named(list(flags.check_flags(subject(tmp_path))), "flags")


DOTTED = [
    ["--speculative-config.method", "dspark", "--speculative-config.model", "d"],
    ["-sc.method", "dspark", "-sc.model=d"],
    ["--speculative_config.method=dspark", "--speculative_config.model", "d"],
    ["-sc", '{"method": "dspark", "model": "d"}'],
]


@pytest.mark.parametrize("typed", DOTTED)
def test_spellings_of_the_speculative_config(typed: list[str]) -> None:
    """Catches vLLM's dotted form taken for no speculative config."""
    assert parse_serve(["t", *typed]).speculative == {"method": "dspark", "model": "d"}


def test_dotted_values_have_types() -> None:
    """Catches numbers, nested options and lists kept as text."""
    typed = ["--speculative-config.num_speculative_tokens", "7"]
    typed += ["-sc.dspark.scheduling=false", "-sc.moe+", "a,b", "-sc.size=4k"]
    read = parse_serve(["t", *typed])
    assert read.speculative == {"num_speculative_tokens": 7, "moe": ["a", "b"], "size": 4000}
    assert read.options == {"scheduling": False}
    with pytest.raises(DSparkConfigError, match=r"-sc.method needs a value"):
        parse_serve(["t", "-sc.method"])


def test_dotted_keys_of_a_config_file(tmp_path: Path) -> None:
    """Catches `speculative-config.method: dspark` in YAML, which vLLM reads."""
    file = tmp_path / "serve.yaml"
    file.write_text("speculative-config.method: dspark\nspeculative_config.dspark.windows: host\n")
    read = parse_serve(["t", "--config", str(file)])
    assert (read.speculative, read.options) == ({"method": "dspark"}, {"windows": "host"})


def test_short_flags_reach_vllm(tmp_path: Path) -> None:
    """Catches the `h` of `-sc.method` taken for -h."""
    made = subject(tmp_path)
    typed = ["doctor", made.arguments.target, "-sc.method", "dspark", "-sc.model", "nowhere/at/all"]
    shown = CliRunner().invoke(app, [*typed, "--json", "--quiet"])
    found = json.loads(shown.stdout)["findings"]
    assert "the folder nowhere/at/all does not exist" in {f["message"] for f in found}


def test_optimization_levels_are_no_compilation_config() -> None:
    """Catches -O3, or -O 3, refused as a JSON object that it is not."""
    config = json.dumps({"cudagraph_mode": "NONE"})
    for level in (["-O3"], ["-O", "3"]):
        read = parse_serve(["t", *level, "-cc", config])
        assert read.mapping("compilation-config") == {"cudagraph_mode": "NONE"}


@pytest.mark.parametrize("typed", [["1,2", "4"], ["1,2,4"], ["1", "2", "4"]])
def test_capture_sizes_are_a_list(tmp_path: Path, typed: list[str]) -> None:
    """Catches the first size taken for all of them: doctor's own advice has several."""
    from vllm_dspark.cli.doctor.engine import _sizes

    assert _sizes(subject(tmp_path, "--cudagraph-capture-sizes", *typed)) == [1, 2, 4]
