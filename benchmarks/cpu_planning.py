"""Planning on a CPU: the demo pair under load, without speculation, with fixed K, and scheduled.

    P="--prompts PROMPTS.jsonl --work DIR"
    python -m benchmarks.cpu_planning split $P
    python -m benchmarks.cpu_planning calibrate $P --pairs PAIRS.jsonl
    vllm-dspark bench --out DIR ...                # the page holds the command
    python -m benchmarks.cpu_planning page $P

Only prompts that the drafter was not trained on are used; one half of them calibrates, the other
half is benchmarked. PAIRS holds (confidence, outcome) pairs as the option `record_confidences`
writes them; the name of a request, INDEX|TEMPERATURE, says which prompt it is about, counted over
all held-out prompts shuffled with seed 0. Calibrations are judged on prompts that they were not
fitted on: four parts, each predicted by a fit to the other three.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from examples.train_drafter.prompts import is_heldout
from vllm_dspark.artifacts.schema import CalibrationRecord, PositionRecord
from vllm_dspark.artifacts.store import read_calibration, write_record
from vllm_dspark.bench import plots, report
from vllm_dspark.bench.workload import Question, hold_out
from vllm_dspark.planning.calibration import Calibration, fit_scaling, fit_temperatures
from vllm_dspark.planning.quality import quality_by_position
from vllm_dspark.planning.survival import survival

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "benchmarks"
NAME = "cpu-planning"
CLASSES = ("greedy", "sampled")
_PARTS = 4

Rows = Sequence[tuple[str, int, int, Sequence[float]]]  # prompt id, verified, accepted, confidences


def heldout_prompts(path: Path) -> list[dict[str, str]]:
    """Prompts of the file that the packaged drafter was not trained on."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if is_heldout(row["id"])]


def split(path: Path, work: Path) -> None:
    """Write the prompts of the benchmark and those of the calibration."""
    rows = heldout_prompts(path)
    chosen = {q.text for q in hold_out([Question(r["domain"], r["prompt"]) for r in rows])[0]}
    for name, wanted in (("bench", True), ("calibration", False)):
        part = [row for row in rows if (row["prompt"] in chosen) is wanted]
        text = "".join(json.dumps(row) + "\n" for row in part)
        (work / f"{name}-prompts.jsonl").write_text(text)
        print(f"{name}: {len(part)} prompts")


def read_pairs(path: Path, prompts: Path, work: Path) -> dict[str, Rows]:
    """Rows of the calibration prompts, by class of request."""
    order = heldout_prompts(prompts)
    random.Random(0).shuffle(order)
    lines = (work / "calibration-prompts.jsonl").read_text().splitlines()
    allowed = {json.loads(line)["id"] for line in lines}
    found: dict[str, list[Any]] = {name: [] for name in CLASSES}
    for line in path.read_text().splitlines():
        for name, sampled, untouched, _, verified, accepted, row in json.loads(line).get(
            "rows", ()
        ):
            prompt = order[int(name.split("|")[0])]["id"]
            if untouched and prompt in allowed:
                found[CLASSES[sampled]].append((prompt, verified, accepted, row))
    return found


def calibrate(pairs: Path, prompts: Path, work: Path) -> None:
    """Fit each class, judge on prompts that were left out, write the record and its quality."""
    fitted: dict[str, Any] = {}
    quality: dict[str, Any] = {}
    temperatures_only: dict[str, list[float]] = {}
    number = 0
    for name, rows in read_pairs(pairs, prompts, work).items():
        verified, accepted, confidence = _columns(rows)
        fitted[name], fitted[f"{name}_offset"] = fit_scaling(confidence, accepted, verified)
        quality[f"{name}_quality"] = _judge(rows, scaled=True)
        temperatures_only[name] = [item.ece_after for item in _judge(rows, scaled=False)]
        number += len(rows)
        print(f"{name}: {len(rows)} blocks of {len({row[0] for row in rows})} prompts")
    record = CalibrationRecord.from_calibration(
        Calibration(**fitted),
        None,
        dataset="held-out prompts of the demo drafter",
        num_samples=number,
        **quality,
    )
    write_record(work / "calibration.json", record)
    (work / "temperatures-only.json").write_text(json.dumps(temperatures_only))
    for name in CLASSES:
        for item, only in zip(quality[f"{name}_quality"], temperatures_only[name], strict=True):
            print(
                f"{name} {item.position}: n = {item.count}, ECE {item.ece_before:.4f} -> "
                f"{item.ece_after:.4f} (temperatures only {only:.4f})"
            )


