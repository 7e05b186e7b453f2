"""Train the drafter on generated text, with the target frozen.

    python -m examples.train_drafter.train --target T --data data.npz --state state.pt \
        --seconds 500 --total-seconds 800

The learning rate follows the share of the run that is done: by steps with `--steps`, else by
training seconds. Killed or stopped early, the same command resumes from the state file.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.train_drafter.config import DrafterConfig, TrainConfig, recipe_hash
from examples.train_drafter.data import Batch, BatchSampler
from examples.train_drafter.export import export
from examples.train_drafter.generate import Dataset
from examples.train_drafter.losses import Losses, combine, slot_losses
from examples.train_drafter.model import DSparkDrafter
from examples.train_drafter.target import FrozenTarget

LOG_EVERY = 100
SlotLosses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


def learning_rate_factor(progress: float, config: TrainConfig) -> float:
    """Linear warm-up, a plateau, then a cosine to 1 % of the peak; progress in 0..1."""
    if progress < config.warmup:
        return max(progress / config.warmup, 0.01)
    if progress < config.decay_from:
        return 1.0
    done = min((progress - config.decay_from) / (1 - config.decay_from), 1.0)
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * done))


def make_optimizers(model: DSparkDrafter, config: TrainConfig) -> list[torch.optim.Optimizer]:
    """AdamW for everything, or Muon for the matrices and AdamW for the rest."""
    matrices, rest = [], []
    for name, parameter in model.named_parameters():
        is_matrix = parameter.ndim == 2 and name.startswith(("layers.", "fc."))
        (matrices if is_matrix else rest).append(parameter)
    if config.optimizer == "adamw":
        matrices, rest = [], matrices + rest
    elif config.optimizer != "muon":
        raise ValueError(f"optimizer {config.optimizer!r} is not adamw or muon")
    decay = config.weight_decay
    made: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(
            rest,
            lr=config.lr,
            betas=config.betas,
            weight_decay=decay,
            fused=rest[0].is_cuda,
        )
    ]
    if matrices:
        made.append(
            torch.optim.Muon(
                matrices,
                lr=config.lr,
                weight_decay=decay,
                momentum=0.95,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return made


def batch_losses(
    model: DSparkDrafter, target: FrozenTarget, batch: Batch, config: TrainConfig, fused: SlotLosses
) -> Losses:
    """Target forward, drafter forward, losses of one batch."""
    size = model.config.block_size
    final, features = target.forward(batch.tokens, collect=model.config.target_layer_ids)
    before, labels, valid = batch.slots(size)
    hidden = model(batch.tokens, features, batch.anchors, target.embed).flatten(0, 2)
    markov = model.markov_embed(batch.tokens.gather(1, before), hidden.dtype).flatten(0, 1)
    index = before[:, :, None].expand(-1, -1, final.shape[-1])
    with torch.no_grad():
        wanted = target.logits(final.gather(1, index).flatten(0, 1))
    draft = model.logits(hidden, markov, target.embed)
    ce, tv = fused(draft, wanted, labels.flatten())
    confidence = model.confidence_head(hidden, markov)
    shape = (-1, size)
    return combine(
        ce.view(shape), tv.view(shape), confidence.view(shape), valid.view(shape), config
    )


class Trainer:
    """Model, average, optimisers and progress; everything that a resumed run needs."""

    def __init__(
        self,
        target: FrozenTarget,
        data: Dataset,
        drafter: DrafterConfig,
        config: TrainConfig,
        fused: SlotLosses = slot_losses,
    ) -> None:
        torch.manual_seed(config.seed)
        self.target, self.config, self.fused = target, config, fused
        self.sampler = BatchSampler(data, config.buckets, target.device, config.seed)
        self.model = DSparkDrafter(drafter)
        # The head is frozen and expects the target's last norm: start from its weight, halved,
        # because a random direction at full size would start with confident nonsense.
        self.model.norm.weight.data.copy_(0.5 * target.norm.float())
        self.model.to(target.device)
        self._calibrate()
        self.average = copy.deepcopy(self.model).requires_grad_(False)
        self.optimizers = make_optimizers(self.model, config)
        self.step, self.elapsed = 0, 0.0
        self.history: list[dict[str, Any]] = []

    def _calibrate(self) -> None:
        batch = self.sampler.next()
        ids = self.model.config.target_layer_ids
        features = self.target.forward(batch.tokens, collect=ids)[1]
        columns = torch.arange(batch.tokens.shape[1], device=self.target.device)
        first = batch.anchors.min(dim=1, keepdim=True).values
        response = (columns >= first) & (columns < batch.ends[:, None])
        self.model.calibrate_features(features, response)

    def train_step(self, progress: float) -> Losses:
        """One update; returns its losses (on the device, unsynchronised)."""
        config = self.config
        factor = learning_rate_factor(progress, config)
        losses = batch_losses(self.model, self.target, self.sampler.next(), config, self.fused)
        losses.total.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), config.grad_clip)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.lr * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step += 1
        # Short memory at first, so that the average does not remember the random start.
        keep = min(config.ema_decay, (1 + self.step) / (10 + self.step))
        with torch.no_grad():
            averaged, current = list(self.average.parameters()), list(self.model.parameters())
            torch._foreach_lerp_(averaged, current, 1 - keep)
        return losses

    def run(
        self,
        seconds: float,
        progress_of: Callable[[int, float], float],
        on_report: Callable[[], None] = lambda: None,
        log_every: int = LOG_EVERY,
    ) -> None:
        """Train until `progress_of(step, elapsed)` is 1 or `seconds` are used."""
        started, before = time.monotonic(), self.elapsed
        while (progress := progress_of(self.step, self.elapsed)) < 1:
            losses = self.train_step(progress)
            if self.step % log_every == 0:
                self._log(losses, progress)
                on_report()
            elif self.target.device.type == "cuda" and self.step % 10 == 0:
                torch.cuda.synchronize()  # keeps the clock below honest: the queue is async
            used = time.monotonic() - started
            self.elapsed = before + used
            if used > seconds:
                break

    def _log(self, losses: Losses, progress: float) -> None:
        row = {
            "step": self.step,
            "seconds": round(self.elapsed, 1),
            "lr": self.config.lr * learning_rate_factor(progress, self.config),
            **{
                n: round(float(getattr(losses, n).detach()), 4)
                for n in (
                    "total",
                    "cross_entropy",
                    "total_variation",
                    "confidence",
                    "expected_length",
                )
            },
            "acceptance": [round(x, 4) for x in losses.acceptance.tolist()],
        }
        self.history.append(row)
        print(json.dumps(row), flush=True)

    @torch.no_grad()
    def validate(self, sampler: BatchSampler, batches: int) -> dict[str, Any]:
        """Mean losses of the averaged weights over validation batches."""
        rows = [
            batch_losses(self.average, self.target, sampler.next(), self.config, self.fused)
            for _ in range(batches)
        ]
        names = ("total", "cross_entropy", "total_variation", "confidence", "expected_length")
        result: dict[str, Any] = {
            n: float(torch.stack([getattr(r, n) for r in rows]).mean()) for n in names
        }
        result["acceptance"] = torch.stack([r.acceptance for r in rows]).mean(0).tolist()
        return result

    def save(self, path: Path) -> None:
        """Atomic: a run killed while saving keeps the previous state."""
        state = {
            "drafter_config": self.model.config,
            "train_config": self.config,
            "recipe": recipe_hash(),
            "model": self.model.state_dict(),
            "ema": self.average.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "sampler": self.sampler.rng.bit_generator.state,
            "step": self.step,
            "elapsed": self.elapsed,
            "history": self.history,
        }
        temporary = path.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(path)

    def load(self, path: Path) -> None:
        """Continue from a state file of the same shape."""
        state = torch.load(path, map_location=self.target.device, weights_only=False)
        if state["drafter_config"] != self.model.config:
            raise ValueError(f"{path} holds another drafter shape: {state['drafter_config']}")
        self.model.load_state_dict(state["model"])
        self.average.load_state_dict(state["ema"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.sampler.rng.bit_generator.state = state["sampler"]
        self.step, self.elapsed = state["step"], state["elapsed"]
        self.history = state["history"]


def compiled_slot_losses() -> SlotLosses:
    """The loss kernel, fused by torch.compile; the largest saving of the whole recipe."""
    return torch.compile(slot_losses, dynamic=False)


def override(config: TrainConfig, settings: list[str]) -> TrainConfig:
    """Apply `name=value` strings to a config."""
    kinds = {f.name: type(getattr(config, f.name)) for f in dataclasses.fields(config)}
    changes = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if kinds.get(name) not in (int, float, str):
            raise ValueError(f"{name!r} is not a plain setting of TrainConfig")
        changes[name] = kinds[name](value)
    return dataclasses.replace(config, **changes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--state", type=Path, required=True)
    parser.add_argument("--export", type=Path, help="checkpoint folder, written every report")
    parser.add_argument("--log", type=Path, help="JSON log, written every report")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--total-seconds", type=float, help="length of the whole schedule")
    parser.add_argument("--steps", type=int, help="length of the whole schedule, in steps")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    if (args.steps is None) == (args.total_seconds is None):
        parser.error("give --steps or --total-seconds")
    target = FrozenTarget.load(args.target, args.device)
    config = override(TrainConfig(), args.set)
    fused = slot_losses if args.no_compile else compiled_slot_losses()
    data = Dataset.load(args.data)
    trainer = Trainer(target, data, DrafterConfig(), config, fused)
    if args.state.exists():
        trainer.load(args.state)
        print(f"resumed at step {trainer.step}, {trainer.elapsed:.0f} s", flush=True)

    def progress_of(step: int, elapsed: float) -> float:
        return step / args.steps if args.steps else elapsed / args.total_seconds

    saved_at = time.monotonic()

    def on_report() -> None:
        nonlocal saved_at
        if args.log:
            args.log.write_text(json.dumps(trainer.history))
        if time.monotonic() - saved_at > 100:
            saved_at = time.monotonic()
            trainer.save(args.state)
            if args.export:
                export(trainer.average, args.export)

    trainer.run(args.seconds, progress_of, on_report)
    trainer.save(args.state)
    if args.export:
        export(trainer.average, args.export)
    if args.log:
        args.log.write_text(json.dumps(trainer.history))
    held = BatchSampler(data, config.buckets, target.device, seed=7, validation=True)
    print("validation", json.dumps(trainer.validate(held, 40)), flush=True)


if __name__ == "__main__":
    main()
