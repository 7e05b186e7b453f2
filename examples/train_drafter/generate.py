"""On-policy text: decode many prompts at once with the target, on one GPU, in plain torch.

    python -m examples.train_drafter.generate --target T --prompts train.npz --out data.npz \
        --seconds 200

A fixed number of slots each hold one sequence. One decode step for all slots is captured in a
CUDA graph; every `SYNC_EVERY` steps the host takes finished sequences out and prefills new prompts
into their slots (only keys and values: a prompt's last token goes through the decode step). The
output file holds what was finished when the time or the prompts ran out.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from examples.train_drafter.config import GenerateConfig
from examples.train_drafter.prompts import DOMAINS, PromptSet
from examples.train_drafter.target import FrozenTarget

# Decode steps between two looks at the finished slots: a look costs a host sync and a prefill.
SYNC_EVERY = 24
# Requests are sorted by prompt length within such windows, so one prefill call pads little.
SORT_WINDOW = 8192
PREFILL_TOKENS = 65536


@dataclass(frozen=True)
class Request:
    """One sample to draw: which prompt, how warm."""

    prompt: int
    temperature: float


@dataclass
class Dataset:
    """Finished sequences: prompt and response in one row of `tokens`."""

    tokens: np.ndarray  # uint16 [total]
    offsets: np.ndarray  # int64 [n + 1]
    prompt_lengths: np.ndarray  # int32 [n]
    temperatures: np.ndarray  # float32 [n]
    domains: np.ndarray  # uint8 [n]
    derived: np.ndarray  # bool [n], whether the prompt was a derived one

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    def save(self, path: Path) -> None:
        np.savez(path, **self.__dict__)

    @classmethod
    def load(cls, path: Path) -> Dataset:
        with np.load(path) as data:
            return cls(**{name: data[name] for name in data.files})

    def counts(self) -> dict[str, int]:
        """Response tokens per "domain/origin/temperature"."""
        lengths = np.diff(self.offsets) - self.prompt_lengths
        total: Counter[str] = Counter()
        for domain, derived, warm, count in zip(
            self.domains, self.derived, self.temperatures, lengths, strict=True
        ):
            origin = "derived" if derived else "public"
            total[f"{DOMAINS[domain]}/{origin}/T={warm:.1f}"] += int(count)
        return dict(sorted(total.items()))


def plan_requests(prompts: PromptSet, config: GenerateConfig) -> list[Request]:
    """Every sample to draw, shuffled, then sorted by prompt length inside windows."""
    rng = np.random.default_rng(config.seed)
    requests = []
    for index, source in enumerate(prompts.sources):
        if source == "derived":
            warm = rng.choice(config.temperatures, p=config.derived_odds)
            requests.append(Request(index, float(warm)))
            continue
        for warm, count in zip(config.temperatures, config.public_samples, strict=True):
            requests += [Request(index, warm)] * count
    order = rng.permutation(len(requests))
    lengths = np.diff(prompts.offsets)
    planned: list[Request] = []
    for start in range(0, len(order), SORT_WINDOW):
        window = [requests[i] for i in order[start : start + SORT_WINDOW]]
        planned += sorted(window, key=lambda r: lengths[r.prompt])
    return planned


def sample(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Gumbel-max per row: logits [B, V], temperatures [B] (0 means argmax) -> tokens [B]."""
    scores = logits.float()
    warm = temperatures > 0
    # -log(exponential) is Gumbel noise; the clamp keeps a drawn 0 from becoming infinite.
    noise = torch.empty_like(scores).exponential_().clamp_min_(1e-20).log_().neg_()
    noise = torch.where(warm[:, None], noise, 0.0)
    scale = torch.where(warm, temperatures, 1.0)
    return (scores / scale[:, None] + noise).argmax(-1)


