"""Accepted length and confidence quality of a drafter on held-out prompts.

    python -m examples.train_drafter.evaluate --target T --drafter FOLDER \
        --prompts heldout.npz --out eval.json [--per-domain 20]

Speculative decoding never changes the target's text, so the text is generated first, without any
drafting, and the drafter is then judged along it, block after block:

T = 0   the drafter runs free (each slot's Markov bias comes from its own previous argmax); drafts
        are accepted while they equal the target's greedy text. One more token comes from the
        target, and the next block starts at that token.
T = 1   the target's text x is a sample of p_t. Rejection sampling emits x by an accepted draft
        with probability min(p_d, p_t)(x), so given that x was emitted, the draft was accepted
        with probability min(1, p_d(x) / p_t(x)). Drawing that coin along the text has exactly the
        joint law of (text, accepted lengths) of speculative sampling with probabilistic drafts.

AL is emitted tokens per block, target-generated token included. The AUC of slot k compares the
confidence with the outcome over the blocks in which all slots before k were accepted. At T = 1 the
outcome is a coin of probability 1 - TV(p_d, p_t), so no score can reach an AUC of 1: `auc_ceiling`
is what that exact probability itself, as a score, would get on the same coins.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from examples.train_drafter.config import GenerateConfig
from examples.train_drafter.export import load_checkpoint
from examples.train_drafter.generate import Dataset, Request, generate
from examples.train_drafter.model import DSparkDrafter
from examples.train_drafter.prompts import DOMAINS, PromptSet
from examples.train_drafter.target import FrozenTarget

MAX_NEW = 256
# Block slots scored at once: their logits are the memory peak ([slots, V]).
SLOTS_AT_ONCE = {"cuda": 65536, "cpu": 2048}


@dataclass
class Walk:
    """What happened along one sequence: emitted tokens by block, and every judged slot."""

    emitted: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)  # 0-based slot of each judged draft
    confidence: list[float] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    accepted: list[bool] = field(default_factory=list)


@dataclass
class Judged:
    """Every slot of every possible block of one sequence, [places, K] arrays.

    Row i is the block anchored at the i-th response token. Slots past the end of the text count
    as rejected. `exact` is 1 - TV(p_d, p_t) at T = 1 and zero at T = 0.
    """

    accepted: np.ndarray
    confidence: np.ndarray
    exact: np.ndarray


def _mean(values: np.ndarray) -> float | None:
    return round(float(values.mean()), 4) if len(values) else None


def area_under_curve(score: np.ndarray, label: np.ndarray) -> float | None:
    """ROC AUC by mean ranks (ties count half); None when one class is empty."""
    positives = int(label.sum())
    if positives in (0, len(label)):
        return None
    _, inverse, counts = np.unique(score, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    total = ranks[inverse][label].sum() - positives * (positives + 1) / 2
    return round(float(total / (positives * (len(label) - positives))), 4)


@torch.no_grad()
def judge(
    model: DSparkDrafter,
    target: FrozenTarget,
    tokens: Tensor,
    first: int,
    greedy: bool,
    generator: torch.Generator,
) -> Judged:
    """Draft a block at every position of one sequence: tokens [T], first response token `first`."""
    size, end = model.config.block_size, len(tokens)
    row = tokens[None]
    final, features = target.forward(row, collect=model.config.target_layer_ids)
    parts: list[Tensor] = []
    step = max(1, SLOTS_AT_ONCE[tokens.device.type] // size)
    for start in range(first, end - 1, step):
        anchors = torch.arange(start, min(start + step, end - 1), device=tokens.device)
        hidden = model(row, features, anchors[None], target.embed)[0]  # [n, K, H]
        previous = tokens[anchors]
        alive = torch.ones_like(anchors, dtype=torch.bool)
        slots = []
        for k in range(size):
            at = anchors + 1 + k
            label = tokens[at.clamp_max(end - 1)]
            markov = model.markov_embed(previous, hidden.dtype)
            logits = model.logits(hidden[:, k], markov, target.embed)
            confidence = model.confidence_head(hidden[:, k], markov).sigmoid()
            exact = torch.zeros_like(confidence)
            if greedy:
                previous = logits.argmax(-1)
                coin = previous == label
            else:
                wanted = target.logits(final[0, (at - 1).clamp_max(end - 1)])
                ratio, exact = _acceptance(logits, wanted, label)
                luck = torch.rand(len(label), generator=generator).to(ratio.device)
                coin = luck < ratio
                previous = label  # a slot is looked at only if all drafts before it were the text
            alive = alive & coin & (at < end)
            slots.append(torch.stack([alive.float(), confidence.float(), exact.float()]))
        parts.append(torch.stack(slots, dim=-1))  # [3, n, K]
    accepted, scores, exacts = torch.cat(parts, dim=1).cpu().numpy()
    return Judged(accepted > 0, scores, exacts)


def _acceptance(draft: Tensor, wanted: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """p_d(x) / p_t(x) and 1 - TV per row: draft, wanted [n, V] logits, labels [n] -> [n], [n]."""
    p_draft, p_wanted = draft.float().softmax(-1), wanted.float().softmax(-1)
    ratio = p_draft.gather(1, labels[:, None]) / p_wanted.gather(1, labels[:, None])
    return ratio[:, 0], torch.minimum(p_draft, p_wanted).sum(-1)


def walk(judged: Judged) -> Walk:
    """Follow the blocks that speculative decoding would start, first to last."""
    accepted = judged.accepted
    places, size = accepted.shape
    result, at = Walk(), 0
    while at < places:
        room = places - at  # tokens left in the text after this anchor
        count = min(int(accepted[at].sum()), room)
        for k in range(min(count + 1, size, room)):
            result.slots.append(k)
            result.confidence.append(float(judged.confidence[at, k]))
            result.exact.append(float(judged.exact[at, k]))
            result.accepted.append(k < count)
        emitted = min(count + 1, room)
        result.emitted.append(emitted)
        at += emitted
    return result


def summarise(walks: list[Walk], domains: np.ndarray, size: int) -> dict[str, Any]:
    """AL by domain with its standard error over prompts (bootstrap), macro AL, AUC by slot."""
    rng = np.random.default_rng(0)
    tokens = np.asarray([sum(w.emitted) for w in walks])
    blocks = np.asarray([len(w.emitted) for w in walks])
    by_domain: dict[str, Any] = {}
    for index, name in enumerate(DOMAINS):
        rows = np.flatnonzero((domains == index) & (blocks > 0))
        if not len(rows):
            continue
        draws = rng.choice(rows, (1000, len(rows)))
        spread = (tokens[draws].sum(1) / blocks[draws].sum(1)).std()
        by_domain[name] = {
            "al": round(float(tokens[rows].sum() / blocks[rows].sum()), 4),
            "stderr": round(float(spread), 4),
            "prompts": len(rows),
            "tokens": int(tokens[rows].sum()),
            "blocks": int(blocks[rows].sum()),
        }
    slots = np.concatenate([np.asarray(w.slots, int) for w in walks])
    confidence = np.concatenate([np.asarray(w.confidence) for w in walks])
    accepted = np.concatenate([np.asarray(w.accepted, bool) for w in walks])
    exact = np.concatenate([np.asarray(w.exact) for w in walks])
    by_slot: dict[str, list[float | None]] = {
        "judged": [],
        "acceptance": [],
        "mean_confidence": [],
        "auc": [],
        "auc_ceiling": [],
    }
    for k in range(size):
        chosen = slots == k
        by_slot["judged"].append(int(chosen.sum()))
        by_slot["acceptance"].append(_mean(accepted[chosen]))
        by_slot["mean_confidence"].append(_mean(confidence[chosen]))
        by_slot["auc"].append(area_under_curve(confidence[chosen], accepted[chosen]))
        by_slot["auc_ceiling"].append(area_under_curve(exact[chosen], accepted[chosen]))
    if not exact.any():
        del by_slot["auc_ceiling"]
    macro = float(np.mean([d["al"] for d in by_domain.values()]))
    return {"macro_al": round(macro, 4), "domains": by_domain, **by_slot}


def choose(domains: np.ndarray, per_domain: int | None) -> list[int]:
    """Indices into `domains`: all, or `per_domain` of each domain, evenly spaced.

    Not the first ones: finished text lies in the order of finishing, short answers first.
    """
    chosen: list[int] = []
    for index in range(len(DOMAINS)):
        rows = np.flatnonzero(domains == index)
        count = min(len(rows), per_domain or len(rows))
        chosen += rows[np.linspace(0, len(rows) - 1, count).astype(int)].tolist()
    return sorted(chosen)


def make_text(
    target: FrozenTarget, prompts: PromptSet, chosen: list[int], temperature: float, slots: int
) -> Dataset:
    """The target's own continuations, without drafting."""
    lengths = np.diff(prompts.offsets)
    requests = [Request(i, temperature) for i in sorted(chosen, key=lambda i: lengths[i])]
    config = GenerateConfig(slots=slots, max_new=MAX_NEW, seed=7)
    return generate(target, prompts, requests, config)


