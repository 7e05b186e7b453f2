"""Writes docs/benchmarks/demo-calibration.{md,json} and the packaged calibration of the demo pair.

    vllm-dspark calibrate TARGET --enforce-eager --max-num-seqs 32 --max-model-len 2048 \
        --dtype bfloat16 --kv-cache-memory-bytes 1073741824 --speculative-config SPEC \
        --prompts HELDOUT.jsonl --max-tokens 96 --json greedy-drafts.json
    (the same with "draft_sample_method": "probabilistic" and --temperature 1: sampled-drafts.json)
    python -m benchmarks.demo_calibration greedy-drafts.json sampled-drafts.json

TARGET: `python -m vllm_dspark.demo.target`; SPEC: the packaged drafter with K = 7; HELDOUT.jsonl:
prompts that the drafter was not trained on (examples/train_drafter/prompts.py, `is_heldout`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from vllm_dspark.artifacts.schema import CalibrationRecord
from vllm_dspark.artifacts.store import write_atomic, write_record

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/benchmarks/demo-calibration.md"
PACKAGED = ROOT / "vllm_dspark/demo/calibration.json"
GOAL = 0.03
PROMPTS = "public prompts that the drafter was not trained on"
# Paths of the machine that measured are nobody's business.
DROPPED = ("model", "drafter", "artifacts", "source", "figures", "calibration")


def main(argv: list[str] | None = None) -> None:
    """Write all three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("greedy_drafts", type=Path)
    parser.add_argument("sampled_drafts", type=Path)
    paths = parser.parse_args(argv)
    reports = {
        "greedy drafts": json.loads(paths.greedy_drafts.read_text()),
        "sampled drafts": json.loads(paths.sampled_drafts.read_text()),
    }
    record = CalibrationRecord.model_validate(reports["greedy drafts"]["calibration"])
    write_record(PACKAGED, record.model_copy(update={"dataset": PROMPTS}))
    kept = {
        name: {key: value for key, value in report.items() if key not in DROPPED}
        for name, report in reports.items()
    }
    write_atomic(PAGE.with_suffix(".json"), json.dumps(kept, indent=1) + "\n")
    write_atomic(PAGE, page(reports))


def page(reports: dict[str, dict[str, Any]]) -> str:
    """The page with its tables."""
    greedy_drafts, sampled_drafts = reports["greedy drafts"], reports["sampled drafts"]
    before = greedy_drafts["classes"]["sampled"]["positions"][0]
    said = before["base_rate"] + before["ece_before"]
    sections = [
        ("T = 0", greedy_drafts, "greedy"),
        ("T = 1, greedy drafts (vLLM's default)", greedy_drafts, "sampled"),
        ("T = 1, sampled drafts", sampled_drafts, "sampled"),
    ]
    return (
        f"""# Calibration of the demo pair

SmolLM2-135M-Instruct with the packaged drafter on a 2-core Xeon (CPU build, bf16), K = 7,
{greedy_drafts["prompts"]} {PROMPTS}, 96 tokens each. One half of the prompts fits, the other half
judges: all figures are of the judging half. Made with `vllm-dspark calibrate` and
`benchmarks/demo_calibration.py` (its head has the commands); the fit for vLLM's default is packaged
as `vllm_dspark/demo/calibration.json`, and `vllm-dspark demo` uses it.

ECE: 15 bins of equal mass, of the survival (product of confidences up to the position). Floor: what
a perfect forecast would show with as many independent rows; rows of one text depend on each other,
so the true one is higher. Base: Brier score of always forecasting the acceptance rate. Goal:
ECE <= {GOAL} at every position, Brier below base.

"""
        + "\n".join(section(*item) for item in sections)
        + f"""
## Why temperatures alone are not enough

The head was trained to say 1 - TV, the acceptance of a draft that is *sampled* from the drafter.
vLLM drafts the argmax by default, which a request at T = 1 accepts with p(argmax): at position 1
the head says about {said:.0%} and {before["base_rate"]:.0%} are accepted. That is a bias, which no
temperature mends (it cannot move a confidence across 1/2), so `calibrate` fits an offset per
position too where STS alone clearly falls short (`--fit sts` keeps it from doing so); the column
"STS alone" shows what it would have been. A calibration therefore belongs to a rule of acceptance,
which is part of its fingerprint (`acceptance_rule`).
"""
    )


def section(title: str, report: dict[str, Any], name: str) -> str:
    """One table and its verdict."""
    fitted = report["classes"][name]
    lines = [
        f"## {title}",
        "",
        f"Method {fitted['method']}, fitted on {fitted['rows_fit']} rows, judged on "
        f"{fitted['rows_held_out']}.",
        "",
        "| position | rate | ECE before | STS alone | after | floor | Brier before | after | base "
        "| AUC |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in fitted["positions"]:
        sts = "" if row["ece_sts"] is None else f"{row['ece_sts']:.3f}"
        lines.append(
            f"| {row['position']} | {row['base_rate']:.0%} | {row['ece_before']:.3f} | {sts} | "
            f"{row['ece_after']:.3f} | {row['ece_floor']:.3f} | {row['brier_before']:.3f} | "
            f"{row['brier_after']:.3f} | {row['brier_of_base_rate']:.3f} | {row['auc']:.3f} |"
        )
    worst = max(fitted["positions"], key=lambda row: row["ece_after"])
    met = "met" if worst["ece_after"] <= GOAL else "**missed**"
    base = all(row["brier_after"] < row["brier_of_base_rate"] for row in fitted["positions"])
    verdict = "below base everywhere" if base else "**not** below base everywhere"
    lines += [
        "",
        f"Goal for the ECE {met}: at worst {worst['ece_after']:.3f} (position "
        f"{worst['position']}). Brier {verdict}.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
