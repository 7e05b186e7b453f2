"""The documentation builds without a warning, its generated parts are fresh, its commands run.

`tests/support/doc_commands.py` says how a command is marked. The blocks without a mark are run
here, with a tiny pair in the place of TARGET and DRAFTER and one server for all that need one.
"""

import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.doc_commands import CLIENT, ROOT, SERVER, Block, blocks, pages, stray_commands
from tests.support.engines import ENGINE_ENVIRONMENT
from tests.support.pairs import Pair, PairSpec
from tests.support.patience import PATIENCE_S, free_port, wait_until

ALL = [block for page in pages() for block in blocks(page)]


def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    """Catches dead links and anchors, pages outside the navigation, broken hooks."""
    pytest.importorskip("mkdocs", reason="mkdocs is an extra: vllm-dspark[docs]")
    pytest.importorskip("material", reason="mkdocs-material is an extra: vllm-dspark[docs]")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tmp_path / "site/cli.html").read_text()
    assert "<code>--num-speculative-tokens</code>" in page, "the command reference is empty"
    # A fence that superfences does not understand ends up as text.
    for html in (tmp_path / "site").rglob("*.html"):
        assert "```" not in html.read_text(), f"a broken fence on {html.name}"


def test_generated_parts_are_fresh() -> None:
    """Run `python tools/make_pages.py` if this fails."""
    from tools.make_pages import pages as generated

    for path, text in generated().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.relative_to(ROOT)} is stale"


def test_every_option_is_documented_and_explained() -> None:
    """Catches options without a description, and a reference that leaves one out."""
    from vllm_dspark.config import DSparkConfig

    page = (ROOT / "docs/options.md").read_text()
    for name, field in DSparkConfig.model_fields.items():
        assert field.description, name
        assert f"| `{name}` |" in page, name


def test_every_command_is_marked() -> None:
    """Catches commands that nobody runs: outside `bash` blocks, or with a mark of no meaning."""
    strays = [where for page in pages() for where in stray_commands(page)]
    assert strays == [], "put commands into ```bash blocks"
    assert [f"{block.where}: {block.problem()}" for block in ALL if block.problem()] == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("```bash\nvllm-dspark version\n```\n", []),
        ("    vllm-dspark version\n", ["page.md:1"]),
        ("text\n\n```\nmake test\n```\n", ["page.md:3"]),
        ("```text\nA=1 python x.py\n```\n", ["page.md:1"]),
        ("    dspark: 60 s, 5123 steps\n", []),
        ("```json\nvllm\n```\n", []),
    ],
)
def test_stray_commands_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, expected: list[str]
) -> None:
    """The check above can fail."""
    monkeypatch.setattr("tests.support.doc_commands.ROOT", tmp_path)
    (tmp_path / "page.md").write_text(text)
    assert stray_commands(tmp_path / "page.md") == expected


@pytest.mark.parametrize(
    ("mark", "problem"),
    [
        ("", ""),
        (' title="needs a GPU"', ""),
        (' title="needs a GPU, several nodes"', ""),
        (' title="run by tests/test_docs.py"', ""),
        (' title="run by make test"', ""),
        (' title="run by make tea"', "no target"),
        (' title="run by tests/no_such_test.py"', "no file"),
        (' title="not run: "', "no reason"),
        (' title="later"', "unknown mark"),
        (" gpu", "unknown mark"),
    ],
)
def test_marks_are_checked(tmp_path: Path, mark: str, problem: str) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"```bash{mark}\nmake test\n```\n")
    (block,) = blocks(page)
    assert (problem in block.problem()) if problem else block.problem() == ""


# ---- running them


@pytest.fixture(scope="module")
def pair(build: Callable) -> Pair:
    return build(PairSpec(kind="markov"))


def environment() -> dict[str, str]:
    """The test engines' settings, with this interpreter's commands first on the path."""
    ours = {k: v for k, v in os.environ.items() if k != "VLLM_USE_V2_MODEL_RUNNER"}
    commands = str(Path(sys.executable).parent)
    return {**ours, **ENGINE_ENVIRONMENT, "PATH": f"{commands}{os.pathsep}{ours['PATH']}"}


def with_models(text: str, pair: Pair) -> str:
    text = re.sub(r"\bTARGET\b", str(pair.target), text)
    text = re.sub(r"\bDRAFTER\b", str(pair.drafter), text)
    # Models this small run in float32 only: in bfloat16 vLLM's AMX attention dies of an illegal
    # instruction on the machine that this was written on.
    text = text.replace("--enforce-eager", "--enforce-eager --dtype float32")
    return text.replace("enforce_eager=True", 'enforce_eager=True, dtype="float32"')


def run_block(block: Block, text: str) -> None:
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, (
        f"{block.where}\n{text}\n{done.stdout[-2000:]}{done.stderr[-2000:]}"
    )


@pytest.mark.engine
@pytest.mark.parametrize(
    "block", [b for b in ALL if b.title == ""], ids=lambda block: block.where.replace("/", "-")
)
def test_plain_commands(block: Block, pair: Pair) -> None:
    """Each block that says nothing else runs as it stands."""
    run_block(block, with_models(block.text, pair))


@pytest.fixture(scope="module")
def port(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """The documentation's one server, started by its own command; yields where it listens."""
    (block,) = [b for b in ALL if b.title == SERVER]
    number = free_port()
    # Ours on top: another port than 8000, and less KV cache than half of this machine.
    text = f"{with_models(block.text, pair)} --port {number} --kv-cache-memory-bytes {64 << 20}"
    log = tmp_path_factory.mktemp("docs") / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", f"exec {text}"],  # exec: signals reach the server
            cwd=ROOT,
            env=environment(),
            stdout=output,
            stderr=output,
        )
    try:

        def ready() -> bool:
            assert process.poll() is None, f"{block.where}\n{log.read_text()[-4000:]}"
            return _answers(number)

        wait_until(f"the server that writes {log}", ready)
        yield number
    finally:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=PATIENCE_S)
    except OSError:
        return False
    return True


@pytest.mark.engine
@pytest.mark.parametrize(
    "block", [b for b in ALL if b.title == CLIENT], ids=lambda block: block.where.replace("/", "-")
)
def test_commands_beside_the_server(block: Block, port: int) -> None:
    assert "localhost:8000" in block.text, "commands beside the server talk to localhost:8000"
    run_block(block, block.text.replace("localhost:8000", f"127.0.0.1:{port}"))


@pytest.mark.engine
def test_python_of_getting_started(pair: Pair, tmp_path: Path) -> None:
    """The five lines of Python, in a process of their own."""
    page = (ROOT / "docs/getting-started.md").read_text()
    (code,) = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "script.py"
    script.write_text(with_models(code, pair))
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**environment(), "VLLM_CPU_KVCACHE_SPACE": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip(), "nothing was generated"