def evaluate_text(
    model: DSparkDrafter,
    target: FrozenTarget,
    data: Dataset,
    greedy: bool,
    per_domain: int | None = None,
) -> dict[str, Any]:
    """Judge a drafter along finished text, all or `per_domain` rows of each domain."""
    generator = torch.Generator().manual_seed(11)
    walks, chosen = [], choose(data.domains, per_domain)
    for i in chosen:
        row = data.tokens[data.offsets[i] : data.offsets[i + 1]].astype(np.int64)
        tokens = torch.from_numpy(row).to(target.device)
        first = int(data.prompt_lengths[i])
        if len(row) - first < 2:
            walks.append(Walk())
            continue
        walks.append(walk(judge(model, target, tokens, first, greedy, generator)))
    return summarise(walks, data.domains[chosen], model.config.block_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafter", type=Path, required=True, help="checkpoint folder")
    parser.add_argument("--prompts", type=Path, required=True, help="heldout.npz of prompts.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--text", type=Path, help="keep or reuse generated text: PREFIX-T.npz")
    parser.add_argument("--per-domain", type=int, help="prompts per domain (default: all)")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    target = FrozenTarget.load(args.target, args.device)
    model = load_checkpoint(args.drafter, args.device)
    prompts = PromptSet.load(args.prompts)
    chosen = choose(prompts.domains, args.per_domain)
    slots = 512 if args.device == "cuda" else 32
    result: dict[str, Any] = {"max_new_tokens": MAX_NEW, "block_size": model.config.block_size}
    for temperature in (0.0, 1.0):
        started = time.monotonic()
        kept = args.text.with_name(f"{args.text.name}-{temperature:.0f}.npz") if args.text else None
        if kept and kept.exists():
            data = Dataset.load(kept)
        else:
            data = make_text(target, prompts, chosen, temperature, slots)
            if kept:
                data.save(kept)
        middle = time.monotonic()
        summary = evaluate_text(model, target, data, temperature == 0, args.per_domain)
        result[f"T={temperature:.0f}"] = summary
        print(
            f"T={temperature:.0f}: text {middle - started:.0f} s, "
            f"judged in {time.monotonic() - middle:.0f} s",
            flush=True,
        )
        print(json.dumps(summary, indent=1), flush=True)
    args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