def _columns(rows: Rows) -> tuple[Any, Any, Any]:
    _, verified, accepted, confidence = zip(*rows, strict=True)
    return np.array(verified), np.array(accepted), np.array(confidence, dtype=np.float32)


def _judge(rows: Rows, *, scaled: bool) -> tuple[PositionRecord, ...]:
    """Quality before and after calibration; every row predicted by a fit without its prompt."""
    verified, accepted, confidence = _columns(rows)
    names = sorted({row[0] for row in rows})
    random.Random(0).shuffle(names)
    part_of = {name: index % _PARTS for index, name in enumerate(names)}
    part = np.array([part_of[row[0]] for row in rows])
    predicted = np.zeros(confidence.shape)
    for index in range(_PARTS):
        fit, held = part != index, part == index
        data = (confidence[fit], accepted[fit], verified[fit])
        temperatures, offsets = fit_scaling(*data) if scaled else (fit_temperatures(*data), ())
        calibration = Calibration(temperatures, temperatures, offsets)
        predicted[held] = _survival(calibration, confidence[held])
    raw = _survival(Calibration.identity(confidence.shape[1]), confidence)
    before, after = (quality_by_position(s, accepted, verified) for s in (raw, predicted))
    return tuple(PositionRecord.of(b, a) for b, a in zip(before, after, strict=True))


def _survival(calibration: Calibration, confidence: Any) -> Any:
    """[N, K]; the greedy half of the calibration is the one meant."""
    classes = np.zeros(len(confidence), dtype=np.bool_)
    return survival(calibration.apply(np.ascontiguousarray(confidence.T), classes)).T


def write_page(work: Path) -> None:
    """The page, its JSON and its plots, from DIR/bench.json and DIR/calibration.json."""
    found = json.loads((work / "bench.json").read_text())
    record = read_calibration(work / "calibration.json", 7)
    quality = {
        name: [item.model_dump() for item in getattr(record, f"{name}_quality")] for name in CLASSES
    }
    only = json.loads((work / "temperatures-only.json").read_text())
    notes = work / "notes.md"
    found["calibration"] = {
        "parameters": record.model_dump(mode="json", exclude={f"{c}_quality" for c in CLASSES}),
        "positions": quality,
        "ece_with_temperatures_only": only,
    }
    if plots.available():
        plots.draw(found, FOLDER, NAME)
    found["cost_table"] = json.loads((work / "cost-table.json").read_text())
    (FOLDER / f"{NAME}.json").write_text(_compact(found))
    text = page(found, notes.read_text() if notes.exists() else "")
    (FOLDER / f"{NAME}.md").write_text(text)


def _compact(found: Mapping[str, Any]) -> str:
    """JSON with one cell a line."""
    cells = ",\n".join(json.dumps(cell) for cell in found["cells"])
    rest = json.dumps({k: v for k, v in found.items() if k != "cells"}, indent=1)
    return f'{rest[:-2]},\n "cells": [\n{cells}\n]}}\n'


def page(found: Mapping[str, Any], notes: str) -> str:
    """The whole page; notes: what the figures do not say by themselves."""
    machine, settings = found["fingerprint"], found["settings"]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    return f"""# Planning on a CPU

Written by `python -m benchmarks.cpu_planning page`; raw cells, medians and spreads lie beside this
page as JSON. Output tokens per second, medians of {_repeats(found)} interleaved repeats; bold:
the fastest of the row. "ours / best fixed": the best of no speculation and all fixed K, chosen for
each repeat by the other repeats, with a 95 % bootstrap interval.

{report.markdown(*report.header_and_lines(found))}

Geometric means over the loads, ours against one setting for all of them (chosen the same way):

{_overall(found)}

{notes}
![Throughput against interactivity]({NAME}-frontier.svg)

## What ours did

AL: tokens per request and verification step, the target's own included. Window: tokens verified.
Step times are those of planned steps.

{report.markdown(*report.drafts_table(found))}

![Windows over load]({NAME}-windows.svg) ![Predicted and measured]({NAME}-step-time.svg)

## Latency

{report.markdown(*report.latency_table(found))}

## Calibration of the confidences

Survival a_k on prompts that the fit had not seen (four-fold over the prompts); 15 bins of equal
mass. The fit is a temperature and an offset per position; the last column is the ECE with
temperatures alone.

{_calibration(found["calibration"])}

## Conditions

| | |
| --- | --- |
| pair | SmolLM2-135M-Instruct, packaged drafter, bf16, eager, K = 7 for ours |
| machine | {machine["device"]}, {machine["cores"]} cores |
| versions | {versions} |
| a cell | {settings["tokens_per_request"]} output tokens per request in flight |
| other processes | took {_foreign(found):.0%} of the machine's CPU time while cells ran |
| modes | off: stock vLLM (V1 runner, no plugin); off-v2: V2 runner; fixedK: the plugin with \
`"scheduling": false`, since stock vLLM has no DSpark on a CPU; ours: scheduling on |

## Commands

{_COMMANDS}"""


