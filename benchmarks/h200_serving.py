"""Writes docs/benchmarks/h200-serving.{md,json} and README's table from runs of the benchmark.

    python -m benchmarks.h200_serving --run "SmolLM2-135M=DIR" --run "Qwen3-8B shape, replayed=DIR2"

Every folder holds the `cells.jsonl` of one run and, if they are to be on the page, `command.txt`
with the commands that made it and `notes.md` with what the figures do not say (where it loses, and
why). Runs may differ in models and modes; each is a section of its own, and
in the JSON's `rows` the workload carries the run's name. Goals are judged from the same figures.
Without data nothing is written.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.serving_goals import Verdict, verdicts
from vllm_dspark.bench import plots, report
from vllm_dspark.bench.identity import SOURCE
from vllm_dspark.bench.modes import BenchError
from vllm_dspark.bench.store import read_cells

ROOT = Path(__file__).resolve().parent.parent
NAME = "h200-serving"
_BEGIN, _END = "<!-- h200-serving: begin -->", "<!-- h200-serving: end -->"
_AFTER = "<!-- cpu-demo: end -->"


@dataclass(frozen=True)
class Run:
    """One measured run: its report, the commands that made it, and remarks."""

    name: str
    report: dict[str, Any]
    command: str
    notes: str

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of the report."""
        rows: list[dict[str, Any]] = self.report["rows"]
        return rows


def read_run(name: str, folder: Path) -> Run:
    """A run from its folder; BenchError where it holds nothing."""
    identity, cells = read_cells([folder / "cells.jsonl"], ignore=SOURCE)
    if not cells:
        raise BenchError(f"{folder} holds no cell: measure first, nothing is written")
    made = report.make_report(identity, cells)
    # engine facts and settings are in the run's own report, if it came to its end
    whole = folder / "bench.json"
    if whole.exists():
        saved = json.loads(whole.read_text())
        made |= {key: saved[key] for key in ("settings", "conditions")}
        for facts in (made["conditions"].get("engines") or {}).values():
            if "error" in facts:  # the rest is the end of a log, with paths of that machine
                facts["error"] = facts["error"].split(";")[0].splitlines()[0]
    texts = [folder / name for name in ("command.txt", "notes.md")]
    command, notes = (path.read_text().strip() if path.exists() else "" for path in texts)
    return Run(name, made, command, notes)


def write(runs: Sequence[Run], root: Path = ROOT) -> None:
    """Page, JSON, plots and README's table."""
    folder = root / "docs" / "benchmarks"
    if plots.available():
        for number, run in enumerate(runs):
            plots.draw(run.report, folder, f"{NAME}-{number + 1}")
    (folder / f"{NAME}.json").write_text(_json(runs))
    (folder / f"{NAME}.md").write_text(page(runs, folder))
    readme = root / "README.md"
    readme.write_text(with_table(readme.read_text(), readme_table(runs)))


def _json(runs: Sequence[Run]) -> str:
    """One row and one cell a line."""
    found = {
        "goals": [verdict.as_json() for verdict in _verdicts(runs)],
        "runs": [
            {"name": r.name, **{k: v for k, v in r.report.items() if k not in ("rows", "cells")}}
            for r in runs
        ],
    }
    text = json.dumps(found, indent=1)[:-2]
    for key in ("rows", "cells"):
        lines = ",\n".join(
            json.dumps({**item, "workload": f"{run.name}: {item['workload']}"})
            for run in runs
            for item in run.report[key]
        )
        text += f',\n "{key}": [\n{lines}\n]'
    return text + "}\n"


