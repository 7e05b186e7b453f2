"""Writes docs/benchmarks/demo-calibration.{md,json} and the packaged calibration of the demo pair.

    vllm-dspark calibrate TARGET --enforce-eager --max-num-seqs 32 --max-model-len 2048 \
        --dtype bfloat16 --kv-cache-memory-bytes 1073741824 --speculative-config SPEC \
        --prompts HELDOUT.jsonl --max-tokens 96 --json greedy-drafts.json
        [or a recording of such a run: --recording PAIRS.jsonl instead of --prompts]
    (the same with "draft_sample_method": "probabilistic" and --temperature 1: sampled-drafts.json)
    python -m benchmarks.demo_calibration greedy-drafts.json sampled-drafts.json PAIRS.jsonl

TARGET: `python -m vllm_dspark.demo.target`; SPEC: the packaged drafter with K = 7; HELDOUT.jsonl:
prompts that the drafter was not trained on (examples/train_drafter/prompts.py, `is_heldout`).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

from vllm_dspark.artifacts.pairs import read_pairs
from vllm_dspark.artifacts.schema import CalibrationRecord
from vllm_dspark.artifacts.store import write_atomic, write_record
from vllm_dspark.cli.calibrate import pairs_by_class
from vllm_dspark.planning.reliability import fit_class, held_out_prompts

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs/benchmarks/demo-calibration.md"
PACKAGED = ROOT / "vllm_dspark/demo/calibration.json"
GOAL = 0.03
SPLITS = 20
PROMPTS = "public prompts that the drafter was not trained on"
# Paths of the machine that measured are nobody's business.
DROPPED = ("model", "drafter", "artifacts", "source", "figures", "calibration")


def main(argv: list[str] | None = None) -> None:
    """Write all three files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("greedy_drafts", type=Path)
    parser.add_argument("sampled_drafts", type=Path)
    parser.add_argument("recording", type=Path, help="pairs of the run with greedy drafts")
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
    write_atomic(PAGE, page(reports) + splits(paths.recording))


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
{greedy_drafts["prompts"]} {PROMPTS} ({sampled_drafts["prompts"]} for
the last table), 96 tokens each. One half of the prompts fits, the other half judges: all figures
are of the judging half. Made with `vllm-dspark calibrate` and
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
"STS alone" shows what it would have been. With sampled drafts the raw head is right, and more of
them are accepted ({sampled_drafts["classes"]["sampled"]["positions"][0]["base_rate"]:.0%} at
position 1). A calibration therefore belongs to a rule of acceptance, which is part of its
fingerprint (`acceptance_rule`).
"""
    )


def splits(recording: Path) -> str:
    """How much of a held-out ECE is the luck of one split."""
    _, found = read_pairs(recording)
    names = {pair.request_id: index for index, pair in enumerate(found)}
    index = {name: number for number, name in enumerate(names)}
    classes, _ = pairs_by_class([(index[pair.request_id], pair) for pair in found])
    lines = [
        "",
        "## One split and many",
        "",
        f"ECE after calibration (with offsets, greedy drafts) over {SPLITS} random halves of the",
        "prompts: mean, and the largest of all.",
        "",
        "| position | T = 0 mean | largest | T = 1 mean | largest |",
        "| --- | --- | --- | --- | --- |",
    ]
    errors = {}
    for name, pairs in classes.items():
        errors[name] = np.array(
            [
                [
                    position.after.ece
                    for position in fit_class(
                        pairs, held_out_prompts(len(index), 0.5, seed), "affine"
                    ).positions
                ]
                for seed in range(SPLITS)
            ]
        )
    for k in range(next(iter(errors.values())).shape[1]):
        cells = [
            f"{value:.3f}"
            for name in ("greedy", "sampled")
            for value in (errors[name][:, k].mean(), errors[name][:, k].max())
        ]
        lines.append(f"| {k + 1} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


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
