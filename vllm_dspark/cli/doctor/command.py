"""The terminal side of `vllm-dspark doctor`."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from vllm_dspark.cli.doctor.arguments import parse_serve
from vllm_dspark.cli.doctor.examine import examine, examine_wheel
from vllm_dspark.cli.doctor.findings import Finding, Report
from vllm_dspark.cli.doctor.subject import Subject, probe_machine
from vllm_dspark.cli.doctor.vllm_flags import vllm_flags

_STYLES = {"ok": "green", "info": "cyan", "warning": "yellow", "error": "bold red"}


def run_doctor(arguments: Sequence[str], wheel: Path | None) -> Report:
    """Examine a wheel, or an engine's command line; raises DSparkConfigError for bad arguments."""
    if wheel is not None:
        return examine_wheel(wheel)
    return examine(Subject(parse_serve(arguments, vllm_flags()), probe_machine()))


def print_report(report: Report, console: Console, quiet: bool = False) -> None:
    """Findings, worst last so that they stay in view; quiet leaves out what is fine."""
    order = ("ok", "info", "warning", "error")
    for level in order[1:] if quiet else order:
        for finding in report.findings:
            if finding.level == level:
                _print(finding, console)
    counts = report.as_json()["counts"]
    console.print(
        ", ".join(f"{counts[level]} {level}" for level in order), markup=False, highlight=False
    )


def _print(finding: Finding, console: Console) -> None:
    line = Text(f"{finding.level:<8}", style=_STYLES[finding.level])
    line.append(f"{finding.check}: {finding.message}", style="default")
    console.print(line, soft_wrap=True)
    for word, text in (("why", finding.reason), ("do", finding.flag)):
        if text:
            console.print(Text(f"         {word}: {text}", style="dim"), soft_wrap=True)


def as_json(report: Report, quiet: bool = False) -> str:
    """One JSON object; quiet leaves out findings that are fine (they stay in the counts)."""
    content = report.as_json()
    if quiet:
        content["findings"] = [f for f in content["findings"] if f["level"] != "ok"]
    return json.dumps(content, indent=1)