def page(runs: Sequence[Run], folder: Path) -> str:
    """The whole page."""
    sections = "\n".join(
        _section(run, f"{NAME}-{number + 1}", folder) for number, run in enumerate(runs)
    )
    machine = runs[0].report["fingerprint"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"""# Serving on an H200

Written by `python -m benchmarks.h200_serving` from the cells of the runs below; medians, spreads
and cells lie beside this page as JSON. {machine["device"]}; {versions}.

Output tokens per second, medians of interleaved repeats, bold: the fastest of the row. off, fixedK
and adaptive are stock vLLM without the plugin. "ours / best fixed": the best of off and all fixed
K of the row, chosen for each repeat by the other repeats, with a 95 % bootstrap interval.

## Goals

{report.markdown(("goal", "found", "met"), [v.line() for v in _verdicts(runs)])}

{sections}"""


def _verdicts(runs: Sequence[Run]) -> list[Verdict]:
    return [verdict for run in runs for verdict in verdicts(run.name, run.report)]


def _section(run: Run, stem: str, folder: Path) -> str:
    parts = [f"## {run.name}", report.markdown(*report.header_and_lines(run.report))]
    if run.notes:
        parts.append(run.notes)
    against = _against_adaptive(run.rows)
    if against:
        parts += ["Ours over stock adaptive verification:", against]
    if (folder / f"{stem}-frontier.svg").exists():
        parts.append(f"![Throughput against interactivity]({stem}-frontier.svg)")
    drafts = report.drafts_table(run.report)
    if drafts[1]:
        parts += [
            "What ours did (AL: tokens per request and step; window: tokens verified):",
            report.markdown(*drafts),
        ]
    parts += ["Latency:", report.markdown(*report.latency_table(run.report))]
    engines = _engines(run.report)
    if engines:
        parts += ["Engines (memory: what torch reserved when they were up, fixed caches included):"]
        parts += [engines]
    left_out = _left_out(run.report)
    if left_out:
        parts.append(f"Left out: {left_out}.")
    if run.command:
        parts.append(f'```bash title="needs a GPU"\n{run.command}\n```')
    return "\n\n".join(parts) + "\n"


def _against_adaptive(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        [
            row["workload"],
            f"{row['temperature']:g}",
            str(row["concurrency"]),
            f"{ratio['value']:.3f}",
            f"{ratio['low']:.3f} to {ratio['high']:.3f}",
        ]
        for row in rows
        if (ratio := row.get("ours_over_adaptive"))
    ]
    return report.markdown(("workload", "T", "requests", "ratio", "95 %"), lines) if lines else ""


def _engines(found: Mapping[str, Any]) -> str:
    """Start-up time and memory, where the run wrote them down."""
    engines = (found.get("conditions") or {}).get("engines") or {}
    lines = [
        [name, f"{facts['start_s']:.0f}", f"{facts['gpu_gib']:.2f}" if "gpu_gib" in facts else ""]
        for name, facts in engines.items()
        if "start_s" in facts
    ]
    return report.markdown(("mode", "start, s", "GiB"), lines) if lines else ""


def _left_out(found: Mapping[str, Any]) -> str:
    """Modes that failed, with the first line of why."""
    engines = (found.get("conditions") or {}).get("engines") or {}
    return "; ".join(
        f"{name} ({facts['error']})" for name, facts in engines.items() if "error" in facts
    )


def readme_table(runs: Sequence[Run]) -> str:
    """The short table: every load, off, the best fixed K by its median, stock adaptive and ours."""
    lines = []
    for run in runs:
        for row in run.rows:
            fixed = {k: v for k, v in row["fixed"].items() if v is not None}
            best = max(fixed, key=lambda k: fixed[k], default=None)
            lines.append(
                [
                    f"{run.name}, {row['workload']}, T = {row['temperature']:g}",
                    str(row["concurrency"]),
                    _rate(row["off"]),
                    "" if best is None else f"{_rate(fixed[best])} (K = {best})",
                    _rate(row["stock_adaptive"]),
                    _rate(row["ours"]),
                ]
            )
    header = ("on an H200, tokens/s", "requests", "off", "best fixed K", "stock adaptive", "ours")
    return report.markdown(header, lines)


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def with_table(readme: str, table: str) -> str:
    """README with the table in its place, which is made behind the CPU's on first use."""
    block = (
        f"{_BEGIN}\n{table}\n\nHow they came about, where it loses and the goals:"
        f" [h200-serving.md](docs/benchmarks/{NAME}.md).\n{_END}"
    )
    if _BEGIN in readme:
        return re.sub(f"{_BEGIN}.*?{_END}", lambda _: block, readme, flags=re.DOTALL)
    if _AFTER not in readme:
        raise BenchError(f"README.md has neither {_BEGIN!r} nor {_AFTER!r} to put the table behind")
    return readme.replace(_AFTER, f"{_AFTER}\n\n{block}", 1)


def _named(items: Sequence[str]) -> Iterator[tuple[str, Path]]:
    for item in items:
        name, found, folder = item.rpartition("=")
        if not found or not name:
            raise BenchError(f"--run {item!r}: write NAME=FOLDER")
        yield name, Path(folder)


def _require_h200(runs: Sequence[Run]) -> None:
    for run in runs:
        device = run.report["fingerprint"]["device"]
        if "H200" not in device:
            raise BenchError(f"run {run.name!r} was measured on {device}, not on an H200")


def main(argv: list[str] | None = None) -> int:
    """Write everything, or say what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run", action="append", required=True, metavar="NAME=FOLDER")
    try:
        named = list(_named(parser.parse_args(argv).run))
        runs = [read_run(name, folder) for name, folder in named]
        _require_h200(runs)
        write(runs)
    except BenchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
