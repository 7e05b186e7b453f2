"""Compare a few settings on short runs and write the best one's overrides.

    python -m examples.train_drafter.sweep --target T --data data.npz --out best.json \
        --steps 250 --try "optimizer=adamw lr=1e-3" --try "optimizer=muon lr=2e-3"
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch

from examples.train_drafter.config import DrafterConfig, TrainConfig
from examples.train_drafter.data import BatchSampler
from examples.train_drafter.generate import Dataset
from examples.train_drafter.target import FrozenTarget
from examples.train_drafter.train import Trainer, compiled_slot_losses, override


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=250)
    parser.add_argument("--try", dest="tries", action="append", required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    target, data = FrozenTarget.load(args.target, args.device), Dataset.load(args.data)
    fused = compiled_slot_losses()
    results = []
    for settings in args.tries:
        config = override(TrainConfig(), [*settings.split(), "warmup=0.1"])
        trainer = Trainer(target, data, DrafterConfig(), config, fused)
        started = time.monotonic()
        trainer.run(float("inf"), lambda step, _: step / args.steps)
        held = BatchSampler(data, config.buckets, target.device, seed=7, validation=True)
        score = trainer.validate(held, 20)
        seconds = round(time.monotonic() - started, 1)
        results.append({"settings": settings, "seconds": seconds, **score})
        print(json.dumps(results[-1]), flush=True)
    best = max(results, key=lambda r: r["expected_length"])
    args.out.write_text(json.dumps({"best": best["settings"], "results": results}))
    print("best:", best["settings"])


if __name__ == "__main__":
    main()
