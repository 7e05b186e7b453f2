"""`vllm-dspark plot`: figures from the JSON of any command."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_dspark.cli.draw import (
    draw_image,
    html_report,
    require_drawable,
    require_matplotlib,
)
from vllm_dspark.cli.figures import KINDS, figures_of
from vllm_dspark.cli.output import require_writable, write_file
from vllm_dspark.cli.result_figures import Figure
from vllm_dspark.errors import InputError

Source = tuple[dict[str, Any], list[Figure]]


@dataclass(frozen=True)
class PlotReport:
    """What was drawn."""

    figures: dict[str, int]  # kind -> how many
    paths: tuple[str, ...]

    def to_json(self) -> str:
        """One JSON object."""
        return json.dumps({"command": "plot", "figures_drawn": self.figures, "files": self.paths})


def run_plot(
    files: Sequence[Path], image: Path | None, page: Path | None, only: Sequence[str] = ()
) -> PlotReport:
    """Draw all figures of `files` (or those of some kinds) as an image, a page, or both."""
    require_matplotlib()
    if image is None and page is None:
        raise InputError("say where to: --out FILE.png or FILE.svg, or --html FILE.html")
    unknown = set(only) - set(KINDS)
    if unknown:
        raise InputError(f"--only {', '.join(sorted(unknown))}: kinds are {', '.join(KINDS)}")
    require_drawable(image)
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--html {page}: choose a name that ends in .html or .htm")
    for option, path in (("--out", image), ("--html", page)):
        require_writable(path, option)
        if path is not None and any(_same(path, file) for file in files):
            raise InputError(f"{option} {path} is one of the files to draw; name another")
    sources = _sources(files, only)
    figures = [figure for _, found in sources.values() for figure in found]
    if image is not None:
        draw_image(figures, image)
    if page is not None:
        write_file(page, html_report(sources))
    kinds = [figure["figure"] for figure in figures]
    counts = {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)}
    return PlotReport(counts, tuple(str(path) for path in (image, page) if path is not None))


def _same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except OSError:  # one of them does not exist
        return False


def _sources(files: Sequence[Path], only: Sequence[str]) -> dict[str, Source]:
    sources: dict[str, Source] = {}
    for path in files:
        try:
            obj = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise InputError(f"cannot read {path}: {error.strerror}") from error
        except (ValueError, RecursionError) as error:  # also text that is none, and absurd nesting
            raise InputError(f"{path} is not JSON: {error}") from error
        if not isinstance(obj, dict):
            raise InputError(f"{path} holds a {type(obj).__name__}, not a JSON object")
        figures = figures_of(obj, str(path))
        if only:
            figures = [figure for figure in figures if figure["figure"] in only]
        sources[str(path)] = (obj, figures)
    if not any(figures for _, figures in sources.values()):
        raise InputError(f"no figure of kind {', '.join(only)} in {', '.join(map(str, files))}")
    return sources