_COMMANDS = """```bash title="not run: a measurement, an hour of a quiet machine"
P="--prompts PROMPTS.jsonl --work DIR"
python -m benchmarks.cpu_planning split $P
python -m benchmarks.cpu_planning calibrate $P --pairs PAIRS.jsonl
python -m benchmarks.cpu_cost_table --out DIR/cost-table.json --seconds 60
vllm-dspark bench --out DIR --workload decode --concurrency 1,2,4,8,16,32 --temperature 0,1 \\
  --modes off,fixed1,fixed2,fixed3,fixed5,fixed7,ours --slices 0.15 --repeats 6 \\
  --time-limit 1440 --tokens 64 --least-tokens 128 --outrank --prompts DIR/bench-prompts.jsonl \\
  --pair '{"engine": {"enforce_eager": true},
    "speculative": {"draft_sample_method": "probabilistic"}, "plugin_options": {
    "cost_table": "DIR/cost-table.json", "calibration": "DIR/calibration.json"}}'
python -m benchmarks.cpu_planning page $P
```
"""


def _repeats(found: Mapping[str, Any]) -> str:
    """Repeats that modes have, which a time limit can make unequal: "3", "2 to 4"."""
    counts = [
        int(figures["tokens_per_s"]["repeats"])
        for row in found["rows"]
        for figures in row["modes"].values()
    ]
    least, most = min(counts), max(counts)
    return str(least) if least == most else f"{least} to {most}"


def _foreign(found: Mapping[str, Any]) -> float:
    """Share of the machine that neither the engine measured nor the idle ones had."""
    cells, cores = found["cells"], found["fingerprint"]["cores"]
    taken = sum(cell["cpu_s"]["foreign"] for cell in cells)
    return float(taken / (cores * sum(cell["seconds"] for cell in cells)))


def _overall(found: Mapping[str, Any]) -> str:
    header = ["workload", "T", "against", "ratio", "95 %", "setting"]
    lines = []
    for entry in found["overall"]:
        for name in ("best_single_fixed", "best_single_fixed_k"):
            ratio = entry[f"ours_over_{name}"]
            if ratio is None:
                continue
            against = "best single K" if name.endswith("_k") else "best single setting (K or off)"
            interval = f"{ratio['low']:.3f} to {ratio['high']:.3f}"
            line = [entry["workload"], f"{entry['temperature']:g}", against]
            line += [f"{ratio['value']:.3f}", interval, ", ".join(sorted(ratio["chosen"]))]
            lines.append(line)
    return report.markdown(header, lines)


def _calibration(quality: Mapping[str, Any]) -> str:
    header = ["requests", "k", "blocks", "base rate", "ECE raw", "ECE", "Brier", "of base rate"]
    header += ["AUC", "ECE, temperatures"]
    lines = []
    for name in CLASSES:
        only = quality["ece_with_temperatures_only"][name]
        for item, bare in zip(quality["positions"][name], only, strict=True):
            figures = [item["base_rate"], item["ece_before"], item["ece_after"]]
            figures += [item["brier_after"], item["brier_of_base_rate"], item["auc"], bare]
            start = [name, str(item["position"]), str(item["count"])]
            lines.append(start + [f"{value:.3f}" for value in figures])
    return report.markdown(header, lines)


def main() -> int:
    """Do one of the three."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("split", "calibrate", "page"))
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--pairs", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.what == "split":
        split(args.prompts, args.work)
    elif args.what == "calibrate":
        calibrate(args.pairs, args.prompts, args.work)
    else:
        write_page(args.work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
