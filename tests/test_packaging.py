"""sdist and wheel, built as a release builds them, then looked at from inside."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.check_wheel import problems, version_of_source

ROOT = Path(__file__).parent.parent


def run(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy of the sources, so that the checkout stays as it is."""
    for package in ("build", "twine", "wheel"):
        pytest.importorskip(package, reason=f"{package} is in the extra: vllm-dspark[test]")
    source, folder = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "vllm_dspark", source / "vllm_dspark", ignore=ignored)
    run("build", "--no-isolation", "--outdir", folder, source)
    return folder


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def test_names_and_version(dist: Path) -> None:
    """One version, from vllm_dspark/__init__.py, in both file names."""
    version = version_of_source()
    names = {path.name for path in dist.iterdir()}
    assert names == {
        f"vllm_dspark-{version}-py3-none-any.whl",
        f"vllm_dspark-{version}.tar.gz",
    }


def test_version_stands_in_one_place() -> None:
    """Catches a second version, in the metadata or in a page."""
    literal = re.compile(rf"""["']{re.escape(version_of_source())}["']""")
    for path in (ROOT / "setup.py", ROOT / "pyproject.toml", *(ROOT / "vllm_dspark").rglob("*.py")):
        if path != ROOT / "vllm_dspark/__init__.py":
            assert not literal.search(path.read_text()), path


def test_twine_accepts_both(dist: Path) -> None:
    """Catches a long description that PyPI cannot render, and bad metadata."""
    said = run("twine", "check", "--strict", *sorted(dist.iterdir()))
    assert said.count("PASSED") == 2, said


def test_wheel_contents(wheel: Path) -> None:
    assert problems(wheel) == []


def test_sdist_can_be_built_from(dist: Path) -> None:
    """The wheel above came out of the sdist (that is how `build` works); nothing else is in it."""
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tops = {name.split("/")[1] for name in tar.getnames() if "/" in name}
    assert {"setup.py", "pyproject.toml", "README.md", "LICENSE", "vllm_dspark"} <= tops
    assert not tops & {"tests", "shared", "docs", ".venv"}


@pytest.mark.parametrize(
    ("name", "change", "finding"),
    [
        ("vllm_dspark/py.typed", None, "missing: vllm_dspark/py.typed"),
        ("vllm_dspark/demo/drafter/config.json", None, "missing: vllm_dspark/demo/drafter"),
        ("tests/conftest.py", b"", "not ours: tests/conftest.py"),
        ("vllm_dspark/x.pyc", b"", "compiled: vllm_dspark/x.pyc"),
        ("entry_points.txt", b"[console_scripts]\n", "entry point missing"),
        ("METADATA", b"Version: 9.9\nRequires-Dist: torch>=2\n", "hard requirement on 'torch>=2'"),
        ("METADATA", b"Version: 9.9\n", "version 9.9"),
    ],
)
def test_findings(
    wheel: Path, tmp_path: Path, name: str, change: bytes | None, finding: str
) -> None:
    """Each check can fail."""
    broken = tmp_path / wheel.name
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(broken, "w") as new:
        for item in old.namelist():
            if item != name and not item.endswith(f".dist-info/{name}"):
                new.writestr(item, old.read(item))
            elif "dist-info" in item and change is not None:
                new.writestr(item, change)
        if change is not None and "/" in name:
            new.writestr(name, change)
    assert any(finding in line for line in problems(broken)), problems(broken)