class SlotDecoder:
    """`slots` sequences decoded in lockstep, each at its own position."""

    def __init__(self, target: FrozenTarget, slots: int, max_length: int, max_new: int) -> None:
        device = target.device
        self.target, self.max_new, self.max_length = target, max_new, max_length
        self.cache = target.new_cache(slots, max_length)
        self.token = torch.zeros(slots, dtype=torch.long, device=device)
        self.position = torch.zeros(slots, dtype=torch.long, device=device)
        self.limit = torch.zeros(slots, dtype=torch.long, device=device)
        self.length = torch.zeros(slots, dtype=torch.long, device=device)
        self.warm = torch.zeros(slots, device=device)
        self.active = torch.zeros(slots, dtype=torch.bool, device=device)
        # One column more than any sequence has: idle slots write there.
        self.text = torch.zeros(slots, max_length + 1, dtype=torch.int32, device=device)
        self._rows = torch.arange(slots, device=device)

    def step(self) -> None:
        """Decode one token in every active slot; all state stays on the device."""
        logits = self.target.decode(self.token, self.position, self.cache)
        drawn = sample(logits, self.warm)
        # An idle slot sits at position 0, where attention is cheapest.
        at = torch.where(self.active, self.position + 1, 0)
        self.text[self._rows, torch.where(self.active, at, self.max_length)] = drawn.int()
        done = (drawn == self.target.shape.eos_token_id) | (at + 1 >= self.limit)
        self.length.copy_(torch.where(self.active & done, at + 1, self.length))
        self.active.logical_and_(~done)
        self.token.copy_(torch.where(self.active, drawn, 0))
        self.position.copy_(torch.where(self.active, at, 0))

    def runner(self) -> Callable[[], None]:
        """`step`, as a CUDA graph where there is one to be had."""
        if not self.token.is_cuda:
            return self.step
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # warm-up off the capture stream, as CUDA graphs ask
            for _ in range(2):
                self.step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        return graph.replay

    def admit(self, slots: list[int], rows: list[np.ndarray], temperatures: list[float]) -> None:
        """Prefill prompts into free slots; call with rows of similar length."""
        step = max(1, PREFILL_TOKENS // max(len(r) for r in rows))
        for start in range(0, len(slots), step):
            self._admit(
                slots[start : start + step],
                rows[start : start + step],
                temperatures[start : start + step],
            )

    def _admit(self, slots: list[int], rows: list[np.ndarray], temperatures: list[float]) -> None:
        device = self.token.device
        longest = max(len(r) for r in rows)
        # Right padding: causal attention never looks at it, and decoding overwrites it.
        width = min(-(-longest // 64) * 64, self.max_length)
        host = np.zeros((len(rows), width), np.int32)
        for i, row in enumerate(rows):
            host[i, : len(row)] = row
        tokens = torch.from_numpy(host).to(device)
        at = torch.tensor(slots, device=device)
        lengths = torch.tensor([len(r) for r in rows], device=device)
        self.target.forward(tokens.long(), cache=self.cache, slots=at)
        self.text[at, :width] = tokens
        self.token[at] = tokens.long().gather(1, (lengths - 1)[:, None])[:, 0]
        self.position[at] = lengths - 1
        self.limit[at] = (lengths + self.max_new).clamp_max(self.max_length)
        self.warm[at] = torch.tensor(temperatures, device=device)
        self.active[at] = True


def generate(
    target: FrozenTarget,
    prompts: PromptSet,
    requests: list[Request],
    config: GenerateConfig,
    seconds: float = float("inf"),
    report_every: float = 20.0,
) -> Dataset:
    """Sample `requests` in order until they or the seconds are used up."""
    torch.manual_seed(config.seed)
    slots = min(config.slots, len(requests))
    lengths = np.diff(prompts.offsets)
    max_length = int(max(lengths[r.prompt] for r in requests)) + config.max_new
    decoder = SlotDecoder(target, slots, max_length, config.max_new)
    run = decoder.runner()
    decoder.active.zero_()
    holder: list[Request | None] = [None] * slots
    finished: list[tuple[Request, np.ndarray]] = []
    started = last = time.monotonic()
    upcoming, generated = 0, 0
    while True:
        active = decoder.active.cpu().numpy()
        free = [i for i in range(slots) if not active[i]]
        harvested = [i for i in free if holder[i] is not None]
        if harvested:
            text = decoder.text[torch.tensor(harvested, device=target.device)].cpu().numpy()
            ends = decoder.length.cpu().numpy()
            for i, row in zip(harvested, text, strict=True):
                request, holder[i] = holder[i], None
                if request is not None:
                    finished.append((request, row[: ends[i]].astype(np.uint16)))
                    generated += int(ends[i] - lengths[request.prompt])
        now = time.monotonic()
        if now - last > report_every:
            last = now
            rate = generated / (now - started)
            print(
                f"{now - started:.0f} s: {len(finished)} sequences, {generated} tokens, "
                f"{rate:.0f}/s",
                flush=True,
            )
        taken = requests[upcoming : upcoming + len(free)]
        if now - started > seconds or not (taken or active.any()):
            break
        if taken:
            upcoming += len(taken)
            used = free[: len(taken)]
            for i, request in zip(used, taken, strict=True):
                holder[i] = request
            decoder.admit(
                used, [prompts.row(r.prompt) for r in taken], [r.temperature for r in taken]
            )
        for _ in range(SYNC_EVERY):
            run()
    return _collect(prompts, finished)


def _collect(prompts: PromptSet, finished: list[tuple[Request, np.ndarray]]) -> Dataset:
    lengths = np.diff(prompts.offsets)
    requests = [request for request, _ in finished]
    index = np.asarray([r.prompt for r in requests])
    return Dataset(
        tokens=np.concatenate([row for _, row in finished]),
        offsets=np.cumsum([0] + [len(row) for _, row in finished]).astype(np.int64),
        prompt_lengths=lengths[index].astype(np.int32),
        temperatures=np.asarray([r.temperature for r in requests], np.float32),
        domains=prompts.domains[index],
        derived=prompts.sources[index] == "derived",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True, help="HF folder or GGUF file")
    parser.add_argument("--prompts", type=Path, required=True, help="npz from prompts.py")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--limit", type=int, default=None, help="use only so many requests")
    parser.add_argument("--slots", type=int, default=GenerateConfig.slots)
    parser.add_argument("--max-new", type=int, default=GenerateConfig.max_new)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    config = GenerateConfig(slots=args.slots, max_new=args.max_new)
    target = FrozenTarget.load(args.target, args.device)
    prompts = PromptSet.load(args.prompts)
    requests = plan_requests(prompts, config)[: args.limit]
    started = time.monotonic()
    data = generate(target, prompts, requests, config, args.seconds)
    wall = time.monotonic() - started
    data.save(args.out)
    total = len(data.tokens) - int(data.prompt_lengths.sum())
    print(f"{len(data)} of {len(requests)} sequences, {total} tokens in {wall:.0f} s")
    for name, count in data.counts().items():
        print(f"  {name}: {count}")


if __name__ == "__main__":
    main()
